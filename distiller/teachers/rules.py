"""Which placements run beside which engines, and what each is for: the data that checks, messages and docs share.

Importing this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from distiller.config.teacher import Teacher
from distiller.errors import UserError

QUANTIZED_PLACEMENTS = ("replicated", "balanced")


@dataclass(frozen=True)
class Rule:
    """One placement as a user sees it.

    Attributes:
        gpu, host: the teacher's memory on each rank's GPU, and in the node's host memory.
        beside_ddp, beside_zero: how it runs beside a student under DDP or FSDP (or alone), and under DeepSpeed.
        communicates: what passes between ranks in a step.
    """

    gpu: str
    host: str
    beside_ddp: str
    beside_zero: str
    communicates: str


RULES: dict[str, Rule] = {
    "replicated": Rule("whole", "none", "yes", "yes", "nothing"),
    "cpu": Rule("none", "one copy, shared", "yes", "yes", "nothing"),
    "streamed": Rule(
        "`ring_blocks` and `resident_blocks`", "one page-locked copy, shared", "yes", "yes", "shares of blocks"
    ),
    "disk": Rule("as streamed", "page cache, two blocks a rank", "yes", "yes", "nothing"),
    "balanced": Rule("its part of one copy", "none", "yes", "yes", "turns on the GPUs"),
    "sequential": Rule("its part of one copy", "none", "yes", "yes", "as balanced"),
    "custom": Rule("as `device_map` says", "as `device_map` says", "yes", "yes", "as balanced"),
    "rank0": Rule("whole on one rank", "none", "yes", "yes", "inputs and outputs"),
    "sharded": Rule("1/N, and one block or two", "none, or 1/N a rank", "FSDP2", "ZeRO-3", "every block, gathered"),
    "swap": Rule("whole while it runs", "one copy a rank", "yes", "yes", "nothing"),
    "cached": Rule("none", "none", "yes", "yes", "nothing"),
}


def may_run(teacher: Teacher, name: str, num_processes: int, under_deepspeed: bool) -> bool:
    """Whether this placement could take the place of the recipe's."""
    try:
        check_placement(teacher.model_copy(update={"placement": name}), num_processes, under_deepspeed)
    except UserError:
        return False
    return True


def check_placement(teacher: Teacher, num_processes: int, under_deepspeed: bool) -> None:
    """Raises UserError where the recipe's teacher cannot run in this world, whatever its size."""
    name = teacher.placement
    if teacher.quantization != "none" and name not in (*QUANTIZED_PLACEMENTS, "auto", "cached"):
        reason = "int8 layers run in other placements only"
        if name == "sharded":
            reason = "int8 weights inside ZeRO-3 or FSDP give wrong numbers, silently"
        raise UserError(
            f"teacher.quantization is {teacher.quantization} and teacher.placement {name}: {reason}; choose placement "
            f"{' or '.join(QUANTIZED_PLACEMENTS)}, or quantization none"
        )
    if name == "rank0" and teacher.rank >= num_processes:
        raise UserError(
            f"teacher.rank is {teacher.rank} and the run has {num_processes} rank(s), counted from 0; give at most "
            f"{num_processes - 1}, or start more processes"
        )
    if teacher.quantization == "int8" and name != "cached" and find_spec("bitsandbytes") is None:
        raise UserError("teacher.quantization=int8 needs bitsandbytes; run: pip install 'distiller[quantization]'")
    if name == "sharded" and teacher.offload == "nvme" and not under_deepspeed:
        raise UserError(
            "teacher.offload is nvme, which only DeepSpeed does, and the student's engine is not DeepSpeed; use a ZeRO "
            "launch file, or teacher.offload=cpu, or teacher.placement=disk"
        )


def table() -> str:
    """The rules as a Markdown table."""
    heads = ("`teacher.placement`", "on each GPU", "in host memory", "beside DDP, FSDP or alone", "beside ZeRO")
    rows = ["| " + " | ".join((*heads, "int8", "ranks exchange")) + " |", "| --- " * (len(heads) + 2) + "|"]
    for name, rule in RULES.items():
        int8 = "yes" if name in (*QUANTIZED_PLACEMENTS, "cached") else "no"
        cells = (f"`{name}`", rule.gpu, rule.host, rule.beside_ddp, rule.beside_zero, int8, rule.communicates)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"

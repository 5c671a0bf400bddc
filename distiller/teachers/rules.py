"""Checks a placement against processes and engine, and makes the support table, from the placements' specifications."""

from __future__ import annotations

from importlib.util import find_spec

from distiller.config.placements import AUTO, PLACEMENTS
from distiller.config.placements.keys import in_words, quantized_placements
from distiller.config.quantization import NEEDS_BITSANDBYTES
from distiller.config.teacher import Teacher
from distiller.errors import UserError


def may_run(teacher: Teacher, name: str, num_processes: int, under_deepspeed: bool) -> bool:
    """Whether placement `name` could run in place of the recipe's, whatever the teacher's size."""
    try:
        check_placement(teacher.model_copy(update={"placement": name}), num_processes, under_deepspeed)
    except UserError:
        return False
    return True


def check_placement(teacher: Teacher, num_processes: int, under_deepspeed: bool) -> None:
    """Raises UserError if placement or quantisation cannot run with these processes and engine, whatever the size."""
    spec = None if teacher.placement == AUTO else PLACEMENTS[teacher.placement]
    if spec is not None:
        if teacher.quantization != "none" and spec.why_not_quantized:
            raise UserError(
                f"teacher.quantization is {teacher.quantization} and teacher.placement {spec.name}: "
                f"{spec.why_not_quantized}; choose placement {in_words(quantized_placements(), 'or')}, or quantization "
                "none"
            )
        if teacher.prefetch_steps and spec.why_not_prefetched:
            raise UserError(
                f"teacher.prefetch_steps is {teacher.prefetch_steps} and teacher.placement {spec.name}: "
                f"{spec.why_not_prefetched}; set it to 0, or choose another placement"
            )
        spec.check_world(spec.options.of(teacher), num_processes, under_deepspeed)
    why_not = why_not_compiled(teacher, under_deepspeed)
    if why_not and teacher.compile not in ("auto", "none"):
        raise UserError(f"teacher.compile is {teacher.compile} and {why_not}; leave it out, or set it to none")
    loads_weights = spec is None or spec.loads_teacher
    if teacher.quantization in NEEDS_BITSANDBYTES and loads_weights and find_spec("bitsandbytes") is None:
        raise UserError(
            f"teacher.quantization={teacher.quantization} needs bitsandbytes; run: pip install "
            "'distiller[quantization]'"
        )


def placement_notices(teacher: Teacher, is_asked: bool) -> list[str]:
    """What a user should know of the placement before training starts, a line each.

    `is_asked`: whether the run asks its teacher while it trains.
    """
    spec = PLACEMENTS.get(teacher.placement)
    if spec is None or not spec.computes_elsewhere or teacher.prefetch_steps or not is_asked:
        return []
    return [
        f"teacher.placement {spec.name} and teacher.prefetch_steps 0: student and teacher wait for each other; with 1 "
        "or more they compute at the same time"
    ]


def why_not_compiled(teacher: Teacher, under_deepspeed: bool) -> str:
    """Why the teacher's blocks cannot be compiled, or an empty text. Placement `auto` can, until it is resolved."""
    spec = PLACEMENTS.get(teacher.placement)
    if spec is None:
        return ""
    why_not = spec.why_not_compiled or (spec.why_not_compiled_beside_deepspeed if under_deepspeed else "")
    return f"teacher.placement {spec.name}: {why_not}" if why_not else ""


def table() -> str:
    """The support table in Markdown: each placement's memory, engines, quantisation, and what ranks exchange."""
    heads = ("`teacher.placement`", "on each GPU", "in host memory", "beside DDP, FSDP or alone", "beside ZeRO")
    rows = ["| " + " | ".join((*heads, "quantised", "ranks exchange")) + " |", "| --- " * (len(heads) + 2) + "|"]
    for spec in PLACEMENTS.values():
        row, quantised = spec.row, "no" if spec.why_not_quantized else "yes"
        cells = (f"`{spec.name}`", row.gpu, row.host, row.beside_ddp, row.beside_zero, quantised, row.communicates)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"

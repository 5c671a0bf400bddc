"""Every placement of the teacher on the same work, side by side: memory, time, loss, and the physical limits.

    torchrun --nproc_per_node=2 scripts/benchmarks/placements.py --model wan-14b --output placements.json

One run on one machine: a Wan teacher of real layout whose random weights are made on the device, and a small student
under DDP. A step is the teacher's forward on every rank's own sample, the student's forward and backward, and AdamW.
Times are means over the timed steps, without a synchronisation between them. `swap` as people write it
(`.to("cuda")`, `.to("cpu")` each step, pageable), and diffusers' group offload, stand in the same table.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor, nn

from distiller.config.teacher import Teacher as Options
from distiller.data import rng
from distiller.diffusion.network import PREDICTION, DiffusionNetwork
from distiller.diffusion.pipeline import Location, PipelineFiles
from distiller.diffusion.wan.family import WanFamily
from distiller.distributed.ranks import Ranks
from distiller.teachers.base import Request, Setup, Teacher
from distiller.teachers.factory import open_teacher
from distiller.teachers.weights.layout import REST, lay_out

GIB = 2**30
TEXT_ROWS = 64
LATENT_CHANNELS = 16
MODELS = {
    # The published transformer/config.json of Wan 2.1 T2V.
    "tiny": {"num_attention_heads": 2, "ffn_dim": 512, "num_layers": 5},
    "wan-1.3b": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "wan-14b": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
STUDENT = {"num_attention_heads": 4, "ffn_dim": 1024, "num_layers": 2}
# Latent frames, height and width; patches of 1 x 2 x 2 make the tokens: 480 x 832 pixels, 1, 13 and 81 frames.
SHAPES = {1560: (1, 60, 104), 6240: (4, 60, 104), 32760: (21, 60, 104), 64: (1, 16, 16)}


@dataclass(frozen=True)
class Row:
    """One way to hold the teacher."""

    name: str
    options: dict[str, Any]
    under_deepspeed: bool = False
    accumulation: int = 1
    most_tokens: int = 10**9
    peer: str = ""


COMPILED_BASE = "replicated, compiled"
ROWS = [
    Row("replicated", {"placement": "replicated"}),
    Row("streamed", {"placement": "streamed", "shard_transfers": False}),
    Row("streamed, shared transfers", {"placement": "streamed", "shard_transfers": True}),
    Row("balanced", {"placement": "balanced"}),
    Row("balanced, accumulation 4", {"placement": "balanced"}, accumulation=4),
    Row("rank0", {"placement": "rank0"}, most_tokens=6240),
    Row("sharded (FSDP2)", {"placement": "sharded"}),
    Row("sharded (ZeRO-3), offload cpu", {"placement": "sharded", "offload": "cpu"}, under_deepspeed=True),
    Row("diffusers group offload", {}, peer="group_offload", most_tokens=1560),
    Row("swap, page-locked", {"placement": "swap"}, most_tokens=1560),
    Row("swap, pageable", {"placement": "swap", "pin_memory": False}, most_tokens=1560),
    Row("sharded (FSDP2), offload cpu", {"placement": "sharded", "offload": "cpu"}),
    Row("disk", {"placement": "disk"}, most_tokens=1560),
    Row("sequential", {"placement": "sequential"}, most_tokens=1560),
    Row("streamed, half resident", {"placement": "streamed", "resident_blocks": 20}, most_tokens=6240),
    Row("sharded (ZeRO-3)", {"placement": "sharded"}, under_deepspeed=True, most_tokens=1560),
    Row("cpu", {"placement": "cpu"}, most_tokens=1560),
    Row("replicated, int8", {"placement": "replicated", "quantization": "int8"}, most_tokens=1560),
    Row("streamed, accumulation 4", {"placement": "streamed"}, accumulation=4, most_tokens=1560),
    Row("replicated, compiled", {"placement": "replicated", "compile": "default"}),
    Row("streamed, compiled", {"placement": "streamed", "compile": "default"}),
    Row(
        "streamed, compiled, accumulation 4",
        {"placement": "streamed", "compile": "default"},
        accumulation=4,
        most_tokens=1560,
    ),
    Row("balanced, compiled", {"placement": "balanced", "compile": "default"}, most_tokens=6240),
    Row("sharded (FSDP2), compiled", {"placement": "sharded", "compile": "default"}, most_tokens=6240),
    *(
        Row(f"{name}, {kind}, compiled", {"placement": name, "quantization": kind, "compile": "default"})
        for name in ("replicated", "streamed")
        for kind in ("fp8", "int8", "nf4")
    ),
    Row("naive .to(device) each step", {}, peer="to", most_tokens=1560),
]


class Moved(Teacher):
    """The whole model moved to the GPU and back each step, as trainers without placements do."""

    def __init__(self, network: DiffusionNetwork, module: nn.Module, device: torch.device) -> None:
        self._network, self._module, self._device = network, module, device

    def predict(self, requests: Sequence[Request]) -> list[dict[str, Tensor]]:
        with torch.no_grad():
            self._module.to(self._device)
            outputs = [self._network.run(self._module, call) for r in requests for call in self._network.calls(r)]
            self._module.to("cpu")
        return outputs

    def memory(self) -> Any:
        return None

    def close(self) -> None:
        del self._module


class GroupOffloaded(Teacher):
    """diffusers' group offload: block level, on a stream, from a page-locked copy of each rank's own."""

    def __init__(self, network: DiffusionNetwork, module: Any, device: torch.device) -> None:
        self._network, self._module = network, module
        module.enable_group_offload(
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=True,
            record_stream=True,
        )

    def predict(self, requests: Sequence[Request]) -> list[dict[str, Tensor]]:
        with torch.no_grad():
            return [self._network.run(self._module, call) for r in requests for call in self._network.calls(r)]

    def memory(self) -> Any:
        return None

    def close(self) -> None:
        del self._module


def write_teacher(folder: Path, model: str, device: torch.device) -> dict[str, Any]:
    """Writes random bfloat16 weights, a file for each unit, unless they are there, and returns the config."""
    config = WanFamily.architecture.defaults() | {"attention_head_dim": 128, "text_dim": 4096} | MODELS[model]
    config |= {"in_channels": LATENT_CHANNELS, "out_channels": LATENT_CHANNELS}
    network = make_network(folder, config)
    module = network.skeleton("transformer", torch.bfloat16)
    target, described = folder / "transformer", json.dumps({"_class_name": "WanTransformer3DModel", **config})
    if (target / "config.json").exists() and (target / "config.json").read_text() == described:
        return config
    target.mkdir(parents=True, exist_ok=True)
    generator, weight_map = torch.Generator(device).manual_seed(0), {}
    for unit in lay_out(module, network.block_names("transformer")):
        state = {}
        for entry in unit.entries:
            # Like an initialised layer: unit gain through products, ones in norms.
            scale = entry.shape[-1] ** -0.5 if len(entry.shape) > 1 else 0.02
            value = torch.randn(entry.shape, generator=generator, device=device) * scale
            value = value + 1 if "norm" in entry.names[0] and entry.names[0].endswith("weight") else value
            state[entry.names[0]] = value.to(entry.dtype).cpu()
        name = f"{unit.name or 'rest'}.safetensors"
        save_file(state, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(state, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (target / "config.json").write_text(described)
    return config


def make_network(folder: Path, config: dict[str, Any]) -> DiffusionNetwork:
    """The network over these files."""
    files = PipelineFiles(Location("benchmark", "benchmark", folder, None), {}, {"transformer": config}, {}, {})
    return DiffusionNetwork(WanFamily(files), 512)


def open_row(row: Row, network: DiffusionNetwork, folder: Path, ranks: Ranks) -> Teacher:
    """The teacher of a row."""
    if not row.peer:
        options = Options(path="-", **row.options)
        mode = "none" if options.compile == "auto" else options.compile
        return open_teacher(network, Setup(torch.bfloat16, options, ranks, row.under_deepspeed, compile_mode=mode))
    module = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.bfloat16)
    from distiller.diffusion.wan.short_text import install_short_text

    install_short_text(module, 512)
    module.eval().requires_grad_(False)
    peers: dict[str, Callable[..., Teacher]] = {"to": Moved, "group_offload": GroupOffloaded}
    return peers[row.peer](network, module, ranks.device)


def make_requests(step: int, rank: int, count: int, tokens: int, device: torch.device) -> list[Request]:
    """One sample a micro-batch; noise and text are functions of (step, rank)."""
    requests = []
    for number in range(count):
        sample_id = 100_000 + 1_000 * rank + 10 * step + number
        text = rng.noise(1, 0, sample_id, (1, TEXT_ROWS, 4096), "text")
        text[:, -2:] = 0
        inputs = {
            "latents": rng.noise(0, 0, sample_id, (1, LATENT_CHANNELS, *SHAPES[tokens]), "noise").to(device),
            "timesteps": torch.full((1,), 500.0 + step, device=device),
            "text": text.to(device),
        }
        requests.append(Request((sample_id,), inputs, (PREDICTION,)))
    return requests


def make_student(config: dict[str, Any], device: torch.device) -> nn.Module:
    """A small Wan transformer under DDP, the same for every row."""
    from distiller.diffusion.wan.short_text import install_short_text

    torch.manual_seed(0)
    student = WanTransformer3DModel.from_config(config | STUDENT).to(device)
    install_short_text(student, 512)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return student
    return nn.parallel.DistributedDataParallel(student, device_ids=[device.index] if device.type == "cuda" else None)


def measure(row: Row, teacher: Teacher, config: dict[str, Any], tokens: int, ranks: Ranks) -> dict[str, Any]:
    """Step time, its teacher's part alone, and the losses."""
    device, student = ranks.device, make_student(config, ranks.device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=device.type == "cuda")
    slow = "swap, pageable" in row.name or row.peer == "to" or row.name == "cpu"
    warm, timed = (2, 5) if tokens < 5_000 else (1, 3) if tokens < 10_000 else (1, 1)
    if slow or row.peer or row.name == "disk":
        warm, timed = (0, 1) if slow else (1, 2)
    losses, all_requests = [], []
    for step in range(warm + timed):
        all_requests.append(make_requests(step, ranks.rank, row.accumulation, tokens, device))

    def fingerprint(targets: Sequence[dict[str, Tensor]]) -> int:
        """Equal for equal bits."""
        bits = torch.cat([target[PREDICTION].flatten() for target in targets]).view(torch.int16).long()
        return int((bits * (torch.arange(len(bits), device=device) % 65521 + 1)).sum())

    def student_step(requests: Sequence[Request], targets: Sequence[dict[str, Tensor]]) -> Tensor:
        total = torch.zeros((), device=device)
        for request, target in zip(requests, targets, strict=True):
            inputs = request.inputs
            with torch.autocast(device.type, torch.bfloat16):
                ours = student(inputs["latents"], inputs["timesteps"], inputs["text"], return_dict=False)[0]
            loss = (ours.float() - target[PREDICTION].float()).square().mean() / len(requests)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        if ranks.world_size > 1:
            dist.barrier()
        return time.perf_counter()

    def run(steps: Sequence[int]) -> float:
        started = wait()
        for step in steps:
            losses.append(student_step(all_requests[step], teacher.predict(all_requests[step])))
        return (wait() - started) * 1e3 / max(len(steps), 1)

    run(range(warm))
    step_ms = run(range(warm, warm + timed))
    teacher_ms = None
    if not slow and tokens < 5_000:
        started = wait()
        for step in range(timed):
            teacher.predict(all_requests[warm + step])
        teacher_ms = (wait() - started) * 1e3 / timed
    bits = ranks.gather(fingerprint(teacher.predict(all_requests[0])))
    mean = torch.stack(losses)
    if ranks.world_size > 1:
        dist.all_reduce(mean)
    return {"step_ms": step_ms, "teacher_ms": teacher_ms, "losses": (mean / ranks.world_size).tolist(), "bits": bits}


def bus_bandwidth(ranks: Ranks, num_bytes: int = 2**30) -> float:
    """Bytes a second from page-locked host memory, measured on all GPUs at once."""
    if ranks.device.type != "cuda":
        return float("inf")
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=ranks.device)
    target.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    ranks.node_barrier()
    started = time.perf_counter()
    for _ in range(24):
        target.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return 24 * num_bytes / max(ranks.gather(time.perf_counter() - started))


def run_row(
    row: Row, network: DiffusionNetwork, config: dict[str, Any], folder: Path, shapes: list[int], ranks: Ranks
) -> dict:
    """Loads, measures every shape, and frees."""
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    started = time.perf_counter()
    teacher = open_row(row, network, folder, ranks)
    load_s = time.perf_counter() - started
    memory = teacher.memory()
    result: dict[str, Any] = {"name": row.name, "load_s": load_s, "accumulation": row.accumulation, "shapes": {}}
    result["allocated"] = ranks.gather((torch.cuda.memory_allocated() if on_gpu else 0) - before)
    result["gpu"] = ranks.gather(memory.gpu_bytes if memory else None)
    result["host"] = memory.host_bytes if memory else None
    for tokens in shapes:
        if tokens <= row.most_tokens:
            result["shapes"][tokens] = measure(row, teacher, config, tokens, ranks)
    teacher.close()
    del teacher
    gc.collect()
    return result


def print_table(results: list[dict], shapes: list[int], limits: dict[int, float], bandwidth: float, title: str) -> None:
    """One table of all rows."""
    base = results[0]["shapes"]
    # A compiled teacher rounds at other places: its outputs are compared with those of the compiled `replicated`.
    compiled = next((r["shapes"] for r in results if r["name"] == COMPILED_BASE and "shapes" in r), base)
    print(
        f"\n{title}\npage-locked host to device, all GPUs at once: {bandwidth / 1e9:.1f} GB/s each; "
        + "bytes that pass / bandwidth: "
        + ", ".join(f"{name} {ms:.0f} ms" for name, ms in limits.items())
    )
    heads = [f"{tokens:,} tokens" for tokens in shapes]
    print(
        "| teacher | GPU GiB a rank | GPU GiB in all | host GiB a node | load s | "
        + " | ".join(f"{head}: step ms (teacher) | ratio" for head in heads)
        + " | teacher's outputs equal | losses within |"
    )
    print("| --- " * (7 + 2 * len(shapes)) + "|")
    for result in results:
        if "error" in result:
            print(f"| {result['name']} | {result['error']} |")
            continue
        gpu = [
            value if value is not None else other
            for value, other in zip(result["gpu"], result["allocated"], strict=True)
        ]
        cells = [result["name"], "/".join(sorted({f"{v / GIB:.2f}" for v in gpu})), f"{sum(gpu) / GIB:.1f}"]
        cells += ["-" if result["host"] is None else f"{result['host'] / GIB:.1f}", f"{result['load_s']:.0f}"]
        worst, is_equal, same = 0.0, True, compiled if "compiled" in result["name"] else base
        for tokens in shapes:
            one = result["shapes"].get(tokens)
            if one is None or tokens not in base:
                cells += ["", ""]
                continue
            micro = one["step_ms"] / result["accumulation"]
            teacher_ms = "" if one["teacher_ms"] is None else f" ({one['teacher_ms'] / result['accumulation']:.0f})"
            cells += [f"{micro:.0f}{teacher_ms}", f"{micro / base[tokens]['step_ms']:.2f}"]
            if result["accumulation"] == 1:
                pairs = zip(one["losses"], base[tokens]["losses"], strict=False)
                worst = max(worst, *(abs(a / b - 1) for a, b in pairs))
                is_equal &= one["bits"] == same[tokens]["bits"]
        if result["accumulation"] > 1:
            cells += ["other samples", ""]
        else:
            cells += ["bit for bit" if is_equal else "by another batch or kernel", f"{worst:.1e}"]
        print("| " + " | ".join(cells) + " |")


def choose_rows(wanted: str | None) -> list[Row]:
    """Those that `--rows` asks for, in its order, after `replicated`."""
    if wanted is None:
        return ROWS
    chosen = {ROWS[0].name: ROWS[0]}
    for name in wanted.split("|"):
        named = [row for row in ROWS if row.name == name] or [row for row in ROWS if name in row.name]
        if not named:
            raise SystemExit(f"--rows: no row's name contains {name!r}")
        chosen |= {row.name: row for row in named}
    return list(chosen.values())


def main() -> None:
    """Runs the rows and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="wan-14b")
    parser.add_argument("--tokens", type=int, nargs="+", choices=SHAPES, default=[1560, 6240, 32760])
    parser.add_argument(
        "--rows",
        help="only those named so, or whose name contains this, in this order, separated by |; after replicated",
    )
    parser.add_argument("--folder", type=Path, help="for the weights, to use them again (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further row after so long")
    options = parser.parse_args()
    rows = choose_rows(options.rows)
    began = time.perf_counter()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    ranks = Ranks.join(device)
    folder = ranks.broadcast_from_local_main(lambda: str(options.folder or tempfile.mkdtemp(prefix="placements-")))
    folder = Path(folder)
    try:
        config = ranks.broadcast_from_local_main(lambda: write_teacher(folder, options.model, device))
        network = make_network(folder, config)
        units = lay_out(network.skeleton("transformer", torch.bfloat16), network.block_names("transformer"))
        passing = sum(unit.num_bytes for unit in units if unit.name != REST)
        bandwidth = bus_bandwidth(ranks)
        limits = {"streamed": passing / bandwidth * 1e3, "shared": passing / bandwidth * 1e3 / ranks.local_world_size}
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        title = f"{options.model}, {ranks.world_size} x {name}, torch {torch.__version__}"
        results = []
        for row in rows:
            if (ranks.broadcast_from_main(lambda: time.perf_counter() - began)) > 60 * options.minutes:
                break
            try:
                results.append(run_row(row, network, config, folder, options.tokens, ranks))
            except Exception as error:
                if ranks.is_main:
                    traceback.print_exc()
                results.append({"name": row.name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
            if ranks.is_main:
                print(
                    f"{time.perf_counter() - began:6.0f} s  {row.name}: {json.dumps(results[-1])[:600]}",
                    file=sys.stderr,
                    flush=True,
                )
                if options.output:
                    report = {"title": title, "bandwidth": bandwidth, "limits_ms": limits, "rows": results}
                    options.output.write_text(json.dumps(report, indent=1))
        if ranks.is_main:
            print_table(results, options.tokens, limits, bandwidth, title)
    finally:
        ranks.node_barrier()
        if ranks.is_local_main and options.folder is None:
            shutil.rmtree(folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

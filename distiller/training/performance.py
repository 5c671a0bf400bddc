"""Time, throughput and memory of a run's updates, as they are logged."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import Tensor

from distiller.training.run import Run
from distiller.training.timing import PARTS
from distiller.training.tracking import GIB, peak_flops


def performance(
    run: Run, times_ms: dict[str, float], batches: Sequence[Any], prefetched_bytes: int
) -> dict[str, float | None]:
    """Time, throughput and memory; of the slowest and fastest rank where they may differ. Communicates.

    `prefetched_bytes`: on this rank's device, of updates that the teacher has answered ahead.
    """
    device, on_gpu = run.accelerator.device, run.accelerator.device.type == "cuda"
    peak_gib = torch.cuda.max_memory_allocated(device) / GIB if on_gpu else 0.0
    memory = None if run.teacher is None else run.teacher.memory()
    if memory is not None and on_gpu:
        memory = replace(memory, gpu_bytes=memory.gpu_bytes + run.replicated_head_bytes)
    elif memory is not None:
        memory = replace(memory, host_bytes=memory.host_bytes + run.replicated_head_bytes * run.ranks.local_world_size)
    teacher_gib = 0.0 if memory is None else memory.gpu_bytes / GIB
    # ru_maxrss is in KiB on Linux.
    host_peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    own = [*(times_ms[part] for part in PARTS), peak_gib, teacher_gib, host_peak_gib, prefetched_bytes / GIB]
    local = torch.tensor([times_ms["step"], *own], device=device)
    gathered = run.accelerator.gather(local.unsqueeze(0))
    assert isinstance(gathered, Tensor)
    step_ms, *others = gathered.cpu().T.tolist()
    parts_ms = dict(zip(PARTS, others, strict=False))
    gpu_gib, teachers_gib, hosts_gib, prefetched_gib = others[len(PARTS) :]
    step_s = max(step_ms) / 1e3
    tokens = sum(run.task.tokens(batch) for batch in batches) * run.accelerator.num_processes
    under_deepspeed = run.engine.startswith("deepspeed")
    return {
        **_over_ranks("perf/step_ms", step_ms),
        **_over_ranks("perf/teacher_ms", None if run.teacher is None else parts_ms["teacher"]),
        **_over_ranks("perf/student_ms", parts_ms["student"]),
        **_over_ranks("perf/optimizer_ms", None if under_deepspeed else parts_ms["optimizer"]),
        **_over_ranks("perf/data_ms", parts_ms["data"]),
        "perf/samples_per_s": run.plan.samples_per_update / step_s,
        "perf/tokens_per_s": tokens / step_s,
        "perf/mfu": _model_flops_utilization(run, tokens / step_s / run.accelerator.num_processes),
        "memory/gpu_peak_gib": max(gpu_gib) if on_gpu else None,
        "memory/gpu_peak_gib_min": min(gpu_gib) if on_gpu else None,
        "memory/gpu_peak_gib_max": max(gpu_gib) if on_gpu else None,
        "memory/teacher_gpu_gib": None if memory is None else max(teachers_gib),
        "memory/teacher_gpu_gib_all_ranks": None if memory is None else sum(teachers_gib),
        "memory/teacher_host_gib": None if memory is None else memory.host_bytes / GIB,
        "memory/prefetched_gib": max(prefetched_gib) if run.recipe.teacher.prefetch_steps else None,
        "memory/host_rss_gib": psutil.Process().memory_info().rss / GIB,
        "memory/host_peak_gib": max(hosts_gib),
        "memory/host_peak_gib_min": min(hosts_gib),
    }


def _over_ranks(name: str, values: Sequence[float] | None) -> dict[str, float | None]:
    """The mean, the least and the largest of the ranks' values; None where there are none."""
    if values is None:
        return {name: None, f"{name}_min": None, f"{name}_max": None}
    return {name: sum(values) / len(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def _model_flops_utilization(run: Run, tokens_per_s: float) -> float | None:
    """The student's model FLOPs (6 a parameter and token, Kaplan et al. 2020) over the GPU's peak, without teacher."""
    peak = peak_flops(run.accelerator.device, run.mixed_precision)
    return None if peak is None else 6 * run.student_parameters * tokens_per_s / peak

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
    shares = [times_ms["step"], peak_gib, teacher_gib, host_peak_gib, prefetched_bytes / GIB]
    local = torch.tensor(shares, device=device)
    gathered = run.accelerator.gather(local.unsqueeze(0))
    assert isinstance(gathered, Tensor)
    step_ms, gpu_gib, teachers_gib, hosts_gib, prefetched_gib = gathered.cpu().T.tolist()
    step_s = max(step_ms) / 1e3
    tokens = sum(run.task.tokens(batch) for batch in batches) * run.accelerator.num_processes
    under_deepspeed = run.engine.startswith("deepspeed")
    return {
        "perf/step_ms": sum(step_ms) / len(step_ms),
        "perf/step_ms_min": min(step_ms),
        "perf/step_ms_max": max(step_ms),
        "perf/teacher_ms": None if run.teacher is None else times_ms["teacher"],
        "perf/student_ms": times_ms["student"],
        "perf/optimizer_ms": None if under_deepspeed else times_ms["optimizer"],
        "perf/data_ms": times_ms["data"],
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
    }


def _model_flops_utilization(run: Run, tokens_per_s: float) -> float | None:
    """The student's model FLOPs (6 a parameter and token, Kaplan et al. 2020) over the GPU's peak, without teacher."""
    peak = peak_flops(run.accelerator.device, run.mixed_precision)
    return None if peak is None else 6 * run.student_parameters * tokens_per_s / peak

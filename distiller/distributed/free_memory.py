"""How much memory there is to have: on a GPU, and on the host within the container's limit."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


def free_gpu_bytes(device: torch.device) -> int:
    """What a GPU has left for this process: unused memory, and what the allocator holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_host_bytes() -> int:
    """What the host can give without swapping: the system's own figure, or less where a control group limits it."""
    available = psutil.virtual_memory().available
    for limit_file, usage_file, cache_key in (
        (CGROUP / "memory.max", CGROUP / "memory.current", "inactive_file"),
        (CGROUP / "memory/memory.limit_in_bytes", CGROUP / "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = limit_file.read_text().strip(), int(usage_file.read_text())
            lines = (limit_file.parent / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        if limit != "max":
            # Cached file pages count as used, and are given back at once.
            cache = next((int(line.split()[1]) for line in lines if line.startswith(f"{cache_key} ")), 0)
            available = min(available, int(limit) - used + cache)
    return max(available, 0)

"""Free memory of a GPU, and of the host within its container's limit, in bytes."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


def free_gpu_bytes(device: torch.device) -> int:
    """Free for this process on a GPU: unused memory, and what torch's allocator reserves without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_host_bytes() -> int:
    """Available on the host without swapping: the system's figure, or less where a control group (1 or 2) limits it."""
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
            # Cached file pages count as used, but the kernel frees them on demand.
            cache = next((int(line.split()[1]) for line in lines if line.startswith(f"{cache_key} ")), 0)
            available = min(available, int(limit) - used + cache)
    return max(available, 0)

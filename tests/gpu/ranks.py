"""Launches on the GPUs that are there: a rank each, or two machines of one rank that share the only one.

NCCL refuses two ranks of a host on one GPU. It knows hosts by a hash, which NCCL_HOSTID replaces; its ranks then talk
over sockets, slowly, and compute what they would on a GPU each.
"""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from tests.launch.launching import launch
from tests.launch.machines import Network, begun_on_both

NUM_GPUS = torch.cuda.device_count()
ONE_GPU = Network((("env", "NCCL_HOSTID=first"), ("env", "NCCL_HOSTID=second")), "127.0.0.1")


def run_on_gpus(config_file: Path, run_dir: Path, *arguments: str, timeout_s: int = 280) -> Path:
    """`accelerate launch --config_file FILE -m distiller ARGUMENTS output_dir=RUN_DIR`; the folder, when it has ended.

    As many processes as the file asks for; with fewer GPUs than that it must ask for two.
    """
    content = yaml.safe_load(config_file.read_text())
    if content["use_cpu"] or content["num_processes"] <= NUM_GPUS:
        result = launch(config_file, *arguments, f"output_dir={run_dir}", timeout_s=timeout_s)
        assert result.code == 0, result.stderr
        return run_dir
    assert content["num_processes"] == 2
    with begun_on_both(ONE_GPU, config_file, 2, run_dir, *arguments) as both:
        for running in both:
            assert running.wait_until_gone(timeout_s) == 0, running.output
    return run_dir

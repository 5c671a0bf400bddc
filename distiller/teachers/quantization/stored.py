"""Quantised weights in files of their own, for placements that read weights again for every update."""

from __future__ import annotations

import shutil
import time

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from distiller.config.quantization import ARITHMETIC
from distiller.errors import RunError, UserError
from distiller.storage.stages import Stage, digest_files, digest_of
from distiller.storage.weight_files import WeightFiles
from distiller.teachers.base import Network, Setup
from distiller.teachers.quantization.files import QuantizedFiles
from distiller.teachers.weights.loading import ModulePlan

GIB = 2**30
VISIBILITY_TIMEOUT_S = 30


def store_quantized(network: Network, plan: ModulePlan, files: QuantizedFiles, setup: Setup) -> WeightFiles:
    """Open files that hold the plan's units, quantised; written once, into the folder of stages. Communicates.

    Each machine's first rank writes them, where no run has done so for the same weights, dtype and quantisation. Host
    memory holds one unit at a time. Raises UserError on all ranks where they cannot be written.
    """
    assert setup.stages_dir is not None, "quantised files need a folder"
    key = {
        "weights": digest_files(network.weight_files(plan.name)),
        "dtype": str(setup.dtype),
        "quantization": ARITHMETIC[setup.options.quantization],
        # Which layers are quantised is the libraries' choice, and may change with their versions.
        "layout": digest_of([[e.names, str(e.dtype), e.shape] for unit in plan.units for e in unit.entries]),
    }
    stage = Stage("quantized-weights", key, setup.stages_dir)

    setup.ranks.all_succeed(lambda: _make(plan, files, stage, setup) if setup.ranks.is_local_main else None)
    files.close()
    return setup.ranks.all_succeed(lambda: _open(stage))


def _make(plan: ModulePlan, files: QuantizedFiles, stage: Stage, setup: Setup) -> None:
    if stage.is_complete:
        return
    num_bytes, parent = sum(unit.num_bytes for unit in plan.units), stage.partial.parent
    print(f"writing {num_bytes / GIB:.2f} GiB of quantised weights into {parent}, once")
    advice = f"teacher.placement {setup.options.placement} keeps quantised weights in files, which cannot be written"
    remedy = "choose another cache_dir, or another teacher.placement"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(parent).free) < num_bytes:
            raise UserError(
                f"{advice}: they take {num_bytes / GIB:.2f} GiB and {parent} has {free / GIB:.2f} GiB free; {remedy}"
            )
        stage.make_once(True, lambda: _write(plan, files, stage))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(stage.partial, ignore_errors=True)
        raise UserError(f"{advice} ({error}); {remedy}") from error


def _write(plan: ModulePlan, files: QuantizedFiles, stage: Stage) -> None:
    shutil.rmtree(stage.partial, ignore_errors=True)
    stage.partial.mkdir(parents=True)
    for i, unit in enumerate(plan.units):
        tensors = {}
        for entry in unit.entries:
            name = next(name for name in entry.names if name in files.tensors)
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
            try:
                files.read(name, tensors[name])
            except OSError as error:
                raise RunError(f"the teacher's weights cannot be read ({error})") from error
        save_file(tensors, stage.partial / f"{i:05}.safetensors")
    stage.finish()


def _open(stage: Stage) -> WeightFiles:
    """The stage's files. Raises UserError where this rank does not see what the machine's first rank has written."""
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
    while not stage.is_complete:
        if time.monotonic() > deadline:
            raise UserError(
                f"{stage.folder} was written by the machine's first rank and is not seen by another one; choose a "
                "cache_dir that all ranks of the machine share"
            )
        time.sleep(0.1)
    stage.wait_until_complete()  # refuses files that this user may not read
    return WeightFiles(sorted(stage.folder.glob("*.safetensors")))

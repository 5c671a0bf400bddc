"""Quantised weights in files of their own, for placements that read weights again for every update."""

from __future__ import annotations

import shutil

import torch
from safetensors.torch import save_file

from distiller.config.quantization import ARITHMETIC
from distiller.errors import UserError
from distiller.storage.stages import Stage, digest_files, digest_of
from distiller.storage.weight_files import WeightFiles
from distiller.teachers.base import Network, Setup
from distiller.teachers.quantization.files import QuantizedFiles
from distiller.teachers.weights.loading import ModulePlan

GIB = 2**30


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

    def make() -> None:
        if setup.ranks.is_local_main and not stage.is_complete:
            print(f"writing {sum(unit.num_bytes for unit in plan.units) / GIB:.2f} GiB of quantised weights, once")
            try:
                stage.make_once(True, lambda: _write(plan, files, stage))
            except OSError as error:
                raise UserError(
                    f"teacher.placement {setup.options.placement} keeps quantised weights in files, which cannot be "
                    f"written ({error}); choose another cache_dir, or another teacher.placement"
                ) from error

    setup.ranks.all_succeed(make)
    stage.wait_until_complete()
    files.close()
    return WeightFiles(sorted(stage.folder.glob("*.safetensors")))


def _write(plan: ModulePlan, files: QuantizedFiles, stage: Stage) -> None:
    shutil.rmtree(stage.partial, ignore_errors=True)
    stage.partial.mkdir(parents=True)
    for i, unit in enumerate(plan.units):
        tensors = {}
        for entry in unit.entries:
            name = next(name for name in entry.names if name in files.tensors)
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
            files.read(name, tensors[name])
        save_file(tensors, stage.partial / f"{i:05}.safetensors")
    stage.finish()

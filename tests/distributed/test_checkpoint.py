"""Checkpoints of several ranks: one rank's failure is everyone's, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from distiller.checkpoint import gathering, writing
from distiller.checkpoint.reading import CheckpointReader
from distiller.checkpoint.resuming import verify
from distiller.checkpoint.saving import Checkpoints
from distiller.checkpoint.snapshot import Snapshot
from distiller.distributed.ranks import Ranks
from distiller.errors import AgreedError, UserError
from distiller.run_folder import output_dir
from distiller.run_folder.output_dir import check_shared, check_shared_stages
from tests.distributed.ranks import on_ranks
from tests.toy_state import IDENTITY, ToyState
from tests.toy_task import toy_recipe


def _full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_memory(*_: Any) -> Any:
    raise RuntimeError("not enough memory: you tried to allocate 9 bytes")


def everything(folder: Path) -> dict[str, Any]:
    PartialState(cpu=True)
    output_dir._VISIBILITY_TIMEOUT_S = 1
    ranks = Ranks.join(torch.device("cpu"))
    state = ToyState(ranks.rank, ranks.world_size)
    state.updates = 1
    checkpoints = Checkpoints(folder, ranks, 2, IDENTITY, state, None)
    results: dict[str, Any] = {}

    def steps() -> list[str]:
        ranks.barrier()
        found = sorted(os.listdir(folder / "checkpoints"))
        ranks.barrier()
        return found

    checkpoints.save(2, 0, wait=True)
    results["whole"] = steps()

    write, note = Snapshot.write, writing.write_durably
    for name, fails_too in (("a rank's disk is full", False), ("its note cannot be written either", True)):
        if ranks.rank == 1:
            Snapshot.write = _full  # type: ignore[method-assign]
            writing.write_durably = _full if fails_too else note
        with contextlib.redirect_stderr(io.StringIO()) as said:
            checkpoints.save(4, 0)
            checkpoints.finish()
        results[name] = (said.getvalue(), checkpoints.num_failed, steps())
        try:
            checkpoints.save(4, 0, wait=True)
        except AgreedError as error:
            results[f"{name}, at the end"] = str(error)
        Snapshot.write, writing.write_durably = write, note  # type: ignore[method-assign]
    checkpoints.save(6, 0, wait=True)
    results["afterwards"] = steps()

    # Its tensors lie across these buffers.
    checkpoints._snapshot = Snapshot(torch.device("cpu"), 32)
    results["gathered"] = {name: value.clone() for name, value in checkpoints.gathered_result().items()}
    if ranks.is_main:
        gathering._allocate = _no_memory  # type: ignore[assignment]
    try:
        checkpoints.gathered_result()
    except AgreedError as error:
        results["no memory"] = str(error)
    results["there"] = [checkpoints.saved_result(step) for step in (6, 7)]

    verify(folder, 6, ranks)
    if ranks.is_main:
        file = folder / "checkpoints" / "step-6" / f"rank-00001-of-{ranks.world_size:05}.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    ranks.barrier()
    try:
        verify(folder, 6, ranks)
    except UserError as error:
        results["damaged"] = str(error)

    check_shared(folder, ranks)
    own = folder / f"of-rank-{ranks.rank}"
    own.mkdir()
    try:
        check_shared(own, ranks)
    except UserError as error:
        results["not shared"] = str(error)
    recipe = toy_recipe(folder / "run").model_copy(update={"cache_dir": str(own)})
    check_shared_stages(recipe, False, ranks)
    try:
        # One rank lacks a stage that another one has, in a folder of its own.
        check_shared_stages(recipe, ranks.rank == 1, ranks)
    except UserError as error:
        results["stages"] = str(error)
    return results


def test_three_ranks(tmp_path):
    done = on_ranks(3, everything, tmp_path, timeout_s=240)
    for rank, result in enumerate(done):
        assert result["whole"] == ["latest", "step-2"]
        for number, name in enumerate(("a rank's disk is full", "its note cannot be written either")):
            said, num_failed, left = result[name]
            assert num_failed == 2 * number + 1
            assert left == ["latest", "step-2"]
            assert ("training goes on" in said) == (rank == 0)
            assert f"step-4: {os.strerror(errno.ENOSPC)}" in result[f"{name}, at the end"]
        assert result["afterwards"] == ["latest", "step-2", "step-6"]
        assert result["there"] == [tmp_path / "checkpoints" / "step-6", None]
        assert result["no memory"] == "rank 0: RuntimeError: not enough memory: you tried to allocate 9 bytes"
        assert "rank-00001-of-00003.safetensors is damaged" in result["damaged"]
        assert f"continue from {tmp_path}/checkpoints/step-2" in result["damaged"]
        assert "of rank 1 is not the folder of rank 0" in result["not shared"]
        assert result["stages"].startswith(f"cache_dir: {tmp_path}/of-rank-")
    whole = dict(CheckpointReader(tmp_path / "checkpoints" / "step-2").whole("weights"))
    reference = ToyState(0, 1).tensors
    gathered = done[0]["gathered"]
    assert [result["gathered"] for result in done[1:]] == [{}, {}]
    assert {name: value.shape for name, value in gathered.items()} == {
        name: value.shape for name, value in whole.items()
    }
    assert all(torch.equal(value, whole[name]) and value.dtype == whole[name].dtype for name, value in gathered.items())
    assert all(torch.equal(value.flatten(), reference["weights", name]) for name, value in whole.items())

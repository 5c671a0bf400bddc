"""Keyed folders that several processes, and several runs, make or wait for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from distiller.raw_columns import RawColumns
from distiller.stages import Stage


@pytest.mark.timeout(60)
def test_two_runs_of_two_ranks_make_a_stage_one_after_the_other(tmp_path):
    """Ranks are threads. Whichever run is first makes it; the other finds it made, on both of its ranks."""
    stage, answers, at_work = Stage("drawn", {"of": "both"}, tmp_path), [], []
    meetings = {run: threading.Barrier(2) for run in "ab"}

    def work(run: str, rank: int) -> None:
        with stage.made_by_all(rank == 0, run) as is_missing:
            answers.append((run, is_missing))
            if is_missing:
                at_work.append(run)
                # The collective that the body begins with.
                meetings[run].wait()
                assert set(at_work) == {run}
                if rank == 0:
                    (stage.partial / "part").touch()
                    stage.finish()
                stage.wait()

    threads = [threading.Thread(target=work, args=(run, rank)) for run in "ab" for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = at_work[0]
    assert sorted(answers) == sorted([(run, run == first) for run in "ab" for _ in range(2)])
    assert [file.name for file in stage.folder.iterdir() if file.name == "part"] == ["part"]


def test_columns_grow_on_the_disk_and_leave_nothing_but_tensors(tmp_path):
    folder = tmp_path / "columns"
    parts = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (2, 0, 5)]
    with RawColumns(folder) as columns:
        for part in parts:
            columns.append("wide", part)
            columns.append("flags", part[:, 0] > 0)
        columns.append("empty", torch.zeros(0, 4))
        mapped = {name: tensor.clone() for name, tensor in columns.mapped().items()}
        with pytest.raises(AssertionError, match="wide"):
            columns.append("wide", torch.zeros(1, 4))
    assert torch.equal(mapped["wide"], torch.cat(parts))
    assert torch.equal(mapped["flags"], torch.cat(parts)[:, 0] > 0)
    assert mapped["empty"].shape == (0, 4)
    assert not list(Path(folder).iterdir())

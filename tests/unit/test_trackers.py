"""Trackers over the sessions of one run: pieces that belong together, and steps that never go back."""

from __future__ import annotations

import errno
import io
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from PIL import Image

from distiller.config.loading import dump
from distiller.training.loop import train
from distiller.training.trackers import TrackedRun, Trackers, grouped_name, options_of, tracked_run
from distiller.training.tracking import Tracker
from tests import toys
from tests.toy_task import build_toy_run, toy_recipe

LAST_STEP = 12


def recipe_with(folder: Path, *trackers: str, **tracking: Any) -> Any:
    recipe = toy_recipe(folder)
    section = recipe.tracking.model_copy(update={"trackers": trackers, **tracking})
    return recipe.model_copy(update={"tracking": section})


def session(recipe: Any, steps: range, samples: Path | None = None) -> None:
    """As the loop: the session begins after the checkpoint of `steps.start - 1`, and ends without one.

    The last step shows the samples in that folder.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    folder = Path(recipe.output_dir)
    folder.mkdir(exist_ok=True)
    accelerator = Accelerator(cpu=True, log_with=list(recipe.tracking.trackers), project_dir=folder / "tracking")
    tracker = Tracker(recipe, accelerator, steps.start, LAST_STEP)
    tracker.start_trackers(recipe)
    for step in steps:
        tracker.log({"step": step, "loss": step / 2, "perf/samples_per_s": 1.0, "perf/step_ms": 1.0})
    if samples is not None:
        tracker.log_samples(samples, steps[-1])
    tracker.close()


def test_tensorboard_shows_one_series_whose_steps_never_go_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_with(tmp_path / "run", "tensorboard")
    # The first one died before it had a checkpoint: the second starts at step 1 again.
    for steps in (range(1, 4), range(1, 9), range(6, 8), range(6, 13)):
        session(recipe, steps)
    events = EventAccumulator(str(tmp_path / "run" / "tracking" / "distiller"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/total")] == [(s, s / 2) for s in range(1, 13)]
    # Of its values TensorBoard makes runs of their own, one for each session that tells them.
    assert len(list((tmp_path / "run" / "tracking" / "distiller").glob("*/events*"))) == 1


def test_the_id_lies_in_the_output_folder_and_a_copy_is_another_run(tmp_path):
    first = tracked_run(tmp_path / "a")
    assert first.last_steps == {}
    first.with_step(["wandb", "tensorboard"], 8).with_step(["tensorboard"], 6).write()
    again = tracked_run(tmp_path / "a")
    assert (again.id, again.last_steps) == (first.id, {"wandb": 8, "tensorboard": 8})
    (tmp_path / "link").symlink_to("a")
    assert tracked_run(tmp_path / "link") == again
    assert tracked_run(tmp_path / "b").id != first.id
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    copy = tracked_run(tmp_path / "copy")
    assert (copy.id != first.id, copy.last_steps) == (True, {"tensorboard": 8})
    assert tracked_run(tmp_path / "copy") == copy
    for torn in ("torn", "[]", '{"id": 1}'):
        (tmp_path / "a" / "run.json").write_text(torn)
        assert tracked_run(tmp_path / "a").last_steps == {}


def test_steps_of_a_session_without_trackers_were_handed_to_nobody(tmp_path):
    """A tracker gets what it lacks, also where the recipe has named it in an earlier session."""
    recipe, given = recipe_with(tmp_path / "run", "wandb", mode="disabled"), []
    log_with(recipe, range(1, 5), {"wandb": given})
    # Steps 5 to 12 in a session with --set tracking.trackers=[], of which metrics.jsonl knows.
    log_with(recipe, range(9, 15), {"wandb": given})
    assert given == [*range(1, 5), *range(9, 15)]


def log_with(recipe: Any, steps: range, given: dict[str, list[int]]) -> None:
    """A session whose trackers are doubles that note the steps."""
    doubles = [
        SimpleNamespace(
            name=name,
            store_init_configuration=lambda values: None,
            log=lambda values, step, name=name: given[name].append(step),
        )
        for name in given
    ]
    accelerator: Any = SimpleNamespace(
        is_main_process=True, trackers=doubles, init_trackers=lambda project, config, options: None
    )
    trackers = Trackers(accelerator)
    trackers.start(recipe, steps.start)
    for step in steps:
        trackers.log({"loss": 1.0}, step)


def test_trackers_get_the_recipe_and_where_the_session_runs(tmp_path):
    recipe, stored = recipe_with(tmp_path / "run", "wandb", mode="disabled"), []
    double = SimpleNamespace(name="wandb", store_init_configuration=stored.append)
    accelerator: Any = SimpleNamespace(is_main_process=True, trackers=[double], init_trackers=lambda *given: None)
    Trackers(accelerator).start(recipe, 1, {"host": "node-1", "gpus": []})
    assert stored == [{"recipe": dump(recipe), "environment": "host: node-1\ngpus: []\n"}]


def test_a_tracker_that_cannot_drop_steps_gets_none_twice(tmp_path):
    recipe = recipe_with(tmp_path / "run", "wandb", "tensorboard", mode="disabled")
    given: dict[str, list[int]] = {"wandb": [], "tensorboard": []}
    for steps in (range(1, 9), range(6, 8), range(6, 13)):
        log_with(recipe, steps, given)
    assert given["wandb"] == list(range(1, 13))
    assert given["tensorboard"] == [*range(1, 9), *range(6, 8), *range(6, 13)]


def test_pieces_share_a_group_and_online_a_run(tmp_path, monkeypatch):
    recipe = recipe_with(tmp_path / "mine", "wandb", "trackio", "tensorboard", run_name="seven")
    run = tracked_run(tmp_path / "mine" / "tracking")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    options = options_of(recipe, run, 6)
    assert options["wandb"]["group"] == run.id
    # Two offline pieces with one id: `wandb sync` would replace the first by the second.
    assert (options["wandb"]["mode"], options["wandb"].get("id")) == ("offline", None)
    assert options["tensorboard"] == {"purge_step": 6}
    assert options["trackio"] == {"name": f"seven-{run.id}", "group": run.id, "resume": "allow"}
    monkeypatch.setenv("WANDB_API_KEY", "k")
    online = options_of(recipe, run, 6)["wandb"]
    assert (online["mode"], online["id"], online["resume"]) == ("online", run.id, "allow")


def _records(file: bytes) -> Iterator[bytes]:
    """Of a .wandb file: LevelDB's log format (blocks of 32 KiB, parts of records), after wandb's own first 7 bytes."""
    offset, parts = 7, []
    while offset + 7 <= len(file):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
        _, length, kind = struct.unpack("<IHB", file[offset : offset + 7])
        parts.append(file[offset + 7 : offset + 7 + length])
        offset += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


@pytest.mark.slow
def test_wandb_offline_leaves_two_pieces_of_one_group(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    recipe = recipe_with(tmp_path / "run", "wandb", mode="offline")
    for steps in (range(1, 9), range(6, 13)):
        session(recipe, steps)
    groups, steps_seen = set(), []
    pieces = (tmp_path / "run" / "tracking" / "wandb").glob("offline-run-*/*.wandb")
    for file in sorted(pieces, key=lambda piece: piece.stat().st_mtime_ns):
        for content in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "run":
                groups.add(record.run.run_group)
            elif record.WhichOneof("record_type") == "history":
                steps_seen.append(record.history.step.num)
    assert groups == {json.loads((tmp_path / "run" / "tracking" / "run.json").read_text())["id"]}
    assert steps_seen == list(range(1, 13))


def test_a_disk_without_space_costs_trackers_their_steps_and_not_the_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorboard")

    def full(self: TrackedRun) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    recipe = recipe_with(tmp_path / "run", "tensorboard")
    session(recipe, range(1, 2))
    monkeypatch.setattr(TrackedRun, "write", full)
    session(recipe, range(2, 5))
    assert capsys.readouterr().err.count("No space left on device; trackers miss steps, training goes on") == 1


def test_trackers_show_metrics_in_groups():
    names = ["loss", "loss/prediction", "lr", "grad_norm", "perf/step_ms_max", "perf/teacher_ms", "eval/loss"]
    names += ["eval/loss/prediction", "memory/teacher_gpu_gib", "memory/gpu_peak_gib", "optim/skipped_steps"]
    assert [grouped_name(name) for name in names] == [
        *("loss/total", "loss/prediction", "optim/lr", "optim/grad_norm", "perf/step_ms_max", "teacher/ms"),
        *("eval/loss/total", "eval/loss/prediction", "teacher/memory_gpu_gib", "memory/gpu_peak_gib"),
        "optim/skipped_steps",
    ]


def test_all_metrics_of_a_run_belong_to_a_group(tmp_path):
    train(build_toy_run(toy_recipe(tmp_path, batch_size=4)))
    (line, *_) = toys.read_metrics(tmp_path)
    groups = {grouped_name(name).partition("/")[0] for name in line if name != "step"}
    assert groups == {"loss", "optim", "perf", "memory", "teacher", "progress"}


def test_tensorboard_shows_samples_of_their_steps(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_with(tmp_path / "run", "tensorboard")
    pictures, texts = tmp_path / "pictures", tmp_path / "texts"
    for folder in (pictures, texts):
        folder.mkdir()
    Image.new("RGB", (6, 4), (250, 20, 30)).save(pictures / "samples.png")
    (texts / "samples.txt").write_text("# teacher\n<b>one</b>\n\ntwo\n")
    for start, folder in ((1, pictures), (3, texts)):
        session(recipe, range(start, start + 2), folder)
    events = EventAccumulator(str(tmp_path / "run" / "tracking" / "distiller"))
    events.Reload()
    (image,) = events.Images("eval/samples")
    assert (image.step, image.width, image.height) == (2, 6, 4)
    assert Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB").getpixel((5, 3)) == (250, 20, 30)
    (text,) = events.Tensors("eval/samples/text_summary")
    assert text.step == 4
    assert text.tensor_proto.string_val[0].decode() == "    # teacher\n    <b>one</b>\n    \n    two\n"


def test_wandb_gets_samples_beside_the_numbers_of_their_step(tmp_path, monkeypatch):
    logged: list[tuple[int, dict[str, Any]]] = []
    recipe = recipe_with(tmp_path / "run", "wandb", mode="offline")
    monkeypatch.setattr("accelerate.tracking.WandBTracker.log", lambda _, values, step: logged.append((step, values)))
    folder = tmp_path / "shown"
    folder.mkdir()
    (folder / "samples.txt").write_text("a < b")
    session(recipe, range(1, 3), folder)
    # The next session begins with the last step again: its numbers are there, its samples may not be.
    session(recipe, range(2, 3), folder)
    assert [step for step, _ in logged] == [1, 2, 2, 2]
    assert [list(values) for step, values in logged if "eval/samples" in values] == [["eval/samples"]] * 2
    assert "<pre>a &lt; b</pre>" in logged[2][1]["eval/samples"].html

"""The files of a cache: written and read bit for bit, checked, refused by field, repaired."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distiller.cache.key import first_difference
from distiller.cache.layout import Layout, samples_per_shard, shard_name
from distiller.cache.manifest import KEY_FILE, MANIFEST_FILE, Manifest, open_cache, remove_damaged
from distiller.cache.reading import CachedData
from distiller.cache.shards import Shard, remove_partial, write_shard
from distiller.cache.writing import _Keys, check_free_space, claim, plan_layout
from distiller.data.rng import sample_order
from distiller.errors import RunError, UserError
from distiller.storage.stage_folders import CACHED_STAGES
from distiller.tasks.micro_batch import RepeatedDraws
from distiller.teachers.base import Request
from tests.cached_cases import fill_cache
from tests.toy_task import LinearTeacher, Sequences, TokenTask

KEY = {"format": 1, "teacher": {"weights": "a1", "dtype": "float32"}, "seed": 0}
NAMES = frozenset(("hidden", "ids"))
LAYOUT = Layout(num_samples=10, draws=2, per_shard=4, seed=3)


def sample(index: int) -> dict[str, torch.Tensor]:
    """Two tensors, one of a length of its own."""
    generator = torch.Generator().manual_seed(index)
    hidden = torch.randn(1 + index % 3, 5, generator=generator).to(torch.bfloat16)
    return {"hidden": hidden, "ids": torch.randint(0, 2**16, (4,), generator=generator, dtype=torch.int32)}


def write_cache(folder: Path, key: dict[str, Any] = KEY, layout: Layout = LAYOUT) -> Path:
    """A whole cache: sample i of draw d is number 100 d + i."""
    folder.mkdir(exist_ok=True)
    for shard in range(layout.num_shards):
        write_shard(folder / shard_name(shard), [sample(100 * d + i) for d, i in layout.keys_of(shard)])
    plan_layout(folder, key, layout, NAMES)
    sizes = tuple((folder / shard_name(shard)).stat().st_size for shard in range(layout.num_shards))
    Manifest(key, layout, ("hidden", "ids"), sizes, 40.0, 10.0, {}).write(folder)
    return folder


def test_every_sample_of_every_draw_has_one_place():
    places = {LAYOUT.locate(draw, i): (draw, i) for draw in range(2) for i in range(10)}
    assert len(places) == 20
    for shard in range(LAYOUT.num_shards):
        for row, key in enumerate(LAYOUT.keys_of(shard)):
            assert places[shard, row] == key
    # In the order of each epoch, so that training reads from front to back.
    ids = [i for shard in range(3) for _, i in LAYOUT.keys_of(shard)]
    assert ids == sample_order(3, 0, 10)


def test_what_is_read_is_what_was_written(tmp_path):
    samples = [sample(index) for index in range(7)]
    write_shard(tmp_path / "a.safetensors", samples)
    shard = Shard(tmp_path / "a.safetensors")
    assert len(shard) == 7
    for row in (6, 0, 3):
        read = shard.read(row)
        assert read.keys() == samples[row].keys()
        for name, tensor in samples[row].items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_flipped_bit_is_found_in_the_sample_that_has_it_and_in_no_other(tmp_path):
    file = tmp_path / "a.safetensors"
    write_shard(file, [{"x": torch.full((64,), float(index))} for index in range(4)])
    content = bytearray(file.read_bytes())
    content[content.index(torch.full((64,), 2.0).numpy().tobytes()) + 17] ^= 1
    file.write_bytes(content)
    shard = Shard(file)
    assert shard.read(1)["x"][0] == 1
    with pytest.raises(RunError, match=r"a\.safetensors is damaged .* row 2 .* --repair"):
        shard.read(2)


def test_data_comes_with_the_outputs_of_its_draw(tmp_path):
    folder = write_cache(tmp_path / "cache", layout=Layout(16, 2, 4, 3))
    data = CachedData(Sequences(), folder, Layout(16, 2, 4, 3), draws=2)
    for epoch, index in ((0, 5), (1, 5), (2, 5), (5, 0)):
        (sample_id, _), outputs = data[epoch, index]
        assert sample_id == index
        assert torch.equal(outputs["hidden"], sample(100 * (epoch % 2) + index)["hidden"])


def test_repeated_draws_ask_the_data_for_the_first_epochs_again():
    class Epochs(torch.utils.data.Dataset):
        def __getitem__(self, key):
            return key

    repeated = RepeatedDraws(Epochs(), 3)
    assert [repeated[epoch, 7] for epoch in (0, 2, 3, 7)] == [(0, 7), (2, 7), (0, 7), (1, 7)]


def test_the_first_field_that_differs_is_named():
    other = {"format": 1, "teacher": {"weights": "a1", "dtype": "bfloat16"}, "seed": 0}
    assert first_difference(KEY, KEY) is None
    assert first_difference(KEY, other) == "teacher.dtype is 'float32' there and 'bfloat16' here"
    assert first_difference(KEY, KEY | {"extra": 1}) == "extra is nothing there and 1 here"
    assert first_difference(KEY | {"extra": 1}, KEY) == "extra is 1 there and nothing here"
    # In the recipe's order; what the cache alone has is last.
    assert first_difference({"extra": 1, **other}, other | {"seed": 1}) == "seed is 0 there and 1 here"


def test_a_cache_that_fits_is_opened(tmp_path):
    folder = write_cache(tmp_path / "cache")
    manifest = open_cache(folder, KEY, ("hidden",), epochs=2, draws=None)
    assert manifest.layout == LAYOUT
    assert open_cache(folder, KEY, ("hidden", "ids"), epochs=9, draws=2) == manifest


def test_outputs_without_draws_serve_any_number_of_passes(tmp_path):
    """Their key has no seed."""
    key = {name: value for name, value in KEY.items() if name != "seed"}
    layout = Layout(10, 1, 4, 3)
    folder = write_cache(tmp_path / "cache", key, layout)
    assert open_cache(folder, key, ("hidden",), epochs=9, draws=None).layout == layout


@pytest.mark.parametrize(
    ("spoil", "changes", "message"),
    [
        (lambda folder: (folder / MANIFEST_FILE).unlink(), {}, "is not complete .* run distiller cache"),
        (lambda folder: (folder / MANIFEST_FILE).write_text("{}"), {}, "cannot be read .* --repair"),
        (lambda folder: None, {"key": KEY | {"seed": 1}}, "seed is 0 there and 1 here"),
        (lambda folder: None, {"wanted": ("hidden", "features/3")}, "holds hidden, ids .* also needs features/3"),
        (lambda folder: None, {"epochs": 3}, "holds 2 draws .* passes 3 times .* set cache.draws=2"),
        (lambda folder: (folder / shard_name(4)).unlink(), {}, "outputs-000004.safetensors is missing; .* --repair"),
        (lambda folder: (folder / shard_name(1)).write_bytes(b"x"), {}, "outputs-000001.safetensors has 1 bytes of"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(tmp_path, spoil, changes, message):
    folder = write_cache(tmp_path / "cache")
    spoil(folder)
    asked: dict[str, Any] = {"key": KEY, "wanted": ("hidden",), "epochs": 2, "draws": None} | changes
    with pytest.raises(UserError, match=message):
        open_cache(folder, **asked)


def test_a_folder_that_is_no_cache_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no cache"):
        open_cache(tmp_path, KEY, ("hidden",), 1, None)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="is not empty and is no cache; give a new folder"):
        claim(tmp_path, KEY)


def test_hidden_entries_and_copies_of_stages_make_no_other_folder_of_it(tmp_path):
    (tmp_path / ".nfs0001").touch()
    (tmp_path / CACHED_STAGES).mkdir()
    claim(tmp_path, KEY)


def test_a_begun_cache_is_gone_on_with_only_for_the_same_key(tmp_path):
    claim(tmp_path, KEY)
    assert plan_layout(tmp_path, KEY, LAYOUT, NAMES) == LAYOUT
    claim(tmp_path, KEY)
    # What a file holds was decided at the beginning.
    assert plan_layout(tmp_path, KEY, Layout(10, 2, 8, 3), NAMES) == LAYOUT
    with pytest.raises(UserError, match=r"was begun with hidden, ids of each sample, and now it is features/3, hidden"):
        plan_layout(tmp_path, KEY, LAYOUT, frozenset(("hidden", "features/3")))
    with pytest.raises(UserError, match=r"was begun with 2 draws .* now it is 3"):
        plan_layout(tmp_path, KEY, Layout(10, 3, 4, 3), NAMES)
    with pytest.raises(UserError, match=r"teacher\.weights is 'a1' there and 'b2' here"):
        claim(tmp_path, KEY | {"teacher": {"weights": "b2", "dtype": "float32"}})
    (tmp_path / KEY_FILE).write_text(json.dumps([]))
    with pytest.raises(UserError, match="cannot be used"):
        claim(tmp_path, KEY)


def test_repair_removes_the_damaged_files_and_no_other(tmp_path):
    folder = write_cache(tmp_path / "cache")
    (folder / shard_name(1)).write_bytes((folder / shard_name(1)).read_bytes()[:-1])
    content = bytearray((folder / shard_name(3)).read_bytes())
    content[-1] ^= 128
    (folder / shard_name(3)).write_bytes(content)
    # A whole file, of other samples.
    (folder / shard_name(5)).write_bytes((folder / shard_name(0)).read_bytes())
    every = range(LAYOUT.num_shards)
    assert remove_damaged(folder, LAYOUT, every, NAMES) == [shard_name(1), shard_name(3), shard_name(5)]
    assert {file.name for file in folder.glob("outputs-*")} == {shard_name(index) for index in (0, 2, 4)}


def test_repair_removes_files_that_hold_other_outputs(tmp_path):
    folder = write_cache(tmp_path / "cache")
    write_shard(folder / shard_name(2), [{"hidden": sample(100 * d + i)["hidden"]} for d, i in LAYOUT.keys_of(2)])
    assert remove_damaged(folder, LAYOUT, range(LAYOUT.num_shards), NAMES) == [shard_name(2)]


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    folder = write_cache(tmp_path / "cache")
    left = {file.name for file in folder.iterdir()}
    (folder / ".tmpX7aQ").write_bytes(b"x")
    (folder / f".{shard_name(3)}.partial").write_bytes(b"x")
    remove_partial(folder)
    assert {file.name for file in folder.iterdir()} == left


def test_a_disk_that_fails_is_one_line(tmp_path):
    # Also root cannot write a file where a folder is.
    (tmp_path / ".a.safetensors.partial").mkdir()
    with pytest.raises(RunError, match=r"a\.safetensors cannot be written .* the same command goes on"):
        write_shard(tmp_path / "a.safetensors", [sample(0)])


def test_a_draws_files_are_of_one_size_and_enough_for_every_rank():
    # 100 samples, asked for 8 at a time: 13 requests.
    assert samples_per_shard(100, 1, 1, 8) == 104
    assert samples_per_shard(100, 1, 2, 8) == 56
    assert samples_per_shard(100, 1, 8, 8) == 16
    assert samples_per_shard(100, 4, 8, 8) == 56
    assert samples_per_shard(100, 1, 1000, 8) == 8
    layout = Layout(100, 3, 16, 0)
    assert [layout.size_of(shard) for shard in range(layout.num_shards)] == [16, 16, 16, 16, 16, 16, 4] * 3
    assert all(layout.size_of(shard) == len(layout.keys_of(shard)) for shard in range(layout.num_shards))


def test_one_rank_writes_every_file_with_the_answers_for_its_samples(tmp_path):
    """Each of the two files takes two calls of the teacher, for four samples each."""

    class FirstTokens(TokenTask):
        def request(self, batch):
            return Request(self.sample_ids(batch), {"tokens": torch.stack([tokens[0] for _, tokens in batch])}, ())

    layout = fill_cache(tmp_path, FirstTokens(), teacher := LinearTeacher(), 4, torch.device("cpu"))
    data = CachedData(Sequences(), tmp_path, layout, draws=1)
    for number in range(16):
        (_, tokens), outputs = data[0, number]
        assert torch.allclose(outputs["output"], tokens[0] @ teacher.weight)


def test_the_last_file_of_a_draw_repeats_its_last_sample_in_the_teacher_s_requests():
    """Five samples in files of four, of which the teacher is asked for two at a time."""
    layout = Layout(5, 2, 4, 3)
    groups, first, second = list(_Keys(layout, range(4), 2)), sample_order(3, 0, 5), sample_order(3, 1, 5)
    assert [len(group) for group in groups] == [2] * 8
    assert [key for group in groups[:2] for key in group] == [(0, i) for i in first[:4]]
    assert [key for group in groups[2:4] for key in group] == [(0, first[4])] * 4
    assert [key for group in groups[4:6] for key in group] == [(1, i) for i in second[:4]]
    assert [key for group in groups[6:] for key in group] == [(1, second[4])] * 4


def test_answers_that_are_not_finite_are_no_cache(tmp_path):
    class Broken(LinearTeacher):
        def predict(self, requests):
            return [{"output": outputs["output"] / 0.0} for outputs in super().predict(requests)]

    with pytest.raises(RunError, match="the teacher's output is not finite for samples 0, 3, 1, 15"):
        fill_cache(tmp_path / "cache", TokenTask(), Broken(), 4, torch.device("cpu"))
    assert not list((tmp_path / "cache").iterdir())
    # Of many samples eight are named.
    with pytest.raises(RunError, match=r"not finite for samples (\d+, ){7}\d+ or the ones beside them"):
        fill_cache(tmp_path / "large", TokenTask(), Broken(), 16, torch.device("cpu"))


@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_cannot_be_written_ends_the_making_of_a_cache(tmp_path, number):
    """The first of two, and the last, after which the teacher is asked nothing more."""
    # Also root cannot write a file where a folder is.
    (tmp_path / "cache" / f".{shard_name(number)}.partial").mkdir(parents=True)
    with pytest.raises(RunError, match=rf"outputs-00000{number}\.safetensors cannot be written"):
        fill_cache(tmp_path / "cache", TokenTask(), LinearTeacher(), 4, torch.device("cpu"))


def test_a_disk_without_room_is_refused(tmp_path):
    check_free_space(tmp_path, 1.0)
    plan_layout(tmp_path, KEY, LAYOUT, NAMES)
    with pytest.raises(UserError, match=r"GiB free and .* GiB are still to be written"):
        check_free_space(tmp_path, 2.0**60)
    # With less to store the same folder may be begun.
    fewer = Layout(10, 1, 4, 3)
    assert plan_layout(tmp_path, KEY, fewer, NAMES) == fewer


def test_what_just_fits_is_written_and_files_that_are_there_keep_their_key(tmp_path, monkeypatch):
    folder = write_cache(tmp_path / "cache")
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=100))
    check_free_space(folder, 100.0)
    with pytest.raises(UserError, match="still to be written"):
        check_free_space(folder, 101.0)
    assert (folder / KEY_FILE).is_file()

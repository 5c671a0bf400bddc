"""`distiller cache` and training from it, through real launches.

    DISTILLER_KILLS=20 python -m pytest tests/launch/test_cache.py -k killed

kills the writing of a cache as often as that.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from distiller.cache.layout import shard_name
from distiller.storage.stage_folders import CACHED_STAGES
from distiller.storage.weight_files import read_header
from tests import toys
from tests.launch.launching import CONFIGS, begin, launch

KILLS = int(os.environ.get("DISTILLER_KILLS", "3"))


def cached(folder: Path) -> list[str]:
    """The overrides of a training run from a cache."""
    return ["teacher.placement=cached", f"teacher.cache={folder}"]


def files_of(folder: Path) -> dict[str, bytes]:
    """What a cache holds, but for how it was made."""
    return {file.name: file.read_bytes() for file in sorted(folder.glob("outputs-*"))}


@pytest.fixture(scope="module")
def cache(toy) -> Path:
    """Made by two ranks, each with a streamed teacher."""
    folder = toy / "outputs"
    options = [f"teacher.cache={folder}", "teacher.placement=streamed", f"output_dir={toy / 'unused'}"]
    result = launch(CONFIGS / "cpu_2proc.yaml", "cache", str(toy / "recipe.yaml"), *options)
    assert result.code == 0, result.stderr
    assert "bytes a sample" in result.stdout
    assert f"complete in {folder}" in result.stdout
    assert not (toy / "unused" / "recipe.yaml").exists()
    return folder


def test_training_from_a_cache_is_training_beside_the_teacher_bit_for_bit(toy, reference, cache):
    output_dir = toy / "from-cache"
    # Not even a file of the teacher's weights is opened but for its digest.
    result = launch(CONFIGS / "cpu.yaml", "train", str(toy / "recipe.yaml"), *cached(cache), f"output_dir={output_dir}")
    assert result.code == 0, result.stderr
    toys.assert_same_run(output_dir, reference, loss_tolerance=0.0, tolerance=0.0)
    assert (output_dir / "samples.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu_2proc", "zero2", "zero3_offload"])
def test_ranks_and_engines_read_the_same_cache(toy, reference, cache, name):
    output_dir = toy / f"from-cache-{name}"
    options = [*cached(cache), f"output_dir={output_dir}", "train.batch_size=4", "train.num_workers=1"]
    result = launch(CONFIGS / f"{name}.yaml", "train", str(toy / "recipe.yaml"), *options)
    assert result.code == 0, result.stderr
    toys.assert_same_run(output_dir, reference)


@pytest.mark.slow
def test_another_recipe_is_refused_by_the_field_that_differs(toy, cache):
    for override, field in (
        ("teacher.dtype=bfloat16", "teacher.dtype"),
        ("seed=4", "seed"),
        ("cache.draws=9", "draws"),
    ):
        options = [*cached(cache), f"output_dir={toy / 'refused'}", override]
        result = launch(CONFIGS / "cpu.yaml", "train", str(toy / "recipe.yaml"), *options)
        complaints = [line for line in result.stderr.splitlines() if line.startswith("distiller:")]
        assert len(complaints) == 1, result.stderr
        assert "teacher.cache:" in complaints[0]
        assert field in complaints[0]
    assert not (toy / "refused" / "recipe.yaml").exists()


@pytest.mark.slow
def test_a_damaged_file_is_named_and_repaired(toy, cache, reference):
    whole, damaged = files_of(cache), cache / shard_name(1)
    content = bytearray(damaged.read_bytes())
    # The first sample that training meets in it.
    content[read_header(damaged)["prediction"].start] ^= 1
    damaged.write_bytes(content)
    output_dir = toy / "damaged"
    train = ["train", str(toy / "recipe.yaml"), *cached(cache), f"output_dir={output_dir}", "train.num_workers=1"]
    result = launch(CONFIGS / "cpu.yaml", *train)
    assert result.code == 1
    assert f"distiller: {damaged} is damaged" in result.stderr
    assert "Traceback" not in result.stderr.partition("ChildFailedError")[0].partition("distiller:")[0]
    result = launch(CONFIGS / "cpu_2proc.yaml", "cache", str(toy / "recipe.yaml"), *cached(cache), "--repair")
    assert result.code == 0, result.stderr
    assert f"{damaged.name} is damaged; it will be made again" in result.stdout
    assert files_of(cache) == whole
    result = launch(CONFIGS / "cpu.yaml", *train, "--resume")
    assert result.code == 0, result.stderr
    toys.assert_same_run(output_dir, reference, loss_tolerance=0.0, tolerance=0.0)


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
def test_a_cache_whose_writing_is_killed_again_and_again_is_the_same(toy, reference):
    """Files that are there are kept, whenever the others died."""
    num_shards, moments = 40 + 20 * KILLS, random.Random(5)
    command = ["cache", str(toy / "recipe.yaml"), f"cache.draws={num_shards}"]
    whole, broken, config = toy / "whole", toy / "broken", CONFIGS / "cpu_2proc.yaml"
    result = launch(config, *command, f"teacher.cache={whole}")
    assert result.code == 0, result.stderr
    for _ in range(KILLS):
        before = {file: file.stat().st_mtime_ns for file in broken.glob("outputs-*")}
        running = begin(config, toy / "unused", *command, f"teacher.cache={broken}")
        more = len(before) + moments.randint(1, 20)
        running.wait_until(lambda more=more: len(list(broken.glob("outputs-*"))) >= more, 120)
        time.sleep(moments.uniform(0, 0.05))
        running.kill_all()
        assert not (broken / "manifest.json").exists()
        assert {file: file.stat().st_mtime_ns for file in before} == before
    result = launch(config, *command, f"teacher.cache={broken}")
    assert result.code == 0, result.stderr
    assert files_of(broken) == files_of(whole)
    names = {file.name for file in broken.iterdir()}
    assert names == {*files_of(whole), "key.json", "manifest.json", ".running", CACHED_STAGES}

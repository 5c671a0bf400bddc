"""Which keys a placement reads: others are refused or left behind by an override; the registry alone lists them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import distiller
from distiller.commands.caching import _with_live_teacher
from distiller.commands.run_reading import open_run
from distiller.config.loading import dump, load
from distiller.config.placements import PLACEMENTS
from distiller.config.placements.keys import all_keys, keys_free_on_resume, placement_names, readers, unread_keys
from distiller.config.teacher import Teacher
from distiller.errors import UserError
from distiller.run_folder.output_dir import check_output_dir
from distiller.storage.yaml_files import dump_yaml, parse_yaml

PACKAGE = Path(distiller.__file__).parent
VALUES: dict[str, Any] = {
    "pin_memory": False,
    "ring_blocks": 5,
    "resident_blocks": "auto",
    "amortise": False,
    "shard_transfers": False,
    "read_threads": 9,
    "device_map": {"": 0},
    "rank": 1,
    "micro_batch": 2,
    "devices": 2,
    "inner": "disk",
    "offload": "cpu",
    "nvme_path": "/local",
    "cache": "/cache",
}
"""A value of each key that is not its default."""
NEEDED: dict[str, dict[str, Any]] = {"custom": {"device_map": {"": 1}}, "cached": {"cache": "/outputs"}}
"""Keys without which a placement is incomplete."""


def recipe_file(folder: Path, **teacher: Any) -> str:
    data = {
        "task": {"kind": "diffusion"},
        "teacher": {"path": "nowhere", **teacher},
        "student": {"num_layers": 1},
        "data": {"path": "prompts.txt"},
        "train": {"max_steps": 1},
        "output_dir": str(folder / "run"),
    }
    file = folder / "written.yaml"
    file.write_text(dump_yaml(data))
    return str(file)


def make_run(folder: Path, data: str) -> Path:
    (folder / "run").mkdir()
    (folder / "run" / "recipe.yaml").write_text(data)
    return folder / "run"


def test_every_key_has_a_value_here_and_is_declared_by_one_class():
    assert set(VALUES) == set(all_keys())
    declared: dict[str, set[type]] = {}
    for spec in PLACEMENTS.values():
        for parent in spec.options.__mro__:
            for key in inspect.get_annotations(parent):
                declared.setdefault(key, set()).add(parent)
    assert {key: classes for key, classes in declared.items() if key in all_keys() and len(classes) > 1} == {}


@pytest.mark.parametrize(("placement", "key"), [(name, key) for name in placement_names() for key in unread_keys(name)])
def test_a_key_that_the_placement_does_not_read_is_refused_with_those_that_do(tmp_path, placement, key):
    file = recipe_file(tmp_path, placement=placement, **NEEDED.get(placement, {}), **{key: VALUES[key]})
    with pytest.raises(UserError) as refused:
        load(file)
    said = str(refused.value)
    assert said.startswith(f"{file}: teacher.{key} is ")
    assert f"which teacher.placement {placement} does not read; leave it out, or choose a placement that does: " in said
    named = set(said.rpartition(": ")[2].replace(" or ", ", ").split(", "))
    assert named == set(readers(key))
    assert "\n" not in said


@pytest.mark.parametrize("placement", placement_names())
def test_what_it_reads_and_every_default_are_accepted(placement, tmp_path):
    read = {key: value for key, value in VALUES.items() if key not in unread_keys(placement)}
    load(recipe_file(tmp_path, placement=placement, **read))
    defaults = {key: Teacher.model_fields[key].default for key in unread_keys(placement)}
    load(recipe_file(tmp_path, placement=placement, **defaults, **NEEDED.get(placement, {})))


def test_the_message_shows_value_and_readers(tmp_path):
    with pytest.raises(UserError) as refused:
        load(recipe_file(tmp_path, placement="replicated"), ["teacher.ring_blocks=5"])
    assert str(refused.value) == (
        "'teacher.ring_blocks=5': teacher.ring_blocks is 5, which teacher.placement replicated does not read; leave it "
        "out, or choose a placement that does: streamed, disk or auto"
    )


def test_auto_reads_what_its_candidates_read():
    candidates = [spec for spec in PLACEMENTS.values() if spec.is_auto_candidate]
    assert set(all_keys()) - set(unread_keys("auto")) == {key for spec in candidates for key in spec.keys} | {"cache"}


def test_an_override_of_the_placement_leaves_keys_of_the_old_one_behind(tmp_path):
    file = recipe_file(tmp_path, placement="streamed", ring_blocks=5, shard_transfers=False)
    replicated = load(file, ["teacher.placement=replicated"]).teacher
    assert (replicated.ring_blocks, replicated.shard_transfers) == (3, "auto")
    disk = load(file, ["teacher.placement=disk"]).teacher
    assert (disk.ring_blocks, disk.shard_transfers) == (5, "auto")
    assert load(file, ["teacher.placement=streamed"]).teacher.ring_blocks == 5
    with pytest.raises(UserError, match=r"^'teacher\.ring_blocks=4': teacher\.ring_blocks is 4, which .* rank0 does"):
        load(file, ["teacher.placement=rank0", "teacher.ring_blocks=4"])


def test_an_override_does_not_mend_what_the_file_has_wrong(tmp_path):
    file = recipe_file(tmp_path, placement="replicated", ring_blocks=5)
    with pytest.raises(UserError, match=r"teacher\.ring_blocks is 5"):
        load(file, ["teacher.placement=replicated"])


def test_commands_read_a_run_of_any_placement_and_move_its_teacher(tmp_path):
    run = make_run(tmp_path, dump(load(recipe_file(tmp_path, placement="sharded", offload="nvme", nvme_path="/local"))))
    assert open_run(run, "evaluate").recipe.teacher.offload == "nvme"
    moved = open_run(run, "sample", ["teacher.placement=streamed"]).recipe.teacher
    assert (moved.placement, moved.offload, moved.nvme_path) == ("streamed", "none", None)
    with pytest.raises(UserError, match=r"teacher\.rank is 1, which teacher\.placement sharded"):
        open_run(run, "evaluate", ["teacher.rank=1"])


def test_a_run_of_an_older_version_may_hold_unread_keys(tmp_path):
    data = parse_yaml(dump(load(recipe_file(tmp_path, placement="replicated"))))
    data["teacher"] |= {"ring_blocks": 5, "rank": 1}
    run = make_run(tmp_path, dump_yaml(data))
    for command in ("evaluate", "sample", "export"):
        teacher = open_run(run, command).recipe.teacher
        assert (teacher.ring_blocks, teacher.rank) == (3, 0)


def test_a_resumed_run_may_change_placement_and_all_of_their_keys(tmp_path):
    assert set(keys_free_on_resume()) == {f"teacher.{key}" for key in all_keys()}
    file = recipe_file(tmp_path, placement="streamed", ring_blocks=5)
    make_run(tmp_path, dump(load(file)))
    for overrides in (["teacher.placement=replicated"], ["teacher.placement=rank0", "teacher.micro_batch=2"]):
        assert not check_output_dir(load(file, overrides), resume=True, last_step=1)
    with pytest.raises(UserError, match=r"seed was 0 and is 1 now .*; only .*teacher\.ring_blocks.* may change"):
        check_output_dir(load(file, ["seed=1"]), resume=True, last_step=1)


def test_a_cache_is_made_by_a_recipe_that_trains_from_it(tmp_path):
    recipe, was_cached = _with_live_teacher(load(recipe_file(tmp_path, placement="cached", cache="/outputs")))
    assert (was_cached, recipe.teacher.placement, recipe.teacher.cache) == (True, "auto", "/outputs")
    # Written by a live teacher in any placement.
    for name in set(placement_names()) - {"custom"}:
        assert load(recipe_file(tmp_path, placement=name, cache="/outputs")).teacher.cache == "/outputs"


def test_alone_a_teacher_moves_nearest_to_where_it_was():
    def moved(num_gpus: int, placement: str, **options: Any) -> dict[str, object]:
        teacher = Teacher(path="-", placement=placement, **options)
        return dict(PLACEMENTS[placement].alone(teacher, num_gpus))

    assert moved(1, "rank0", rank=3) == {"rank": 0}
    assert moved(0, "cached", cache="/outputs") == {"placement": "auto"}
    assert [moved(count, "sharded")["placement"] for count in (0, 1, 2)] == ["replicated", "replicated", "balanced"]
    assert moved(2, "sharded", offload="cpu") == {"placement": "streamed"}
    assert moved(2, "sharded", offload="nvme", nvme_path="/local") == {"placement": "disk"}
    spread = {"": 1, "blocks.0": "cpu"}
    assert moved(0, "custom", device_map=spread) == {"device_map": {"": 0, "blocks.0": "cpu"}}
    assert moved(1, "custom", device_map=spread) == {}


def test_placements_are_listed_in_the_registry_alone():
    """Three names or more as strings in one file are a list that a new placement would have to be added to."""
    # The older trainer's flags name what that trainer had, and no more will come.
    outside = ("config/placements/", "older/")
    listing = {}
    for file in PACKAGE.rglob("*.py"):
        path = str(file.relative_to(PACKAGE))
        if not path.startswith(outside):
            nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            listing[path] = strings & set(PLACEMENTS)
    assert {path: names for path, names in listing.items() if len(names) >= 3} == {}


def test_a_specification_names_others_only_where_the_teacher_moves_or_is_held_by_another():
    for file in (PACKAGE / "config" / "placements").glob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        named = strings & set(PLACEMENTS) - {file.stem}
        assert file.stem in ("__init__", "sharded", "dedicated") or len(named) < 3, file

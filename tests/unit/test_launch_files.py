"""The launch files that travel with the package: listed, copied, and explained value by value."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distiller.cli import main
from distiller.launch.checks import check_request
from distiller.launch.request import deepspeed_settings, read_launch_file
from distiller.storage.packaged_files import copy_launch_files, launch_files_dir

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
JSONS = sorted((ROOT / "ds_configs").glob("*.json"))
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")


def test_every_file_is_listed_in_one_line(capsys):
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [file.name for file in SHIPPED]
    for line, file in zip(lines, SHIPPED, strict=True):
        comment = file.read_text(encoding="utf-8").splitlines()[0]
        assert comment.startswith("# ")
        assert line.endswith(f" {comment.removeprefix('# ')}")
        assert len(line) <= 120


@pytest.mark.parametrize("name", ["mine", "a #b", "a: b", 'it\'s "so" \\ \u00e9' + " long" * 30])
def test_every_copy_works_from_another_folder(tmp_path, monkeypatch, capsys, name):
    assert main(["configs", str(tmp_path / name)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(file.name for file in written) == sorted(file.name for file in (*SHIPPED, *JSONS))
    monkeypatch.chdir(tmp_path)
    for file in sorted((tmp_path / name / "accelerate_configs").iterdir()):
        request = read_launch_file(file)
        if "nvme" not in file.name:
            check_request(request)
        if request.distributed_type == "DEEPSPEED":
            original = json.loads((ROOT / "ds_configs" / f"{file.stem}.json").read_text(encoding="utf-8"))
            assert deepspeed_settings(request) == original


def leaves(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield key, value


def rows(heading: str) -> list[tuple[list[str], str]]:
    """(names, value) of every row of the first table below a heading; a name may have several rows."""
    lines = PAGE.split(f"{heading}\n", 1)[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| ---"))
    found = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        key, value = (cell.strip() for cell in line.split(" | ")[:2])
        found.append((re.findall(r"`(\w+)`", key), value))
    return found


def values_of(name: str, table: list[tuple[list[str], str]]) -> list[str]:
    """What the rows of a name say; with semicolons a row has one value for each of its keys."""
    found = []
    for names, cell in table:
        if name not in names:
            continue
        if reference := re.match(r"as in `(\w+\.json)`", cell):
            original = json.loads((ROOT / "ds_configs" / reference[1]).read_text(encoding="utf-8"))
            found.append(shown(dict(leaves(original))[name]))
            continue
        is_by_place = "; " in cell
        values = re.split("; " if is_by_place else ", ", cell)
        # Sections stand in front of their keys.
        found += (
            [value for key, value in zip(names[-len(values) :], values, strict=True) if key == name]
            if is_by_place
            else values
        )
    return [value.strip('`"') for value in found]


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else value


HEADINGS = {"zero": "## The DeepSpeed files, value by value", "teacher": "### The sharded teacher's files"}


@pytest.mark.parametrize("file", JSONS, ids=lambda file: file.stem)
def test_every_value_is_in_its_table(file):
    table = rows(next(heading for start, heading in HEADINGS.items() if file.name.startswith(start)))
    settings = list(leaves(json.loads(file.read_text(encoding="utf-8"))))
    wrong = {
        name: (value, values_of(name, table)) for name, value in settings if shown(value) not in values_of(name, table)
    }
    assert not wrong


@pytest.mark.parametrize("start", HEADINGS)
def test_tables_name_nothing_else(start):
    texts = [file.read_text(encoding="utf-8") for file in JSONS if file.name.startswith(start)]
    names = {name for names, _ in rows(HEADINGS[start]) for name in names}
    assert [name for name in sorted(names) if not any(f'"{name}"' in text for text in texts)] == []


def test_a_stray_file_is_not_copied(tmp_path, monkeypatch):
    source = Path(shutil.copytree(launch_files_dir() / "accelerate_configs", tmp_path / "from" / "accelerate_configs"))
    shutil.copytree(launch_files_dir() / "ds_configs", tmp_path / "from" / "ds_configs")
    (source / ".cpu.yaml.swp").write_text("no")
    (source / "cpu.yaml~").write_text("no")
    monkeypatch.setattr("distiller.storage.packaged_files.launch_files_dir", lambda: tmp_path / "from")
    copy_launch_files(tmp_path / "to")
    copied = tmp_path / "to" / "accelerate_configs"
    assert {file.name for file in copied.iterdir()} == {file.name for file in source.glob("[a-z]*.yaml")}
    assert (copied / "cpu.yaml").read_text() == (source / "cpu.yaml").read_text()

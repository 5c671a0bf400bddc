"""Recipes are read as people write them, and written so that any YAML reader reads the same."""

from __future__ import annotations

import math

import pytest
import yaml

from distiller.storage.yaml_files import dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("6E3", 6e3),
        ("1.0e-4", 1e-4),
        (".5", 0.5),
        ("-1.", -1.0),
        ("0", 0),
        ("+7", 7),
        ("010", 10),
        (".inf", math.inf),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("2024-01-31", "2024-01-31"),
        ("'1e-4'", "1e-4"),
        ("~", None),
        ("", None),
        ("[1, a]", [1, "a"]),
        ("{a: &x {b: 1}, c: {<<: *x, d: 2}}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
    ],
)
def test_scalars(text, value):
    read = parse_yaml(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "value",
    ["1e4", "no", "010", "5", "", "~", "a: b", "猫", "1:30", "2024-01-01", "true", "<<", "0x1f", 1e-5, 3, None, True],
)
def test_what_is_written_is_read_back_by_any_reader(value):
    text = dump_yaml({"key": value})
    assert parse_yaml(text) == yaml.safe_load(text) == {"key": value}


def test_keys_stay_in_order():
    assert dump_yaml({"b": 1, "a": 2}) == "b: 1\na: 2\n"


@pytest.mark.parametrize("text", ["a: 1\na: 2", "x: {a: 1, a: 1}", "[{a: 1, a: 1}]"])
def test_a_key_may_stand_only_once(text):
    with pytest.raises(ValueError, match=r"line .*'a' is given twice"):
        parse_yaml(text)

"""The page on placements shows the program's own rules, and says something of every placement."""

from __future__ import annotations

import re
from typing import get_args

from distiller.config.teacher import Placement
from distiller.teachers import PLACEMENTS
from distiller.teachers.rules import RULES
from tests.placement_table import PAGE, page


def test_the_table_is_that_of_the_rules():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.placement_table"


def test_every_placement_has_a_rule_and_a_section():
    text = PAGE.read_text(encoding="utf-8")
    described = re.findall(r"^### .*$", text, flags=re.MULTILINE)
    named = {name for heading in described for name in re.findall(r"`(\w+)`", heading)}
    assert set(RULES) == set(PLACEMENTS) == set(get_args(Placement)) - {"auto"}
    assert named == set(get_args(Placement))

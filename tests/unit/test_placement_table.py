"""The page on placements shows the program's own rules, and says something of every placement."""

from __future__ import annotations

import re

from distiller.config.placements.keys import placement_names
from tests.placement_table import PAGE, page


def test_the_table_is_that_of_the_rules():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.placement_table"


def test_every_placement_has_a_section():
    text = PAGE.read_text(encoding="utf-8")
    described = re.findall(r"^### .*$", text, flags=re.MULTILINE)
    named = {name for heading in described for name in re.findall(r"`(\w+)`", heading)}
    assert named == set(placement_names())

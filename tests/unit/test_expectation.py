"""A run compares its memory and time with what was predicted, once, and says where a prediction was off."""

from __future__ import annotations

import pytest

from distiller.training.expectation import GIB, Expectation, ExpectationNotice, comparison
from tests.toy_network import setup

RANKS = setup().ranks


@pytest.mark.parametrize(
    ("expected", "measured", "said"),
    [
        (Expectation(18 * GIB, 150), Expectation(17 * GIB, 160), "update 20: GPU peak 17.00 GiB, predicted 18.00, "
         "160 ms an update, predicted 150"),
        (Expectation(18 * GIB, None), Expectation(17 * GIB, 160), "update 20: GPU peak 17.00 GiB, predicted 18.00"),
        (Expectation(20 * GIB, 150), Expectation(17 * GIB, 160), "update 20: GPU peak 17.00 GiB, predicted 20.00, "
         "160 ms an update, predicted 150; the prediction of memory is off by more than 10%"),
        (Expectation(10 * GIB, 1500), Expectation(17 * GIB, 160), "update 20: GPU peak 17.00 GiB, predicted 10.00, "
         "160 ms an update, predicted 1,500; the prediction of memory and time is off by more than 10%"),
    ],
)  # fmt: skip
def test_the_line(expected, measured, said):
    assert comparison(expected, measured, 20) == said


def test_it_is_printed_once_after_twenty_updates_of_a_session(capsys):
    notice = ExpectationNotice(Expectation(GIB, None), RANKS, 101, lambda: GIB)
    for step in range(101, 160):
        notice.end(step)
        if step < 120:
            assert capsys.readouterr().err == ""
        elif step == 120:
            assert capsys.readouterr().err == "update 120: GPU peak 1.00 GiB, predicted 1.00\n"
    assert capsys.readouterr().err == ""


def test_nothing_is_said_where_nothing_was_predicted(capsys):
    notice = ExpectationNotice(None, RANKS, 1, lambda: GIB)
    for step in range(1, 40):
        notice.end(step)
    assert capsys.readouterr().err == ""

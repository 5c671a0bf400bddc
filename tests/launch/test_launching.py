"""What a launch that hangs leaves behind: no process, and the stacks of all that it had."""

from __future__ import annotations

import sys

import pytest

from tests.launch.launching import Running

CHILD = "def child_sleeps(): time.sleep(60)\nimport time; print('begun', flush=True); child_sleeps()"
PARENT = f"""
import subprocess, sys
def parent_waits(): subprocess.run([sys.executable, "-c", {CHILD!r}])
parent_waits()
"""


@pytest.fixture
def running(tmp_path):
    found = Running([sys.executable, "-c", PARENT], tmp_path)
    found.wait_until(lambda: "begun" in found.output, 60)
    yield found
    found.kill_all()


def test_a_wait_that_is_in_vain_shows_every_stack(running):
    with pytest.raises(AssertionError, match=r"not within 0\.1 s") as failure:
        running.wait_until(lambda: False, 0.1)
    assert "child_sleeps" in str(failure.value)
    assert "parent_waits" in str(failure.value)


def test_a_launch_without_an_end_shows_every_stack(running):
    with pytest.raises(AssertionError, match=r"no end within 0\.1 s") as failure:
        running.wait_until_gone(0.1)
    assert "child_sleeps" in str(failure.value)
    assert "parent_waits" in str(failure.value)

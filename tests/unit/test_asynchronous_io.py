from __future__ import annotations

import os

import pytest

from distiller.errors import UserError
from distiller.launch.asynchronous_io import ARCHITECTURES, check_asynchronous_io


@pytest.mark.parametrize("listed", [None, "9.0", "8.0;9.0+PTX", "8.0 9.0"])
def test_a_list_that_deepspeed_reads_stays(builder, monkeypatch, listed):
    assert after_check(monkeypatch, listed) == listed


@pytest.mark.parametrize("listed", ["9.0a", "8.0;9.0a+PTX", "Hopper", "10.0f 9.0"])
def test_a_list_that_deepspeed_cannot_read_goes(builder, monkeypatch, listed):
    assert after_check(monkeypatch, listed) is None


def test_no_libaio_is_one_line(builder, monkeypatch):
    monkeypatch.setattr(builder, "is_compatible", lambda self, verbose: False)
    with pytest.raises(UserError, match=r"^teacher.offload=nvme: .* apt-get install libaio-dev, or use disk$"):
        check_asynchronous_io("teacher.offload=nvme", "disk")


@pytest.fixture
def builder(monkeypatch):
    """DeepSpeed's, with libaio."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose: True)
    return AsyncIOBuilder


def after_check(monkeypatch, listed: str | None) -> str | None:
    if listed is None:
        monkeypatch.delenv(ARCHITECTURES, raising=False)
    else:
        monkeypatch.setenv(ARCHITECTURES, listed)
    check_asynchronous_io("offload to nvme", "zero3_offload.yaml")
    return os.environ.get(ARCHITECTURES)

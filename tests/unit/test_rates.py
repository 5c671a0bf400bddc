"""Rates that were measured on this machine, and which of them a plan takes."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from distiller.cli import main
from distiller.planner.allocation_trace import Kernel
from distiller.planner.gpus import GIB, GPUS
from distiller.planner.kernel_times import COMPILED_LAUNCH, kernels_ms
from distiller.planner.rates import Rates, gpu_here, keep_rates, launch_ms, rates_file, read_rates

RATES = Rates(short_flops=9e14, float32_flops=6e13, bandwidth=4e12, host=5e10, launch_ms=0.04)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def gpu(monkeypatch):
    """A function that gives this machine a GPU of a name."""

    def name_it(name: str, major: int = 9, minor: int = 0) -> None:
        properties = SimpleNamespace(total_memory=100 * GIB, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)

    return name_it


def test_rates_are_kept_for_each_machine_and_gpu(monkeypatch):
    assert read_rates("NVIDIA H200") is None
    assert keep_rates("NVIDIA H200", RATES) == rates_file()
    other = replace(RATES, launch_ms=0.1)
    keep_rates("NVIDIA L4", other)
    assert (read_rates("NVIDIA H200"), read_rates("NVIDIA L4")) == (RATES, other)
    # A home folder that several machines share.
    monkeypatch.setattr("platform.node", lambda: "another")
    assert read_rates("NVIDIA H200") is None


@pytest.mark.parametrize("change", ["not JSON", "launch_ms missing", "launch_ms zero", "a list"])
def test_a_file_that_says_nothing_is_as_none(change):
    keep_rates("NVIDIA H200", RATES)
    found = json.loads(rates_file().read_text())
    (rates,) = found.values()
    if change == "launch_ms missing":
        del rates["launch_ms"]
    elif change == "launch_ms zero":
        rates["launch_ms"] = 0
    text = {"not JSON": "{", "a list": "[]"}.get(change, json.dumps(found))
    rates_file().write_text(text)
    assert read_rates("NVIDIA H200") is None
    keep_rates("NVIDIA H200", RATES)
    assert read_rates("NVIDIA H200") == RATES


def test_what_was_measured_replaces_the_data_sheet(gpu):
    gpu("NVIDIA H200")
    assert gpu_here() is GPUS["H200"]
    keep_rates("NVIDIA H200", RATES)
    here = gpu_here()
    assert here is not None
    assert (here.short_flops, here.host, here.launch_ms) == (9e14, 5e10, 0.04)
    assert (here.peers, here.has_float8) == (GPUS["H200"].peers, True)


@pytest.mark.parametrize(
    ("version", "bfloat16", "float8"), [((7, 5), False, False), ((8, 6), True, False), ((8, 9), True, True)]
)
def test_a_kind_that_no_table_has_is_known_once_it_was_measured(gpu, version, bfloat16, float8):
    gpu("NVIDIA Unheard", *version)
    assert gpu_here() is None
    keep_rates("NVIDIA Unheard", RATES)
    here = gpu_here()
    assert here is not None
    assert (here.name, here.memory_gib, here.has_bfloat16, here.has_float8) == ("NVIDIA Unheard", 100, bfloat16, float8)


def test_a_slow_host_bounds_short_operations():
    kernels = {Kernel(0, 1000, torch.float32): 50, Kernel(1000, 1000, torch.bfloat16): 50}
    slow = replace(GPUS["H200"], launch_ms=0.05)
    assert kernels_ms(kernels, slow, is_compiled=False, share=1.0) == pytest.approx(100 * 0.05)
    assert kernels_ms(kernels, slow, is_compiled=True, share=1.0) == pytest.approx(50 * COMPILED_LAUNCH * 0.05)


def test_starting_an_operation_takes_time_on_this_machine_too():
    assert 0.001 < launch_ms(torch.device("cpu")) < 10


@pytest.mark.parametrize(
    ("options", "said"), [([], "this machine has none"), (["--gpu", "H200"], "leave --machine and --gpu out")]
)
def test_without_a_gpu_nothing_is_measured(options, said, capsys):
    if torch.cuda.is_available() and not options:
        pytest.skip("this machine has a GPU")
    assert main(["plan", "digits-wan", "--measure", *options]) == 2
    assert said in capsys.readouterr().err

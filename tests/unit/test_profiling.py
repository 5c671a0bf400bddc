"""A profile of chosen updates: what their time is split into, the files, and the updates that may be chosen."""

from __future__ import annotations

import gzip
import json

import pytest

from distiller import commands
from distiller.errors import UserError
from distiller.training.time_shares import Interval, kernel_kind, length, operator_kind, time_shares
from tests import toys


def test_the_length_of_a_union_counts_what_overlaps_once():
    assert length([]) == 0
    assert length([Interval(5, 7), Interval(0, 2), Interval(1, 3), Interval(1, 2)]) == 5


def test_copies_and_communication_count_where_nothing_runs_beside_them():
    """Two updates of 50: kernels until 40 on two streams, a copy from 30 to 60, NCCL to 70, a wait, and the host."""
    work = [
        ("products", Interval(0, 30)),
        ("memory", Interval(10, 20)),
        ("memory", Interval(30, 40)),
        ("bus", Interval(30, 60)),
        ("network", Interval(55, 70)),
    ]
    shares = time_shares([Interval(0, 50), Interval(50, 100)], [Interval(80, 90)], work, on_gpu=True)  # type: ignore[arg-type]
    assert shares.update_ms == 0.05
    assert shares.shares == pytest.approx(
        # 40 of computing in the ratio 30 : 20; of the copy 15 before NCCL begins, and of NCCL 15.
        {"products": 0.24, "memory": 0.16, "bus": 0.15, "network": 0.15, "data": 0.1, "host": 0.2}
    )
    assert shares.bound == "matrix products and attention"
    assert str(shares) == (
        "0.1 ms an update, bound by matrix products and attention: matrix products and attention 24%, the host 20%, "
        "element-wise and other operations 16%, communication that nothing hides 15%, copies from and to the host that "
        "nothing hides 15%, waiting for data 10%"
    )


def test_a_host_that_cannot_start_kernels_fast_enough_is_named():
    work = [("memory", Interval(start, start + 4)) for start in range(0, 100, 10)]
    shares = time_shares([Interval(0, 100)], [], work, on_gpu=True)  # type: ignore[arg-type]
    assert shares.bound == "starting kernels (10 an update, of 4 us)"
    slow = time_shares([Interval(0, 100)], [], [("memory", Interval(0, 40))], on_gpu=True)
    assert slow.bound == "the host"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8", "products"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::gelu>", "memory"),
        ("triton_poi_fused_add_mul_native_layer_norm_0", "memory"),
        ("Memcpy DtoD (Device -> Device)", "memory"),
        ("Memset (Device)", "memory"),
        ("Memcpy HtoD (Pinned -> Device)", "bus"),
        ("Memcpy DtoH (Device -> Pageable)", "bus"),
        ("Memcpy PtoP (Device -> Device)", "network"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "network"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name, kind):
    assert kernel_kind(name) == kind


def test_operators_of_a_cpu_are_told_apart():
    products = ["aten::addmm", "aten::mm", "aten::bmm", "aten::mkldnn_convolution", "aten::convolution_backward"]
    products.append("aten::_scaled_dot_product_flash_attention_for_cpu")
    assert [operator_kind(name) for name in products] == ["products"] * len(products)
    assert {operator_kind(name) for name in ("aten::mul", "aten::native_layer_norm", "aten::copy_")} == {"memory"}


def test_a_run_leaves_a_trace_a_table_and_a_line(make_recipe, capsys):
    recipe = make_recipe(train={"max_steps": 4, "batch_size": 4}, rollout={"enabled": False}, profile={"steps": [2, 3]})
    folder = commands.train(recipe, False)
    folder = toys.Path(recipe.output_dir) if folder is None else folder
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("profile of steps")]
    assert len(said) == 1
    assert said[0].startswith("profile of steps 2 to 3: ")
    assert " ms an update, bound by " in said[0]
    files = sorted(path.name for path in (folder / "profile").iterdir())
    assert files == ["steps-2-3-rank-0.json.gz", "steps-2-3.txt"]
    assert "aten::addmm" in (folder / "profile" / "steps-2-3.txt").read_text()
    with gzip.open(folder / "profile" / "steps-2-3-rank-0.json.gz") as trace:
        names = [event.get("name") for event in json.load(trace)["traceEvents"]]
    # Parts of an update, twice each.
    assert [names.count(part) for part in ("teacher", "student", "optimizer")] == [2, 2, 2]


def test_updates_that_the_run_does_not_have_are_refused(make_recipe):
    recipe = make_recipe(train={"max_steps": 4, "batch_size": 4}, profile={"steps": [3, 5]})
    with pytest.raises(UserError, match=r"profile.steps is \[3, 5\] and the run has 4 updates"):
        commands.train(recipe, False)
    with pytest.raises(UserError, match=r"profile.steps is \[3, 2\]; give the first update and then the last"):
        make_recipe(profile={"steps": [3, 2]})

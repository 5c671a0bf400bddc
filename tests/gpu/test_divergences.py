"""The chunked loss on a GPU: run by hand, `python -m pytest tests/gpu/test_divergences.py -s`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distiller.language.loss.chunked_loss import TokenSums, chunked_loss
from distiller.language.loss.divergence_values import SparseTarget
from distiller.language.loss.divergences import (
    Divergence,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    SkewedKL,
    SkewedReverseKL,
)
from distiller.language.loss.targets import HiddenTarget, LogitsTarget, Target
from distiller.language.loss.token_losses import Objective
from distiller.language.model.logits import LogitChange, TokenIds

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # The compiler on its own choices.
    pytest.mark.filterwarnings("ignore:.*[Oo]nline softmax is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
NUM_TOKENS, CHUNK, VOCABULARY, TEACHER_VOCABULARY, WIDTH = 700, 256, 5003, 4999, 256
NUM_IDS, CHANGE = 4990, LogitChange(0.5, 8.0)
"""Of kind "changed": ids that stand for tokens, and what the student does to its logits."""
KINDS = [ForwardKL(), ReverseKL(), JensenShannon(0.5), SkewedKL(0.1), SkewedReverseKL(0.1)]


@pytest.fixture(autouse=True)
def _no_compiled_code_of_other_tests() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def run(
    objective: Objective, dtype: torch.dtype, kind: str = "hidden states", mask_on: str = "cpu", **options: Any
) -> tuple[TokenSums, list[torch.Tensor]]:
    """Sums and gradients of tokens of which a third do not count; three chunks, the last one short."""
    hidden = normal(NUM_TOKENS, WIDTH, dtype=dtype, seed=0).requires_grad_()
    weight = (normal(VOCABULARY, WIDTH, dtype=dtype, seed=1) * 0.2).requires_grad_()
    bias = normal(VOCABULARY, dtype=dtype, seed=2).requires_grad_()
    target: Target = HiddenTarget(
        normal(NUM_TOKENS, WIDTH, dtype=dtype, seed=3), normal(TEACHER_VOCABULARY, WIDTH, dtype=dtype, seed=4) * 0.2
    )
    if kind == "changed":
        target = target._replace(change=LogitChange(2.0))
    elif kind != "hidden states":
        logits = target.hidden @ target.weight.t()
        target = LogitsTarget(logits)
        if kind == "top-k":
            weights, ids = (logits.float() / objective.temperature).softmax(1).topk(16, dim=1)
            target = SparseTarget(ids, weights, 1 - weights.sum(1))
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(NUM_TOKENS, generator=generator) < 2 / 3
    labels = torch.randint(TEACHER_VOCABULARY, (NUM_TOKENS,), generator=generator).where(mask, -100).cuda()
    if kind == "changed":
        labels, options = labels.clamp(max=NUM_IDS - 1), options | {"change": CHANGE, "ids": TokenIds(NUM_IDS)}
    sums = chunked_loss(
        hidden, weight, target, labels, mask.to(mask_on), objective, bias=bias, chunk_tokens=CHUNK, **options
    )
    (sums.loss / sums.tokens).backward()
    gradients = [tensor.grad for tensor in (hidden, weight, bias)]
    return sums, [gradient for gradient in gradients if gradient is not None]


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    # Both may be nothing at all: in how many tokens the two agree.
    size = theirs.double().norm().clamp(min=1e-300)
    distance = ((ours.double() - theirs.double()).norm() / size).item()
    print(f"{distance:.1e}")
    assert distance <= tolerance


def compare(objective: Objective, dtype: torch.dtype, kind: str = "hidden states") -> None:
    eager, eager_gradients = run(objective, dtype, kind, compile=False)
    compiled, compiled_gradients = run(objective, dtype, kind, mask_on="cuda")
    assert_near(compiled.unused.detach(), eager.unused.detach(), 1e-5)
    assert compiled.tokens == eager.tokens > CHUNK
    for ours, theirs in zip(compiled[:4], eager[:4], strict=True):
        assert_near(ours.detach(), theirs.detach(), 1e-5)
    assert len(compiled_gradients) == len(eager_gradients) == 3
    for ours, theirs in zip(compiled_gradients, eager_gradients, strict=True):
        # One rounding of the gradient by the logits may fall to the other side.
        assert_near(ours, theirs, 1e-5 if dtype is torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_compiled_equals_eager(divergence: Divergence, dtype: torch.dtype):
    compare(Objective(divergence, 0.5, 0.7), dtype)


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["logits", "top-k", "changed"])
def test_other_targets_compiled_equal_eager(kind: str, weight: float):
    compare(Objective(ForwardKL(), 2.0, weight), torch.bfloat16, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_over_float32_weights(dtype: torch.dtype):
    objective = Objective(ForwardKL(), 2.0, 0.7)
    exact, exact_gradients = run(objective, torch.float32, compile=False)
    with torch.autocast("cuda", dtype):
        sums, gradients = run(objective, torch.float32)
    assert_near(sums.loss.detach(), exact.loss.detach(), 1e-2)
    for ours, theirs in zip(gradients, exact_gradients, strict=True):
        assert ours.dtype is torch.float32
        assert_near(ours, theirs, 2e-2)


def test_a_mask_on_the_cpu_never_makes_the_host_wait():
    objective = Objective(ForwardKL(), 2.0, 0.7)
    for compile in (False, True):
        run(objective, torch.bfloat16, compile=compile)
        inputs = [normal(NUM_TOKENS, WIDTH, dtype=torch.bfloat16, seed=seed) for seed in range(2)]
        weights = [normal(VOCABULARY, WIDTH, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in (2, 3)]
        target = HiddenTarget(inputs[1], weights[1].detach())
        labels, mask = (
            torch.zeros(NUM_TOKENS, dtype=torch.int64, device="cuda"),
            torch.ones(NUM_TOKENS, dtype=torch.bool),
        )
        arguments = (inputs[0], weights[0], target, labels, mask, objective)
        chunked_loss(*arguments, chunk_tokens=CHUNK, compile=compile).loss.backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            chunked_loss(*arguments, chunk_tokens=CHUNK, compile=compile).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_is_that_of_a_chunk():
    """Whole logits of both in float32 would take 2 GiB, one bfloat16 copy 0.5: what is kept is sums and a chunk."""
    num_tokens, vocabulary = 8192, 32_768
    hidden = normal(num_tokens, WIDTH, dtype=torch.bfloat16, seed=0).requires_grad_()
    weight = normal(vocabulary, WIDTH, dtype=torch.bfloat16, seed=1).requires_grad_()
    target = HiddenTarget(hidden.detach().flip(0), weight.detach())
    labels, mask = torch.zeros(num_tokens, dtype=torch.int64, device="cuda"), torch.ones(num_tokens, dtype=torch.bool)

    def once() -> None:
        hidden.grad = weight.grad = None
        sums = chunked_loss(hidden, weight, target, labels, mask, Objective(), chunk_tokens=512)
        (sums.loss / sums.tokens).backward()

    once()
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    peak = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
    print(peak / 2**20, "MiB")
    # Student's and teacher's logits and the gradient of 512 tokens, the weight's gradient in float32, and room.
    assert peak < 3 * 512 * vocabulary * 2 + 4 * weight.numel() + 64 * 2**20

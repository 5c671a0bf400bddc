"""Divergences against plain float64, at any temperature and dtype."""

import math
from typing import get_args

import pytest
import torch

from distiller.config.causal_lm import SAMPLED_KINDS, DivergenceKind, DivergenceLoss
from distiller.errors import UserError
from distiller.language.loss import divergence_values
from distiller.language.loss.chunked_loss import chunked_loss
from distiller.language.loss.divergence_values import SparseTarget
from distiller.language.loss.divergences import (
    DIVERGENCES,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    SkewedKL,
    SkewedReverseKL,
    divergence_of,
)
from distiller.language.loss.targets import LogitsTarget
from distiller.language.loss.token_losses import Objective
from tests.toy_divergence import SquaredHellinger

TEMPERATURES = [0.1, 0.5, 1.0, 2.0, 10.0]
KINDS = [
    ForwardKL(),
    ReverseKL(),
    JensenShannon(0.5),
    JensenShannon(0.1),
    JensenShannon(0.0),
    JensenShannon(1.0),
    SkewedKL(0.1),
    SkewedKL(0.0),
    SkewedReverseKL(0.1),
    SkewedReverseKL(0.0),
]


def kl(p, q):
    return torch.where(p > 0, p * (p.log() - q.log()), 0).sum(1)


def plain(divergence, p, q):
    """What the papers say, from probabilities."""
    match divergence:
        case JensenShannon(0.0) | SkewedKL(0.0) | ForwardKL():
            return kl(p, q)
        case JensenShannon(1.0) | SkewedReverseKL(0.0) | ReverseKL():
            return kl(q, p)
        case JensenShannon(beta):
            m = beta * p + (1 - beta) * q
            return beta * kl(p, m) + (1 - beta) * kl(q, m)
        case SkewedKL(alpha):
            return kl(p, alpha * p + (1 - alpha) * q)
        case SkewedReverseKL(alpha):
            return kl(q, alpha * q + (1 - alpha) * p)
    raise AssertionError(divergence)


def reference(divergence, student, teacher, temperature):
    """Value [N] and gradient [N, V], float64."""
    student = student.double().requires_grad_()
    q, p = (student / temperature).softmax(1), (teacher.double() / temperature).softmax(1)
    value = temperature**2 * plain(divergence, p, q)
    return value.detach(), torch.autograd.grad(value.sum(), student)[0]


def logits(seed, num_tokens=6, vocabulary=11, scale=2.0, dtype=torch.float32):
    return (scale * torch.randn(num_tokens, vocabulary, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_near(ours, theirs, tolerance=1e-5):
    assert ours.dtype is torch.float32
    assert (ours.double() - theirs).abs().max() <= tolerance * (1 + theirs.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_values_and_gradients_equal_float64(divergence, temperature, dtype):
    student, teacher = logits(0, dtype=dtype), logits(1, dtype=dtype)
    value, gradient = reference(divergence, student, teacher, temperature)
    ours, our_gradient = divergence_values.dense_divergence_and_gradient(divergence, student, teacher, temperature)
    assert_near(ours, value)
    assert_near(our_gradient, gradient)
    student = student.float().requires_grad_()
    by_autograd = divergence_values.dense_divergence(divergence, student, teacher, temperature)
    assert torch.equal(by_autograd, ours)
    assert_near(torch.autograd.grad(by_autograd.sum(), student)[0], gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_large_logits_at_a_low_temperature_stay_finite(divergence, dtype):
    """Probabilities that underflow to 0 on one side, the other or both."""
    student, teacher = logits(2, scale=30.0).to(dtype), logits(3, scale=30.0).to(dtype)
    for temperature in (0.05, 1.0):
        student.requires_grad_()
        value, gradient = divergence_values.dense_divergence_and_gradient(divergence, student, teacher, temperature)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
        by_autograd = divergence_values.dense_divergence(divergence, student, teacher, temperature).sum()
        assert torch.autograd.grad(by_autograd, student)[0].isfinite().all()


@pytest.mark.parametrize("masked", [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_ids_that_both_mask_are_as_if_absent(divergence, masked):
    student, teacher = logits(4), logits(5)
    value, gradient = divergence_values.dense_divergence_and_gradient(divergence, student, teacher, 0.5)
    wider = [torch.nn.functional.pad(x, (0, 3), value=masked) for x in (student, teacher)]
    wide_value, wide_gradient = divergence_values.dense_divergence_and_gradient(divergence, *wider, 0.5)
    torch.testing.assert_close(wide_value, value)
    torch.testing.assert_close(wide_gradient, torch.nn.functional.pad(gradient, (0, 3)))


@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_a_student_that_agrees_is_at_the_minimum(divergence):
    student = logits(6, scale=5.0)
    shifted = student + 7.0
    value, gradient = divergence_values.dense_divergence_and_gradient(divergence, student, shifted, 0.7)
    assert value.abs().max() < 1e-6
    assert gradient.abs().max() < 1e-6


def test_ends_of_beta_are_the_limits_of_the_ratios():
    """Agarwal et al. 2024: D(beta) / beta tends to the forward KL."""
    student, teacher = logits(7, scale=0.5).double(), logits(8, scale=0.5).double()
    p, q = teacher.softmax(1), student.softmax(1)
    small = 1e-5
    for divergence, limit in ((JensenShannon(small), JensenShannon(0.0)), (JensenShannon(1 - small), JensenShannon(1))):
        ratio = plain(divergence, p, q) / small
        ours = divergence_values.dense_divergence(limit, student, teacher, 1.0)
        torch.testing.assert_close(ours.double(), ratio, rtol=1e-3, atol=0)


def hellinger(p, q):
    return (p.sqrt() - q.sqrt()).square().sum(1)


@pytest.mark.parametrize("num_ids", [None, 4])
def test_a_divergence_is_added_by_a_class_and_one_entry(monkeypatch, num_ids):
    """The loss of chunks, live and of a cache's likeliest ids, against float64 and autograd."""
    monkeypatch.setitem(DIVERGENCES, "hellinger", SquaredHellinger)
    divergence = divergence_of(DivergenceLoss.model_construct(kind="hellinger"))
    hidden, weight, teacher = logits(20, vocabulary=5), logits(21, num_tokens=11, vocabulary=5), logits(22)
    target = LogitsTarget(teacher) if num_ids is None else top(teacher, num_ids, 2.0)
    inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    labels, mask = torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.bool)
    sums = chunked_loss(*inputs, target, labels, mask, Objective(divergence, temperature=2.0), chunk_tokens=4)
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    q, p = (exact[0] @ exact[1].t() / 2).softmax(1), (teacher.double() / 2).softmax(1)
    if num_ids is not None:
        q, p = outcomes(q, target.ids), outcomes(p, target.ids)
    expected = 4 * hellinger(p, q).sum()
    assert_near(sums.loss.detach(), expected.detach())
    for ours, theirs in zip(torch.autograd.grad(sums.loss, inputs), torch.autograd.grad(expected, exact), strict=True):
        assert_near(ours, theirs)


def test_the_recipe_s_names_are_those_of_the_divergences():
    """The recipe imports no torch, so it has them once more."""
    assert get_args(DivergenceKind) == tuple(DIVERGENCES)
    assert tuple(name for name, kind in DIVERGENCES.items() if kind.can_be_sampled) == SAMPLED_KINDS


@pytest.mark.parametrize(
    ("name", "divergence"),
    [
        ("forward_kl", ForwardKL()),
        ("reverse_kl", ReverseKL()),
        ("jsd", JensenShannon(0.3)),
        ("skewed_kl", SkewedKL(0.2)),
        ("skewed_reverse_kl", SkewedReverseKL(0.2)),
    ],
)
def test_a_divergence_reads_its_own_options(name, divergence):
    assert divergence_of(DivergenceLoss(kind=name, beta=0.3, skew=0.2)) == divergence


def test_every_kind_has_a_name_and_published_defaults():
    defaults = {name: kind() for name, kind in DIVERGENCES.items()}
    assert defaults["jsd"] == JensenShannon(0.5)
    assert defaults["skewed_kl"] == SkewedKL(0.1)
    assert {type(kind) for kind in KINDS} == set(DIVERGENCES.values())


@pytest.mark.parametrize("make", [lambda: JensenShannon(1.1), lambda: SkewedKL(1.0), lambda: SkewedReverseKL(-0.1)])
def test_shares_outside_their_range_are_refused(make):
    with pytest.raises(UserError, match=r"is in \[0, 1"):
        make()


def test_cross_entropy_and_its_gradient():
    student, labels = logits(9, dtype=torch.bfloat16), torch.tensor([0, 10, 3, 3, 7, 1])
    exact = student.double().requires_grad_()
    value = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    assert_near(divergence_values.cross_entropy(student, labels), value.detach())
    gradient = torch.autograd.grad(value.sum(), exact)[0]
    assert_near(divergence_values.cross_entropy_gradient(student, labels), gradient)


def top(teacher, count, temperature):
    """Exact probabilities of the likeliest ids, and the rest in one."""
    p = (teacher.double() / temperature).softmax(1)
    weights, ids = p.topk(count, dim=1)
    rest = p.scatter(1, ids, 0.0).sum(1)
    return SparseTarget(ids, weights.float(), rest.float())


def outcomes(probabilities, ids):
    rest = probabilities.scatter(1, ids, 0.0).sum(1, keepdim=True)
    return torch.cat([probabilities.gather(1, ids), rest], 1)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_top_k_and_a_tail_are_outcomes_of_their_own(divergence, temperature):
    student, teacher = logits(10), logits(11)
    target = top(teacher, 4, temperature)
    exact = student.double().requires_grad_()
    q = outcomes((exact / temperature).softmax(1), target.ids)
    p = outcomes((teacher.double() / temperature).softmax(1), target.ids)
    value = temperature**2 * plain(divergence, p, q)
    gradient = torch.autograd.grad(value.sum(), exact)[0]
    ours, our_gradient = divergence_values.sparse_divergence_and_gradient(divergence, student, target, temperature)
    assert_near(ours, value.detach())
    assert_near(our_gradient, gradient)
    student.requires_grad_()
    by_autograd = divergence_values.sparse_divergence(divergence, student, target, temperature)
    assert_near(torch.autograd.grad(by_autograd.sum(), student)[0], gradient)


def test_top_k_of_all_ids_is_dense():
    student, teacher = logits(12), logits(13)
    dense = divergence_values.dense_divergence_and_gradient(ForwardKL(), student, teacher, 2.0)
    sparse = divergence_values.sparse_divergence_and_gradient(ForwardKL(), student, top(teacher, 11, 2.0), 2.0)
    torch.testing.assert_close(sparse, dense)


@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_top_k_is_never_negative(divergence):
    """Without the tail's bucket a student that puts more on the ids than the teacher does has a negative KL."""
    teacher = logits(14, num_tokens=64)
    target = top(teacher, 3, 1.0)
    student = teacher.clone()
    student[:, :] -= 5 * (torch.ones_like(teacher).scatter(1, target.ids, 0.0))
    truncated = target.weights * (target.weights.log() - student.log_softmax(1).gather(1, target.ids))
    assert truncated.sum(1).max() < 0
    assert divergence_values.sparse_divergence(divergence, student, target, 1.0).min() > 1e-4
    assert divergence_values.sparse_divergence(divergence, teacher, target, 1.0).min() >= 0


def test_a_small_tail_is_not_lost_to_rounding():
    """1 - sum(q) would be 0 or worse in float32."""
    student = torch.tensor([[20.0, 19.0, -5.0, -6.0]])
    target = SparseTarget(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]), torch.tensor([1e-9]))
    q = student.double().softmax(1)
    expected = 0.5 * (0.5 / q[0, 0]).log() + 0.5 * (0.5 / q[0, 1]).log() + 1e-9 * (1e-9 / q[0, 2:].sum()).log()
    value, gradient = divergence_values.sparse_divergence_and_gradient(ForwardKL(), student, target, 1.0)
    torch.testing.assert_close(value[0].double(), expected, rtol=1e-6, atol=0)
    assert gradient[0, 2] != 0


@pytest.mark.parametrize("exact_ids", [0, 3])
def test_the_expectation_over_samples_is_the_forward_kl(exact_ids):
    """Every id drawn once and weighed by its chance, from a proposal flatter than p; alone, or beside exact top-k."""
    student, teacher = logits(15, num_tokens=2), logits(16, num_tokens=2)
    value, gradient = reference(ForwardKL(), student, teacher, 1.0)
    p = teacher.softmax(1)
    entropy = -(p * p.log()).sum(1)
    top_weights, top_ids = p.topk(exact_ids, dim=1)
    remaining = p.scatter(1, top_ids, 0.0)
    proposal = remaining.sqrt() / remaining.sqrt().sum(1, keepdim=True)
    expected_value, expected_gradient = torch.zeros(2), torch.zeros_like(student)
    for drawn in range(student.shape[1]):
        ids = torch.cat([top_ids, torch.full((2, 2), drawn)], 1)
        weight = (remaining / proposal).nan_to_num()[:, [drawn, drawn]] / 2
        target = SparseTarget(ids, torch.cat([top_weights, weight], 1), torch.zeros(2), entropy)
        of_draw, gradient_of_draw = divergence_values.sparse_divergence_and_gradient(ForwardKL(), student, target, 1.0)
        expected_value += proposal[:, drawn] * of_draw
        expected_gradient += proposal[:, [drawn]] * gradient_of_draw
    assert_near(expected_value, value)
    assert_near(expected_gradient, gradient)


def test_samples_without_an_entropy_give_the_cross_entropy():
    student, ids = logits(17), torch.tensor([0, 10, 3, 3, 7, 1])
    target = SparseTarget(ids[:, None], torch.ones(6, 1), torch.zeros(6), torch.zeros(6))
    value, gradient = divergence_values.sparse_divergence_and_gradient(ForwardKL(), student, target, 1.0)
    torch.testing.assert_close(value, divergence_values.cross_entropy(student, ids))
    torch.testing.assert_close(gradient, divergence_values.cross_entropy_gradient(student, ids))


def test_other_divergences_of_samples_are_refused():
    target = SparseTarget(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), torch.zeros(1), torch.zeros(1))
    with pytest.raises(UserError, match="estimate the forward KL alone: ReverseKL"):
        divergence_values.sparse_divergence(ReverseKL(), logits(0, num_tokens=1), target, 1.0)

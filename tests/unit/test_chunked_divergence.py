"""Output layer and loss in one, against the whole logits in float64."""

import math
import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from distiller.errors import UserError
from distiller.language.cache.forms import TokenForm, target_of
from distiller.language.cache.sparse_records import SparseForm
from distiller.language.loss import chunked_loss as chunked
from distiller.language.loss.chunked_loss import chunked_loss, default_chunk_tokens
from distiller.language.loss.divergence_values import SparseTarget
from distiller.language.loss.divergences import ForwardKL, JensenShannon, ReverseKL
from distiller.language.loss.targets import HiddenTarget, LogitsTarget
from distiller.language.loss.token_losses import Objective, token_losses
from distiller.language.model.logits import PLAIN, Head, LogitChange, TokenIds
from tests.unit.test_divergences import KINDS, TEMPERATURES, outcomes, plain, top

NUM_TOKENS, WIDTH, TEACHER_WIDTH = 14, 8, 6
IGNORED = -100


@dataclass
class Case:
    """Inputs of one call."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: Any
    labels: torch.Tensor
    mask: torch.Tensor
    change: LogitChange = PLAIN
    ids: TokenIds | None = None

    def run(self, objective, **options):
        """The sums, and the gradients by hidden states, weight and bias."""
        inputs = [x for x in (self.hidden, self.weight, self.bias) if x is not None]
        for tensor in inputs:
            tensor.requires_grad_().grad = None
        sums = self.sums(objective, **options)
        (3 * sums.loss).backward()
        return sums, [tensor.grad for tensor in inputs]

    def sums(self, objective, **options):
        options = {"chunk_tokens": 4, "compile": False, "change": self.change, "ids": self.ids} | options
        return chunked_loss(
            self.hidden, self.weight, self.target, self.labels, self.mask, objective, bias=self.bias, **options
        )


def make(mask="ragged", vocabulary=11, teacher_vocabulary=11, dtype=torch.float32, bias=True, seed=0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    masks = {
        "all": [1] * 14,
        "none": [0] * 14,
        "one": [0] * 9 + [1] + [0] * 4,
        "ragged": [1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1],
        "whole chunks": [1] * 8 + [0] * 6,
        "a chunk left out": [1] * 4 + [0] * 4 + [1] * 6,
    }
    chosen = torch.tensor(masks[mask], dtype=torch.bool)
    labels = torch.randint(min(vocabulary, teacher_vocabulary), (NUM_TOKENS,), generator=generator)
    return Case(
        normal(NUM_TOKENS, WIDTH),
        normal(vocabulary, WIDTH),
        normal(vocabulary) if bias else None,
        HiddenTarget(normal(NUM_TOKENS, TEACHER_WIDTH), normal(teacher_vocabulary, TEACHER_WIDTH)),
        labels.where(chosen, IGNORED),
        chosen,
    )


def rounded(exact, dtype):
    """As products in a dtype give it, with the gradient of what is exact."""
    return exact + (exact.detach().to(dtype).double() - exact.detach())


def changed(logits, change):
    """What the library's models do, in their own order."""
    logits = logits * change.scale
    return logits if change.cap is None else change.cap * torch.tanh(logits / change.cap)


def expect(case, objective, dtype=torch.float32):
    """Divergence, cross-entropy, agreeing tokens, unused, and the gradients of three times the loss, in float64."""
    inputs = [x.detach().double().requires_grad_() for x in (case.hidden, case.weight, case.bias) if x is not None]
    student = F.linear(inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None)
    student = everything = changed(rounded(student, dtype)[case.mask], case.change)
    labels, known = case.labels[case.mask], slice(None)
    if case.ids is not None:
        known = [number for number in range(case.ids.size) if number not in case.ids.absent]
        labels = torch.tensor([known.index(label) for label in labels])
        student = student[:, known]
    q_all = student / objective.temperature
    if isinstance(case.target, SparseTarget):
        ids = case.target.ids[case.mask]
        p = torch.cat([case.target.weights, case.target.tail[:, None]], 1).double()[case.mask]
        q = outcomes(q_all.softmax(1), ids)
        agreeing = student.argmax(1) == ids[:, 0]
    else:
        if isinstance(case.target, HiddenTarget):
            teacher = F.linear(case.target.hidden.double(), case.target.weight.double())
        else:
            teacher = case.target.logits.double()
        shared = min(teacher.shape[1], student.shape[1])
        teacher = rounded(teacher, dtype)[case.mask]
        if isinstance(case.target, HiddenTarget):
            teacher = changed(teacher, case.target.change)
        teacher = teacher[:, :shared] if case.ids is None else teacher[:, known]
        p, q = (teacher / objective.temperature).softmax(1), q_all[:, :shared].softmax(1)
        agreeing = student[:, :shared].argmax(1) == teacher.argmax(1)
    divergence = objective.temperature**2 * plain(objective.divergence, p, q).sum()
    cross_entropy = F.cross_entropy(student, labels, reduction="sum")
    unused = -everything.softmax(1)[:, known].sum(1).log().sum()
    loss = objective.weight * divergence + (1 - objective.weight) * cross_entropy + unused
    (3 * loss).backward()
    values = [divergence.detach(), cross_entropy.detach(), agreeing.sum(), unused.detach()]
    return values, [x.grad for x in inputs]


def assert_near(ours, theirs, tolerance):
    assert ours.isfinite().all()
    assert (ours.double() - theirs).norm() <= tolerance * (1e-9 + theirs.norm())


def check(case, objective, tolerance=2e-5, dtype=torch.float32, **options):
    sums, gradients = case.run(objective, **options)
    expected, expected_gradients = expect(case, objective, dtype)
    assert sums.tokens == case.mask.sum()
    assert sums.agreeing == expected[2]
    for ours, theirs in zip((sums.divergence, sums.cross_entropy), expected, strict=False):
        assert ours.dtype is torch.float32
        assert not ours.requires_grad
        assert_near(ours, theirs, tolerance)
    torch.testing.assert_close(sums.unused.double(), expected[3], rtol=tolerance, atol=1e-6 * len(case.mask))
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert_near(ours, theirs, tolerance if dtype is torch.float32 else 2e-2)


CHANGES = {
    "plain": (PLAIN, PLAIN),
    "scale": (LogitChange(0.25), LogitChange(3.0)),
    "cap": (LogitChange(cap=2.0), LogitChange(cap=5.0)),
    "both": (LogitChange(0.5, 1.5), LogitChange(2.0, 4.0)),
    "student alone": (LogitChange(0.5, 1.5), PLAIN),
}
"""Of student and teacher."""


@pytest.mark.parametrize("ids", [None, TokenIds(7), TokenIds(8, (2, 5))], ids=["all", "padded", "holes"])
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changed_logits_and_ids_of_tokens_equal_float64(ids, changes, dtype):
    case = make(vocabulary=12, teacher_vocabulary=10, dtype=dtype)
    case.ids, case.change = ids, CHANGES[changes][0]
    if ids is not None:
        known = [number for number in range(ids.size) if number not in ids.absent]
        case.labels = torch.tensor(known)[case.labels.clamp(min=0) % len(known)].where(case.mask, IGNORED)
    case.target = case.target._replace(change=CHANGES[changes][1])
    for divergence in (ForwardKL(), ReverseKL(), JensenShannon(0.3)):
        check(case, Objective(divergence, 2.0, 0.6), dtype=dtype)
    check(case, Objective(JensenShannon(0.3), 0.7, 1.0), dtype=dtype)


def test_only_ids_of_tokens_reach_a_sparse_target_and_a_text():
    case, ids = make("all", vocabulary=12, teacher_vocabulary=12), TokenIds(9, (4,))
    weight, change = case.target.weight.clone(), LogitChange(0.5, 3.0)
    weight[[4, 9, 10, 11]] = 50.0
    head = Head(weight[:9], None, change, ids)
    case.target, case.ids = HiddenTarget.of(case.target.hidden, head), ids
    case.labels = case.labels.masked_fill(case.labels == 4, 3) % 9
    objective = Objective(ForwardKL(), 2.0, 0.7)
    sums, gradients = case.run(objective)
    form = TokenForm(SparseForm("topk", 8, 2, 2.0, ids.size), seed=0)
    kept = form.store_tokens(case.target.hidden, 0, head)
    case.target = target_of(form.restore_tokens([kept], [NUM_TOKENS], NUM_TOKENS), head, ids.size)
    assert not (case.target.ids == 4).any()
    stored, stored_gradients = case.run(objective)
    torch.testing.assert_close(stored.divergence, sums.divergence, rtol=2e-3, atol=2e-3)
    for ours, theirs in zip(stored_gradients, gradients, strict=True):
        assert_near(ours, theirs, 2e-3)
    assert (head.logits(torch.ones(1, TEACHER_WIDTH)).argmax(1) != 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_values_and_gradients_equal_float64(divergence, temperature, dtype):
    check(make(dtype=dtype), Objective(divergence, temperature, 0.7), dtype=dtype)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("mask", ["all", "none", "one", "ragged", "whole chunks", "a chunk left out"])
def test_masks_and_weights(mask, weight):
    check(make(mask), Objective(ReverseKL(), 2.0, weight))


@pytest.mark.parametrize(("vocabulary", "teacher_vocabulary"), [(9, 11), (11, 9)])
@pytest.mark.parametrize("given", ["hidden states", "logits"])
def test_vocabularies_of_different_size_share_their_first_ids(vocabulary, teacher_vocabulary, given):
    case = make(vocabulary=vocabulary, teacher_vocabulary=teacher_vocabulary)
    if given == "logits":
        case.target = LogitsTarget(F.linear(*case.target[:2]))
    check(case, Objective(ForwardKL(), 2.0, 0.6))
    check(case, Objective(ForwardKL(), 2.0, 1.0))
    further = slice(min(vocabulary, teacher_vocabulary), None)
    _, (_, of_weight, of_bias) = case.run(Objective(ForwardKL(), 2.0, 1.0))
    assert not of_weight[further].any()
    assert not of_bias[further].any()


def test_a_teachers_bias_counts():
    case = make()
    bias = torch.linspace(-1, 1, 11)
    logits = LogitsTarget(F.linear(*case.target[:2], bias))
    case.target = case.target._replace(bias=bias)
    ours = case.sums(Objective())
    case.target = logits
    torch.testing.assert_close(ours.loss, case.sums(Objective()).loss)


@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_top_k_targets(divergence):
    case = make()
    case.target = top(F.linear(*case.target[:2]), 3, 2.0)
    check(case, Objective(divergence, 2.0, 0.7))


@pytest.mark.parametrize("kind", ["topk", "topk+sampled"])
@pytest.mark.parametrize("vocabulary", [23, 40, 17])
def test_a_stored_head_of_all_shared_ids_is_the_live_teacher(kind, vocabulary):
    """Of a student with other ids as well, whose softmax is then over the shared ones; but for a half's rounding."""
    case, objective = make("all", vocabulary=vocabulary, teacher_vocabulary=23), Objective(ForwardKL(), 2.0, 0.7)
    head = Head(case.target.weight, None)
    sums, gradients = case.run(objective)
    shared = min(vocabulary, 23)
    form = TokenForm(SparseForm(kind, shared, 2, 2.0, shared), seed=0)
    kept = form.store_tokens(case.target.hidden, 0, head)
    case.target = target_of(form.restore_tokens([kept], [NUM_TOKENS], NUM_TOKENS), head, len(head.weight))
    stored, stored_gradients = case.run(objective)
    torch.testing.assert_close(stored.divergence, sums.divergence, rtol=2e-3, atol=2e-3)
    assert stored.agreeing == sums.agreeing
    for ours, theirs in zip(stored_gradients, gradients, strict=True):
        assert_near(ours, theirs, 2e-3)


def test_sampled_targets_estimate_forward_kl_alone():
    """Every id with its probability as the weight: an estimate without error."""
    case, objective = make(), Objective(ForwardKL(), 2.0, 0.7)
    sums, gradients = case.run(objective)
    target = top(F.linear(*case.target[:2]), 11, 2.0)
    case.target = target._replace(entropy=-(target.weights * target.weights.log()).sum(1))
    sampled, sampled_gradients = case.run(objective)
    torch.testing.assert_close(sampled, sums)
    torch.testing.assert_close(sampled_gradients, gradients)
    with pytest.raises(UserError, match="forward KL alone"):
        case.sums(Objective(ReverseKL()))


@pytest.mark.parametrize("chunk_tokens", [1, 3, 9, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_the_chunk_size_changes_nothing(chunk_tokens, bias):
    case, objective = make(bias=bias), Objective(ReverseKL(), 0.5, 0.7)
    sums, gradients = case.run(objective)
    other, other_gradients = case.run(objective, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(other, sums)
    torch.testing.assert_close(other_gradients, gradients)


@pytest.mark.parametrize("padding", [1e4, math.nan])
def test_tokens_that_do_not_count_have_no_effect(padding):
    case, objective = make(), Objective(ReverseKL(), 0.5, 0.7)
    sums, gradients = case.run(objective)
    case.hidden.data[~case.mask] = padding
    case.target.hidden[~case.mask] = padding
    case.labels[~case.mask] = 2**40
    other, other_gradients = case.run(objective)
    assert torch.equal(torch.stack(other[:4]), torch.stack(sums[:4]))
    for ours, theirs in zip(other_gradients, gradients, strict=True):
        assert torch.equal(ours, theirs)
    assert not other_gradients[0][~case.mask].any()


@pytest.mark.parametrize("divergence", KINDS, ids=str)
def test_twice_the_tokens_are_twice_the_sums(divergence):
    """The mean over tokens does not depend on how many there are, nor on the vocabulary's size."""
    case, objective = make(), Objective(divergence, 2.0, 0.7)
    twice = replace(
        case,
        hidden=case.hidden.repeat(2, 1),
        target=HiddenTarget(case.target.hidden.repeat(2, 1), case.target.weight),
        labels=case.labels.repeat(2),
        mask=case.mask.repeat(2),
    )
    sums, gradients = case.run(objective)
    of_twice, of_twice_gradients = twice.run(objective)
    assert of_twice.tokens == 2 * sums.tokens
    torch.testing.assert_close(of_twice.loss / of_twice.tokens, sums.loss / sums.tokens)
    torch.testing.assert_close(of_twice_gradients[0], gradients[0].repeat(2, 1))
    torch.testing.assert_close(of_twice_gradients[1], 2 * gradients[1])


def test_the_gradient_is_the_slope_of_the_values():
    case, objective = make(), Objective(JensenShannon(0.5), 0.7, 0.6)
    _, gradients = case.run(objective)
    generator = torch.Generator().manual_seed(1)
    for name, gradient in zip(("hidden", "weight", "bias"), gradients, strict=True):
        direction = torch.randn(gradient.shape, generator=generator)
        step = 1e-2
        ahead, behind = (
            replace(case, **{name: getattr(case, name).detach() + sign * step * direction}).sums(objective).loss
            for sign in (1, -1)
        )
        slope = (ahead - behind) / (2 * step)
        torch.testing.assert_close((gradient * direction).sum() / 3, slope, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_over_float32_weights(dtype):
    """Products in 16 bits, gradients and their sums in float32."""
    case, objective = make(), Objective(ForwardKL(), 2.0, 0.7)
    expected, expected_gradients = expect(case, objective)
    with torch.autocast("cpu", dtype):
        sums, gradients = case.run(objective)
    assert_near(sums.divergence, expected[0], 2e-2)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert ours.dtype is torch.float32
        assert_near(ours, theirs, 2e-2)
    assert (sums.divergence.double() - expected[0]).abs() > 1e-6, "the products were in float32"


def test_float16_weights_get_the_gradient_of_many_tokens():
    """The sum over tokens, times the scale that keeps small gradients, exceeds float16's range; the result does not."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, WIDTH, generator=generator).expand(2048, WIDTH)
    weight = 0.3 * torch.randn(11, WIDTH, generator=generator)
    labels, mask = torch.full((2048,), 3), torch.ones(2048, dtype=torch.bool)
    gradients = []
    for dtype in (torch.float16, torch.float64):
        ours, bias = weight.to(dtype).requires_grad_(), torch.zeros(11, dtype=dtype, requires_grad=True)
        target = LogitsTarget(torch.zeros(2048, 11, dtype=dtype))
        sums = chunked_loss(hidden.to(dtype), ours, target, labels, mask, Objective(ForwardKL(), 1.0, 0.0), bias=bias)
        (sums.loss / 2048).backward()
        gradients.append((ours.grad, bias.grad))
    for half, exact in zip(*gradients, strict=True):
        assert half.dtype is torch.float16
        torch.testing.assert_close(half.double(), exact, rtol=1e-2, atol=1e-3)


def test_float16_keeps_small_gradients():
    """p - q of a large vocabulary is mostly below float16's range."""
    case = make(mask="all", vocabulary=4096, teacher_vocabulary=4096, bias=False)
    case.hidden *= 1e-3
    case.target.hidden.mul_(1e-3)
    objective = Objective(ForwardKL(), 1.0, 1.0)
    _, expected = expect(case, objective)
    with torch.autocast("cpu", torch.float16):
        _, gradients = case.run(objective)
    assert_near(gradients[1], expected[1], 1e-2)


def test_the_weights_gradient_gathers_in_float32():
    """In bfloat16 each chunk's part would be rounded against the sum of all before it."""
    case = make(mask="all", dtype=torch.bfloat16)
    case = replace(
        case,
        hidden=case.hidden.repeat(16, 1),
        target=HiddenTarget(case.target.hidden.repeat(16, 1), case.target.weight),
        labels=case.labels.repeat(16),
        mask=case.mask.repeat(16),
    )
    _, gradients = case.run(Objective(), chunk_tokens=1)
    _, expected = case.run(Objective(), chunk_tokens=1000)
    assert gradients[1].dtype is torch.bfloat16
    assert_near(gradients[1], expected[1].double(), 3e-3)


def test_evaluation_makes_no_gradient(monkeypatch):
    case, objective = make(), Objective(ReverseKL(), 2.0, 0.7)
    sums, _ = case.run(objective)
    wanted = []
    inner = chunked.token_losses
    monkeypatch.setattr(chunked, "token_losses", lambda *args: (wanted.append(args[5]), inner(*args))[1])
    with torch.no_grad():
        evaluated = case.sums(objective)
    assert torch.equal(torch.stack(evaluated[:4]), torch.stack(sums[:4]).detach())
    assert not evaluated.loss.requires_grad
    assert wanted
    assert not any(wanted)


def test_frozen_inputs_get_no_gradient():
    case, objective = make(), Objective(ReverseKL(), 2.0, 0.7)
    _, expected = case.run(objective)
    for name in ("hidden", "weight", "bias"):
        frozen = replace(case, **{name: getattr(case, name).detach()})
        others = [getattr(frozen, other) for other in ("hidden", "weight", "bias") if other != name]
        gradients = torch.autograd.grad(3 * frozen.sums(objective).loss, others)
        wanted = [g for g, other in zip(expected, ("hidden", "weight", "bias"), strict=True) if other != name]
        torch.testing.assert_close(list(gradients), wanted)


def test_a_second_backward_is_refused():
    case = make()
    case.weight.requires_grad_()
    loss = case.sums(Objective()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute it again"):
        loss.backward()


def test_logits_of_one_chunk_at_a_time_exist(monkeypatch):
    """Chunks of 4 rows; when one begins, nothing of the last is left."""
    alive, inner = [], chunked.token_losses

    def spy(student, teacher, *rest):
        assert student.shape == teacher.shape == (min(4, len(student)), 11)
        assert not [kept for kept in alive if kept() is not None]
        alive.extend([weakref.ref(student), weakref.ref(teacher)])
        return inner(student, teacher, *rest)

    monkeypatch.setattr(chunked, "token_losses", spy)
    make(mask="all").run(Objective())
    assert len(alive) == 8


def test_chunks_fit_their_budget():
    assert default_chunk_tokens(128_256) == 1024
    assert default_chunk_tokens(32_000) == 4096
    assert default_chunk_tokens(50) == 4096
    assert default_chunk_tokens(2_000_000) == 67
    for vocabulary in (32_000, 128_256, 256_000, 2_000_000):
        assert 4 * vocabulary * default_chunk_tokens(vocabulary) <= chunked.CHUNK_BYTES


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": -1.0}, {"temperature": math.nan}])
def test_a_temperature_is_positive(options):
    with pytest.raises(UserError, match="a temperature is a positive number"):
        Objective(**options)


def test_a_weight_is_a_share():
    with pytest.raises(UserError, match=r"in \[0, 1\]: 1.5 was given"):
        Objective(weight=1.5)


def test_rows_that_fill_up_a_chunk_may_hold_anything():
    objective, counts = Objective(JensenShannon(0.5), 0.7, 0.6), torch.tensor([True, True, False])
    student, teacher, labels = torch.randn(3, 11), torch.randn(3, 11), torch.tensor([1, 10, 0])
    expected, gradient = token_losses(student[:2], teacher[:2], labels[:2], counts[:2], objective, True, 1.0)
    student[2], teacher[2] = math.nan, math.inf
    sums, filled_gradient = token_losses(student, teacher, labels, counts, objective, True, 1.0)
    torch.testing.assert_close(sums, expected)
    torch.testing.assert_close(filled_gradient[:2], gradient)


def test_chunks_of_one_shape_are_given_to_the_compiled_operations(monkeypatch):
    """Which are the eager ones here. By default they are compiled on a GPU alone."""
    heights = []

    def compiled_losses(student, *arguments, **options):
        heights.append(len(student))
        return token_losses(student, *arguments, **options)

    monkeypatch.setattr(chunked, "compiled_token_losses", lambda: compiled_losses)
    case, objective = make("ragged"), Objective(JensenShannon(0.5), 0.7, 0.6)
    sums, gradients = case.run(objective)
    case.run(objective, compile=None)
    assert heights == []
    compiled, compiled_gradients = case.run(objective, compile=True)
    num_chunks = -(-int(case.mask.sum()) // 4)
    assert case.mask.sum() % 4 > 0
    assert heights == [4] * num_chunks
    torch.testing.assert_close(compiled, sums)
    torch.testing.assert_close(compiled_gradients, gradients)
    monkeypatch.setattr(chunked, "runs_on_gpu", lambda device: True)
    case.run(objective, compile=None)
    assert heights == [4] * (2 * num_chunks)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["ragged", "one"])
def test_compiled_equals_eager(mask):
    """Also where the last chunk is filled up, from memory that holds anything, with a label that is no id."""
    case, objective = make(mask), Objective(JensenShannon(0.5), 0.7, 0.6)
    if mask == "ragged":
        case.change, case.ids = LogitChange(0.5, 4.0), TokenIds(11, (3,))
        case.labels = case.labels.masked_fill(case.labels == 3, 2)
        case.target = case.target._replace(change=LogitChange(2.0, 5.0))
    assert mask == "ragged" or (not case.mask[0] and case.labels[0] == IGNORED)
    sums, gradients = case.run(objective)
    compiled, compiled_gradients = case.run(objective, compile=True)
    torch.testing.assert_close(compiled, sums)
    torch.testing.assert_close(compiled_gradients, gradients)

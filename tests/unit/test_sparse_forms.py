"""What is kept of a token's distribution: packed without loss, and, where it is sampled, without bias."""

from __future__ import annotations

import pytest
import torch

from distiller.language.cache.sparse_records import SparseForm
from distiller.language.loss.divergence_values import dense_divergence, log_probabilities, sparse_divergence
from distiller.language.loss.divergences import ForwardKL

FORMS = [("topk", 8, 0), ("sampled", 0, 12), ("topk+sampled", 4, 6)]


def logits(num: int, vocabulary: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(num, vocabulary, generator=torch.Generator().manual_seed(0))


def grid(num: int, points: int) -> torch.Tensor:
    """Evenly spaced uniforms: the mean over them is the expectation, but for what lies between two."""
    return ((torch.arange(points, dtype=torch.float64) + 0.5) / points).repeat(num)


@pytest.mark.parametrize("vocabulary", [40, 2**16, 2**16 + 1, 128_256, 300_000])
@pytest.mark.parametrize(("kind", "k", "samples"), FORMS)
def test_records_are_unpacked_as_they_were(kind, k, samples, vocabulary):
    form = SparseForm(kind, k, samples, 1.0, vocabulary)
    records = form.make(logits(5, vocabulary), torch.rand(5, dtype=torch.float64))
    packed = form.pack(records)
    assert form.id_bits == {40: 16, 2**16: 16, 2**16 + 1: 17, 128_256: 17, 300_000: 20}[vocabulary]
    for before, after in zip(records, form.unpack(packed), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


def test_a_token_takes_as_many_bytes_as_is_said():
    form = SparseForm("topk+sampled", 20, 23, 1.0, 49_152)
    packed = form.pack(form.make(logits(10, 49_152), torch.rand(10, dtype=torch.float64)))
    assert sum(tensor.nbytes for tensor in packed.values()) == 10 * (43 * 2 + 20 * 2 + 2 + 2)


def test_top_k_keeps_the_likeliest_and_the_exact_mass_of_the_rest():
    form, teacher = SparseForm("topk", 8, 0, 2.0, 40), logits(6, 40)
    target = form.target(form.make(teacher, torch.zeros(6, dtype=torch.float64)))
    p = log_probabilities(teacher, 2.0).exp()
    best, ids = p.topk(8, dim=1)
    assert torch.equal(target.ids, ids)
    torch.testing.assert_close(target.weights, best, rtol=2**-8, atol=2**-24)
    torch.testing.assert_close(target.tail, 1 - best.sum(1), rtol=2**-8, atol=2**-24)
    torch.testing.assert_close(target.weights.sum(1) + target.tail, torch.ones(6), rtol=0, atol=1e-6)
    assert target.entropy is None


@pytest.mark.parametrize(("kind", "k", "samples"), FORMS[1:])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_samples_have_the_expectation_of_the_whole_distribution(kind, k, samples, temperature):
    points, vocabulary = 4000, 40
    form, teacher, student = SparseForm(kind, k, samples, temperature, vocabulary), logits(3, 40), logits(3, 40, 1.0)
    for row in range(3):
        one = teacher[row : row + 1].expand(points, -1)
        target = form.target(form.make(one, grid(1, points)))
        mean = torch.zeros(points, vocabulary).scatter_add(1, target.ids, target.weights).mean(0)
        p = log_probabilities(teacher[row : row + 1], temperature).exp()[0]
        # A half's rounding of the head, which the tail makes up for, and the grid's.
        torch.testing.assert_close(mean, p, rtol=2e-3, atol=4 / points)
        expected = dense_divergence(ForwardKL(), student[row : row + 1], teacher[row : row + 1], temperature)
        found = sparse_divergence(ForwardKL(), student[row : row + 1].expand(points, -1), target, temperature)
        assert abs(found.mean() - expected.item()) < 5e-3 * max(1.0, expected.item())


def test_samples_of_an_id_are_one_entry_with_a_count():
    form, teacher = SparseForm("sampled", 0, 10, 1.0, 40), torch.full((1, 40), -30.0)
    teacher[0, 7], teacher[0, 31] = 5.0, 5.0 + torch.tensor(4.0).log()
    records = form.make(teacher, torch.tensor([0.5], dtype=torch.float64))
    assert records.entries.tolist() == [7, 31]
    assert records.counts.tolist() == [2, 8]
    target = form.target(records)
    torch.testing.assert_close(target.weights, torch.tensor([[0.2, 0.8] + [0.0] * 8]))


def test_tokens_with_fewer_different_samples_are_filled_up_with_weights_of_zero():
    form = SparseForm("sampled", 0, 10, 1.0, 40)
    teacher = torch.stack([torch.zeros(40), torch.full((40,), -30.0)])
    teacher[1, 3] = 5.0
    target = form.target(form.make(teacher, torch.tensor([0.1, 0.9], dtype=torch.float64)))
    assert target.ids.shape == (2, 10)
    torch.testing.assert_close(target.weights.sum(1), torch.ones(2))
    assert target.weights[1].tolist() == [1.0] + [0.0] * 9


def test_targets_are_of_one_width_whatever_was_drawn():
    """A compiled loss is made for one shape."""
    certain = torch.full((3, 40), -30.0)
    certain[:, 3] = 5.0
    for samples, width in ((12, 12), (60, 40)):
        form = SparseForm("sampled", 0, samples, 1.0, 40)
        for teacher in (certain, torch.zeros(3, 40), torch.zeros(0, 40)):
            target = form.target(form.make(teacher, torch.rand(len(teacher), dtype=torch.float64)))
            assert target.ids.shape == target.weights.shape == (len(teacher), width)


def test_ids_outside_of_the_shared_vocabulary_are_left_out():
    teacher = logits(4, 50)
    teacher[:, 45] = 100.0
    for kind, k, samples in FORMS:
        form = SparseForm(kind, k, samples, 1.0, 40)
        target = form.target(form.make(teacher, torch.rand(4, dtype=torch.float64)))
        assert int(target.ids.max()) < 40
        torch.testing.assert_close(target.weights.sum(1) + target.tail, torch.ones(4), rtol=0, atol=1e-6)

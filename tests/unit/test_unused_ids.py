"""Ids that no token has: compared by nothing, kept down in the student, never written by either model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from distiller import commands
from distiller.build import build_task
from distiller.cache.key import content_key
from distiller.commands.caching import make_cache
from distiller.config.loading import parse
from distiller.language.data.batch import IGNORED
from distiller.language.exporting import frozen_model
from distiller.language.loss.chunked_loss import chunked_loss
from distiller.language.loss.targets import HiddenTarget
from distiller.language.loss.token_losses import Objective
from distiller.language.model.logits import PLAIN, TokenIds, product_width
from distiller.teachers.factory import open_alone
from tests import toy_causal_lm, toys

IDS = toy_causal_lm.VOCABULARY
"""Of the tokenizer."""
PADDED = 64


def padded_model(folder: Path, **changes: Any) -> Path:
    """A model whose output layer has large logits at ids that no token has, of either sign from token to token."""
    config = toy_causal_lm.llama_config(vocab_size=PADDED, tie_word_embeddings=False, **changes)
    toy_causal_lm.save_model(folder, config)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"][IDS:] *= 100
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, Path]:
    """One with an id for each token, one with large logits beyond, and that one cut to its tokens."""
    folder = tmp_path_factory.mktemp("teachers")
    padded = padded_model(folder / "padded")
    plain = toy_causal_lm.save_model(folder / "plain", toy_causal_lm.llama_config(tie_word_embeddings=False))
    state = load_file(padded / "model.safetensors")
    cut = {name: value[:IDS].clone() if len(value) == PADDED else value for name, value in state.items()}
    save_file(cut, plain / "model.safetensors", metadata={"format": "pt"})
    return {"padded": padded, "plain": plain, "small": toy_causal_lm.save_model(folder / "small")}


def recipe_of(folder: Path, path: Path, /, **sections: Any) -> Any:
    return parse(toy_causal_lm.recipe(folder, path, cache_dir=str(folder / "cache"), **sections))


def losses(run_dir: Path, name: str = "loss") -> list[float]:
    return [line[name] for line in toys.read_metrics(run_dir)]


@torch.no_grad()
def share_of_unused(student: Path, task: Any) -> float:
    """The student's mean probability on ids that no token has, over the learnt positions of the data."""
    model, shares = AutoModelForCausalLM.from_pretrained(student).eval(), []
    rows = task._source.load()
    for number in range(len(rows)):
        row = rows[0, number]
        q = model(row.input_ids[None]).logits[0, row.labels != IGNORED].softmax(1)
        shares.append(q[:, IDS:].sum(1))
    return float(torch.cat(shares).mean())


@pytest.mark.parametrize("alpha", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_student_with_more_ids_than_tokens_keeps_them_down(teachers, tmp_path, capsys, alpha):
    file = toy_causal_lm.write_config(
        tmp_path / "s.json", toy_causal_lm.llama_config(vocab_size=64, num_hidden_layers=1)
    )
    student = {"num_layers": None, "config": str(file)}
    recipe = recipe_of(
        tmp_path,
        teachers["small"],
        student=student,
        task={"losses": {"alpha": alpha}},
        train={"max_steps": 80},
        optim={"lr": 1e-2},
    )
    commands.train(recipe, False)
    out = capsys.readouterr().out
    assert "41 of the student's 64 ids stand for no token" in out
    folder, task = Path(recipe.output_dir), build_task(recipe)
    assert share_of_unused(folder / "student", task) < 0.02
    student = AutoModelForCausalLM.from_pretrained(folder / "student")
    assert student.config.vocab_size == 64
    assert student.generation_config.suppress_tokens == list(range(IDS, 64))
    # The library itself draws tokens alone, at any temperature.
    ids = torch.full((64, 1), 3)
    drawn = student.generate(ids, do_sample=True, temperature=50.0, top_k=0, max_new_tokens=4, min_new_tokens=4)
    assert int(drawn.max()) < IDS
    for line in toys.read_metrics(folder):
        terms = alpha * line["loss/divergence"] + (1 - alpha) * line["loss/cross_entropy"] + line["loss/unused_ids"]
        assert line["loss"] == pytest.approx(terms, rel=1e-5)
    commands.evaluate(folder, [])
    report = json.loads((folder / "summary.json").read_text())["evaluation"]
    assert 0 < report["unused_ids_probability"] < 0.02
    commands.check(recipe.model_copy(update={"output_dir": str(tmp_path / "other")}), None)
    assert "41 of the student's 64 ids stand for no token" in capsys.readouterr().out


def test_padding_logits_change_no_number(teachers, tmp_path, fresh, capsys):
    """Teacher and student padded with large logits, against the same two models cut to the ids of tokens."""
    runs = {}
    for name in ("plain", "padded"):
        recipe = recipe_of(tmp_path, teachers[name], output_dir=str(tmp_path / name), train={"max_steps": 1})
        fresh()
        commands.train(recipe, False)
        runs[name] = Path(recipe.output_dir)
        commands.evaluate(runs[name], [])
    assert losses(runs["padded"], "loss/divergence") == pytest.approx(losses(runs["plain"]), rel=1e-5)
    # Their rows begin as the mean of the tokens' rows, so that the term which keeps them down begins small.
    assert losses(runs["padded"])[0] < losses(runs["plain"])[0] + 1
    reports = [json.loads((folder / "summary.json").read_text())["evaluation"] for folder in runs.values()]
    for figure in ("teacher_perplexity", "untrained_student_perplexity"):
        assert reports[1][figure] == pytest.approx(reports[0][figure], rel=1e-5)
    # The texts have no id that cannot be decoded.
    lines = [toy_causal_lm.sample_lines(folder)[1] for folder in runs.values()]
    assert lines[0] == lines[1]
    assert len(lines[0].split()) > 1


@pytest.mark.parametrize(
    "form", ["hidden", "topk", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sampled", "topk+sampled"))]
)
def test_caches_know_no_padding_either(teachers, tmp_path, fresh, form):
    first = {}
    for name in ("plain", "padded"):
        sections = {"cache": {"form": form, "k": 23, "samples": 3}, "train": {"max_steps": 1}}
        teacher = {"path": str(teachers[name]), "cache": str(tmp_path / f"{name}-outputs")}
        fresh()
        make_cache(recipe_of(tmp_path, teachers[name], teacher=teacher, **sections))
        cached = teacher | {"placement": "cached"}
        recipe = recipe_of(tmp_path, teachers[name], teacher=cached, output_dir=str(tmp_path / name), **sections)
        fresh()
        commands.train(recipe, False)
        first[name] = losses(Path(recipe.output_dir), "loss/divergence")[0]
    assert first["padded"] == pytest.approx(first["plain"], rel=1e-5)


def test_forms_are_compared_over_tokens_alone(teachers, tmp_path):
    """With as many ids as there are tokens nothing is lost: neither the divergence nor the gradient's direction."""
    task: Any = build_task(recipe_of(tmp_path, teachers["padded"], cache={"k": IDS}))
    data = task.load_data(toys.ALONE, None)
    batch = task.collate([data[0, number] for number in range(4)])
    teacher = open_alone(task.network, task._recipe, torch.float32, torch.device("cpu"))
    lines = task.compare_forms([batch], teacher.predict([task.request(batch)])).splitlines()
    live, best = (next(line.split() for line in lines if line.startswith(name)) for name in ("hidden", f"topk k {IDS}"))
    assert float(best[-4]) == pytest.approx(float(live[-4]), rel=1e-3)
    assert best[-1] == live[-1] == "1.0000"


def test_ids_between_those_of_tokens_are_left_out_too(teachers, tmp_path):
    """A tokenizer whose last word has id 25: three ids below it stand for nothing, and 38 above."""
    words = {word: number for number, word in enumerate((*toy_causal_lm.SPECIAL, *toy_causal_lm.WORDS))}
    rules = Tokenizer(models.WordLevel(words | {"here": 25}, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<eos>"}
    folder = tmp_path / "holes"
    shutil.copytree(teachers["padded"], folder)
    PreTrainedTokenizerFast(tokenizer_object=rules, **named).save_pretrained(folder)
    task: Any = build_task(recipe_of(tmp_path, folder))
    assert task.network.ids == TokenIds(26, (22, 23, 24))
    assert "41 of the teacher's 64 ids and 41 of the student's 64 ids stand for no token" in task.notices()[0]
    task.load_data(toys.ALONE, None)
    row = next(row for row in (task._source.load()[0, number] for number in range(9)) if 25 in row.labels)
    batch = task.collate([row])
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    keep, known = row.labels != IGNORED, [number for number in range(26) if number not in (22, 23, 24)]
    with torch.no_grad():
        outputs = {"hidden": model.base_model(batch.batch.input_ids).last_hidden_state}
        trained, plain = task.build_student(), task._student.build(task._known)
        loss = task.loss(trained(**task.student_inputs(batch, outputs, torch.float32)), outputs, batch)
        inputs = row.input_ids[None]
        teacher, student = (of(inputs).logits[0, keep].double() for of in (model, plain))
    p, q = teacher[:, known].log_softmax(1), student[:, known].log_softmax(1)
    assert float(loss.terms["divergence"]) == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)
    unused = -student.softmax(1)[:, known].sum(1).log().sum()
    assert float(loss.terms["unused_ids"]) == pytest.approx(float(unused), rel=1e-4)
    with torch.no_grad():
        says = task._continue(frozen_model(model, torch.device("cpu"), PLAIN, task.network.ids), [[3, 4], [5]])
    assert {token for row in says for token in row} <= set(known)


def test_a_cache_that_was_made_over_padding_is_another_one(teachers, tmp_path):
    recipe = recipe_of(tmp_path, teachers["padded"], cache={"form": "topk"})
    assert content_key(recipe, build_task(recipe), torch.float32)["form"]["vocabulary"] == IDS


def test_samples_have_tokens_alone(teachers, tmp_path):
    """Untrained, the padded models would say ids that no token has at once."""
    recipe = recipe_of(tmp_path, teachers["padded"], train={"max_steps": 1}, student={"num_layers": 5})
    commands.train(recipe, False)
    lines = [line for line in toy_causal_lm.sample_lines(Path(recipe.output_dir)) if line.startswith(("te", "st"))]
    assert all(len(line.split()) > 1 for line in lines)


def test_products_are_as_wide_as_matrix_kernels_like(teachers, tmp_path):
    """Qwen's tokenizer has 151,665 ids: with an odd width cuBLAS has no fast kernel, so padding stays until the cut."""
    assert [product_width(151_665, 151_936), product_width(IDS, IDS), product_width(IDS, 40)] == [151_680, IDS, 40]
    network = build_task(recipe_of(tmp_path, teachers["padded"])).network
    head = network.load_head(torch.float32, torch.device("cpu"))
    assert len(head.weight) == PADDED
    assert network.head_bytes(torch.float32) == head.weight.nbytes
    generator = torch.Generator().manual_seed(1)
    hidden, labels = torch.randn(7, 32, generator=generator), torch.arange(7)
    cut = head._replace(weight=head.weight[:IDS].clone())
    assert torch.equal(head.logits(hidden), cut.logits(hidden))
    sums = [
        chunked_loss(
            hidden, head.weight.flip(1), HiddenTarget.of(hidden, of), labels, labels >= 0, Objective(), ids=network.ids
        )
        for of in (head, cut)
    ]
    assert sums[0].divergence > 1
    assert [float(one) for one in sums[0]] == [float(one) for one in sums[1]]


def test_the_mask_of_absent_ids_is_made_once_for_a_device():
    ids, device = TokenIds(9, (4, 7)), torch.device("cpu")
    with torch.inference_mode():
        first = ids.absence(device)
    assert first is TokenIds(9, (4, 7)).absence(device)
    assert first is not None
    assert first.nonzero().flatten().tolist() == [4, 7]
    assert not first.is_inference()
    assert TokenIds(9).absence(device) is None


def test_a_tokenizer_without_an_id_of_the_model_has_none():
    class Beyond:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 9, "b": 10}

    assert TokenIds.of(Beyond(), below=9) == TokenIds(0)
    assert TokenIds.of(Beyond(), below=10) == TokenIds(10, tuple(range(9)))

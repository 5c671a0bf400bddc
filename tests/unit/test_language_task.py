"""Whole runs of task causal_lm in one process: what they leave, and that they are the same however work is split."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from distiller import commands
from distiller.build import build_task
from distiller.cache.key import content_key, first_difference
from distiller.commands.caching import make_cache
from distiller.commands.gates import figures_of
from distiller.config.loading import parse
from distiller.errors import QualityGateError, UserError
from distiller.language.data.batch import IGNORED, MaskedBatch
from distiller.language.task import CausalLMTask
from distiller.teachers.factory import open_alone
from tests import toy_causal_lm, toys

FEATURES = {"weight": 0.5, "student_blocks": [0, 1], "teacher_blocks": [1, 3]}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return toy_causal_lm.save_model(tmp_path_factory.mktemp("models") / "teacher")


@pytest.fixture
def make_recipe(teacher, tmp_path):
    def make(**sections: Any):
        return parse(toy_causal_lm.recipe(tmp_path, teacher, cache_dir=str(tmp_path / "cache"), **sections))

    return make


def run(recipe: Any, resume: bool = False) -> Path:
    commands.train(recipe, resume)
    return Path(recipe.output_dir)


def task_of(recipe: Any) -> CausalLMTask:
    task = build_task(recipe)
    assert isinstance(task, CausalLMTask)
    return task


def loss_of(task: CausalLMTask, batch: MaskedBatch, trained: Any) -> float:
    """The loss sum of a micro-batch, with the teacher in this process."""
    task.load_data(toys.ALONE, None)
    teacher = open_alone(task.network, task._recipe, torch.float32, torch.device("cpu"))
    outputs = teacher.predict([task.request(batch)])[0]
    with torch.no_grad():
        return float(task.loss(trained(**task.student_inputs(batch, outputs, torch.float32)), outputs, batch).total)


def test_a_run_leaves_the_contracts_files_and_a_model_of_the_library(make_recipe, teacher, capsys):
    folder = run(make_recipe(checkpoint={"every_steps": 2}, task={"losses": {"alpha": 0.7, "features": FEATURES}}))
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints", "environment.json", "inputs.json", "metrics.jsonl", "recipe.yaml", "report.html",
        "samples.txt", "student", "summary.json",
    }  # fmt: skip
    metrics = toys.read_metrics(folder)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    for line in metrics:
        terms = 0.7 * line["loss/divergence"] + 0.3 * line["loss/cross_entropy"] + 0.5 * line["loss/features"]
        assert line["loss"] == pytest.approx(terms, rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(folder / "student")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["student_params"] == sum(parameter.numel() for parameter in model.parameters())
    assert summary["teacher_params"] == AutoModelForCausalLM.from_pretrained(teacher).num_parameters()
    # Tied: stored once, and still tied.
    assert "lm_head.weight" not in load_file(folder / "student" / "model.safetensors")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert AutoTokenizer.from_pretrained(folder / "student").get_vocab() == toy_causal_lm.make_tokenizer().get_vocab()
    assert all((file.stat().st_mode & 0o777) == 0o644 for file in (folder / "student").iterdir())
    texts = (folder / "samples.txt").read_text(encoding="utf-8")
    assert texts.count("prompt: ") == texts.count("teacher: ") == texts.count("student: ") == 2


def test_a_resumed_run_equals_an_unbroken_one(make_recipe, tmp_path, fresh):
    options = {"checkpoint": {"every_steps": 2}}
    whole = run(make_recipe(output_dir=str(tmp_path / "whole"), train={"ema_decay": 0.9}, **options))
    fresh()
    broken = {"output_dir": str(tmp_path / "broken"), **options}
    run(make_recipe(train={"ema_decay": 0.9, "max_steps": 4}, **broken))
    fresh()
    resumed = run(make_recipe(train={"ema_decay": 0.9}, **broken), resume=True)
    assert toys.read_metrics(resumed)[-1]["loss"] == toys.read_metrics(whole)[-1]["loss"]
    assert torch.equal(toy_causal_lm.student_vector(resumed), toy_causal_lm.student_vector(whole))


def test_a_cached_teacher_is_the_live_one(make_recipe, tmp_path, fresh, capsys):
    losses = {"task": {"losses": {"alpha": 0.7, "features": FEATURES}}}
    train = {"batch_size": 4, "samples_per_update": 8}
    live = run(make_recipe(output_dir=str(tmp_path / "live"), train=train, **losses))
    fresh()
    cache = {"path": str(make_recipe().teacher.path), "cache": str(tmp_path / "outputs")}
    make_cache(parse(toy_causal_lm.recipe(tmp_path, **losses, teacher=cache, train=train)), repair=False)
    fresh()
    cached = cache | {"placement": "cached"}
    options = {"output_dir": str(tmp_path / "cached"), "teacher": cached, "train": train | {"num_workers": 1}}
    folder = run(parse(toy_causal_lm.recipe(tmp_path, **losses, **options)))
    ours, theirs = ([line["loss"] for line in toys.read_metrics(place)] for place in (folder, live))
    # The cache was made in the first epoch's micro-batches. Later ones differ, and on some CPUs so do the last bits.
    assert ours[:4] == theirs[:4]
    toy_causal_lm.assert_same_run(folder, live)
    # Nobody is there to be asked to go on with a text.
    assert "teacher: " not in (folder / "samples.txt").read_text()


def test_a_form_belongs_to_a_temperature_and_to_its_size(make_recipe, tmp_path, fresh):
    teacher = {"path": str(make_recipe().teacher.path), "cache": str(tmp_path / "outputs")}
    cache = {"form": "sampled", "samples": 5}
    make_cache(parse(toy_causal_lm.recipe(tmp_path, cache=cache, teacher=teacher)))
    cached = teacher | {"placement": "cached"}
    hot = {"losses": {"divergence": {"temperature": 2.0}}}
    for changes, field in (
        ({"task": hot, "cache": cache}, "form.temperature is 1.0 there and 2.0 here"),
        ({"cache": cache | {"samples": 6}}, "form.samples is 5 there and 6 here"),
        ({"cache": {"form": "hidden"}}, "form.kind is 'sampled' there and 'hidden' here"),
    ):
        fresh()
        with pytest.raises(UserError, match=field):
            commands.train(parse(toy_causal_lm.recipe(tmp_path, teacher=cached, **changes)), resume=False)


def test_an_estimate_serves_no_other_divergence(make_recipe):
    teacher = {"path": str(make_recipe().teacher.path), "cache": "outputs"}
    with pytest.raises(UserError, match=r"cache.form=sampled estimates forward_kl alone, given .*=jsd"):
        make_recipe(teacher=teacher, cache={"form": "sampled"}, task={"losses": {"divergence": {"kind": "jsd"}}})
    with pytest.raises(UserError, match="a token has room for 255 ids in all"):
        make_recipe(cache={"form": "topk+sampled", "k": 200, "samples": 100})
    assert make_recipe(cache={"form": "sampled", "samples": 250}).cache.samples == 250


def test_forms_are_compared_with_the_live_teacher(make_recipe, capsys):
    make_cache(make_recipe(cache={"k": 4, "samples": 8}, task={"losses": {"features": FEATURES}}), compare=True)
    lines = capsys.readouterr().out.splitlines()
    rows = {" ".join(line.split()[:-5]): line.split()[-5:] for line in lines[-4:]}
    assert list(rows) == ["hidden", "topk k 4", "sampled samples 8", "topk+sampled k 4 samples 8"]
    # Exact, bit for bit.
    assert rows["hidden"][2:] == ["+0.00%", "0.00%", "1.0000"]
    # What the tail's ids would add is missing.
    assert float(rows["topk k 4"][2].rstrip("%")) < -5
    # Beside two features of 32 float32 numbers.
    assert [float(row[0]) - 256 for row in rows.values()][1:] == [18.0, pytest.approx(15, abs=10), 36.0]
    bias, error = (float(cell.rstrip("%")) for cell in rows["topk+sampled k 4 samples 8"][2:4])
    assert abs(bias) < 5 * error
    assert float(rows["topk+sampled k 4 samples 8"][4]) > 0.95


def test_four_times_the_tokens_halve_the_standard_error_of_a_form(make_recipe):
    task = task_of(make_recipe(cache={"k": 4}))
    data = task.load_data(toys.ALONE, None)
    batch = task.collate([data[0, number] for number in range(4)])
    teacher = open_alone(task.network, task._recipe, torch.float32, torch.device("cpu"))
    outputs = teacher.predict([task.request(batch)])[0]
    errors = []
    for times in (1, 4):
        lines = task.compare_forms([batch] * times, [outputs] * times).splitlines()
        (row,) = [line for line in lines if line.startswith("topk k")]
        errors.append(float(row.split()[-2].rstrip("%")))
    assert errors[1] == pytest.approx(errors[0] / 2, rel=0.05)


def test_the_output_layer_is_counted_before_it_is_read(make_recipe):
    task = task_of(make_recipe())
    for dtype in (torch.float32, torch.bfloat16):
        head = task.network.load_head(dtype, torch.device("cpu"))
        assert task.replicated_head_bytes(dtype) == sum(tensor.nbytes for tensor in head[:2] if tensor is not None) > 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"max_length": 12}, "data.max_length is 16 there and 12 here"),
        ({"packing": False}, "data.packing is true there and false here"),
        ({"held_out": 0.5}, "data.held_out is 0.25 there and 0.5 here"),
    ],
)
def test_a_cache_of_other_rows_is_refused_by_the_key_that_differs(make_recipe, tmp_path, data, words):
    keys = []
    for changes in ({}, data):
        sections = {"max_length": 16, "packing": True, "held_out": 0.25} | changes
        recipe = make_recipe(data=sections)
        keys.append(content_key(recipe, task_of(recipe), torch.float32))
    assert first_difference(*keys) == words


@pytest.mark.parametrize(("form", "needs"), [("hidden", True), ("topk", False), ("sampled", False)])
def test_a_cache_of_distributions_needs_no_output_layer(make_recipe, tmp_path, form, needs):
    teacher = {"path": str(make_recipe().teacher.path), "placement": "cached", "cache": str(tmp_path)}
    task = task_of(parse(toy_causal_lm.recipe(tmp_path, teacher=teacher, cache={"form": form})))
    assert (task.replicated_head_bytes(torch.float32) > 0) == needs
    task.load_data(toys.ALONE, None)
    assert (task._head is not None) == needs


def test_checkpointing_recomputes_blocks(make_recipe, monkeypatch):
    """Also of a student that the library has loaded, which it does in eval mode."""
    task = task_of(make_recipe(student={"num_layers": None, "path": str(make_recipe().teacher.path)}))
    trained = task.build_student()
    task.enable_gradient_checkpointing(trained)
    block, calls = trained.model.base_model.layers[0].input_layernorm, []
    block.register_forward_hook(lambda *_: calls.append(1))
    batch = task.collate([toy_causal_lm.sample(0, 8)])
    outputs = {"hidden": torch.zeros(1, 8, 32)}
    task.load_data(toys.ALONE, None)
    loss = task.loss(trained(**task.student_inputs(batch, outputs, torch.float32)), outputs, batch)
    loss.total.backward()
    assert len(calls) == 2


def test_what_the_padding_holds_and_what_is_not_learnt_changes_no_loss(make_recipe):
    """Cases 28 and 29."""
    task = task_of(make_recipe(task={"losses": {"alpha": 0.5, "features": FEATURES}}))
    trained = task.build_student()
    rows = [toy_causal_lm.sample(0, 9), toy_causal_lm.sample(1, 17, num_learnt=3)]
    batch = task.collate(rows)
    whole = loss_of(task, batch, trained)
    ids = batch.batch.input_ids.clone()
    ids[0, 9:] = 7
    from dataclasses import replace

    other = replace(batch, batch=replace(batch.batch, input_ids=ids))
    assert loss_of(task, other, trained) == pytest.approx(whole, abs=1e-5)
    alone = sum(loss_of(task, task.collate([row]), trained) for row in rows)
    assert alone == pytest.approx(whole, rel=1e-5)
    assert task.count(batch) == 8 + 3


def test_nothing_but_the_text_needs_no_teacher(make_recipe):
    recipe = make_recipe(task={"losses": {"alpha": 0.0}})
    assert not task_of(recipe).needs_live_teacher
    folder = run(recipe)
    line = toys.read_metrics(folder)[0]
    assert line["loss"] == line["loss/cross_entropy"]
    assert "loss/divergence" not in line
    assert "teacher: " not in (folder / "samples.txt").read_text()


def test_figures_are_those_of_the_library(make_recipe, tmp_path, teacher, capsys):
    """Perplexities, divergence and agreement, from the library's own logits of each row alone, in float64."""
    folder = run(make_recipe(data={"held_out": 0.3}))
    commands.evaluate(folder, ["evaluation.batch_tokens=64"])
    report = json.loads((folder / "summary.json").read_text())["evaluation"]
    rows = task_of(make_recipe(data={"held_out": 0.3}))._source.held_out()
    files = {"teacher": teacher, "student": folder / "student"}
    models = {name: AutoModelForCausalLM.from_pretrained(path).eval() for name, path in files.items()}
    models["untrained_student"] = task_of(make_recipe()).build_student().model
    total = dict.fromkeys([*models, "kl", "agreeing"], 0.0)
    count, by_position = 0, {}
    for number in range(len(rows)):
        row = rows[0, number]
        keep = row.labels != IGNORED
        logs = {}
        for name, model in models.items():
            with torch.no_grad():
                hidden = model.base_model(row.input_ids[None]).last_hidden_state[0, keep]
                logs[name] = (hidden @ model.get_output_embeddings().weight.T).double().log_softmax(1)
            total[name] -= float(logs[name].gather(1, row.labels[keep][:, None]).sum())
        total["kl"] += float((logs["teacher"].exp() * (logs["teacher"] - logs["student"])).sum())
        total["agreeing"] += int((logs["teacher"].argmax(1) == logs["student"].argmax(1)).sum())
        count += int(keep.sum())
        divergences = (logs["teacher"].exp() * (logs["teacher"] - logs["student"])).sum(1).tolist()
        agreeing = (logs["teacher"].argmax(1) == logs["student"].argmax(1)).tolist()
        for position, *values in zip(keep.nonzero().flatten().tolist(), divergences, agreeing, strict=True):
            band = next(name for name, end in (("0-15", 16), ("16-63", 64), ("64-255", 256)) if position < end)
            by_position.setdefault(band, []).append(values)
    assert report["num_tokens"] == count
    assert len(by_position) > 1
    assert set(report["by_token_position"]) == set(by_position)
    for band, values in by_position.items():
        means = [sum(column) / len(values) for column in zip(*values, strict=True)]
        assert list(report["by_token_position"][band].values()) == pytest.approx(means, rel=1e-4)
    for name in models:
        assert report[f"{name}_perplexity"] == pytest.approx(math.exp(total[name] / count), rel=1e-4)
    assert report["kl_divergence"] == pytest.approx(total["kl"] / count, rel=1e-4)
    assert report["top1_agreement"] == pytest.approx(total["agreeing"] / count)
    parameters = {name: AutoModelForCausalLM.from_pretrained(path).num_parameters() for name, path in files.items()}
    assert {name: report[f"{name}_parameters"] for name in parameters} == parameters
    assert report["size_ratio"] == parameters["teacher"] / parameters["student"]
    assert report["speed_ratio"] == report["student_tokens_per_s"] / report["teacher_tokens_per_s"]
    assert set(figures_of(report)) == set(task_of(make_recipe(data={"held_out": 0.3})).figures())
    words = r"evaluation.min_improvement is 1000 and .* times lower than before training"
    with pytest.raises(QualityGateError, match=words):
        commands.evaluate(folder, ["evaluation.min_improvement=1000"])


def test_a_dry_run_needs_no_more_rows_than_the_run(make_recipe, capsys):
    """A few packed rows: twelve documents would fill fewer than an update takes."""
    commands.dry_run(make_recipe(data={"packing": True, "max_length": 64, "held_out": 0.5}, train={"batch_size": 4}))
    assert "dry run: " in capsys.readouterr().out


def test_samples_go_to_text_files_alone(make_recipe, tmp_path, capsys):
    folder = run(make_recipe(train={"max_steps": 1, "batch_size": 8}))
    commands.sample(folder, [], ["the red cat"], 0, tmp_path / "two.txt")
    assert (tmp_path / "two.txt").read_text().startswith("prompt: the red cat\nteacher: ")
    with pytest.raises(UserError, match=r"\.txt"):
        commands.sample(folder, [], ["the red cat"], 0, tmp_path / "two.png")


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "skewed_kl", "skewed_reverse_kl"])
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(make_recipe, kind):
    losses = {"divergence": {"kind": kind, "temperature": 2.0}}
    recipe = make_recipe(task={"losses": losses}, student={"num_layers": 5})
    task = task_of(recipe)
    batch = task.collate([toy_causal_lm.sample(0, 9), toy_causal_lm.sample(1, 17)])
    assert abs(loss_of(task, batch, task.build_student())) < 1e-4


@pytest.mark.parametrize("quantization", ["int8", "fp8", "nf4"])
def test_the_error_of_a_quantised_teacher_is_given_in_tokens(make_recipe, capsys, quantization):
    folder = run(make_recipe(teacher={"quantization": quantization}, train={"max_steps": 1}))
    summary = json.loads((folder / "summary.json").read_text())
    figures = summary["teacher_quantization_figures"]
    # The toy's large weights and five layers enlarge the error of 4 bits.
    assert 0 < figures["KL in nats"] < (1 if quantization == "nf4" else 0.2)
    assert 0.3 < figures["same top token"] <= 1
    told = f"; KL in nats: {figures['KL in nats']:.3g}; same top token: {figures['same top token']:.3g})"
    assert f"{quantization} teacher: its outputs differ from float32's by " in (output := capsys.readouterr().out)
    assert told in output


def test_token_errors_are_those_of_the_logits(make_recipe, teacher):
    generator = torch.Generator().manual_seed(0)
    reference = [torch.randn(1, length, 32, generator=generator) for length in (5, 9)]
    quantised = [hidden + 0.1 * torch.randn(hidden.shape, generator=generator) for hidden in reference]
    network = task_of(make_recipe()).network
    figures = network.token_errors(
        [{"hidden": h} for h in quantised], [{"hidden": h} for h in reference], torch.float32
    )
    head = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).lm_head.weight.detach()[
        : network.ids.size
    ]
    absent = list(network.ids.absent)
    p, q = (
        (torch.cat(hidden, 1)[0] @ head.T).index_fill(1, torch.tensor(absent, dtype=torch.long), -torch.inf).softmax(-1)
        for hidden in (reference, quantised)
    )
    divergence = torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum(-1).mean()
    agreement = (p.argmax(-1) == q.argmax(-1)).float().mean()
    assert figures == pytest.approx({"KL in nats": divergence.item(), "same top token": agreement.item()}, rel=1e-4)


def test_a_larger_vocabulary_is_compared_over_the_ids_that_both_have(make_recipe, tmp_path, capsys):
    config = toy_causal_lm.llama_config(vocab_size=40, num_hidden_layers=1)
    file = toy_causal_lm.write_config(tmp_path / "student.json", config)
    folder = run(make_recipe(student={"num_layers": None, "config": str(file)}))
    assert "17 of the student's 40 ids stand for no token of the tokenizer" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(folder / "student").config.vocab_size == 40


def test_dropout_is_taken_out_and_said(tmp_path, capsys):
    """GPT-2: fused projections, learned positions, dropout in its config."""
    teacher = toy_causal_lm.save_model(tmp_path / "gpt2", toy_causal_lm.gpt2_config())
    folder = run(parse(toy_causal_lm.recipe(tmp_path, teacher, student={"num_layers": 1})))
    assert "trains without dropout" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(folder / "student").config.resid_pdrop == 0

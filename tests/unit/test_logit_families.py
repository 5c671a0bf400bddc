"""Models that scale or cap their logits: what is trained equals the library's own forward pass, family by family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from distiller import commands
from distiller.build import build_task
from distiller.commands.caching import make_cache
from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.language.data.batch import IGNORED
from distiller.language.model import behaviour_probe
from distiller.language.model.logits import CAPS, DIVISORS, FACTORS, Head, LogitChange, change_of
from distiller.language.model.spec import ModelSpec
from tests import toy_causal_lm, toys

COMMON: dict[str, Any] = {
    "vocab_size": toy_causal_lm.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "sliding_window": 16,
}
CAP = {"final_logit_softcapping": 1.5}
MOE = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "time_step_limit": [0.0, 1e9]}
INKLING2 = CAP | {"unpadded_vocab_size": toy_causal_lm.VOCABULARY}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": toy_causal_lm.VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
COMPASS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
}
FAMILIES: dict[str, tuple[dict[str, Any], LogitChange]] = {
    "gemma2": (CAP, LogitChange(cap=1.5)),
    "gemma3_text": (CAP, LogitChange(cap=1.5)),
    "gemma3n_text": (CAP | GEMMA3N, LogitChange(cap=1.5)),
    "gemma4_unified_text": (CAP, LogitChange(cap=1.5)),
    "vaultgemma": (CAP, LogitChange(cap=1.5)),
    "nanochat": (CAP, LogitChange(cap=1.5)),
    "recurrent_gemma": ({"logits_soft_cap": 1.5, "lru_width": 32}, LogitChange(cap=1.5)),
    "cohere": ({"logit_scale": 0.25}, LogitChange(0.25)),
    "cohere2": ({"logit_scale": 0.25}, LogitChange(0.25)),
    "cohere2_moe": ({"logit_scale": 0.25, **MOE}, LogitChange(0.25)),
    "cohere_compass_text": ({"logit_scale": 0.25, **COMPASS}, LogitChange(0.25)),
    "granite": ({"logits_scaling": 4.0}, LogitChange(0.25)),
    "granite_swa": ({"logits_scaling": 4.0}, LogitChange(0.25)),
    "granitemoe": ({"logits_scaling": 4.0, **MOE}, LogitChange(0.25)),
    "granitemoe_swa": ({"logits_scaling": 4.0, **MOE}, LogitChange(0.25)),
    "granitemoeshared": ({"logits_scaling": 4.0, "shared_intermediate_size": 16, **MOE}, LogitChange(0.25)),
    "granitemoehybrid": (
        {"logits_scaling": 4.0, "shared_intermediate_size": 16, "mamba_d_head": 16, **MOE, **MAMBA},
        LogitChange(0.25),
    ),
    "hyperclovax": ({"logits_scaling": 0.25}, LogitChange(0.25)),
    "minicpm3": ({"dim_model_base": 8, "num_key_value_heads": 4, **MLA}, LogitChange(0.25)),
    "falcon_h1": ({"lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_d_head": 8, **MAMBA}, LogitChange(0.25)),
    "inkling_text": ({"logits_mup_width_multiplier": 4.0}, LogitChange(0.25)),
    "inkling2_text": (INKLING2, LogitChange(cap=1.5)),
    "inkling2_loop_text": (INKLING2, LogitChange(cap=1.5)),
}
TESTED_FAST = ("gemma2", "cohere", "granite", "minicpm3")
"""A cap, a factor, a divisor, and a divisor of the hidden states."""


LAYERS, WIDTH = {"num_layers": 1}, {"num_layers": None, "hidden_size": 16}


def config_of(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **(COMMON | FAMILIES[kind][0] | changes))


@pytest.mark.parametrize(
    "kind", [kind if kind in TESTED_FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES]
)
def test_loss_and_gradient_are_those_of_the_librarys_own_logits(tmp_path, monkeypatch, kind):
    """Of a teacher and a student of one family, after what each makes of its output layer's logits."""
    teacher = toy_causal_lm.save_model(tmp_path / "teacher", config_of(kind))
    file = toy_causal_lm.write_config(tmp_path / "student.json", config_of(kind))
    student = {"num_layers": None, "config": str(file)}
    losses = {"alpha": 0.6, "divergence": {"temperature": 2.0}}
    task: Any = build_task(parse(toy_causal_lm.recipe(tmp_path, teacher, student=student, task={"losses": losses})))
    assert task.files.spec.logit_change == FAMILIES[kind][1]
    model: Any = AutoModelForCausalLM.from_pretrained(teacher).eval()
    if kind.startswith("inkling2"):
        # Its files name the output layer otherwise.
        head = Head(model.lm_head.weight.detach(), None, task.files.spec.logit_change, task.network.ids)
        monkeypatch.setattr(task.network, "load_head", lambda *_: head)
    task.load_data(toys.ALONE, None)
    batch = task.collate([toy_causal_lm.sample(0, 9), toy_causal_lm.sample(1, 12)])
    inputs = {"input_ids": batch.batch.input_ids, "position_ids": batch.batch.position_ids, "use_cache": False}
    with torch.no_grad():
        theirs = model(**inputs).logits
        outputs = {"hidden": model.base_model(**inputs).last_hidden_state}
    trained = task.build_student()
    total = task.loss(trained(**task.student_inputs(batch, outputs, torch.float32)), outputs, batch).total
    total.backward()

    reference, keep = task._student.build(task._known).train(), batch.batch.labels != IGNORED
    ours, theirs = reference(**inputs).logits[keep].double(), theirs[keep].double()
    assert ours.shape[1] == toy_causal_lm.VOCABULARY
    if FAMILIES[kind][1].cap is not None:
        assert float(theirs.abs().max()) > 1.2, "the cap is reached"
    kl = 4 * F.kl_div((ours / 2).log_softmax(1), (theirs / 2).log_softmax(1), log_target=True, reduction="sum")
    expected = 0.6 * kl + 0.4 * F.cross_entropy(ours, batch.batch.labels[keep], reduction="sum")
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    expected.backward()
    gradients = {name: value.grad for name, value in trained.model.named_parameters() if value.grad is not None}
    wanted = {name: value.grad for name, value in reference.named_parameters() if value.grad is not None}
    assert gradients.keys() == wanted.keys()
    distance = torch.stack([(gradients[name] - wanted[name]).norm() for name in wanted]).norm()
    assert distance <= 1e-4 * torch.stack([value.norm() for value in wanted.values()]).norm()


def test_caches_figures_and_texts_are_of_changed_logits(tmp_path, fresh):
    """A capped teacher and a student of another family, which scales; figures by the library's own forward passes."""
    teacher_path = toy_causal_lm.save_model(tmp_path / "teacher", config_of("gemma2"))
    file = toy_causal_lm.write_config(tmp_path / "student.json", config_of("granite"))
    sections: dict[str, Any] = {"student": {"num_layers": None, "config": str(file)}, "data": {"held_out": 0.2}}
    sections |= {"train": {"max_steps": 2}, "cache_dir": str(tmp_path / "cache")}
    first = {}
    for form in (None, "hidden", "topk"):
        teacher: dict[str, Any] = {"path": str(teacher_path)}
        if form is not None:
            teacher["cache"] = str(tmp_path / f"{form}-outputs")
            sections["cache"] = {"form": form, "k": toy_causal_lm.VOCABULARY}
            fresh()
            make_cache(parse(toy_causal_lm.recipe(tmp_path, teacher=teacher, **sections)))
            teacher["placement"] = "cached"
        recipe = parse(
            toy_causal_lm.recipe(tmp_path, teacher=teacher, output_dir=str(tmp_path / f"{form}-run"), **sections)
        )
        fresh()
        commands.train(recipe, False)
        first[form] = toys.read_metrics(Path(recipe.output_dir))[0]["loss"]
    assert first["hidden"] == first[None]
    assert first["topk"] == pytest.approx(first[None], abs=2e-3)

    run_dir = tmp_path / "None-run"
    commands.evaluate(run_dir, [])
    report = json.loads((run_dir / "summary.json").read_text())["evaluation"]
    models = {
        name: AutoModelForCausalLM.from_pretrained(path).eval()
        for name, path in (("teacher", teacher_path), ("student", run_dir / "student"))
    }
    task: Any = build_task(parse(toy_causal_lm.recipe(tmp_path, teacher_path, **sections)))
    rows, total, count = task._source.held_out(), dict.fromkeys(["teacher", "student", "kl"], 0.0), 0
    for number in range(len(rows)):
        row = rows[0, number]
        keep, logs = row.labels != IGNORED, {}
        for name, model in models.items():
            with torch.no_grad():
                logs[name] = model(row.input_ids[None]).logits[0, keep].log_softmax(1)
            total[name] -= float(logs[name].gather(1, row.labels[keep][:, None]).sum())
        total["kl"] += float((logs["teacher"].exp() * (logs["teacher"] - logs["student"])).sum())
        count += int(keep.sum())
    for name in models:
        perplexity = torch.tensor(total[name] / count).exp().item()
        assert report[f"{name}_perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert report["kl_divergence"] == pytest.approx(total["kl"] / count, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "student"),
    [
        ("gemma2", LAYERS),
        ("granite", WIDTH),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gemma2", WIDTH), ("granite", LAYERS))),
        *(pytest.param("cohere", student, marks=pytest.mark.slow) for student in (LAYERS, WIDTH)),
    ],
)
def test_students_cut_out_of_such_a_teacher_change_logits_too(tmp_path, kind, student):
    teacher = toy_causal_lm.save_model(tmp_path / "teacher", config_of(kind))
    task: Any = build_task(parse(toy_causal_lm.recipe(tmp_path, teacher, student=student)))
    trained, reference, ids = task.build_student().model, task._student.build(task._known), torch.arange(3, 11)[None]
    with torch.no_grad():
        ours = trained.get_output_embeddings().head.logits(trained.base_model(ids).last_hidden_state[0])
        torch.testing.assert_close(ours, reference(ids).logits[0])


def test_what_a_config_says_and_the_library_ignores_is_no_change(tmp_path):
    """A llama has no logit_scale: its forward pass is what counts."""
    spec = ModelSpec(toy_causal_lm.llama_config(logit_scale=0.5), False, "x")
    assert spec.logit_change.is_plain
    behaviour_probe.check_behaviour(spec, "x", packs=True)


@pytest.mark.parametrize("wrong", [LogitChange(), LogitChange(4.0), LogitChange(0.25, 5.0)], ids=str)
def test_a_change_that_is_not_the_librarys_is_refused_by_its_keys(monkeypatch, wrong):
    spec = ModelSpec(config_of("granite"), False, "x")
    monkeypatch.setattr(behaviour_probe, "change_of", lambda _: wrong)
    with pytest.raises(
        UserError, match=r"x: model type granite changes its logits .*\(logits_scaling 4.0 in its config"
    ):
        behaviour_probe.check_behaviour(spec, "x", packs=False)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_an_unknown_change_of_which_no_small_model_shows_anything_is_refused(monkeypatch, scale):
    spec = ModelSpec(toy_causal_lm.llama_config(logit_scale=scale), False, "x")
    monkeypatch.setattr(behaviour_probe, "MAX_PARAMETERS", 10)
    with pytest.raises(UserError, match=f"x: what model type llama does to its logits by logit_scale {scale}"):
        behaviour_probe.check_behaviour(spec, "x", packs=False)
    # A listed one is known.
    behaviour_probe.check_behaviour(ModelSpec(config_of("granite"), False, "x"), "x", packs=False)


def test_every_listed_family_is_tested():
    untestable = {
        "beam": "every default of its config builds a model of gigabytes",
        "gemma4_text": "as gemma4_unified_text, and its small model takes seconds",
        "xlstm": "its recurrent kernels want widths that no toy has",
    }
    assert {*CAPS, *FACTORS, *DIVISORS} == {*FAMILIES, *untestable}
    for kind, (_, change) in FAMILIES.items():
        assert change_of(config_of(kind)) == change


@pytest.mark.parametrize(
    ("kind", "key", "value", "rule"),
    [
        ("granite", "logits_scaling", 0, "other than 0"),
        ("cohere", "logit_scale", float("inf"), "other than 0"),
        ("gemma2", "final_logit_softcapping", 0.0, "above 0"),
        ("gemma2", "final_logit_softcapping", -3.0, "above 0"),
    ],
)
def test_what_makes_no_logits_is_refused_by_its_key(kind, key, value, rule):
    config = config_of(kind)
    setattr(config, key, value)
    with pytest.raises(UserError, match=f"^its config's {key} is .*; it must be a finite number {rule}$"):
        change_of(config)

"""A config that ties embedding and output layer, beside weights that hold both: the stored ones decide, as they do in
transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from distiller import commands
from distiller.build import build_task
from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.export import export_checkpoint
from distiller.language.model.files import find_model
from distiller.language.model.spec import ModelSpec
from distiller.language.model.weight_tying import tied_as_stored
from distiller.storage.hub import stored_names
from tests import toy_causal_lm


def logits_of(folder: Path) -> torch.Tensor:
    """Of the library, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 19)[None]).logits


def save_untied(folder: Path, **changes: Any) -> Path:
    """A Llama whose config ties, and whose file has an output layer of its own, as merged adapters leave it."""
    toy_causal_lm.save_model(folder, toy_causal_lm.llama_config(**changes))
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(state["model.embed_tokens.weight"].shape, generator=generator)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 0.3 * noise
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> Path:
    return save_untied(tmp_path_factory.mktemp("models") / "untied", num_hidden_layers=2)


def recipe(tmp_path: Path, teacher: Path, **sections: Any) -> Any:
    return parse(toy_causal_lm.recipe(tmp_path, teacher, cache_dir=str(tmp_path / "cache"), **sections))


@pytest.mark.parametrize("average", [False, True])
def test_a_saved_student_keeps_its_own_output_layer(untied, tmp_path, average):
    """Equal to its teacher, it has nothing to learn, and every way out holds what came in."""
    options = recipe(
        tmp_path,
        untied,
        student={"path": str(untied), "num_layers": None},
        train={"max_steps": 2, "batch_size": 4, "log_every": 1} | ({"ema_decay": 0.5} if average else {}),
        optim={"lr": 1e-12},
        checkpoint={"every_steps": 1},
        evaluation={"num_samples": 0},
    )
    commands.train(options, False)
    run_dir = Path(options.output_dir)
    exported = tmp_path / "exported"
    export_checkpoint(build_task(options), run_dir / "checkpoints" / "step-2", exported)
    for folder in (run_dir / "student", exported):
        assert set(load_file(folder / "model.safetensors")) == set(load_file(untied / "model.safetensors"))
        assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
        assert torch.allclose(logits_of(folder), logits_of(untied), rtol=0, atol=1e-6)


def test_a_student_out_of_the_teacher_takes_both_matrices(untied, tmp_path):
    cut = {"num_layers": None, "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 16}
    stored = load_file(untied / "model.safetensors")
    for section, width in (({"num_layers": 1}, 32), (cut, 24)):
        student = build_task(recipe(tmp_path, untied, student=section)).build_student().model
        assert torch.equal(student.model.embed_tokens.weight, stored["model.embed_tokens.weight"][:, :width])
        assert torch.equal(student.lm_head.weight, stored["lm_head.weight"][:, :width])


def test_both_stored_and_equal_is_one_matrix(untied, tmp_path):
    folder = tmp_path / "equal"
    shutil.copytree(untied, folder)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    task = build_task(recipe(tmp_path, folder, student={"num_layers": 1}))
    student = task.build_student().model
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert task.files.anatomy.is_tied


def test_one_stored_under_the_output_layers_name_serves_both(untied, tmp_path):
    folder = tmp_path / "head"
    shutil.copytree(untied, folder)
    state = load_file(folder / "model.safetensors")
    del state["model.embed_tokens.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    student = build_task(recipe(tmp_path, folder, student={"num_layers": 2})).build_student().model
    assert torch.equal(student.model.embed_tokens.weight, state["lm_head.weight"])
    with torch.no_grad():
        hidden = student.model(input_ids=torch.arange(3, 19)[None]).last_hidden_state
    assert torch.allclose(hidden @ state["lm_head.weight"].T, logits_of(folder), rtol=0, atol=1e-5)


def test_a_hubs_model_is_tied_by_its_header_or_its_index(untied, tmp_path, monkeypatch):
    """Weights are fetched only where both matrices are stored, which must be compared then."""
    sharded, described = tmp_path / "sharded", tmp_path / "described"
    model = AutoModelForCausalLM.from_pretrained(untied)
    model.save_pretrained(sharded, max_shard_size="10KB")
    shutil.copytree(untied, sharded, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(sharded, described, ignore=shutil.ignore_patterns("*.safetensors"))
    asked = []

    def download(name: str, allow_patterns: list[str], **_: Any) -> str:
        asked.append("*.safetensors" in allow_patterns)
        return str(sharded if asked[-1] else described)

    monkeypatch.setattr("distiller.storage.hub.snapshot_download", download)
    found = find_model("teacher", "owner/untied", None, None, tmp_path / "stages", trusts_code=False)
    assert not found.anatomy.is_tied
    assert asked == [False, True]
    monkeypatch.setattr("distiller.storage.hub.snapshot_download", lambda *_, **__: str(untied))
    assert not find_model("teacher", "owner/whole", None, None, tmp_path, trusts_code=False).anatomy.is_tied
    asked.clear()
    (described / "model.safetensors.index.json").unlink()
    monkeypatch.setattr("distiller.storage.hub.snapshot_download", download)
    assert find_model("teacher", "owner/tied", None, None, tmp_path, trusts_code=False).anatomy.is_tied
    assert asked == [False]


@pytest.mark.parametrize("equal", [True, False])
def test_experts_in_several_files_are_no_other_matrix_of_one_name(tmp_path, equal):
    """The library merges a layer's experts, so their files hold several tensors of one name of the module."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(vocab_size=12, num_experts=2, tie_word_embeddings=True, **sizes)
    anatomy, embedding = ModelSpec(config, False, "teacher"), torch.randn(12, 8)
    expert = "model.layers.0.mlp.experts.{}.gate_proj.weight"
    shards = [
        {"model.embed_tokens.weight": embedding, expert.format(0): torch.zeros(4, 8)},
        {"lm_head.weight": embedding.clone() if equal else embedding + 1, expert.format(1): torch.zeros(4, 8)},
    ]
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, file)
    names = [name for shard in shards for name in shard]
    assert tied_as_stored(anatomy, names, lambda: files, "teacher").is_tied == equal


@pytest.mark.parametrize("fault", [OSError("429 Too Many Requests"), TimeoutError("timed out"), None])
def test_names_that_the_hub_does_not_tell_are_not_guessed(tmp_path, monkeypatch, fault):
    """Only where there is no whole file, its index tells them; or where the weights are here."""

    def ask(*_: Any, **__: Any) -> Any:
        raise fault or EntryNotFoundError("404")

    monkeypatch.setattr("distiller.storage.hub.HfApi.parse_safetensors_file_metadata", ask)
    monkeypatch.setattr("distiller.storage.hub.is_offline", lambda: False)
    index = {"weight_map": {"lm_head.weight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if fault is None:
        assert stored_names("owner/name", None, tmp_path, "") == {"lm_head.weight"}
        return
    with pytest.raises(UserError, match=f"owner/name: .* cannot be read from the hub .*{fault}"):
        stored_names("owner/name", None, tmp_path, "")
    (tmp_path / "model-1.safetensors").touch()
    assert stored_names("owner/name", None, tmp_path, "") == {"lm_head.weight"}


def test_files_are_converted_and_digested_once(untied, tmp_path, monkeypatch):
    found, asked = find_model("teacher", str(untied), None, None, tmp_path, trusts_code=False), []
    monkeypatch.setattr("distiller.language.model.files.reads_directly", lambda *_: False)
    monkeypatch.setattr(
        "distiller.language.model.files.converted_files", lambda *_: asked.append(1) or [tmp_path / "converted"]
    )
    assert found.weight_files() == found.weight_files() == [tmp_path / "converted"]
    assert asked == [1]

"""Which files are a saved model's: those that its library reads, where a whole file lies beside an older index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, ModelMixin
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from distiller.config.teacher import Teacher
from distiller.diffusion.families import find_pipeline
from distiller.errors import UserError
from distiller.language.model.files import find_model
from distiller.storage.saved_model import ADAPTER_CONFIG, diffusers_files, transformers_files
from distiller.storage.weight_files import WeightFiles
from distiller.vision.stored import check_weights, stored_files
from tests import classifiers, toy_causal_lm, toys


def save_twice(model: torch.nn.Module, folder: Path) -> None:
    """Shards with an index, and beside them the same model, one larger in every number, as one file."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.save_pretrained(folder, max_shard_size="10KB")  # type: ignore[operator]
    assert len(list(folder.glob("*.safetensors"))) > 1
    name = next(folder.glob("*.index.json")).name.removesuffix(".index.json")
    shards = set(json.loads((folder / f"{name}.index.json").read_text())["weight_map"].values())
    stored = {key for shard in shards for key in load_file(folder / shard)}
    save_file({key: state[key] + 1 for key in sorted(stored)}, folder / name, metadata={"format": "pt"})


def assert_reads(files: list[Path], loaded: torch.nn.Module) -> None:
    """The files hold the numbers of the model that the library has loaded."""
    weights, state = WeightFiles(files), loaded.state_dict()
    for name in weights.tensors:
        value = torch.empty(weights.tensors[name].shape)
        weights.read(name, value)
        assert torch.equal(value, state[name].float()), name
    weights.close()


def test_transformers_reads_the_whole_file(tmp_path):
    folder = toy_causal_lm.save_model(tmp_path / "language")
    save_twice(AutoModelForCausalLM.from_pretrained(folder), folder)
    found = find_model("teacher", str(folder), None, None, tmp_path / "stages", trusts_code=False)
    assert_reads(found.weight_files(), AutoModelForCausalLM.from_pretrained(folder))
    picture = tmp_path / "classifier"
    save_twice(AutoModelForImageClassification.from_config(classifiers.resnet_config()), picture)
    assert_reads(stored_files(picture), AutoModelForImageClassification.from_pretrained(picture))


def test_diffusers_reads_the_shards_of_the_index(tmp_path):
    model: ModelMixin = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    save_twice(model, tmp_path)
    assert_reads(diffusers_files(tmp_path, "x"), AutoencoderKL.from_pretrained(tmp_path))


def test_a_config_may_name_the_file(tmp_path):
    folder = toy_causal_lm.save_model(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    other = {name: value + 1 for name, value in state.items()}
    save_file(other, folder / "other.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"transformers_weights": "other.safetensors"}
    (folder / "config.json").write_text(json.dumps(config))
    assert_reads(transformers_files(folder, "x"), AutoModelForCausalLM.from_pretrained(folder))


def test_other_names_are_no_weights(tmp_path):
    """No library reads them, so what lies there may be anything."""
    folder = toy_causal_lm.save_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    for find in (transformers_files, diffusers_files):
        with pytest.raises(UserError, match=r"x: holds no weights in .*other names"):
            find(folder, "x")


def test_an_adapter_is_not_left_out_silently(tmp_path):
    folder = toy_causal_lm.save_model(tmp_path / "model")
    (folder / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(UserError, match=r"holds an adapter .*merge it into the model"):
        find_model("teacher", str(folder), None, None, tmp_path, trusts_code=False)
    with pytest.raises(UserError, match=r"holds an adapter .*merge it into the model"):
        check_weights(folder, "x")


@pytest.mark.parametrize("part", ["text_encoder", "transformer", "vae"])
def test_a_part_in_a_variant_alone_is_refused_before_any_weight_is_read(tmp_path, part):
    """`from_pretrained` would end in a traceback, after hours of stages."""
    folder = toys.make_pipeline(tmp_path / "pipeline")
    (file,) = (folder / part).glob("*.safetensors")
    file.rename(file.with_suffix(".fp16.safetensors"))
    with pytest.raises(UserError, match=rf"{part}: holds no weights in \S+ or its shards .* it has \S+\.fp16\.saf"):
        find_pipeline(Teacher(path=str(folder)))


@pytest.mark.parametrize("part", ["text_encoder", "transformer", "vae"])
def test_so_is_one_on_the_hub(tmp_path, part, monkeypatch):
    folder = toys.make_pipeline(tmp_path / "pipeline")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("distiller.storage.hub.snapshot_download", lambda *_, **__: str(folder))
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: names)
    find_pipeline(Teacher(path="owner/name"))
    (weights,) = (name for name in names if name.startswith(f"{part}/") and name.endswith(".safetensors"))
    names.append(names.pop(names.index(weights)).replace(".safetensors", ".fp16.safetensors"))
    with pytest.raises(UserError, match=rf"owner/name: {part}: holds no weights .*; it has config.json, \S+fp16"):
        find_pipeline(Teacher(path="owner/name"))
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", fail)
    find_pipeline(Teacher(path="owner/name"))


def test_a_language_model_on_the_hub_without_safetensors_is_refused(tmp_path, monkeypatch):
    folder = toy_causal_lm.save_model(tmp_path / "language")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("distiller.storage.hub.snapshot_download", lambda *_, **__: str(folder))
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: ["config.json", "pytorch_model.bin"])
    with pytest.raises(UserError, match=r"owner/name: holds no weights in model.safetensors .*pytorch_model.bin"):
        find_model("teacher", "owner/name", None, None, tmp_path / "stages", trusts_code=False)


def fail(*_: object, **__: object) -> None:
    raise ConnectionError("no answer")

"""Small models, data and recipes of both tasks, which the plain loops and the product are run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PhiConfig

from distiller.config.causal_lm import LanguageRecipe
from distiller.config.classification import ClassificationRecipe
from distiller.config.loading import RECIPES, parse
from tests import classifiers, toy_causal_lm
from tests.beside_plain import merged, nested

LANGUAGE = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
LANGUAGE_MODELS: dict[str, Any] = {
    "teacher": toy_causal_lm.llama_config(**LANGUAGE, num_hidden_layers=3),
    "untied": toy_causal_lm.llama_config(**LANGUAGE, num_hidden_layers=2, tie_word_embeddings=False),
    # Its output layer has a bias.
    "phi": PhiConfig(
        vocab_size=toy_causal_lm.VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        partial_rotary_factor=1.0,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=1,
        initializer_range=0.3,
    ),
}
LANGUAGE_DROPOUT = toy_causal_lm.llama_config(
    **LANGUAGE | {"hidden_size": 8}, num_hidden_layers=2, attention_dropout=0.5
)
FILE_KEYS = ("config", "path")


def language_folder(root: Path) -> Path:
    """Models, configs and texts. Every weight of the models differs from its first value, biases and norms too."""
    root.mkdir(exist_ok=True)
    for number, (name, config) in enumerate(LANGUAGE_MODELS.items()):
        _save_moved(root / name, config, seed=number)
    toy_causal_lm.write_config(root / "student.json", toy_causal_lm.llama_config(**LANGUAGE | {"hidden_size": 8}))
    toy_causal_lm.write_config(root / "phi.json", LANGUAGE_MODELS["phi"])
    toy_causal_lm.write_config(root / "dropout.json", LANGUAGE_DROPOUT)
    texts = [
        json.loads(line)["text"] for line in toy_causal_lm.write_texts(root / "texts.jsonl").read_text().splitlines()
    ]
    (root / "texts").mkdir()
    for number, text in enumerate(texts):
        (root / "texts" / f"{number:03}.txt").write_text(text)
    # Prompts of 1 to 14 words, of which some fill a row of 11 tokens.
    words = [text.split() for text in texts]
    answers = [(of[: len(of) // 2 or 1], of[len(of) // 2 or 1 :]) for of in words]
    lines = [json.dumps({"prompt": " ".join(one), "completion": " " + " ".join(two)}) for one, two in answers if two]
    (root / "answers.jsonl").write_text("\n".join(lines))
    return root


def _save_moved(place: Path, config: Any, seed: int) -> None:
    toy_causal_lm.save_model(place, config, seed)
    model = AutoModelForCausalLM.from_pretrained(place)
    generator = torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(place)


def language_recipe(folder: Path, place: Path, changes: dict[str, Any]) -> LanguageRecipe:
    """A recipe of two updates with these dotted keys changed; names of files are those in `folder`."""
    base = {
        "output_dir": str(place / "run"),
        "cache_dir": str(folder / "stages"),
        "seed": 3,
        "task": {"kind": "causal_lm"},
        "teacher": {"path": str(folder / "teacher")},
        "student": {"num_layers": 2},
        "data": {"kind": "jsonl", "path": "texts.jsonl", "max_length": 32, "packing": False},
        "train": {"max_steps": 2, "batch_size": 4, "log_every": 1},
        "optim": {"lr": 1e-2, "max_grad_norm": 1.0, "eps": 1e-6},
        "checkpoint": {"at_end": False},
    }
    data = merged(base, nested({key: value for key, value in changes.items() if key != "student"}))
    data["student"] = changes.get("student", data["student"])
    for section, key in (("data", "path"), ("student", "config"), ("student", "path"), ("teacher", "path")):
        if key in data[section]:
            data[section][key] = str(folder / data[section][key])
    if data["teacher"].get("placement") == "cached":
        data["teacher"]["cache"] = str(place / "outputs")
    recipe = parse(data)
    assert isinstance(recipe, LanguageRecipe)
    return recipe


def classification_folder(root: Path) -> Path:
    """Models, configs and pictures."""
    root.mkdir(exist_ok=True)
    small = {"embedding_size": 4, "hidden_sizes": [4, 8]}
    layers = {"hidden_size": 8, "intermediate_size": 12}
    configs = {
        "resnet": classifiers.resnet_config(**small),
        "vit": classifiers.vit_config(**layers),
        "ten": AutoConfig.for_model("resnet", **small, depths=[1, 1], layer_type="basic", num_labels=10),
    }
    for number, (name, config) in enumerate(configs.items()):
        classifiers.save_classifier(root / name, config, seed=number)
    classifiers.resnet_config(**small, depths=[1, 1]).to_json_file(root / "resnet.json")
    classifiers.vit_config(**layers, num_hidden_layers=2).to_json_file(root / "vit.json")
    dropout = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    classifiers.vit_config(**layers, num_hidden_layers=2, **dropout).to_json_file(root / "dropout.json")
    configs["resnet"].save_pretrained(root / "bare")
    (root / "bare" / "preprocessor_config.json").write_text(json.dumps(classifiers.PROCESSOR))
    classifiers.save_pictures(root / "pictures", count=6)
    classifiers.save_pictures(root / "others", count=4)
    _save_data_set(root / "pictures", root / "saved")
    return root


def _save_data_set(pictures: Path, place: Path) -> None:
    """The pictures as `datasets` saves them, in another order, with columns and a part of other names."""
    files = sorted(pictures.rglob("*.png"), key=lambda file: file.name)
    features = datasets.Features({"view": datasets.Image(), "animal": datasets.ClassLabel(names=classifiers.LABELS)})
    columns = {
        "view": [str(file) for file in files],
        "animal": [classifiers.LABELS.index(file.parent.name) for file in files],
    }
    parts = {"all": datasets.Dataset.from_dict(columns, features)}
    parts["few"] = parts["all"].select(range(6))
    datasets.DatasetDict(parts).save_to_disk(str(place))


def classification_recipe(folder: Path, place: Path, changes: dict[str, Any]) -> ClassificationRecipe:
    """A recipe of three updates with these dotted keys changed; names of files are those in `folder`."""
    base = {
        "output_dir": str(place / "run"),
        "cache_dir": str(folder / "stages"),
        "seed": 3,
        "task": {"kind": "classification"},
        "teacher": {"path": "resnet"},
        "student": {"config": "resnet.json"},
        "data": {"path": "pictures"},
        # Two updates an epoch, so that the third is of another one.
        "train": {"max_steps": 3, "batch_size": 7, "log_every": 1},
        "optim": {"lr": 1e-2, "max_grad_norm": 1.0, "eps": 1e-4},
        "checkpoint": {"at_end": False},
    }
    whole = {key: value for key, value in changes.items() if "." not in key}
    data = merged(base | whole, nested({key: value for key, value in changes.items() if key not in whole}))
    for section in ("teacher", "student", "data"):
        data[section] = {key: str(folder / of) if key in FILE_KEYS else of for key, of in data[section].items()}
    if data["teacher"].get("placement") == "cached":
        data["teacher"]["cache"] = str(place / "outputs")
    recipe = parse(data)
    assert isinstance(recipe, RECIPES["classification"])
    return recipe

"""What a recipe's `evaluation` measures on finished drawings: checked first, then opened, then made for each seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distiller.config.diffusion import DiffusionRecipe
from distiller.diffusion.clip_score import Clip, ClipScores
from distiller.diffusion.drawing_distances import (
    DRAWINGS_PER_FEATURE,
    FIGURES,
    Distances,
    JudgeFeatures,
    ModelFeatures,
    PictureFeatures,
    has_library,
)
from distiller.diffusion.drawing_figures import MODELS, DrawingFigures, Recognised
from distiller.diffusion.judges import Judge
from distiller.errors import UserError
from distiller.storage.saved_model import check_whole, transformers_files

INSTALL = "pip install 'distiller[evaluation]'"
Measures = Callable[[int], list[DrawingFigures]]
"""Seed -> what is measured on its drawings."""


def check_measures(recipe: DiffusionRecipe) -> None:
    """Raises UserError for folders that hold no such model, and where torchmetrics is needed. Reads no weights."""
    evaluation = recipe.evaluation
    if evaluation.features is not None:
        _check_folder("evaluation.features", evaluation.features, ["preprocessor_config.json"])
        if not has_library():
            raise UserError(f"evaluation.features needs torchmetrics; {INSTALL}")
    if evaluation.clip is not None:
        folder = evaluation.clip
        kind = _check_folder("evaluation.clip", folder, ["preprocessor_config.json", "tokenizer_config.json"])
        if kind != "clip":
            raise UserError(f"evaluation.clip: {folder} holds a model of type {kind}; give a folder of a CLIPModel")


def measured_names(recipe: DiffusionRecipe) -> list[str]:
    """Keys of the figures of one seed."""
    evaluation, names = recipe.evaluation, []
    if evaluation.judge != "none":
        names += [f"{name}_recognised" for name in MODELS]
    if _measures_distances(recipe):
        names += FIGURES
    if evaluation.clip is not None:
        names += [f"{name}_clip_score" for name in MODELS]
    return names


def open_measures(
    recipe: DiffusionRecipe,
    prompts: Sequence[str],
    judge: Judge | None,
    labels: np.ndarray | None,
    device: torch.device,
) -> Measures:
    """Loads the networks that the figures need, and says where drawings are too few for one.

    Args:
        recipe: one that `check_measures` has accepted.
        prompts: of all sample ids.
        judge: the recipe's.
        labels: what the judge should see in each drawing [N].
        device: of the networks.
    """
    evaluation = recipe.evaluation
    features: PictureFeatures | None = None
    if _measures_distances(recipe):
        features = _open_features(evaluation.features, judge, device)
        _say_too_few(len(prompts), features)
    elif judge is not None:
        print(f"note: fid and kid of the drawings need torchmetrics; {INSTALL}")
    clip = None if evaluation.clip is None else Clip(evaluation.clip, device)

    def make(seed: int) -> list[DrawingFigures]:
        made: list[DrawingFigures] = []
        if judge is not None and labels is not None:
            made.append(Recognised(judge, labels))
        if features is not None:
            made.append(Distances(features, seed))
        if clip is not None:
            made.append(ClipScores(clip, prompts))
        return made

    return make


def _measures_distances(recipe: DiffusionRecipe) -> bool:
    evaluation = recipe.evaluation
    return (evaluation.features is not None or evaluation.judge != "none") and has_library()


def _open_features(folder: str | None, judge: Judge | None, device: torch.device) -> PictureFeatures:
    if folder is not None:
        return ModelFeatures(folder, device)
    assert judge is not None
    return JudgeFeatures(judge)


def _say_too_few(count: int, features: PictureFeatures) -> None:
    enough = DRAWINGS_PER_FEATURE * features.num_features
    if count < enough:
        print(
            f"note: fid is too large with fewer than about {enough:,} drawings, ten for each of "
            f"{features.num_features:,} features, and there are {count:,}; raise evaluation.num_samples, or read kid"
        )


def _check_folder(key: str, given: str, names: Sequence[str]) -> str:
    """The `model_type` of a folder with config, these files and whole safetensors files. Raises UserError."""
    folder = Path(given)
    for name in ("config.json", *names):
        if not (folder / name).is_file():
            raise UserError(f"{key}: {given} has no {name}; give a folder that transformers has saved a model into")
    check_whole(transformers_files(folder, f"{key}: {given}"), f"{key}: ")
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str(config["model_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{key}: {given}/config.json does not name its model_type ({error!r}); save it again"
        ) from error

"""Distances between the distributions of teacher's and student's drawings, computed by torchmetrics.

The features are a judge's, or those of an image model of transformers; the figures of other features are other figures.
"""

from __future__ import annotations

import importlib.util
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModel, CLIPModel

from distiller.data import rng
from distiller.diffusion.drawing_figures import DrawingFigures
from distiller.diffusion.judges import Judge
from distiller.errors import UserError

FIGURES = ("fid", "kid", "kid_subset_std")
NUM_SUBSETS, MAX_SUBSET_SIZE = 100, 1000
"""Of KID: those of torchmetrics and of Binkowski et al. 2018, section 4."""
DRAWINGS_PER_FEATURE = 10
"""FID of fewer drawings than this for each feature is much too large: the covariances are noise."""


def has_library() -> bool:
    """Whether torchmetrics is installed. Does not import it."""
    return importlib.util.find_spec("torchmetrics") is not None


class PictureFeatures(ABC):
    """Maps pictures to vectors."""

    num_features: int
    """Length of a vector."""

    @abstractmethod
    def compute(self, pictures: np.ndarray) -> Tensor:
        """The features of pictures, uint8 [B, H, W, 3]: [B, D] float64 on the CPU."""


@final
class JudgeFeatures(PictureFeatures):
    """What a judge sees of a picture."""

    def __init__(self, judge: Judge) -> None:
        self._judge, self.num_features = judge, judge.num_features

    def compute(self, pictures: np.ndarray) -> Tensor:
        return torch.from_numpy(self._judge.features(pictures)).double()


@final
class ModelFeatures(PictureFeatures):
    """The pooled output of an image model of transformers, in float32.

    Of a whole CLIP model it is the projected embedding; of a model without a pooled output, or whose folder lacks the
    pooling layer's weights as those of classifiers do, the mean of its last hidden states over all positions.
    """

    def __init__(self, folder: str, device: torch.device) -> None:
        """Loads model and processor from a folder that `check_measures` has accepted.

        Raises UserError where the folder lacks other weights: transformers would fill them at random.
        """
        options: dict[str, Any] = {"local_files_only": True}
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **options)
        options |= {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
        model, report = AutoModel.from_pretrained(folder, **options)
        missing = sorted(report["missing_keys"])
        if others := [name for name in missing if "pooler" not in name]:
            raise UserError(f"evaluation.features: {folder} lacks the weights {others[0]}; give a model that is whole")
        self._has_pooler = not missing
        self._is_clip = isinstance(model, CLIPModel)
        self._model, self._device = model.eval().requires_grad_(False).to(device), device
        self.num_features = self.compute(np.zeros((1, 64, 64, 3), dtype=np.uint8)).shape[1]

    def compute(self, pictures: np.ndarray) -> Tensor:
        pixels = self._processor(images=list(pictures), return_tensors="pt")["pixel_values"].to(self._device)
        with torch.no_grad():
            if self._is_clip:
                pooled = self._model.get_image_features(pixel_values=pixels).pooler_output
            else:
                outputs = self._model(pixel_values=pixels)
                pooled = outputs.get("pooler_output") if self._has_pooler else None
                if pooled is None:
                    # [B, tokens, D], of a convolutional network [B, D, height, width].
                    states = outputs.last_hidden_state
                    pooled = states.flatten(2).mean(2) if states.dim() == 4 else states.mean(1)
        # The pooled output of a convolutional network is [B, D, 1, 1].
        return pooled.flatten(1).double().cpu()


@final
class Distances(DrawingFigures):
    """`fid`, `kid` and `kid_subset_std`: how far the student's drawings as a whole are from the teacher's.

    `fid` is |m_t - m_s|^2 + trace(C_t + C_s - 2 (C_t C_s)^(1/2)) with means m and covariances C of the features (Heusel
    et al. 2017, arXiv 1706.08500, equation 6). `kid` is the unbiased estimate of the squared maximum mean discrepancy
    with the kernel (x.y / D + 1)^3 (Binkowski et al. 2018, arXiv 1801.01401, section 4), as a mean over 100 random
    subsets of half of the drawings, 1,000 at most; `kid_subset_std` is its standard deviation over these.
    """

    def __init__(self, features: PictureFeatures, seed: int) -> None:
        """`seed`: of the subsets."""
        self._features, self._seed = features, seed
        self._parts: dict[str, list[Tensor]] = {"teacher": [], "student": []}

    def add(self, drawings: Mapping[str, np.ndarray], sample_ids: Sequence[int]) -> None:
        del sample_ids
        for name, parts in self._parts.items():
            parts.append(self._features.compute(drawings[name]))

    def figures(self) -> dict[str, Any]:
        teacher, student = (torch.cat(parts) for parts in self._parts.values())
        subset_size = min(len(teacher) // 2, MAX_SUBSET_SIZE)
        figures: dict[str, Any] = dict.fromkeys(FIGURES)
        if len(teacher) >= 2:
            figures["fid"] = frechet_distance(teacher, student)
        if subset_size >= 2:
            figures["kid"], figures["kid_subset_std"] = kernel_distance(teacher, student, subset_size, self._seed)
        return figures


def frechet_distance(teacher: Tensor, student: Tensor) -> float:
    """FID of features [N, D] float64; see `Distances`. Needs torchmetrics."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    metric = FrechetInceptionDistance(feature=_Given(teacher.shape[1]))
    metric.update(teacher, real=True)
    metric.update(student, real=False)
    return metric.compute().item()


def kernel_distance(teacher: Tensor, student: Tensor, subset_size: int, seed: int) -> tuple[float, float]:
    """KID of features [N, D] float64, and its standard deviation over subsets; see `Distances`. Needs torchmetrics."""
    from torchmetrics.image.kid import KernelInceptionDistance

    with warnings.catch_warnings():
        # That it keeps all features.
        warnings.simplefilter("ignore", UserWarning)
        metric = KernelInceptionDistance(_Given(teacher.shape[1]), subsets=NUM_SUBSETS, subset_size=subset_size)
    metric.update(teacher, real=True)
    metric.update(student, real=False)
    # It draws from the global generator.
    with rng.seeded(seed):
        mean, std = metric.compute()
    return mean.item(), std.item()


@final
class _Given(nn.Module):
    """What torchmetrics takes for a network: features in, features out."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features

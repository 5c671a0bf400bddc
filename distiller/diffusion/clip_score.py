"""CLIP score: how well drawings fit their prompts, by a CLIP model of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

from distiller.diffusion.drawing_figures import MODELS, DrawingFigures


@final
class Clip:
    """A CLIP model in float32, with its tokenizer and image processor."""

    def __init__(self, folder: str, device: torch.device) -> None:
        """Loads a folder that `check_clip` has accepted."""
        options: dict[str, Any] = {"local_files_only": True}
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **options)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model: Any = CLIPModel.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **options)
        self._model, self._device = model.eval().requires_grad_(False).to(device), device

    def cosines(self, pictures: np.ndarray, prompts: Sequence[str]) -> Tensor:
        """The cosine of each picture's embedding with its prompt's: [B] float64 on the CPU.

        Args:
            pictures: uint8 [B, H, W, 3].
            prompts: B prompts; what is longer than the model's texts is cut.
        """
        pixels = self._processor(images=list(pictures), return_tensors="pt")["pixel_values"].to(self._device)
        length = self._model.config.text_config.max_position_embeddings
        texts = self._tokenizer(
            list(prompts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self._device)
        with torch.no_grad():
            of_pictures = self._model.get_image_features(pixel_values=pixels).pooler_output
            of_texts = self._model.get_text_features(
                input_ids=texts["input_ids"], attention_mask=texts["attention_mask"]
            ).pooler_output
        return F.cosine_similarity(of_pictures.double(), of_texts.double()).cpu()


@final
class ClipScores(DrawingFigures):
    """`NAME_clip_score` of each model: 100 times the mean cosine of drawings and prompts.

    Hessel et al. 2021 (arXiv 2104.08718) scale by 2.5 instead and cut off what is negative.
    """

    def __init__(self, clip: Clip, prompts: Sequence[str]) -> None:
        """`prompts`: of each sample id."""
        self._clip, self._prompts = clip, prompts
        self._cosines: dict[str, list[Tensor]] = {name: [] for name in MODELS}

    def add(self, drawings: Mapping[str, np.ndarray], sample_ids: Sequence[int]) -> None:
        prompts = [self._prompts[i] for i in sample_ids]
        for name, cosines in self._cosines.items():
            cosines.append(self._clip.cosines(drawings[name], prompts))

    def figures(self) -> dict[str, Any]:
        return {f"{name}_clip_score": 100 * torch.cat(parts).mean().item() for name, parts in self._cosines.items()}

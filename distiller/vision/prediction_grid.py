"""A grid of pictures with the classes that teacher and student predict for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from distiller.data.pictures import SUFFIXES, UnreadablePictureError, is_picture, open_picture
from distiller.errors import UserError
from distiller.tasks.labelled_grid import labelled_grid
from distiller.vision.files import Picture


def read_prompts(files: Sequence[str], num_channels: int) -> list[Picture]:
    """The pictures that `sample` is asked about. Raises UserError for a file that is none."""
    return [_read(Path(file), num_channels) for file in files]


def classes_of(student: nn.Module, pixels: Tensor) -> list[int]:
    """The number of each picture's class, by a model of the library."""
    with torch.no_grad():
        return student(pixel_values=pixels).logits.argmax(-1).tolist()


def prediction_grid(
    pictures: Sequence[Picture],
    names: Sequence[str],
    truths: Sequence[int | None],
    predictions: dict[str, Sequence[int]],
) -> Image.Image:
    """Pictures under what they are and what each network (by name) takes them for; `names` are the classes'."""
    titles = []
    for place, truth in enumerate(truths):
        said = [f"{who}: {names[numbers[place]]}" for who, numbers in predictions.items()]
        titles.append("; ".join([names[truth], *said] if truth is not None else said))
    side = max(max(picture.shape[:2]) for picture in pictures)
    return labelled_grid({"picture": [_square(picture, side) for picture in pictures]}, titles)


def _square(picture: Picture, side: int) -> np.ndarray:
    """On a white square, with three channels: one grid holds pictures of any size."""
    canvas = np.full((side, side, 3), 255, np.uint8)
    height, width = picture.shape[:2]
    top, left = (side - height) // 2, (side - width) // 2
    canvas[top : top + height, left : left + width] = picture
    return canvas


def _read(file: Path, num_channels: int) -> Picture:
    if not is_picture(file):
        raise UserError(f"--prompts {file}: task classification takes picture files ({', '.join(sorted(SUFFIXES))})")
    try:
        return open_picture(file, num_channels)
    except UnreadablePictureError as error:
        raise UserError(f"--prompts {file}: is not a readable image ({error}); give another") from error

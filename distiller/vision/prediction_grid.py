"""A grid of pictures with the classes that teacher and student predict for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The pictures of `sample --prompts`, uint8 [H, W, C]. Raises UserError for a file that cannot be read as one."""
    return [_read(Path(file), num_channels) for file in files]


def classes_of(student: nn.Module, pixels: Tensor) -> list[int]:
    """The student's predicted class of each picture, as an index of the logits, for pixels [B, C, H, W]."""
    with torch.no_grad():
        return student(pixel_values=pixels).logits.argmax(-1).tolist()


def prediction_grid(
    pictures: Sequence[Picture],
    names: Sequence[str],
    truths: Sequence[int | None],
    predictions: Mapping[str, Sequence[int]],
) -> Image.Image:
    """A grid of pictures, each with its true class, where it is known, and the classes that the networks predict.

    Args:
        names: names of the classes.
        truths: true class of each picture, None where it is not known.
        predictions: name of a network -> its predicted class of each picture.
    """
    titles = []
    for i, truth in enumerate(truths):
        labels = [f"{network}: {names[classes[i]]}" for network, classes in predictions.items()]
        titles.append("; ".join([names[truth], *labels] if truth is not None else labels))
    side = max(max(picture.shape[:2]) for picture in pictures)
    return labelled_grid({"picture": [_square(picture, side) for picture in pictures]}, titles)


def _square(picture: Picture, side: int) -> np.ndarray:
    """The picture in the middle of a white square [side, side, 3], so that one grid can hold pictures of any size."""
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

"""Pictures in a labelled grid."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont


def labelled_grid(rows: Mapping[str, Sequence[np.ndarray]], columns: Sequence[str], cell: int = 160) -> Image.Image:
    """Draws named rows of images (uint8 [H, W, 3]) under column titles.

    Args:
        cell: the width of a drawn image, in pixels; small images are enlarged without smoothing.
    """
    first = next(iter(rows.values()))[0]
    height = round(cell * first.shape[0] / first.shape[1])
    font = ImageFont.load_default(size=14)
    left, top, gap = 80, 66, 8
    picture = Image.new("RGB", (left + len(columns) * (cell + gap), top + len(rows) * (height + gap)), "white")
    canvas = ImageDraw.Draw(picture)
    for number, title in enumerate(columns):
        lines = textwrap.wrap(title, width=cell // 8)
        text = "\n".join(lines[:3]) + ("..." if len(lines) > 3 else "")
        canvas.multiline_text((left + number * (cell + gap), 6), text, fill="black", font=font)
    for place, (name, images) in enumerate(rows.items()):
        y = top + place * (height + gap)
        canvas.text((8, y + height // 2 - 8), name, fill="black", font=font)
        for number, image in enumerate(images):
            method = Image.Resampling.NEAREST if image.shape[1] < cell else Image.Resampling.LANCZOS
            picture.paste(Image.fromarray(image).resize((cell, height), method), (left + number * (cell + gap), y))
    return picture

"""Image folders with captions: `metadata.jsonl` (file_name, text), as in Hugging Face's ImageFolder, or .txt files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from distiller.data.folders import files_below
from distiller.data.pictures import SUFFIXES, UnreadablePictureError, is_picture, open_picture, unread_note
from distiller.errors import RunError, UserError
from distiller.storage.packaged_files import search_note

METADATA = "metadata.jsonl"


def find_images(folder: Path) -> tuple[list[tuple[Path, str]], list[str]]:
    """(file, caption) pairs in a stable order (that of metadata.jsonl, else by name), and notes on files left out.

    Raises UserError.
    """
    if not os.path.isdir(folder):
        raise UserError(
            f"data.path: {folder} is not a folder{search_note(folder)}; data.kind=images needs a folder of images"
        )
    files, metadata = files_below(folder), folder / METADATA
    if metadata.is_file():
        pairs = _from_metadata(metadata)
        notes = _unnamed(files, pairs)
    else:
        pairs = _from_text_files([file for file in files if is_picture(file)])
        notes = []
    note = unread_note(file for file in files if not is_picture(file) and file.suffix not in (".txt", ".jsonl"))
    if not pairs:
        found = f" ({note.removeprefix('data.path: ')})" if note else ""
        raise UserError(
            f"data.path: {folder} holds no captioned image; supported are {', '.join(sorted(SUFFIXES))}{found}"
        )
    for image, caption in pairs:
        if not caption:
            raise UserError(f"data.path: the caption of {image.name} is empty; write one, or remove the image")
    return pairs, notes if note is None else [*notes, note]


def load_image(file: Path, height: int, width: int) -> Tensor:
    """An image, scaled to cover height x width and cut at the centre: [3, H, W] float32 in [-1, 1]."""
    try:
        image = Image.fromarray(open_picture(file, num_channels=3))
    except UnreadablePictureError as error:
        raise RunError(f"{file} is not a readable image ({error}); replace or remove it") from error
    scale = max(height / image.height, width / image.width)
    size = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    image = image.resize(size, Image.Resampling.LANCZOS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1.0


def _from_metadata(file: Path) -> list[tuple[Path, str]]:
    pairs = []
    # JSON may hold U+2028 and similar separators unescaped: only newlines end a line.
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            image, caption = file.parent / entry["file_name"], " ".join(entry["text"].split())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f'data.path: {file.name} line {number} is not a JSON object such as {{"file_name": "1.png", "text": "a '
                'caption"}'
            ) from error
        if not os.path.isfile(image):
            raise UserError(f"data.path: {file.name} line {number} names {entry['file_name']!r}, which does not exist")
        pairs.append((image, caption))
    return pairs


def _unnamed(files: list[Path], pairs: list[tuple[Path, str]]) -> list[str]:
    named = {os.path.normpath(image) for image, _ in pairs}
    count = sum(is_picture(file) and os.path.normpath(file) not in named for file in files)
    return [f"data.path: pictures that {METADATA} does not name and that are left out: {count}"] if count else []


def _from_text_files(images: list[Path]) -> list[tuple[Path, str]]:
    pairs = []
    for image in images:
        caption = image.with_suffix(".txt")
        if not caption.is_file():
            raise UserError(f"data.path: {image.name} has no caption; add {caption.name} or a metadata.jsonl")
        pairs.append((image, " ".join(_read_text(caption).split())))
    return pairs


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.path: {file} cannot be read as UTF-8 text ({error}); save it as UTF-8") from error

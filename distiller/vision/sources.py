"""Where pictures come from: a folder for each class, a saved data set, or scikit-learn's digits."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from distiller.classification_config import ClassificationData
from distiller.data.images import SUFFIXES
from distiller.digits import DIGIT_WORDS, real_digits
from distiller.errors import RunError, UserError
from distiller.vision.files import Picture


class Pictures(ABC):
    """Pictures and their classes, numbered from 0.

    Attributes:
        class_names: of the data's classes, in the data's order.
        classes: of each picture, a place in `class_names`.
        names: of each picture, with its file's size, for the digest that a resumed run is compared by.
    """

    class_names: tuple[str, ...]
    classes: Sequence[int]
    names: Sequence[str]

    @abstractmethod
    def versions(self) -> list[Any]:
        """What changes when the pictures do, for JSON. Reads none of them."""

    @abstractmethod
    def read(self, number: int, num_channels: int) -> Picture:
        """One picture, uint8 [H, W, C]. Raises RunError when it cannot be read."""


class FolderPictures(Pictures):
    """`path/CLASS/**/*.png` and the like; classes and files in the order of their names."""

    def __init__(self, path: Path) -> None:
        if not os.path.isdir(path):
            raise UserError(
                f"data.path: {path} is not a folder; data.kind=images needs one with a folder for each class"
            )
        folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
        self.class_names = tuple(folder.name for folder in folders)
        self._files: list[Path] = []
        classes: list[int] = []
        for number, folder in enumerate(folders):
            files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
            if not files:
                raise UserError(f"data.path: {folder} holds no picture ({', '.join(sorted(SUFFIXES))}); remove it")
            self._files += files
            classes += [number] * len(files)
        if not self._files:
            raise UserError(f"data.path: {path} holds no folders; data.kind=images needs one for each class")
        self.classes = classes
        try:
            sizes = [file.stat().st_size for file in self._files]
        except OSError as error:
            raise UserError(f"data.path: {error.filename} cannot be read ({error.strerror}); remove it") from error
        self.names = [f"{file.relative_to(path)}, {size} bytes" for file, size in zip(self._files, sizes, strict=True)]

    def versions(self) -> list[Any]:
        """Sizes and times: whole contents would be hours of a large data set."""
        return [(status.st_size, status.st_mtime_ns) for status in (file.stat() for file in self._files)]

    def read(self, number: int, num_channels: int) -> Picture:
        file = self._files[number]
        try:
            with Image.open(file) as image:
                return as_picture(image, num_channels)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise RunError(f"{file} is not a readable image ({error}); replace or remove it") from error


class DatasetPictures(Pictures):
    """A data set that `datasets` saved (`save_to_disk`), with a column of images and one of classes."""

    def __init__(self, data: ClassificationData) -> None:
        try:
            import datasets
        except ImportError as error:
            raise UserError("data.kind=datasets needs datasets; pip install 'distiller[datasets]'") from error
        try:
            loaded: Any = datasets.load_from_disk(data.path)
        except Exception as error:
            # It lets the errors of its file formats through.
            reason = " ".join(str(error).split())
            raise UserError(f"data.path: {data.path} is not a data set saved with save_to_disk ({reason})") from error
        if isinstance(loaded, datasets.DatasetDict):
            if data.split not in loaded:
                raise UserError(
                    f"data.split: {data.path} has no {data.split!r}; there are {', '.join(map(str, loaded))}"
                )
            loaded = loaded[data.split]
        for key, column in (("image_column", data.image_column), ("label_column", data.label_column)):
            if column not in loaded.column_names:
                raise UserError(
                    f"data.{key}: {data.path} has no {column!r}; there are {', '.join(loaded.column_names)}"
                )
        feature = loaded.features[data.label_column]
        if not isinstance(feature, datasets.ClassLabel):
            raise UserError(
                f"data.label_column: {data.label_column!r} of {data.path} is no ClassLabel, which names its classes; "
                "use cast_column or class_encode_column on it, and save it again"
            )
        if not isinstance(loaded.features[data.image_column], datasets.Image):
            raise UserError(
                f"data.image_column: {data.image_column!r} of {data.path} holds no images; cast it to Image"
            )
        self.class_names = tuple(feature.names)
        self.classes = list(loaded[data.label_column])
        self.names = [f"{loaded._fingerprint}/{data.image_column}/{number}" for number in range(len(loaded))]
        if any(number not in range(len(self.class_names)) for number in self.classes):
            raise UserError(f"data.path: {data.path} has rows without a class ({data.label_column!r}); remove them")
        self._loaded, self._column = loaded, data.image_column

    def versions(self) -> list[Any]:
        return [str(self._loaded._fingerprint), self._column]

    def read(self, number: int, num_channels: int) -> Picture:
        try:
            return as_picture(self._loaded[number][self._column], num_channels)
        except (OSError, SyntaxError, ValueError, AttributeError, Image.DecompressionBombError) as error:
            raise RunError(f"row {number} of the data set holds no readable image ({error}); remove it") from error


class DigitPictures(Pictures):
    """The 1,797 handwritten digits that travel with scikit-learn, enlarged from 8 x 8."""

    class_names = DIGIT_WORDS

    def __init__(self) -> None:
        try:
            self._images, labels = real_digits()
        except ImportError as error:
            raise UserError("data.kind=digits needs scikit-learn; pip install 'distiller[demo]'") from error
        self.classes = labels.tolist()
        self.names = [f"digit/{number}" for number in range(len(self.classes))]

    def versions(self) -> list[Any]:
        return [hashlib.sha256(self._images.tobytes()).hexdigest()]

    def read(self, number: int, num_channels: int) -> Picture:
        return np.repeat(self._images[number][:, :, None], num_channels, axis=2)


def open_pictures(data: ClassificationData) -> Pictures:
    """The data that a recipe names; reads names and classes only. Raises UserError."""
    if data.kind == "digits":
        return DigitPictures()
    if data.kind == "datasets":
        return DatasetPictures(data)
    return FolderPictures(Path(os.path.expanduser(data.path or "")))


def as_picture(image: Image.Image, num_channels: int) -> Picture:
    """uint8 [H, W, C] with one channel or three, the way up that its EXIF entry says; 16 bits of grey become 8."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        # Pillow's own conversion cuts off at 255, so that nearly all of such a picture is white.
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    values = np.asarray(image.convert("L" if num_channels == 1 else "RGB"))
    return values[:, :, None] if num_channels == 1 else values

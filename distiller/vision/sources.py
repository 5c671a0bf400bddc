"""Sources of pictures: a folder for each class, a saved data set, or a packaged data set."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distiller.config.classification import ClassificationData
from distiller.data.folders import files_below, folders_in
from distiller.data.pictures import (
    READER_VERSION,
    SUFFIXES,
    UnreadablePictureError,
    check_size,
    is_picture,
    open_picture,
    pixels_of,
    unread_note,
)
from distiller.distributed.importing import import_object
from distiller.errors import RunError, UserError
from distiller.storage.packaged_files import search_note
from distiller.vision.files import Picture
from distiller.vision.picture_digest import contents_digest

PACKAGED = {"digits": "distiller.demo.digit_pictures:DigitPictures"}
"""`data.kind` of the data sets that need no path -> module and class of `Pictures`, imported when it is needed."""


class Pictures(ABC):
    """Pictures and their classes, numbered from 0.

    Attributes:
        class_names: names of the data's classes, in the data's order.
        classes: class of each picture, as an index into `class_names`.
        names: name of each picture (with the size of its file), for the digest that must be the same in a resumed run.
        notices: what is left out of the data, a line each.
    """

    class_names: tuple[str, ...]
    classes: Sequence[int]
    names: Sequence[str]
    notices: Sequence[str] = ()

    @abstractmethod
    def contents(self) -> Any:
        """A JSON-ready value that changes when the pictures' pixels do, and is the same for a copy in another folder.

        May read every picture.
        """

    @abstractmethod
    def read(self, index: int, num_channels: int) -> Picture:
        """Picture `index`, uint8 [H, W, num_channels]; 1 channel is grey, 3 are RGB. RunError if it is unreadable."""


class FolderPictures(Pictures):
    """Pictures in a folder for each class (`path/CLASS/**/*.png` and other formats), sorted by name."""

    def __init__(self, path: Path) -> None:
        """Raises UserError where `path` is no folder, or a class has no picture. Reads no file's content."""
        if not os.path.isdir(path):
            raise UserError(
                f"data.path: {path} is not a folder{search_note(path)}; data.kind=images needs one with a folder for "
                "each class"
            )
        folders = folders_in(path)
        if not folders:
            raise UserError(f"data.path: {path} holds no folders; data.kind=images needs one for each class")
        self.class_names = tuple(folder.name for folder in folders)
        number_of = {name: number for number, name in enumerate(self.class_names)}
        found = files_below(path)
        self._files = [file for file in found if is_picture(file) and file.parent != path]
        self.classes = [number_of[file.relative_to(path).parts[0]] for file in self._files]
        if empty := sorted(set(range(len(folders))) - set(self.classes)):
            raise UserError(
                f"data.path: {folders[empty[0]]} holds no picture ({', '.join(sorted(SUFFIXES))}); remove it"
            )
        self.notices = _notices(found, path)
        sizes = [check_size(file) for file in self._files]
        self.names = [f"{file.relative_to(path)}, {size} bytes" for file, size in zip(self._files, sizes, strict=True)]

    def contents(self) -> Any:
        return [READER_VERSION, contents_digest(self._files)]

    def read(self, index: int, num_channels: int) -> Picture:
        file = self._files[index]
        try:
            return open_picture(file, num_channels)
        except UnreadablePictureError as error:
            raise RunError(f"{file} is not a readable image ({error}); replace or remove it") from error


class DatasetPictures(Pictures):
    """A data set that `datasets` saved (`save_to_disk`), with a column of images and one of classes."""

    def __init__(self, data: ClassificationData) -> None:
        try:
            import datasets
        except ImportError as error:
            raise UserError("data.kind=datasets needs datasets; pip install 'distiller[datasets]'") from error
        assert data.path is not None, "ClassificationData requires it"
        try:
            loaded: Any = datasets.load_from_disk(data.path)
        except Exception as error:
            # datasets does not convert the errors of its file formats.
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
        self._fingerprint, self._column = str(loaded._fingerprint), data.image_column
        # Saved as `Image(decode=False)`, a cell is a dictionary of bytes and path.
        self._loaded = loaded.cast_column(data.image_column, datasets.Image())

    def contents(self) -> Any:
        return [READER_VERSION, self._fingerprint, self._column]

    def read(self, index: int, num_channels: int) -> Picture:
        try:
            return pixels_of(self._loaded[index][self._column], num_channels)
        except Exception as error:
            # An empty cell, or any error of Pillow's readers for damaged bytes.
            raise RunError(f"row {index} of the data set holds no readable image ({error}); remove it") from error


def open_pictures(data: ClassificationData) -> Pictures:
    """The data that a recipe names; reads names and classes only. Raises UserError."""
    if data.kind in PACKAGED:
        return import_object(PACKAGED[data.kind])()
    if data.kind == "datasets":
        return DatasetPictures(data)
    return FolderPictures(Path(os.path.expanduser(data.path or "")))


def _notices(files: Sequence[Path], root: Path) -> list[str]:
    """What is left out of a folder's files, a line each."""
    outside = sum(is_picture(file) and file.parent == root for file in files)
    notices = [f"data.path: pictures that lie in no class's folder and are left out: {outside}"] if outside else []
    note = unread_note(file for file in files if not is_picture(file))
    return notices if note is None else [*notices, note]

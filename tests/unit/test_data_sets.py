"""`data.kind=datasets`: what the package `datasets` reads, for texts and for pictures, and what is said of the rest."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest

from distiller.config.causal_lm import LanguageData
from distiller.config.classification import ClassificationData
from distiller.errors import RunError, UserError
from distiller.language.data.corpus import FORMATS, documents_of, open_corpus
from distiller.language.data.documents import Text
from distiller.vision.sources import open_pictures
from tests import classifiers

TEXTS = ["one red cat", "two dogs"]


def texts_of(path: Path, split: str = "train") -> list[str]:
    corpus = open_corpus(LanguageData(kind="datasets", path=str(path), split=split))
    return [document.text for document in documents_of(corpus, None) if isinstance(document, Text)]


def digest_of(path: Path) -> str:
    return open_corpus(LanguageData(kind="datasets", path=str(path))).digest


def write(file: Path, texts: list[str]) -> Path:
    """A file of the format that its name says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_dict({"text": texts})
    if file.suffix == ".arrow":
        table.save_to_disk(str(file.parent / "saved"))
        shutil.move(next((file.parent / "saved").glob("*.arrow")), file)
    elif file.suffix == ".txt":
        file.write_text("\n".join(texts))
    elif file.suffix in (".json", ".jsonl"):
        file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    elif file.suffix == ".csv":
        file.write_text("\n".join(["text", *texts]))
    else:
        table.to_parquet(str(file))
    return file


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_of_every_format_is_read(tmp_path, suffix):
    assert texts_of(write(tmp_path / f"rows{suffix}", TEXTS)) == TEXTS


def test_a_folder_of_files_has_splits(tmp_path):
    write(tmp_path / "train" / "a.jsonl", TEXTS)
    write(tmp_path / "test" / "a.jsonl", ["three"])
    assert texts_of(tmp_path) == TEXTS
    assert texts_of(tmp_path, "test") == ["three"]


def test_the_digest_is_that_of_the_content_and_of_which_part_it_is(tmp_path):
    for place in ("one", "same"):
        write(tmp_path / place / "train" / "a.jsonl", TEXTS)
        write(tmp_path / place / "test" / "a.jsonl", ["three"])
    write(tmp_path / "swapped" / "train" / "a.jsonl", ["three"])
    write(tmp_path / "swapped" / "test" / "a.jsonl", TEXTS)
    digests = [digest_of(tmp_path / place) for place in ("one", "same", "swapped")]
    assert digests[0] == digests[1] != digests[2]


def test_a_row_is_named_that_is_no_document(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "p", "completion": "c"}\n{"prompt": "p"}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl row 1 has the keys prompt; write one of"):
        texts_of(file)


def test_a_file_that_is_none_is_one_line(tmp_path):
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"data\.path: datasets cannot read .*rows\.parquet \(\w+: ") as caught:
        texts_of(file)
    assert "\n" not in str(caught.value)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    file = write(tmp_path / "rows.jsonl", TEXTS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'distiller\[datasets\]'"):
        texts_of(file)
    with pytest.raises(UserError, match=r"pip install 'distiller\[datasets\]'"):
        open_pictures(ClassificationData(kind="datasets", path=str(tmp_path)))


def save_pictures(folder: Path, classes: list[int | None], last: bytes | None = None) -> ClassificationData:
    """The toy pictures with these classes; `last`: what the last one is instead."""
    files = sorted(classifiers.save_pictures(folder / "files", count=2).rglob("*.png"))[: len(classes)]
    pictures = [file.read_bytes() for file in files[: len(classes)]]
    pictures[-1] = last or pictures[-1]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=classifiers.LABELS)})
    columns = {"image": [{"bytes": content, "path": None} for content in pictures], "label": classes}
    datasets.Dataset.from_dict(columns, features).save_to_disk(str(folder / "saved"))
    return ClassificationData(kind="datasets", path=str(folder / "saved"))


def test_pictures_without_a_class_are_refused(tmp_path):
    with pytest.raises(UserError, match="has rows without a class"):
        open_pictures(save_pictures(tmp_path, [0, None, 1]))


def test_a_row_without_a_readable_picture_is_named(tmp_path):
    opened = open_pictures(save_pictures(tmp_path, [0, 1, 2], last=b"no picture"))
    assert opened.class_names == classifiers.LABELS
    assert opened.read(1, 1).shape == (37, 40, 1)
    with pytest.raises(RunError, match="row 2 of the data set holds no readable image"):
        opened.read(2, 3)


def test_a_picture_without_a_frame_0_is_read(tmp_path):
    """Photoshop's format: its frames are layers, counted from 1, and what Pillow opens is all of them together."""
    red = b"\xff" * 64 + bytes(128)
    photoshop = b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 8, 8, 8, 3) + bytes(14) + red
    opened = open_pictures(save_pictures(tmp_path, [0, 1, 2], last=photoshop))
    assert (opened.read(2, 3) == (255, 0, 0)).all()


def test_pictures_that_were_saved_without_being_decoded(tmp_path):
    data = save_pictures(tmp_path, [0, 1, 2])
    saved = datasets.load_from_disk(str(tmp_path / "saved"))
    saved.cast_column("image", datasets.Image(decode=False)).save_to_disk(str(tmp_path / "bytes"))
    as_bytes = open_pictures(data.model_copy(update={"path": str(tmp_path / "bytes")}))
    assert np.array_equal(as_bytes.read(1, 3), open_pictures(data).read(1, 3))

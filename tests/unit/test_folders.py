"""Linked subfolders are followed in every kind of data folder, and cycles of links end."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from distiller.config.causal_lm import LanguageData
from distiller.config.classification import ClassificationData
from distiller.data.folders import files_below, files_matching, folders_in
from distiller.data.images import find_images
from distiller.errors import UserError
from distiller.language.data.corpus import open_corpus
from distiller.storage.stages import digest_files
from distiller.vision.sources import open_pictures


@pytest.fixture
def linked(tmp_path):
    """Makes DATA/own and DATA/linked -> STORE, with two links that lead back, and returns DATA and the store."""

    def make(write):
        data, store = tmp_path / "data", tmp_path / "store"
        for folder in (data / "own", store / "deeper"):
            folder.mkdir(parents=True)
        write(data / "own" / "1")
        write(store / "2")
        write(store / "deeper" / "3")
        (data / "linked").symlink_to(store)
        (store / "again").symlink_to(data)
        (data / "own" / "self").symlink_to("self")
        return data, store

    return make


def test_the_walk_ends_and_names_each_file_once_a_path(linked):
    data, store = linked(lambda file: file.touch())
    (data / "own" / ".hidden").touch()
    (data / "own" / "gone").symlink_to(store / "nowhere")
    names = ["linked/2", "linked/deeper/3", "own/1", "own/gone", "own/self"]
    assert [str(file.relative_to(data)) for file in files_below(data)] == names
    (data / "loop").symlink_to(".")
    assert [folder.name for folder in folders_in(data)] == ["linked", "own"]
    for pattern in ("**/[0-9]", "*/**/?", "**/**/[123]"):
        matched = [str(file.relative_to(data)) for file in files_matching(f"{data}/{pattern}")]
        assert matched == ["linked/2", "linked/deeper/3", "own/1"], pattern
    assert files_matching(f"{data}/*/1") == [data / "own" / "1"]
    assert files_matching(f"{data}/none/**/1") == []


def test_a_link_to_the_folder_around_the_first_reads_nothing_twice(tmp_path):
    train = tmp_path / "data" / "train"
    (train / "cat").mkdir(parents=True)
    (train / "cat" / "1").touch()
    (tmp_path / "data" / "2").touch()
    (train / "up").symlink_to("..")
    assert [str(file.relative_to(train)) for file in files_below(train)] == ["cat/1", "up/2"]
    assert [str(file.relative_to(train)) for file in files_matching(f"{train}/**/[12]")] == ["cat/1", "up/2"]


def test_globs_name_hidden_entries_only_with_a_leading_dot(tmp_path):
    (tmp_path / ".folder").mkdir()
    for name in ("shown.txt", ".hidden.txt", ".folder/inside.txt"):
        (tmp_path / name).touch()
    for pattern, name in (("**/*.txt", "shown.txt"), ("**/.*.txt", ".hidden.txt"), (".*/**/*", ".folder/inside.txt")):
        assert files_matching(f"{tmp_path}/{pattern}") == [tmp_path / name], pattern


def test_a_folder_that_cannot_be_read_is_said(linked, monkeypatch):
    data, _ = linked(lambda file: file.touch())

    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(UserError, match=r"data.path: the folder .*data cannot be read \(Permission denied\)"):
        files_below(data)


@pytest.mark.parametrize("pattern", ["", "/**/*.txt", "/**/*.jsonl"])
def test_documents(linked, pattern):
    kind = "jsonl" if "jsonl" in pattern else "text"
    suffix = ".jsonl" if kind == "jsonl" else ".txt"
    data, store = linked(lambda file: file.with_suffix(suffix).write_text(json.dumps({"text": file.name})))
    corpus = open_corpus(LanguageData(kind=kind, path=f"{data}{pattern}"))
    assert [document.text[-1 if kind == "jsonl" else -3] for document in corpus] == ["2", "3", "1"]
    before = corpus.digest
    (store / "deeper" / "3").with_suffix(suffix).write_text(json.dumps({"text": "4"}))
    assert open_corpus(LanguageData(kind=kind, path=f"{data}{pattern}")).digest != before


def test_data_sets_of_local_files(linked):
    pytest.importorskip("datasets")
    data, store = linked(lambda file: file.with_suffix(".jsonl").write_text(json.dumps({"text": file.name})))
    corpus = open_corpus(LanguageData(kind="datasets", path=str(data)))
    assert sorted(document.text for document in corpus) == ["1", "2", "3"]
    before = corpus.digest
    (store / "2.jsonl").write_text('{"text": "4"}')
    assert open_corpus(LanguageData(kind="datasets", path=str(data))).digest != before


def write_picture(file):
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(file.with_suffix(".png"))
    file.with_suffix(".txt").write_text("a cat")


def test_captioned_pictures(linked):
    data, _ = linked(write_picture)
    found, _ = find_images(data)
    assert [file.name for file, _ in found] == ["2.png", "3.png", "1.png"]


def test_classes(linked):
    data, _ = linked(write_picture)
    (data / "own" / "more").symlink_to(data / "linked" / "deeper")
    pictures = open_pictures(ClassificationData(path=str(data)))
    assert pictures.class_names == ("linked", "own")
    assert list(pictures.classes) == [0, 0, 1, 1]


def test_a_copy_without_links_has_the_same_digests(linked):
    data, store = linked(write_picture)
    (store / "again").unlink()
    (data / "own" / "self").unlink()
    copy = shutil.copytree(data, data.with_name("copy"))
    assert not (copy / "linked").is_symlink()
    assert digest_files(files_below(copy)) == digest_files(files_below(data))
    assert find_images(copy)[0][0][0].name == find_images(data)[0][0][0].name

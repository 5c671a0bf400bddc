"""What is kept by its content is found again, however the files are stored: linked, copied, with other times."""

import hashlib
import os
import shutil

import pytest

from distiller.config.teacher import Teacher
from distiller.diffusion.families import find_pipeline
from distiller.errors import UserError
from distiller.storage import content_digests
from distiller.storage.content_digests import content_digest
from distiller.storage.stages import digest_files
from distiller.vision.picture_digest import contents_digest


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))
    return tmp_path / "cache-home" / "distiller" / "contents"


def into_hub(folder, repository):
    """The folder's files as the hub's cache holds them: weights under their SHA-256, other files under a SHA-1."""
    snapshot = repository / "snapshots" / ("0" * 40)
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        content = file.read_bytes()
        of = hashlib.sha256 if file.suffix == ".safetensors" else hashlib.sha1
        blob, link = repository / "blobs" / of(content).hexdigest(), snapshot / file.relative_to(folder)
        for parent in (blob.parent, link.parent):
            parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_a_pipeline_s_digest_is_that_of_its_content(pipelines, tmp_path, cache_home):
    linked = into_hub(pipelines[1], tmp_path / "models--toy")
    copied = shutil.copytree(linked, tmp_path / "copied")
    assert not any(file.is_symlink() for file in copied.rglob("*"))
    parts = ("transformer", "text_encoder", "tokenizer", "vae")
    found = [find_pipeline(Teacher(path=str(place))).files for place in (pipelines[1], linked, copied)]
    digests = {files.digest(*parts) for files in found}
    assert len(digests) == 1
    assert len(list(cache_home.iterdir())) == 3
    # What is never read decides nothing: another tool may have downloaded it into the hub's cache.
    for name in ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin", ".DS_Store"):
        (linked / "transformer" / name).touch()
    assert {found[1].digest(*parts)} == digests


def test_large_files_of_the_hub_are_read_once(tmp_path, cache_home):
    content = b"weights"
    blob = tmp_path / "blobs" / hashlib.sha256(content).hexdigest()
    blob.parent.mkdir()
    blob.write_bytes(content)
    (tmp_path / "model.safetensors").symlink_to(blob)
    expected = hashlib.blake2b(content, digest_size=16).hexdigest()
    assert content_digest(tmp_path / "model.safetensors") == expected
    # The hub never writes a blob anew: this one shows that it is not read again.
    blob.write_bytes(b"others!")
    assert content_digest(tmp_path / "model.safetensors") == expected
    (cache_home / blob.name).write_text("torn")
    # As in the next process.
    content_digests._computed.clear()
    assert content_digest(tmp_path / "model.safetensors") != expected


def test_a_name_of_64_digits_elsewhere_says_nothing(tmp_path, cache_home):
    for index, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ("a" * 64)).write_text(str(index))
        (tmp_path / folder / "link").symlink_to("a" * 64)
    assert digest_files([tmp_path / "one" / "link"]) != digest_files([tmp_path / "two" / "link"])
    assert not cache_home.exists()


def test_a_home_that_cannot_be_written_costs_time_alone(tmp_path, cache_home):
    cache_home.parent.parent.write_text("a file")
    blob = tmp_path / "blobs" / ("a" * 64)
    blob.parent.mkdir()
    blob.write_text("weights")
    (tmp_path / "link").symlink_to(blob)
    assert content_digest(tmp_path / "link") == content_digest(blob)


def test_a_home_that_cannot_be_searched_costs_time_alone(tmp_path, cache_home, monkeypatch):
    blob = tmp_path / "blobs" / ("a" * 64)
    blob.parent.mkdir()
    blob.write_text("weights")
    (tmp_path / "link").symlink_to(blob)
    expected = content_digest(blob)
    # root may search every folder.
    read_text = type(blob).read_text

    def refuse(path, *args, **options):
        if cache_home in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **options)

    content_digest(tmp_path / "link")
    monkeypatch.setattr(type(blob), "read_text", refuse)
    assert content_digest(tmp_path / "link") == expected
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home.parent.parent))
    (cache_home / blob.name).write_bytes(b"\xff")
    assert content_digest(tmp_path / "link") == expected


def test_pictures_are_known_by_their_contents(tmp_path, cache_home):
    files = [tmp_path / "one" / f"{index}.png" for index in range(3)]
    files[0].parent.mkdir()
    for index, file in enumerate(files):
        file.write_bytes(bytes([index]) * 10)
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copyfile)
    copies = [tmp_path / "two" / file.name for file in files]
    for file in copies:
        os.utime(file, ns=(1, 1))
    first = contents_digest(files)
    assert contents_digest(copies) == first
    assert len([note for note in cache_home.glob("pictures-*") if note.suffix != ".lock"]) == 2
    # The same size and the same place: the time says that it has to be read again.
    files[1].write_bytes(b"\7" * 10)
    os.utime(files[1], ns=(2, 2))
    changed = contents_digest(files)
    assert changed != first
    shutil.rmtree(cache_home)
    cache_home.write_text("a file")
    assert contents_digest(files) == changed
    files[0].unlink()
    with pytest.raises(UserError, match=r"data\.path: .*0\.png: No such file"):
        contents_digest(files)


def test_a_process_reads_a_file_once_until_it_looks_another(tmp_path, monkeypatch):
    read, file = [], tmp_path / "weights"
    file.write_bytes(b"1")
    whole = content_digests.read_digest
    monkeypatch.setattr(content_digests, "read_digest", lambda file: read.append(file) or whole(file))
    first = content_digest(file)
    assert content_digest(file) == first
    assert read == [file]
    os.utime(file, ns=(1, 1))
    assert content_digest(file) == first
    file.write_bytes(b"22")
    assert content_digest(file) != first
    assert len(read) == 3


def test_large_weights_of_a_plain_folder_are_read_once(tmp_path, cache_home, monkeypatch):
    monkeypatch.setattr("distiller.storage.content_digests.LARGE_BYTES", 4)
    file, other = tmp_path / "model.safetensors", tmp_path / "model.bin"
    for each in (file, other):
        each.write_bytes(b"weights")
    first = content_digest(file)
    assert not cache_home.exists(), "it may be written again within the file system's resolution of time"
    monkeypatch.setattr("distiller.storage.content_digests.SETTLED_S", -1.0)
    # As another process, which has read nothing yet.
    monkeypatch.setattr(content_digests, "_computed", {})
    assert content_digest(file) == content_digest(other) == first
    (note,) = cache_home.iterdir()
    note.write_text("0" * 32)
    monkeypatch.setattr(content_digests, "_computed", {})
    assert content_digest(file) == "0" * 32
    times = file.stat()
    file.write_bytes(b"others!")
    # The same size, place and time of change, as a copy that keeps times has it.
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert content_digest(file) == hashlib.blake2b(b"others!", digest_size=16).hexdigest()

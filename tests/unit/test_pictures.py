"""One reader for both tasks' picture files: every mode of Pillow, orientation, transparency; which files are read."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from distiller.config.classification import ClassificationData
from distiller.data.images import load_image
from distiller.data.pictures import MAX_CHECKED_PICTURES, check_pictures, open_picture, unread_note
from distiller.errors import RunError, UserError
from distiller.vision.sources import open_pictures

RED, WHITE = (255, 0, 0), (255, 255, 255)


def plain(mode, colour):
    return Image.new(mode, (8, 8), colour)


def palette():
    return plain("RGB", RED).quantize(4)


def sixteen(value, dtype="<u2"):
    return Image.fromarray(np.full((8, 8), value, dtype))


CASES = [
    ("rgb.png", plain("RGB", RED), {}, RED),
    ("rgba.png", plain("RGBA", (255, 0, 0, 0)), {}, WHITE),
    ("half.png", plain("RGBA", (255, 0, 0, 102)), {}, (255, 153, 153)),
    ("rgba.webp", plain("RGBA", (255, 0, 0, 0)), {"lossless": True}, WHITE),
    ("rgba.tiff", plain("RGBA", (255, 0, 0, 0)), {}, WHITE),
    ("grey-alpha.png", plain("LA", (10, 51)), {}, (206, 206, 206)),
    ("palette.png", palette(), {}, RED),
    ("palette-alpha.png", palette(), {"transparency": 0}, WHITE),
    ("palette-bytes.png", palette(), {"transparency": b"\x66" * 4}, (255, 153, 153)),
    ("palette.gif", palette(), {"transparency": 0}, WHITE),
    ("key.png", plain("RGB", RED), {"transparency": RED}, WHITE),
    ("grey-key.png", plain("L", 7), {"transparency": 7}, WHITE),
    ("bits.png", plain("1", 0), {}, (0, 0, 0)),
    ("bits-key.png", plain("1", 0), {"transparency": 0}, WHITE),
    ("sixteen.png", sixteen(2570), {}, (10, 10, 10)),
    ("sixteen-key.png", sixteen(2570), {"transparency": 2570}, WHITE),
    ("sixteen.tif", sixteen(2570), {}, (10, 10, 10)),
    ("sixteen-big-endian.tif", sixteen(2570, ">u2"), {}, (10, 10, 10)),
    ("sixteen.pgm", plain("I", 2570), {}, (10, 10, 10)),
    ("cmyk.jfif", plain("CMYK", (0, 0, 0, 255)), {"format": "JPEG"}, (0, 0, 0)),
    ("cmyk.tif", plain("CMYK", (0, 255, 255, 0)), {}, RED),
    ("lab.tif", plain("LAB", (0, 128, 128)), {}, (1, 0, 1)),
    ("frames.gif", plain("RGB", RED), {"save_all": True, "append_images": [plain("RGB", WHITE)]}, RED),
    ("frames.tif", plain("RGB", RED), {"save_all": True, "append_images": [plain("RGB", WHITE)]}, RED),
]


@pytest.fixture(params=CASES, ids=[case[0] for case in CASES])
def case(request, tmp_path):
    """A class folder with one picture, its file, and the colour that all of its pixels have on white paper."""
    name, image, options, colour = request.param
    (tmp_path / "cat").mkdir()
    image.save(tmp_path / "cat" / name, **options)
    return tmp_path, tmp_path / "cat" / name, colour


def test_every_mode_on_white(case):
    folder, file, colour = case
    pixels = (load_image(file, 8, 8) + 1) * 127.5
    assert pixels.shape == (3, 8, 8)
    assert np.allclose(pixels.amin((1, 2)), colour, atol=0.51)
    assert np.allclose(pixels.amax((1, 2)), colour, atol=0.51)
    pictures = open_pictures(ClassificationData(path=str(folder)))
    assert (pictures.read(0, 3) == colour).all()
    assert (pictures.read(0, 1) == np.asarray(Image.new("RGB", (1, 1), colour).convert("L"))).all()


def test_grey_multiplied_by_its_alpha(tmp_path):
    """Pillow reads such TIFF files and writes none: the tag ExtraSamples (338) of a plain one becomes 1."""
    file = tmp_path / "grey-alpha.tif"
    plain("LA", (2, 51)).save(file)
    plain_tag, multiplied_tag = (struct.pack("<HHIHH", 338, 3, 1, value, 0) for value in (2, 1))
    content = file.read_bytes()
    assert content.count(plain_tag) == 1
    file.write_bytes(content.replace(plain_tag, multiplied_tag))
    # 2 is grey 10 times 51 / 255.
    assert (open_picture(file, 3) == 206).all()
    assert (open_picture(file, 1) == 206).all()


def test_of_16_bit_pixels_those_of_the_key_alone_are_transparent(tmp_path):
    values = np.full((8, 8), 2570, np.uint16)
    values[:4] = 25700
    Image.fromarray(values).save(tmp_path / "key.png", transparency=2570)
    pixels = open_picture(tmp_path / "key.png", 1)
    assert (pixels[:4] == 100).all()
    assert (pixels[4:] == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_both_tasks_turn_pictures_as_their_exif_entry_says(tmp_path, orientation):
    upright = np.zeros((16, 16, 3), np.uint8)
    # Not symmetric: each of the eight operations gives another picture.
    upright[:8, :4] = 255
    # What a camera stores so that the entry turns it upright: the entry's operation, undone.
    undone = {
        1: lambda a: a,
        2: np.fliplr,
        3: lambda a: np.rot90(a, 2),
        4: np.flipud,
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    (tmp_path / "cat").mkdir()
    file = tmp_path / "cat" / "1.png"
    Image.fromarray(np.ascontiguousarray(undone[orientation](upright))).save(file, exif=exif)
    assert np.array_equal(open_pictures(ClassificationData(path=str(tmp_path))).read(0, 3), upright)
    assert np.array_equal(((load_image(file, 16, 16) + 1) * 127.5).permute(1, 2, 0), upright)


def test_exif_of_wrong_types_still_turns_the_picture(tmp_path):
    """XResolution is a rational number by the standard, here a text, which Pillow reads and cannot write."""
    entries = struct.pack("<HHIHH", 0x112, 3, 1, 6, 0) + struct.pack("<HHI4s", 0x11A, 2, 4, b"abc\0")
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 2) + entries + bytes(4)
    lying = np.zeros((8, 16, 3), np.uint8)
    lying[:, :8] = 255
    (tmp_path / "cat").mkdir()
    for name, content in (("1.png", exif), ("2.png", b"Exif\0\0II*\0\xff\xff\xff\xff"), ("3.png", b"Exif\0\0MM")):
        Image.fromarray(lying).save(tmp_path / "cat" / name, exif=content)
    pictures = open_pictures(ClassificationData(path=str(tmp_path)))
    assert np.array_equal(pictures.read(0, 3), np.rot90(lying, -1))
    assert np.array_equal(pictures.read(1, 3), lying)
    assert np.array_equal(pictures.read(2, 3), lying)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_without_a_white_are_refused(tmp_path, mode):
    (tmp_path / "cat").mkdir()
    file = tmp_path / "cat" / "1.tif"
    plain(mode, 1).save(file)
    words = rf"1.tif is not a readable image \(its pixels are 32-bit numbers \(mode {mode}\).*8 or 16 bits"
    with pytest.raises(RunError, match=words):
        load_image(file, 8, 8)
    with pytest.raises(RunError, match=words):
        open_pictures(ClassificationData(path=str(tmp_path))).read(0, 3)


def test_damaged_files_are_one_line(tmp_path):
    content = io.BytesIO()
    plain("RGB", RED).save(content, "PNG")
    (tmp_path / "cut.png").write_bytes(content.getvalue()[:45])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.tif").touch()
    for file in tmp_path.iterdir():
        with pytest.raises(RunError, match="is not a readable image"):
            load_image(file, 8, 8)


def test_damaged_pixels_are_refused(tmp_path):
    """Pillow raises for them once, and a second attempt to load returns the pixels before the damage."""
    file = tmp_path / "1.png"
    plain("RGB", RED).save(file)
    content = bytearray(file.read_bytes())
    pixels = content.index(b"IDAT") + 4
    content[pixels : pixels + 8] = b"\xff" * 8
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"1\.png is not a readable image"):
        load_image(file, 8, 8)


class TestWhichFiles:
    def test_hidden_files_are_none_and_others_are_counted(self, tmp_path):
        folder = tmp_path / "cat"
        folder.mkdir()
        for name in ("1.png", "2.gif", "3.jfif", "4.tif", "._1.png", ".5.png"):
            plain("RGB", RED).save(folder / name, format="PNG")
        for name in ("6.heic", "7.heic", "8.svg", "README"):
            (folder / name).touch()
        (folder / ".ipynb_checkpoints").mkdir()
        plain("RGB", RED).save(folder / ".ipynb_checkpoints" / "1.png")
        plain("RGB", RED).save(tmp_path / "beside.png")
        pictures = open_pictures(ClassificationData(path=str(tmp_path)))
        assert [name.partition(",")[0] for name in pictures.names] == [
            f"cat/{n}" for n in ["1.png", "2.gif", "3.jfif", "4.tif"]
        ]
        assert len(pictures.notices) == 2
        assert pictures.notices[0].endswith("in no class's folder and are left out: 1")
        assert "not read as pictures: 2 .heic, 1 " in pictures.notices[1]
        assert "1 .svg" in pictures.notices[1]
        assert "1 no suffix" in pictures.notices[1]

    @pytest.mark.parametrize(("count", "more"), [(8, ""), (9, " and 1 more suffixes"), (11, " and 3 more suffixes")])
    def test_of_many_suffixes_eight_are_named(self, count, more):
        note = unread_note(Path(f"{number}.kind{number}") for number in range(count))
        assert note is not None
        named = ", ".join(f"1 .kind{number}" for number in range(8))
        assert note.startswith(f"data.path: files that are not read as pictures: {named}{more}; convert them")

    def test_captioned_folders(self, tmp_path):
        from distiller.data.images import find_images

        for name in ("1.png", "2.gif", ".3.png", "4.heic", "5.png"):
            (tmp_path / name).touch()
        for name in ("1", "2", "5"):
            (tmp_path / f"{name}.txt").write_text("a cat")
        found, notes = find_images(tmp_path)
        assert [file.name for file, _ in found] == ["1.png", "2.gif", "5.png"]
        assert [note.partition(";")[0] for note in notes] == ["data.path: files that are not read as pictures: 1 .heic"]
        (tmp_path / "metadata.jsonl").write_text('{"file_name": "1.png", "text": "a cat"}')
        found, notes = find_images(tmp_path)
        assert [file.name for file, _ in found] == ["1.png"]
        assert notes[0] == "data.path: pictures that metadata.jsonl does not name and that are left out: 2"

    def test_a_folder_of_other_files_names_them(self, tmp_path):
        from distiller.data.images import find_images

        (tmp_path / "1.heic").touch()
        with pytest.raises(UserError, match=r"holds no captioned image.*not read as pictures: 1 \.heic"):
            find_images(tmp_path)


def test_an_image_is_cut_at_its_centre(tmp_path):
    """Scaled by half; of the longer side what lies in the middle stays, in both directions."""
    wide = np.zeros((16, 64, 3), np.uint8)
    wide[:, 24:40] = 200
    for name, picture in (("wide", wide), ("tall", wide.transpose(1, 0, 2))):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
        pixels = (load_image(tmp_path / f"{name}.png", 8, 8) + 1) * 127.5
        # Resampling blurs the edges.
        assert pixels[:, 2:6, 2:6].min() > 195
        assert pixels.mean() > 180


@pytest.mark.parametrize(("side", "width"), [(16, 8), (4, 2)])
def test_both_sides_of_an_image_are_scaled_by_the_same_factor(tmp_path, side, width):
    """To half and to double their size; a bright band becomes four pixels wide, in the middle of dark ones."""
    wide = np.zeros((side, 4 * side, 3), np.uint8)
    wide[:, 2 * side - width // 2 : 2 * side + width // 2] = 200
    for name, picture in (("wide", wide), ("tall", wide.transpose(1, 0, 2))):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
        pixels = (load_image(tmp_path / f"{name}.png", 8, 8) + 1) * 127.5
        band = pixels[0].mean(0 if name == "wide" else 1)
        assert band[3:5].min() > 180
        # Resampling blurs the edges.
        assert band[[0, 7]].max() < 40


def test_of_many_pictures_evenly_spaced_ones_are_read_with_the_first_and_the_last():
    seen: list[int] = []
    assert check_pictures(seen.append, 1000) == f"{MAX_CHECKED_PICTURES} of 1,000 pictures read"
    assert (seen[0], seen[-1], len(set(seen))) == (0, 999, MAX_CHECKED_PICTURES)
    seen.clear()
    assert check_pictures(seen.append, 1) == "1 of 1 pictures read"
    assert seen == [0]

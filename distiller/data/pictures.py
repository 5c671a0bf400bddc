"""Reads picture files as pixels, for the diffusion task's images and for classifiers' pictures."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageCms

from distiller.errors import RunError, UserError

SUFFIXES = frozenset(
    f".{name}"
    for name in "avif bmp gif jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm tga tif tiff webp".split()  # noqa: SIM905
)
"""File name suffixes that are read as pictures."""

WRITTEN_SUFFIXES = (".png", ".bmp", ".jpeg", ".jpg", ".webp")
"""File name suffixes that `sample` writes."""

MAX_CHECKED_PICTURES = 128
"""Pictures that `--check` reads at most, which takes a few seconds."""

READER_VERSION = 2
"""Raised when the same file gives other pixels; part of the keys of everything computed from them."""

_SIXTEEN_BIT_FORMATS = ("PNG", "PPM", "JPEG2000")
"""Formats whose pixels in Pillow's mode I (int32) go from 0 to 65,535."""

_TRANSPOSED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> what turns the picture upright."""


class UnreadablePictureError(ValueError):
    """Why a file cannot be read as a picture, without the file's name."""


def check_pictures(read: Callable[[int], object], count: int) -> str:
    """Reads `count` pictures, or evenly spaced ones of them, and returns a line that says how many.

    Args:
        read: reads one, by its index; raises RunError where it cannot be read.

    Raises:
        UserError: for the first that cannot be read.
    """
    num_read = min(count, MAX_CHECKED_PICTURES)
    for i in range(num_read):
        try:
            read(i * (count - 1) // max(num_read - 1, 1))
        except RunError as error:
            raise UserError(f"data.path: {error}") from error
    return f"{num_read:,} of {count:,} pictures read"


def is_picture(file: Path) -> bool:
    """Whether it is a picture by its name; hidden files (such as macOS's `._1.jpg`) are not."""
    return file.suffix.lower() in SUFFIXES and not file.name.startswith(".")


def check_size(file: Path) -> int:
    """The file's size in bytes. Raises UserError for a missing file, such as the target of a broken link."""
    try:
        return file.stat().st_size
    except OSError as error:
        raise UserError(f"data.path: {file} cannot be read ({error.strerror}); remove or restore it") from error


def unread_note(files: Iterable[Path]) -> str | None:
    """One line that counts these files by suffix, for files that are not read as pictures; None without any."""
    counts = Counter(file.suffix.lower() or "no suffix" for file in files)
    if not counts:
        return None
    named = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(8))
    more = f" and {len(counts) - 8} more suffixes" if len(counts) > 8 else ""
    return (
        f"data.path: files that are not read as pictures: {named}{more}; convert them if they are pictures (read are "
        f"{', '.join(sorted(SUFFIXES))})"
    )


def open_picture(file: Path, num_channels: int) -> np.ndarray:
    """A file's pixels, as `pixels_of`. Raises UnreadablePictureError."""
    try:
        with Image.open(file) as image:
            return pixels_of(image, num_channels)
    except UnreadablePictureError:
        raise
    except Exception as error:
        # Pillow's readers of damaged files raise errors of many types.
        raise UnreadablePictureError(str(error) or type(error).__name__) from error


def pixels_of(image: Image.Image, num_channels: int) -> np.ndarray:
    """uint8 [H, W, C] with one channel (grey) or three (RGB).

    It is turned as its EXIF orientation says, transparent parts become white, 16 bits become 8 by rounding, and an
    animation becomes its first frame, which is the one that Pillow opens. Raises UnreadablePictureError for 32-bit
    pixels, whose white no format defines.
    """
    stored_format = image.format
    image = _on_white(_eight_bit(_upright(image), stored_format))
    pixels = np.asarray(image.convert("L" if num_channels == 1 else "RGB"))
    return pixels[:, :, None] if num_channels == 1 else pixels


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF orientation says; EXIF that cannot be read counts as absent.

    `ImageOps.exif_transpose` also rewrites the whole EXIF, which fails for tags whose values have a wrong type.
    """
    # Some formats have their EXIF only after loading.
    image.load()
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
        method = _TRANSPOSED.get(orientation)
    except Exception:
        # Pillow's reader of EXIF raises errors of many types, and the pixels are not affected.
        method = None
    return image if method is None else image.transpose(method)


def _eight_bit(image: Image.Image, stored_format: str | None) -> Image.Image:
    """The image in a mode of 8 bits a channel, with its transparency."""
    if image.mode == "LAB":
        lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, rgb, outputMode="RGB")
        assert converted is not None, "not in place"
        return converted
    if image.mode == "F" or (image.mode == "I" and stored_format not in _SIXTEEN_BIT_FORMATS):
        raise UnreadablePictureError(
            f"its pixels are 32-bit numbers (mode {image.mode}), which do not say what is white; save it with 8 or 16 "
            "bits a channel"
        )
    if not image.mode.startswith("I"):
        return image
    # Pillow's own conversion clips at 255, which makes nearly all of such a picture white.
    values = np.asarray(image)
    grey = Image.fromarray(np.rint(values / 257).astype(np.uint8))
    if "transparency" in image.info:
        alpha = np.where(values == image.info["transparency"], 0, 255).astype(np.uint8)
        return Image.merge("LA", (grey, Image.fromarray(alpha)))
    return grey


def _on_white(image: Image.Image) -> Image.Image:
    """The image without transparency."""
    if not image.has_transparency_data:
        return image
    if image.mode in ("La", "RGBa"):
        # Pillow converts premultiplied pixels only to the unpremultiplied mode.
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")

"""A prompt file means the same however it was saved, and in whatever locale it is read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distiller.data.images import find_images
from distiller.data.prompts import read_numbered_prompts, read_prompts
from distiller.errors import UserError

PROMPTS = ["a red cat runs", "青い犬が座る", "a bird 🐦 flies"]
LINES = [prompt.encode() for prompt in PROMPTS]


@pytest.mark.parametrize(
    "content",
    [
        b"\n".join(LINES) + b"\n",
        b"\n".join(LINES),
        b"\r\n".join(LINES) + b"\r\n",
        b"\r".join(LINES) + b"\r",
        LINES[0] + b"\r\n" + LINES[1] + b"\n" + LINES[2] + b"\r",
        b"\n\n" + b"\n \n\t\n\r\n".join(LINES) + b"\n\n\n",
        b"".join(b"  \t" + line + b" \t \n" for line in LINES),
        b"".join("\u3000".encode() + line + "\u00a0\n".encode() for line in LINES),
    ],
    ids=["lf", "no final newline", "crlf", "cr", "mixed", "blank lines", "spaces", "wide spaces"],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "bom"])
def test_the_same_prompts(tmp_path, content, mark):
    file = tmp_path / "prompts.txt"
    file.write_bytes(mark + content)
    assert read_prompts(file) == PROMPTS


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e", "\t", "  "])
def test_only_newlines_end_a_prompt(tmp_path, inside):
    file = tmp_path / "prompts.txt"
    file.write_text(f"a red{inside}cat\na dog\n", encoding="utf-8")
    assert read_prompts(file) == [f"a red{inside}cat", "a dog"]


def test_order_and_repeats_are_kept(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"b\na\nb\n")
    assert read_prompts(file) == ["b", "a", "b"]


def test_numbered_prompts_end_with_blank_lines_alone(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"b\na\nb\n\n\n")
    assert read_numbered_prompts(file) == ["b", "a", "b"]
    file.write_bytes(b"b\na\n\nb\n")
    with pytest.raises(UserError, match=r"prompts\.txt line 3 is blank"):
        read_numbered_prompts(file)


def test_captions_hold_the_same_characters(tmp_path):
    """JSON allows U+2028 unescaped, and `str.splitlines` would cut there."""
    for number in range(3):
        (tmp_path / f"{number}.png").touch()
    lines = [
        '{"file_name": "2.png", "text": "a red\u2028cat"}',
        "",
        '{"file_name": "0.png", "text": "青い犬 🐦 "}',
    ]
    (tmp_path / "metadata.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    found, _ = find_images(tmp_path)
    assert [(image.name, caption) for image, caption in found] == [("2.png", "a red cat"), ("0.png", "青い犬 🐦")]


@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_any_locale(tmp_path, locale):
    """The interpreter's own default encoding is ASCII here."""
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(LINES))
    environment = os.environ | {"LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = (
        "import locale, pathlib, sys; assert locale.getpreferredencoding(False) != 'UTF-8'; "
        "from distiller.data.prompts import read_prompts; "
        f"assert read_prompts(pathlib.Path(sys.argv[1])) == {PROMPTS!a}"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "prompts.txt"], check=True, env=environment)


def test_a_refusal_in_any_locale(tmp_path):
    recipe = tmp_path / "猫.yaml"
    recipe.write_text("seed: 犬\n", encoding="utf-8")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run([sys.executable, "-m", "distiller", "train", recipe], env=environment, capture_output=True)
    assert result.returncode == 2
    assert result.stderr.startswith(b"distiller: ")
    assert result.stderr.count(b"\n") == 1
    assert b"seed" in result.stderr

"""Prompt files: plain text, one prompt a line."""

from __future__ import annotations

import os
from pathlib import Path

from distiller.errors import UserError
from distiller.storage.packaged_files import search_note


def read_prompts(path: Path) -> list[str]:
    """Reads a prompt file: UTF-8 with or without BOM, LF or CRLF, in any locale; blank lines are skipped.

    Raises:
        UserError: the file is missing, not UTF-8, or holds no prompt.
    """
    prompts = [line for line in _read_lines(path) if line]
    if not prompts:
        raise UserError(f"data.path: {path} holds no prompt; write one a line (blank lines are skipped)")
    return prompts


def read_numbered_prompts(path: Path) -> list[str]:
    """Reads a prompt file whose lines are referred to by index: blank lines raise UserError, except at the end."""
    lines = _read_lines(path)
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise UserError(f"data.path: {path} holds no prompt; write one a line")
    if "" in lines:
        number = lines.index("") + 1
        raise UserError(f"data.path: {path} line {number} is blank, and latents count lines; fill or remove it")
    return lines


def _read_lines(path: Path) -> list[str]:
    if os.path.isdir(path):
        raise UserError(
            f"data.path: {path} is a folder; give a text file with one prompt a line, or set data.kind to images or "
            "latents"
        )
    if path.suffix.lower() in (".jsonl", ".json", ".csv", ".parquet"):
        raise UserError(
            f"data.path: {path} is no plain text, and a line of it no prompt; give a text file with one prompt a line"
        )
    if not os.path.isfile(path):
        raise UserError(f"data.path: {path} does not exist{search_note(path)}; give a text file with one prompt a line")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"data.path: {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"data.path: {path} cannot be read ({error.strerror})") from error
    if "\0" in text:
        raise UserError(f"data.path: {path} holds NUL characters, so it is not UTF-8 text; save it as UTF-8")
    # Only newlines end a prompt: str.splitlines would also cut at U+2028, form feeds and other separators.
    return [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]

"""Prompt files: plain text, one prompt a line."""

from __future__ import annotations

import os
from pathlib import Path

from distiller.errors import UserError


def read_prompts(path: Path) -> list[str]:
    """Reads a prompt file: UTF-8 with or without BOM, LF or CRLF, in any locale; blank lines are skipped.

    Raises:
        UserError: the file is missing, not UTF-8, or holds no prompt.
    """
    if os.path.isdir(path):
        raise UserError(
            f"data.path: {path} is a folder; give a text file with one prompt a line, or set data.kind to images or "
            "latents"
        )
    if not os.path.isfile(path):
        raise UserError(f"data.path: {path} does not exist; give a text file with one prompt a line")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"data.path: {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"data.path: {path} cannot be read ({error.strerror})") from error
    if "\0" in text:
        raise UserError(f"data.path: {path} holds NUL characters, so it is not UTF-8 text; save it as UTF-8")
    # Only newlines end a prompt: str.splitlines would also cut at U+2028, form feeds and other separators.
    prompts = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise UserError(f"data.path: {path} holds no prompt; write one a line (blank lines are skipped)")
    return prompts

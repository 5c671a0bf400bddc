"""Prompt files: plain text, one prompt a line."""

from __future__ import annotations

from pathlib import Path

from distiller.errors import UserError


def read_prompts(path: Path) -> list[str]:
    """Reads a prompt file: UTF-8 with or without BOM, LF or CRLF, in any locale; blank lines are skipped.

    Raises:
        UserError: the file is missing, not UTF-8, or holds no prompt.
    """
    if not path.is_file():
        raise UserError(f"data.path: {path} is not a file; a prompt file holds one prompt a line")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"data.path: {path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"data.path: {path} cannot be read ({error.strerror})") from error
    # Only newlines end a prompt: str.splitlines would also cut at U+2028, form feeds and other separators.
    prompts = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise UserError(f"data.path: {path} holds no prompt (one a line; blank lines are skipped)")
    return prompts

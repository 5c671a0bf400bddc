"""What a document is: a text, an answer to a prompt, or a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from distiller.errors import UserError, shown

FORMS = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'


@final
@dataclass(frozen=True)
class Text:
    """Every token is learnt. `origin` names the place in errors: a file, and a line where it has several."""

    origin: str
    text: str


@final
@dataclass(frozen=True)
class Answer:
    """The completion is learnt; it follows the prompt without anything between them."""

    origin: str
    prompt: str
    completion: str


@final
@dataclass(frozen=True)
class Chat:
    """The assistant's turns are learnt, as the tokenizer's chat template writes them."""

    origin: str
    messages: tuple[dict[str, Any], ...]


Document = Text | Answer | Chat


def document_of(row: Any, origin: str) -> Document:
    """The document in a JSON object or a data set's row; keys that are none of its form's are left alone.

    Raises UserError: the row is of no known form, or of two.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"data.path: {origin} is no JSON object: {shown(row)}; write {FORMS}")
    found = [names for names in (("text",), ("prompt", "completion"), ("messages",)) if all(n in row for n in names)]
    if len(found) != 1:
        has = f"{len(found)} forms at once" if found else f"the keys {', '.join(map(str, row)) or '(none)'}"
        raise UserError(f"data.path: {origin} has {has}; write one of {FORMS}")
    if found[0] == ("messages",):
        return Chat(origin, _messages_of(row["messages"], origin))
    for name in found[0]:
        _check_text(row[name], name, origin)
    return Text(origin, row["text"]) if found[0] == ("text",) else Answer(origin, row["prompt"], row["completion"])


def is_blank(document: Document) -> bool:
    """Whether it has nothing to learn: no text, no completion."""
    if isinstance(document, Text):
        return not document.text.strip()
    return isinstance(document, Answer) and not document.completion.strip()


def _messages_of(messages: Any, origin: str) -> tuple[dict[str, Any], ...]:
    # What reads a data set may hand out lists that are arrays.
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"data.path: {origin}: messages is {shown(messages)}; it must be a list of role and content")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"data.path: {origin}: {shown(message)} is no message; it needs a role and a content")
        _check_text(message.get("content"), "content", origin)
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"data.path: {origin}: no message has the role assistant, so there is no answer to learn")
    return tuple(dict(message) for message in messages)


def _check_text(value: Any, name: str, origin: str) -> None:
    if not isinstance(value, str):
        raise UserError(f"data.path: {origin}: {name} is {shown(value)}; it must be text")
    # JSON can spell halves of surrogate pairs, which are no characters and have no UTF-8.
    if any("\ud800" <= character <= "\udfff" for character in value) or "\0" in value:
        raise UserError(f"data.path: {origin}: {name} holds characters that are no text (NUL or lone surrogates)")

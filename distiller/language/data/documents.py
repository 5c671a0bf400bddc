"""What a document is: a text, an answer to a prompt, or a conversation."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from transformers import PreTrainedTokenizerBase

from distiller.errors import UserError, shown

FORMS = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'


BESIDE = ("tools", "documents")
"""Lists of objects that the library's `apply_chat_template` takes beside the messages."""
OWN_VARIABLES = "chat_template_kwargs"
"""The name under which a row has further variables of its template; TRL's."""
NOT_THE_ROWS = ("functions", "chat_template", "add_generation_prompt", "continue_final_message")
"""What would change how a conversation is written, and is not taken from a row: `functions` are `tools` by now."""
ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"self", "kwargs"}


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
    options: dict[str, Any] = field(default_factory=dict)
    """What the template is given beside them: `tools`, `documents`, and variables of its own."""


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
        return Chat(origin, _messages_of(row["messages"], origin), _options_of(row, origin))
    for name in (*BESIDE, OWN_VARIABLES):
        if row.get(name):
            raise UserError(
                f"data.path: {origin} has {name} and no messages; a chat template alone reads them: write messages, or "
                f"leave {name} out"
            )
    for name in found[0]:
        _check_text(row[name], name, origin)
    return Text(origin, row["text"]) if found[0] == ("text",) else Answer(origin, row["prompt"], row["completion"])


def is_blank(document: Document) -> bool:
    """Whether it has nothing to learn: no text, no completion."""
    if isinstance(document, Text):
        return not document.text.strip()
    return isinstance(document, Answer) and not document.completion.strip()


def without_nulls(value: Any) -> Any:
    """A table's value without the keys whose value is null, at every depth; elements of lists stay."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def _messages_of(messages: Any, origin: str) -> tuple[dict[str, Any], ...]:
    # What reads a data set may hand out lists that are arrays.
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"data.path: {origin}: messages is {shown(messages)}; it must be a list of role and content")
    found = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"data.path: {origin}: {shown(message)} is no message; it needs a role and a content")
        # Null stands for a key that is not there, as in OpenAI's format; templates would write "None".
        given = {key: value for key, value in message.items() if value is not None}
        if "content" in given or not given.get("tool_calls"):
            _check_text(given.get("content"), "content", origin)
        _check_characters(given, "a message", origin)
        found.append(given)
    if not any(message["role"] == "assistant" for message in found):
        raise UserError(f"data.path: {origin}: no message has the role assistant, so there is no answer to learn")
    return tuple(found)


def _options_of(row: Mapping[str, Any], origin: str) -> dict[str, Any]:
    options = {}
    for name in BESIDE:
        # Tables often hold it as text, since its objects have no columns in common.
        value = _decoded(row.get(name), name, origin)
        if not value and value in (None, [], ()):
            continue
        if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in value):
            raise UserError(f"data.path: {origin}: {name} is {shown(value)}; it must be a list of objects")
        options[name] = list(value)
    own = _decoded(row.get(OWN_VARIABLES), OWN_VARIABLES, origin) or {}
    if not isinstance(own, Mapping):
        raise UserError(f"data.path: {origin}: {OWN_VARIABLES} is {shown(own)}; it must be an object")
    taken = [name for name in own if name in ARGUMENTS or name == "messages"]
    taken += [name for name in NOT_THE_ROWS if row.get(name) is not None]
    if taken:
        raise UserError(
            f"data.path: {origin} says {taken[0]}, which is not the data's to say; a row may have messages, "
            f"{', '.join(BESIDE)}, and {OWN_VARIABLES} with other variables of the template"
        )
    options |= own
    _check_characters(options, "what its template is given", origin)
    return options


def _decoded(value: Any, name: str, origin: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.path: {origin}: {name} is {shown(value)}, which is not JSON ({error})") from error


def _check_text(value: Any, name: str, origin: str) -> None:
    if not isinstance(value, str):
        raise UserError(f"data.path: {origin}: {name} is {shown(value)}; it must be text")
    _check_characters(value, name, origin)


def _check_characters(value: Any, name: str, origin: str) -> None:
    """Of all texts in a value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_characters(inner, str(key), origin)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_characters(inner, name, origin)
    # JSON can spell halves of surrogate pairs, which are no characters and have no UTF-8.
    elif isinstance(value, str) and (any("\ud800" <= character <= "\udfff" for character in value) or "\0" in value):
        raise UserError(f"data.path: {origin}: {name} holds characters that are no text (NUL or lone surrogates)")

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
"""The forms of a row, for messages."""


TEMPLATE_LISTS = ("tools", "documents")
"""Keys of a row with lists of objects that transformers' `apply_chat_template` takes beside the messages."""
TEMPLATE_VARIABLES_KEY = "chat_template_kwargs"
"""The key of a row with further variables for its chat template; TRL uses the same name."""
REFUSED_KEYS = ("functions", "chat_template", "add_generation_prompt", "continue_final_message")
"""Keys that are refused in a row with messages, since they would change how the template writes a conversation.

`functions` is the old name of `tools`.
"""
ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"self", "kwargs"}
"""The parameters of `apply_chat_template`: these names are no variables of a template."""


@final
@dataclass(frozen=True)
class Text:
    """A text, of which every token is learnt.

    `origin` says in messages where a document comes from: the file, and the line in a file with several documents.
    """

    origin: str
    text: str


@final
@dataclass(frozen=True)
class Answer:
    """A prompt and its completion, joined without anything between them. Only the completion is learnt."""

    origin: str
    prompt: str
    completion: str


@final
@dataclass(frozen=True)
class Chat:
    """A conversation, written by the tokenizer's chat template. Only the assistant's messages are learnt."""

    origin: str
    messages: tuple[dict[str, Any], ...]
    options: dict[str, Any] = field(default_factory=dict)
    """What the template is given beside the messages: `tools`, `documents`, and variables of the template's own."""


Document = Text | Answer | Chat


def document_of(row: Any, origin: str) -> Document:
    """The document in a JSON object or a data set's row. Keys that do not belong to the document's form are ignored.

    Args:
        row: the object or row, without null values (see `without_nulls`) where it is of a table.
        origin: where the row comes from, for messages.

    Raises:
        UserError: the row has no known form or more than one, or a value of the wrong type.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"data.path: {origin} is no JSON object: {shown(row)}; write {FORMS}")
    forms = [names for names in (("text",), ("prompt", "completion"), ("messages",)) if all(n in row for n in names)]
    if len(forms) != 1:
        has = f"{len(forms)} forms at once" if forms else f"the keys {', '.join(map(str, row)) or '(none)'}"
        raise UserError(f"data.path: {origin} has {has}; write one of {FORMS}")
    if forms[0] == ("messages",):
        return Chat(origin, _messages_of(row["messages"], origin), _options_of(row, origin))
    for name in (*TEMPLATE_LISTS, TEMPLATE_VARIABLES_KEY):
        if row.get(name):
            raise UserError(
                f"data.path: {origin} has {name} and no messages; a chat template alone reads them: write messages, or "
                f"leave {name} out"
            )
    for name in forms[0]:
        _check_text(row[name], name, origin)
    return Text(origin, row["text"]) if forms[0] == ("text",) else Answer(origin, row["prompt"], row["completion"])


def is_blank(document: Document) -> bool:
    """Whether there is nothing to learn, since the text or the completion is blank. A conversation is never blank."""
    if isinstance(document, Text):
        return not document.text.strip()
    return isinstance(document, Answer) and not document.completion.strip()


def without_nulls(value: Any) -> Any:
    """A table's value without the keys whose value is None, at every depth; None as an element of a list stays."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def _messages_of(messages: Any, origin: str) -> tuple[dict[str, Any], ...]:
    # The type is checked first: an array, which some readers return for a list, has no truth value.
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"data.path: {origin}: messages is {shown(messages)}; it must be a list of role and content")
    checked = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"data.path: {origin}: {shown(message)} is no message; it needs a role and a content")
        # Null means that the key is absent, as in OpenAI's format; templates would write "None".
        given = {key: value for key, value in message.items() if value is not None}
        if "content" in given or not given.get("tool_calls"):
            _check_text(given.get("content"), "content", origin)
        _check_characters(given, "a message", origin)
        checked.append(given)
    if not any(message["role"] == "assistant" for message in checked):
        raise UserError(f"data.path: {origin}: no message has the role assistant, so there is no answer to learn")
    return tuple(checked)


def _options_of(row: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """What the row gives its chat template beside the messages; see `Chat.options`. Raises UserError."""
    options = {}
    for name in TEMPLATE_LISTS:
        # Tables often hold the list as JSON text, since its objects have no columns in common.
        value = _decoded(row.get(name), name, origin)
        if not value and value in (None, [], ()):
            continue
        if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
            raise UserError(f"data.path: {origin}: {name} is {shown(value)}; it must be a list of objects")
        options[name] = list(value)
    variables = _decoded(row.get(TEMPLATE_VARIABLES_KEY), TEMPLATE_VARIABLES_KEY, origin) or {}
    if not isinstance(variables, Mapping):
        raise UserError(f"data.path: {origin}: {TEMPLATE_VARIABLES_KEY} is {shown(variables)}; it must be an object")
    refused = [name for name in variables if name in ARGUMENTS or name == "messages"]
    refused += [name for name in REFUSED_KEYS if row.get(name) is not None]
    if refused:
        raise UserError(
            f"data.path: {origin} says {refused[0]}, which is not the data's to say; a row may have messages, "
            f"{', '.join(TEMPLATE_LISTS)}, and {TEMPLATE_VARIABLES_KEY} with other variables of the template"
        )
    options |= variables
    _check_characters(options, "what its template is given", origin)
    return options


def _decoded(value: Any, name: str, origin: str) -> Any:
    """The value of a JSON text, None for a blank one; what is no text is returned unchanged. Raises UserError."""
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
    """Raises UserError where a text in `value`, at any depth, holds NUL or a lone surrogate."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_characters(inner, str(key), origin)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_characters(inner, name, origin)
    # JSON can escape half of a surrogate pair, which is no character and cannot be encoded as UTF-8.
    elif isinstance(value, str) and (any("\ud800" <= character <= "\udfff" for character in value) or "\0" in value):
        raise UserError(f"data.path: {origin}: {name} holds characters that are no text (NUL or lone surrogates)")

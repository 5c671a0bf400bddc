"""Tokenises documents, and marks which of their tokens are learnt."""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false
from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from distiller.errors import UserError
from distiller.language.data.documents import TEMPLATE_LISTS, Answer, Chat, Document, Text
from distiller.storage.stages import digest_of

BATCH = 256
"""Documents that are tokenised in one call, on the tokenizer's own threads."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag with which a chat template marks what the assistant generates."""
Spans = Sequence[tuple[int, int]]
"""Ranges of characters: the first, and one past the last."""


@final
@dataclass(frozen=True)
class TokenisedDocument:
    """The tokens of one document, int32 [n], and whether each of them is learnt, bool [n]."""

    tokens: NDArray[np.int32]
    learnt: NDArray[np.bool_]


@final
class DocumentTokenizer:
    """Turns documents of each form into tokens, with a fast tokenizer (of the tokenizers library).

    - A text is learnt whole, and ends with the end-of-text token where the tokenizer has one.
    - An answer is tokenised together with its prompt, since one token may hold the end of the prompt and the start of
      the answer. Learnt are the tokens that end after the prompt, and the end-of-text token.
    - A conversation is tokenised as the chat template writes it, with its tools and documents. Learnt is what the
      template marks with `{% generation %}`. Where it has no such mark, learnt is, for each message of the assistant,
      what the template adds to the previous messages and their generation prompt.
    """

    def __init__(self, folder: Path, trusts_code: bool = False) -> None:
        """`trusts_code`: whether Python files of the folder may be run. Raises UserError without a fast tokenizer."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusts_code)
        except Exception as error:
            # Each tokenizer class of transformers raises exceptions of its own for damaged and missing files.
            why = " ".join(str(error).split())[:200]
            raise UserError(f"{folder}: holds no tokenizer that transformers reads ({why})") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                f"{folder}: the tokenizer is a {type(tokenizer).__name__}, which does not say where tokens lie in the "
                "text; give one with a tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._written: set[str] = set()
        """Keys of `TEMPLATE_LISTS` that are known to change what the chat template writes."""
        pad_ids: tuple[Any, ...] = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        self._pad_ids = [int(token_id) for token_id in pad_ids if token_id is not None]

    @property
    def num_ids(self) -> int:
        """The largest token id plus 1."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def pad_id(self, vocabulary: int | None = None) -> int:
        """The token id of the padding, below `vocabulary`. It has no effect on the loss: padding is not learnt."""
        return next((i for i in self._pad_ids if vocabulary is None or i < vocabulary), 0)

    @property
    def digest(self) -> str:
        """The digest of all that decides the tokens; the same for each folder with the same tokenizer."""
        tokenizer = self._tokenizer
        # A chat template can read the special tokens by these names.
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        return digest_of([tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, special])

    def tokenise(self, documents: Iterable[Document]) -> Iterator[TokenisedDocument]:
        """Yields the tokens of each document, in the documents' order. Raises UserError, which names the document."""
        with _own_threads():
            remaining = iter(documents)
            while batch := list(islice(remaining, BATCH)):
                yield from self._tokenise(batch)

    def _tokenise(self, documents: Sequence[Document]) -> Iterator[TokenisedDocument]:
        """`tokenise` for one batch: conversations with marks one by one, all other documents in at most two calls."""
        plain = [index for index, document in enumerate(documents) if not isinstance(document, Chat)]
        chats, tokenised = [], dict[int, TokenisedDocument]()
        for index, document in enumerate(documents):
            if isinstance(document, Chat):
                if self._has_marks(document):
                    tokenised[index] = self._tokenise_marked(document)
                else:
                    chats.append(index)
        rendered = {index: self._render(documents[index]) for index in (*plain, *chats)}
        for indices, adds_special_tokens in ((plain, True), (chats, False)):
            if not indices:
                continue
            encoded = self._tokenizer(
                [rendered[index][0] for index in indices],
                add_special_tokens=adds_special_tokens,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                truncation=False,
                verbose=False,
            )
            for index, ids, offsets in zip(indices, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                tokenised[index] = self._assembled(documents[index], ids, offsets, rendered[index][1])
        yield from (tokenised[index] for index in range(len(documents)))

    def _render(self, document: Document) -> tuple[str, Spans]:
        """The text of a document, and the ranges of its characters that are learnt."""
        if isinstance(document, Text):
            return document.text, ((0, len(document.text)),)
        if isinstance(document, Answer):
            text = document.prompt + document.completion
            return text, ((len(document.prompt), len(text)),)
        return self._render_chat(document)

    def _assembled(
        self, document: Document, ids: list[int], offsets: list[tuple[int, int]], spans: Spans
    ) -> TokenisedDocument:
        """The document with its end-of-text token; learnt are the tokens that overlap one of `spans`.

        `offsets` are the range of characters of each token.
        """
        tokens, token_spans = np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64).reshape(-1, 2)
        # Special tokens that the tokenizer adds have the empty range (0, 0), so only a text's are learnt.
        learnt = np.full(len(tokens), isinstance(document, Text))
        for start, end in spans:
            first, last = token_spans[:, 0], token_spans[:, 1]
            # A token of spaces at the end of a text may have the empty range behind it.
            learnt |= (last > start) & ((first < end) | ((first == last) & (last == end)))
        end_of_text = self._tokenizer.eos_token_id
        if end_of_text is not None and not isinstance(document, Chat):
            if not len(tokens) or tokens[-1] != end_of_text:
                tokens, learnt = np.append(tokens, np.int32(end_of_text)), np.append(learnt, True)
            else:
                learnt[-1] = True
        return TokenisedDocument(tokens, learnt)

    def _has_marks(self, chat: Chat) -> bool:
        """Whether the chat template marks what the assistant generates.

        Raises:
            UserError: there is no chat template, or it ignores the conversation's tools or documents.
        """
        try:
            # Some tokenizers have a separate template for conversations with tools.
            template = self._tokenizer.get_chat_template(tools=chat.options.get("tools"))
        except ValueError as error:
            raise UserError(
                f"data.path: {chat.origin} is a conversation and the tokenizer has no chat template; write prompt and "
                "completion instead, or give a teacher that has one"
            ) from error
        for name in chat.options.keys() & set(TEMPLATE_LISTS) - self._written:
            options = {key: value for key, value in chat.options.items() if key != name}
            alone = replace(chat, options=options)
            if self._apply(alone, chat.messages, tokenize=False) == self._apply(chat, chat.messages, tokenize=False):
                raise UserError(
                    f"data.path: {chat.origin} has {name}, of which the tokenizer's chat template writes nothing; "
                    f"leave them out, or give a teacher whose template reads {name}"
                )
            self._written.add(name)
        return _GENERATION.search(template) is not None

    def _tokenise_marked(self, chat: Chat) -> TokenisedDocument:
        """A conversation whose template marks what is learnt."""
        encoded = self._apply(chat, chat.messages, return_dict=True, return_assistant_tokens_mask=True)
        learnt = np.array(encoded["assistant_masks"], dtype=np.bool_)
        return TokenisedDocument(np.array(encoded["input_ids"], dtype=np.int32), learnt)

    def _render_chat(self, chat: Chat) -> tuple[str, Spans]:
        """The conversation as the template writes it, and the ranges of the assistant's messages. Raises UserError."""
        messages, spans = chat.messages, []
        whole = self._apply(chat, messages, tokenize=False)
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and index == 0:
                raise UserError(
                    f"data.path: {chat.origin} begins with the assistant, and the chat template does not mark what it "
                    "generates, so the answer cannot be told from the rest; mark it with {% generation %} in the "
                    "template, or begin with another turn"
                )
            if message["role"] == "assistant":
                before = self._apply(chat, messages[:index], tokenize=False, add_generation_prompt=True)
                after = self._apply(chat, messages[: index + 1], tokenize=False)
                if not (after.startswith(before) and whole.startswith(after)):
                    raise UserError(
                        f"data.path: {chat.origin}: the chat template writes message {index + 1} in another way when "
                        "others follow it or when it is to be generated, so the answer cannot be told from the rest; "
                        "mark it with {% generation %} in the template, or write prompt and completion"
                    )
                spans.append((len(before), len(after)))
        return whole, spans

    def _apply(self, chat: Chat, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        """Applies the chat template to these messages of a chat, with the chat's options. Raises UserError."""
        try:
            return self._tokenizer.apply_chat_template(list(messages), **chat.options, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            why = " ".join(str(error).split())
            raise UserError(f"data.path: {chat.origin}: the chat template refuses the conversation ({why})") from error


@contextmanager
def _own_threads() -> Iterator[None]:
    """Allows the tokenizer's threads inside the block only: processes forked later would inherit their locks."""
    name = "TOKENIZERS_PARALLELISM"
    given = os.environ.get(name)
    os.environ.setdefault(name, "true")
    try:
        yield
    finally:
        if given is None:
            os.environ[name] = "false"

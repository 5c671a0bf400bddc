"""Documents become tokens, and it is said of every token whether it is learnt."""

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
from distiller.language.data.documents import BESIDE, Answer, Chat, Document, Text
from distiller.storage.stages import digest_of

BATCH = 256
"""Documents that are tokenised at once, by the tokenizer's own threads."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Spans = Sequence[tuple[int, int]]
"""Ranges of characters."""


@final
@dataclass(frozen=True)
class TokenisedDocument:
    """Of one document: its tokens int32 [n], and bool [n], whether the model learns to say each of them."""

    tokens: NDArray[np.int32]
    learnt: NDArray[np.bool_]


@final
class DocumentTokenizer:
    """A tokenizer of the tokenizers library, and what it makes of each form of document.

    - A text is learnt whole, and ends with the end-of-text token where the tokenizer has one.
    - An answer is tokenised together with its prompt, since words may join; tokens that end after the prompt are
      learnt, and so is the end-of-text token after it.
    - A conversation is what the chat template writes of it and of what stands beside it. Learnt is what the template
      marks with `{% generation %}`, or else, for each of the assistant's turns, what it adds to the turns before and
      their generation prompt.
    """

    def __init__(self, folder: Path, trusts_code: bool = False) -> None:
        """`trusts_code`: whether Python files of the folder may be run. Raises UserError for what is none there."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusts_code)
        except Exception as error:
            # Whatever a damaged or missing file makes of the classes that it is tried with.
            why = " ".join(str(error).split())[:200]
            raise UserError(f"{folder}: holds no tokenizer that transformers reads ({why})") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                f"{folder}: the tokenizer is a {type(tokenizer).__name__}, which does not say where tokens lie in the "
                "text; give one with a tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._written: set[str] = set()
        """Of `BESIDE`, what the chat template was seen to write."""
        pad_ids: tuple[Any, ...] = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        self._pad_ids = [int(number) for number in pad_ids if number is not None]

    @property
    def num_ids(self) -> int:
        """All ids of tokens are below it."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def pad_id(self, vocabulary: int | None = None) -> int:
        """What rows are filled up with: an id below `vocabulary`. What it is has no effect, since it is masked."""
        return next((i for i in self._pad_ids if vocabulary is None or i < vocabulary), 0)

    @property
    def digest(self) -> str:
        """The digest of what it does, wherever it was read from."""
        tokenizer = self._tokenizer
        # Chat templates are given the special tokens by their names.
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        return digest_of([tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, special])

    def tokenise(self, documents: Iterable[Document]) -> Iterator[TokenisedDocument]:
        """In the documents' order. Raises UserError, naming the document."""
        with _own_threads():
            remaining = iter(documents)
            while batch := list(islice(remaining, BATCH)):
                yield from self._tokenise(batch)

    def _tokenise(self, documents: Sequence[Document]) -> Iterator[TokenisedDocument]:
        plain = [number for number, document in enumerate(documents) if not isinstance(document, Chat)]
        chats, found = [], dict[int, TokenisedDocument]()
        for number, document in enumerate(documents):
            if isinstance(document, Chat):
                if self._has_marks(document):
                    found[number] = self._tokenise_marked(document)
                else:
                    chats.append(number)
        rendered = {number: self._render(documents[number]) for number in (*plain, *chats)}
        for numbers, adds_special_tokens in ((plain, True), (chats, False)):
            if not numbers:
                continue
            encoded = self._tokenizer(
                [rendered[number][0] for number in numbers],
                add_special_tokens=adds_special_tokens,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                truncation=False,
                verbose=False,
            )
            for number, ids, offsets in zip(numbers, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                found[number] = self._assembled(documents[number], ids, offsets, rendered[number][1])
        yield from (found[number] for number in range(len(documents)))

    def _render(self, document: Document) -> tuple[str, Spans]:
        """The text of a document, and which of its characters are learnt."""
        if isinstance(document, Text):
            return document.text, ((0, len(document.text)),)
        if isinstance(document, Answer):
            text = document.prompt + document.completion
            return text, ((len(document.prompt), len(text)),)
        return self._render_chat(document)

    def _assembled(
        self, document: Document, ids: list[int], offsets: list[tuple[int, int]], spans: Spans
    ) -> TokenisedDocument:
        tokens, places = np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64).reshape(-1, 2)
        # Special tokens that the tokenizer adds lie nowhere in the text.
        learnt = np.full(len(tokens), isinstance(document, Text))
        for start, end in spans:
            learnt |= (places[:, 1] > start) & (places[:, 0] < end)
        end_of_text = self._tokenizer.eos_token_id
        if end_of_text is not None and not isinstance(document, Chat):
            if not len(tokens) or tokens[-1] != end_of_text:
                tokens, learnt = np.append(tokens, np.int32(end_of_text)), np.append(learnt, True)
            learnt[-1] = True
        return TokenisedDocument(tokens, learnt)

    def _has_marks(self, chat: Chat) -> bool:
        """Whether the chat template marks what the assistant generates. Raises UserError where it cannot serve."""
        try:
            # With tools, some tokenizers have a template of its own.
            template = self._tokenizer.get_chat_template(tools=chat.options.get("tools"))
        except ValueError as error:
            raise UserError(
                f"data.path: {chat.origin} is a conversation and the tokenizer has no chat template; write prompt and "
                "completion instead, or give a teacher that has one"
            ) from error
        for name in chat.options.keys() & set(BESIDE) - self._written:
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
        encoded = self._apply(chat, chat.messages, return_dict=True, return_assistant_tokens_mask=True)
        learnt = np.array(encoded["assistant_masks"], dtype=np.bool_)
        return TokenisedDocument(np.array(encoded["input_ids"], dtype=np.int32), learnt)

    def _render_chat(self, chat: Chat) -> tuple[str, Spans]:
        messages, spans = chat.messages, []
        whole = self._apply(chat, messages, tokenize=False)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._apply(chat, messages[:number], tokenize=False, add_generation_prompt=True)
                after = self._apply(chat, messages[: number + 1], tokenize=False)
                if not (after.startswith(before) and whole.startswith(after)):
                    raise UserError(
                        f"data.path: {chat.origin}: the chat template writes message {number + 1} in another way when "
                        "others follow it or when it is to be generated, so the answer cannot be told from the rest; "
                        "mark it with {% generation %} in the template, or write prompt and completion"
                    )
                spans.append((len(before), len(after)))
        return whole, spans

    def _apply(self, chat: Chat, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        """The chat template applied to some of its messages, with its options; UserError for what it raises."""
        try:
            return self._tokenizer.apply_chat_template(list(messages), **chat.options, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            why = " ".join(str(error).split())
            raise UserError(f"data.path: {chat.origin}: the chat template refuses the conversation ({why})") from error


@contextmanager
def _own_threads() -> Iterator[None]:
    """The tokenizer's threads, for as long as no process is forked: loader processes would inherit their locks."""
    name = "TOKENIZERS_PARALLELISM"
    given = os.environ.get(name)
    os.environ.setdefault(name, "true")
    try:
        yield
    finally:
        if given is None:
            os.environ[name] = "false"

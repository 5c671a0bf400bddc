"""A recipe's documents, tokenised once and laid out in rows for training and for evaluation."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import final

from safetensors import SafetensorError

from distiller.config.causal_lm import LanguageData
from distiller.config.recipe import Recipe
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.language.data.corpus import open_corpus
from distiller.language.data.packing import Layout, TextData, lay_out
from distiller.language.data.token_store import TokenStore, tokenise_corpus
from distiller.language.data.tokenization import DocumentTokenizer
from distiller.storage.stages import Stage, digest_of

FORMAT = 3
"""Of the stage's files and of what is made of a document; another number is another key."""


EVALUATE_OTHERS = "distiller evaluate RUN data.path=OTHERS data.held_out=0.9"
"""How a run is measured on documents that it did not hold out."""


@final
class LanguageSource:
    """Everything is known once it is made, since how many rows there are depends on the tokens.

    The first process to be made tokenises, behind a lock, the others find its result; no process group is needed.

    Attributes:
        num_samples: rows to train on.
        data_digest: changes with anything that changes a row.
        stage: with the documents' tokens.
        settings: what of it is no document, by the names of the recipe's keys.
        pad_id: what `collate` fills rows up with.
    """

    def __init__(
        self, recipe: Recipe, tokenizer_folder: Path, trusts_code: bool = False, vocabulary: int | None = None
    ) -> None:
        """Reads all documents, and tokenises them if no run has. Does not communicate. Raises UserError.

        Args:
            trusts_code: whether the folder's Python files may be run.
            vocabulary: the models have no ids from this one on; None = they have all of the tokenizer's.
        """
        data: LanguageData = recipe.data
        self._data, corpus = data, open_corpus(data)
        tokenizer = DocumentTokenizer(tokenizer_folder, trusts_code)
        self.pad_id = tokenizer.pad_id(vocabulary)
        try:
            digest = corpus.digest
        except OSError as error:
            raise UserError(f"data.path: {data.path} cannot be read ({error}); correct its files") from error
        key = {
            "format": FORMAT,
            "kind": data.kind,
            "split": data.split if data.kind == "datasets" else None,
            "data": digest,
            "max_samples": data.max_samples,
            "tokenizer": tokenizer.digest,
        }
        self.stage = stage = Stage("tokens", key, recipe.stages_dir)
        try:
            # Whoever comes first: if its documents are wrong, the next one finds the same and says so, and none waits.
            stage.make_once(True, lambda: tokenise_corpus(stage, corpus, tokenizer, data.max_samples))
        except (OSError, SafetensorError) as error:
            # A full disk reaches us as a SafetensorError, which is no OSError.
            raise UserError(f"the tokens cannot be written to {stage.folder} ({error}); set cache_dir=...") from error
        self._store = TokenStore(stage.folder)
        if vocabulary is not None and tokenizer.num_ids > vocabulary:
            self._store.check_below(vocabulary)
        held_out = held_out_documents(len(self._store), data.held_out)
        training = (number for number in range(len(self._store)) if number not in held_out)
        self._training = lay_out(self._store, training, data.max_length, splits=data.packing, joins=data.packing)
        # Never joined: a row's loss is then one document's, and batches are made of rows of one length.
        self._held_out = lay_out(self._store, sorted(held_out), data.max_length, splits=data.packing, joins=False)
        splits_document = len(self._store) == 1 and data.held_out > 0 and len(self._training) > 1
        if splits_document:
            # Of a single document, its end.
            num_rows = min(max(1, round(data.held_out * len(self._training))), len(self._training) - 1)
            self._training, self._held_out = self._training.split(num_rows)
        self.num_samples = len(self._training)
        if not self.num_samples:
            raise UserError(
                f"data.path: nothing is left to train on: in {self._training.num_left_out} documents, all that are not "
                f"held out, nothing is learnt within data.max_length {data.max_length} tokens (prompts that fill a row "
                "leave no room for what follows them); raise data.max_length"
            )
        laid_out = {"max_length": data.max_length, "packing": data.packing, "held_out": data.held_out}
        self.settings = {"tokenizer": tokenizer.digest, **laid_out}
        # Older versions trained on all rows of a single document: their runs must not be measured on its last ones.
        rows = ["the last rows of one document are held out"] * splits_document
        self.data_digest = digest_of([self._store.digest, *laid_out.values(), *rows])

    def prepare(self, ranks: Ranks) -> None:
        """Says, on rank 0, what there is to learn from, and what of the documents is lost. Does not communicate."""
        for name, layout in (("training", self._training), ("held out", self._held_out)):
            ranks.print(f"{name}: {self._described(layout)}")
            limit = f"data.max_length {self._data.max_length}"
            if layout.num_cut:
                ranks.print(f"warning: {name}: documents that are longer than {limit} and were cut: {layout.num_cut}")
            if layout.num_left_out:
                ranks.print(
                    f"warning: {name}: documents left out, since nothing of them is learnt within {limit}: "
                    f"{layout.num_left_out}"
                )

    def notices(self) -> list[str]:
        """What a user should know of the data before a run: a line each."""
        if len(self._held_out) or not self._data.held_out:
            return []
        only = " (a single document of one row)" if len(self._store) == 1 else ""
        return [
            f"data.held_out is {self._data.held_out:g} and nothing is held out{only}, so that `distiller evaluate` has "
            f"nothing to measure on; give more documents, or measure later on others: {EVALUATE_OTHERS}"
        ]

    def load(self) -> TextData:
        """The rows to train on."""
        return TextData(self._store, self._training)

    def held_out(self) -> TextData:
        """The rows that training never sees, in the documents' order, each of one document; empty with held_out 0."""
        return TextData(self._store, self._held_out)

    def _described(self, layout: Layout) -> str:
        num_tokens = int((layout.pieces[:, 1] - layout.pieces[:, 0]).sum())
        return f"{len(layout)} rows of at most {self._data.max_length} tokens, {num_tokens} in all"


def held_out_documents(num_documents: int, share: float) -> set[int]:
    """Which documents are held out: those whose number's hash is small; at least one where a share is asked for.

    The same for every seed, so that runs are compared on the same; more documents behind them change no choice. A
    single document is none of them: its last rows are held out.
    """
    if share == 0 or num_documents < 2:
        return set()
    chosen, first, last = set(), (2.0, 0), (-1.0, 0)
    for number in range(num_documents):
        place = _hash(number), number
        first, last = min(first, place), max(last, place)
        if place[0] < share:
            chosen.add(number)
    return (chosen or {first[1]}) - ({last[1]} if len(chosen) == num_documents else set())


def _hash(number: int) -> float:
    """A number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(f"held out/{number}".encode(), digest_size=8).digest(), "little") / 2**64

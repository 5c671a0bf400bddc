"""A recipe's documents, tokenised once and laid out in rows for training and for evaluation."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import final

from safetensors import SafetensorError

from distiller.config.causal_lm import LanguageData
from distiller.config.recipe import Recipe
from distiller.data.order import num_held_out
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.language.data.corpus import open_corpus
from distiller.language.data.packing import Layout, TextData, lay_out
from distiller.language.data.token_store import TokenStore, tokenise_corpus
from distiller.language.data.tokenization import DocumentTokenizer
from distiller.storage.stages import Stage, digest_of

FORMAT = 4
"""Version of the stage's files and of how documents become tokens; a part of the stage's key."""


EVALUATE_OTHERS = "distiller evaluate RUN data.path=OTHERS data.held_out=0.9"
"""The command that evaluates a run on documents other than those it held out; for messages."""


@final
class LanguageSource:
    """The rows of a recipe's documents. Construction tokenises all of them, since the tokens decide the number of rows.

    One process tokenises and holds a file lock; the others wait for the lock and then read the result. No process group
    is needed.

    Attributes:
        num_samples: number of rows to train on.
        data_digest: changes with anything that changes a row.
        stage: its folder holds the documents' tokens.
        settings: what decides the rows beside the documents: the tokenizer's digest and values of the recipe's keys.
        pad_id: the token id with which `collate` pads rows.
    """

    def __init__(
        self, recipe: Recipe, tokenizer_folder: Path, trusts_code: bool = False, vocabulary: int | None = None
    ) -> None:
        """Reads all documents, and tokenises them if no run has. Does not communicate. Raises UserError.

        Args:
            recipe: its `data` section and folder for stages are read.
            tokenizer_folder: the folder of the teacher's tokenizer.
            trusts_code: whether the folder's Python files may be run.
            vocabulary: number of ids that both models have; a token id must be less. None = they have all of the
                tokenizer's.
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
            # Any process may be the maker: invalid documents raise the same error in each, and none waits.
            stage.make_once(True, lambda: tokenise_corpus(stage, corpus, tokenizer, data.max_samples))
        except (OSError, SafetensorError) as error:
            # safetensors reports a full disk as SafetensorError, which is no OSError.
            raise UserError(f"the tokens cannot be written to {stage.folder} ({error}); set cache_dir=...") from error
        self._store = TokenStore(stage.folder)
        if vocabulary is not None and tokenizer.num_ids > vocabulary:
            self._store.check_below(vocabulary)
        held_out = held_out_documents(len(self._store), data.held_out)
        training = (index for index in range(len(self._store)) if index not in held_out)
        self._training = lay_out(self._store, training, data.max_length, splits=data.packing, joins=data.packing)
        # Not joined, so that the loss of a row is that of one document. There is little padding to save: evaluation
        # makes batches of rows with similar lengths.
        self._held_out = lay_out(self._store, sorted(held_out), data.max_length, splits=data.packing, joins=False)
        splits_document = len(self._store) == 1 and data.held_out > 0 and len(self._training) > 1
        if splits_document:
            # A single document is not held out whole: its last rows are.
            num_rows = num_held_out(len(self._training), data.held_out)
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
        # Older versions trained on all rows of a single document. Their digest differs, so that their runs are not
        # evaluated on rows that they were trained on.
        rows = ["the last rows of one document are held out"] * splits_document
        self.data_digest = digest_of([self._store.digest, *laid_out.values(), *rows])

    def prepare(self, ranks: Ranks) -> None:
        """Prints on rank 0 the numbers of rows and tokens, and of documents cut or left out. Does not communicate."""
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
        """Lines that a user should read before a run; see `distiller.tasks.interfaces.Checkable.notices`."""
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
        """The rows that are not trained on, in the documents' order, each of one document; empty with held_out 0."""
        return TextData(self._store, self._held_out)

    def _described(self, layout: Layout) -> str:
        """The numbers of rows and tokens, in words."""
        num_tokens = int((layout.pieces[:, 1] - layout.pieces[:, 0]).sum())
        return f"{len(layout)} rows of at most {self._data.max_length} tokens, {num_tokens} in all"


def held_out_documents(num_documents: int, share: float) -> set[int]:
    """Indices of the held-out documents: those for which a hash of the index, in [0, 1), is below `share`.

    At least one document is held out where `share` is above 0, and at least one is not. A single document is not held
    out: its last rows are (see `LanguageSource`). The choice does not depend on the seed, so that runs are compared on
    the same documents; documents that are appended do not change it, unless the hashes alone chose none or all.
    """
    if share == 0 or num_documents < 2:
        return set()
    chosen, lowest, highest = set(), (2.0, 0), (-1.0, 0)
    for index in range(num_documents):
        hashed = _hash(index), index
        lowest, highest = min(lowest, hashed), max(highest, hashed)
        if hashed[0] < share:
            chosen.add(index)
    return (chosen or {lowest[1]}) - ({highest[1]} if len(chosen) == num_documents else set())


def _hash(index: int) -> float:
    """A number in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"held out/{index}".encode(), digest_size=8).digest(), "little") / 2**64

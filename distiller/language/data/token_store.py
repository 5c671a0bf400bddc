"""Tokenised once: a keyed stage's folder of documents as tokens, memory-mapped by every process that reads them."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from distiller.errors import UserError
from distiller.language.data.corpus import Corpus, documents_of
from distiller.language.data.tokenization import DocumentTokenizer, TokenisedDocument
from distiller.storage.growing_tensors import GrowingTensors
from distiller.storage.stages import Stage, digest_files

TOKENS_FILE = "tokens.safetensors"
CHECKED_AT_ONCE = 2**24
DIGEST_FILE = "digest.txt"
"""What the tokens are, whatever made them: a chat template may write the date, which no key knows."""


def tokenise_corpus(stage: Stage, corpus: Corpus, tokenizer: DocumentTokenizer, max_samples: int | None) -> None:
    """Writes the stage, or nothing. Called by one process.

    Tokens go to the disk as they come; of a document 17 bytes stay in memory.

    Raises UserError for what is wrong with a document, and for a corpus without any.
    """
    try:
        with GrowingTensors(stage.partial) as columns:
            about = _append(columns, tokenizer.tokenise(documents_of(corpus, max_samples)))
            save_file(columns.mapped() | about, stage.partial / TOKENS_FILE)
    except BaseException:
        shutil.rmtree(stage.partial)
        raise
    (stage.partial / DIGEST_FILE).write_text(digest_files([stage.partial / TOKENS_FILE]), encoding="utf-8")
    stage.finish()


def _append(columns: GrowingTensors, documents: Iterable[TokenisedDocument]) -> dict[str, Tensor]:
    """Adds the documents' tokens, and returns what is known of each document."""
    lengths, first_learnt, has_prompt = array("q"), array("q"), array("b")
    for document in tqdm(documents, desc="tokenise", unit="document", dynamic_ncols=True, leave=False):
        columns.append("tokens", torch.from_numpy(document.tokens))
        columns.append("learnt", torch.from_numpy(document.learnt))
        lengths.append(len(document.tokens))
        first_learnt.append(_first_learnt(document.learnt))
        has_prompt.append(not document.learnt.all())
    if not lengths:
        raise UserError("data.path: there is no document that is not blank; give at least as many as one update takes")
    return {
        "ends": torch.tensor(lengths).cumsum(0),
        # The first token of all can be said by nobody: nothing comes before it.
        "first_learnt": torch.tensor(first_learnt),
        "has_prompt": torch.tensor(has_prompt).bool(),
    }


def _first_learnt(learnt: NDArray[np.bool_]) -> int:
    places = np.flatnonzero(learnt[1:])
    return int(places[0]) + 1 if len(places) else len(learnt)


@final
class TokenStore:
    """A finished stage's documents. Its large tensors are views of the mapped file, which loader processes share.

    Attributes:
        tokens: int32 [N], all documents one after the other.
        learnt: bool [N].
        starts, ends: int64 [D], where each document lies in them.
        first_learnt: int64 [D], counted from the document's start; at least 1, and its length where nothing is learnt.
        has_prompt: bool [D], whether some of its tokens are not learnt.
        digest: of all this.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.digest = (folder / DIGEST_FILE).read_text(encoding="utf-8")
        with safe_open(folder / TOKENS_FILE, framework="pt") as handle:
            self.tokens: Tensor = handle.get_tensor("tokens")
            self.learnt: Tensor = handle.get_tensor("learnt")
            self.ends: NDArray[np.int64] = handle.get_tensor("ends").numpy()
            self.first_learnt: NDArray[np.int64] = handle.get_tensor("first_learnt").numpy()
            self.has_prompt: NDArray[np.bool_] = handle.get_tensor("has_prompt").numpy()
        self.starts = np.concatenate([np.zeros(1, dtype=np.int64), self.ends[:-1]])

    def __len__(self) -> int:
        return len(self.ends)

    def check_below(self, vocabulary: int) -> None:
        """Reads all tokens; UserError for one that no model with so many ids has."""
        for start in range(0, len(self.tokens), CHECKED_AT_ONCE):
            part = self.tokens[start : start + CHECKED_AT_ONCE]
            if len(places := (part >= vocabulary).nonzero()):
                place = int(places[0])
                document = int(np.searchsorted(self.ends, start + place, side="right"))
                raise UserError(
                    f"data.path: document {document + 1} holds the token id {int(part[place])}, and teacher and "
                    f"student have {vocabulary} ids in common; leave it out, or raise vocab_size in the config.json "
                    "of a model that knows the token"
                )

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        # A loader process that is not forked maps the file too, instead of being sent a copy.
        return TokenStore, (self._folder,)

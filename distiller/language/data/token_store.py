"""The tokens of all documents in a stage's folder: written once, memory-mapped by every process that reads them."""

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
"""Tokens that `TokenStore.check_below` compares at a time."""
DIGEST_FILE = "digest.txt"
"""Holds the digest of the tokens. The stage's key does not decide them alone: a chat template may write the date."""


def tokenise_corpus(stage: Stage, corpus: Corpus, tokenizer: DocumentTokenizer, max_samples: int | None) -> None:
    """Writes the stage's folder, or removes it on any exception. Called by one process.

    Tokens are written to the disk as they are made; 17 bytes per document stay in memory.

    Raises:
        UserError: a document is invalid, or all of them are blank.
    """
    try:
        with GrowingTensors(stage.partial) as columns:
            about = _append(columns, tokenizer.tokenise(documents_of(corpus, max_samples)))
            save_file(columns.mapped() | about, stage.partial / TOKENS_FILE)
    except BaseException:
        shutil.rmtree(stage.partial, ignore_errors=True)
        raise
    (stage.partial / DIGEST_FILE).write_text(digest_files([stage.partial / TOKENS_FILE]), encoding="utf-8")
    stage.finish()


def _append(columns: GrowingTensors, documents: Iterable[TokenisedDocument]) -> dict[str, Tensor]:
    """Appends the documents' tokens to `columns`; returns `ends`, `first_learnt` and `has_prompt` of `TokenStore`."""
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
        # Counted without the first token, which no position predicts.
        "first_learnt": torch.tensor(first_learnt),
        "has_prompt": torch.tensor(has_prompt).bool(),
    }


def _first_learnt(learnt: NDArray[np.bool_]) -> int:
    """The index of the first learnt token after the first token; the number of tokens where there is none."""
    indices = np.flatnonzero(learnt[1:])
    return int(indices[0]) + 1 if len(indices) else len(learnt)


@final
class TokenStore:
    """The documents of a finished stage. `tokens` and `learnt` view the mapped file, which loader processes share.

    Attributes:
        tokens: tensor, int32 [N]: the token ids of all documents, one document after the other.
        learnt: tensor, bool [N]: whether each token is learnt.
        starts, ends: arrays, int64 [D]: document d has the tokens starts[d] to ends[d] - 1.
        first_learnt: array, int64 [D]: index, from the document's start, of the first learnt token after the first
            token; the document's length where there is none.
        has_prompt: array, bool [D]: whether some of the document's tokens are not learnt.
        digest: of the file with all of these.
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
        """Raises UserError for a token id that is not below `vocabulary`. Reads all tokens."""
        for start in range(0, len(self.tokens), CHECKED_AT_ONCE):
            part = self.tokens[start : start + CHECKED_AT_ONCE]
            if len(too_large := (part >= vocabulary).nonzero()):
                index = int(too_large[0])
                document = int(np.searchsorted(self.ends, start + index, side="right"))
                raise UserError(
                    f"data.path: document {document + 1} holds the token id {int(part[index])}, and teacher and "
                    f"student have {vocabulary} ids in common; leave it out, or raise vocab_size in the config.json "
                    "of a model that knows the token"
                )

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        # Pickled as the folder: a loader process that is not forked maps the file itself and receives no copy.
        return TokenStore, (self._folder,)

"""Packing: which tokens of which documents make up each row, and the rows as a data set."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from distiller.data.order import SampleKey
from distiller.language.data.batch import IGNORED, TokenSample
from distiller.language.data.token_store import TokenStore


@final
@dataclass(frozen=True)
class Layout:
    """Rows made of pieces of documents; in each row at least one token is learnt.

    Attributes:
        pieces: int64 [P, 3]. For each piece, indices into the store's tokens: the piece's first token, one past its
            last token, and one past the last token of its document.
        row_starts: int64 [R + 1]: row r consists of the pieces row_starts[r] to row_starts[r + 1] - 1.
        num_cut: number of documents that are longer than a row and lose their end.
        num_left_out: number of documents in which nothing is learnt, also since the prompt alone fills a row.
    """

    pieces: NDArray[np.int64]
    row_starts: NDArray[np.int64]
    num_cut: int
    num_left_out: int

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def split(self, num_last: int) -> tuple[Layout, Layout]:
        """All rows but the last `num_last`, and the last `num_last`. The first layout keeps the counts of documents."""
        row = len(self) - num_last
        piece = int(self.row_starts[row])
        return (
            replace(self, pieces=self.pieces[:piece], row_starts=self.row_starts[: row + 1]),
            Layout(self.pieces[piece:], self.row_starts[row:] - piece, 0, 0),
        )


def lay_out(store: TokenStore, documents: Iterable[int], max_length: int, splits: bool, joins: bool) -> Layout:
    """Arranges documents in rows of at most `max_length` tokens, in the documents' order.

    Args:
        store: the documents' tokens.
        documents: indices of the documents in the store.
        max_length: tokens of a row, at most.
        splits: whether a document that does not fit into its row goes on in the next one; otherwise its end is lost. A
            document with a prompt is never split, since the next row would hold the answer without the prompt.
        joins: whether a document may begin in the row in which the previous one ended.
    """
    pieces, row_starts = array("q"), array("q")
    free_tokens = num_cut = num_left_out = 0
    for document in documents:
        start, end = int(store.starts[document]), int(store.ends[document])
        first_learnt, has_prompt = int(store.first_learnt[document]), bool(store.has_prompt[document])
        if first_learnt >= end - start or (has_prompt and first_learnt > max_length):
            num_left_out += 1
            continue
        is_unsplit = has_prompt or not splits
        num_cut += is_unsplit and end - start > max_length
        min_tokens = min(end - start, max_length) if is_unsplit else 1
        # A last token alone makes no piece: it has no next token, and is itself a label of the piece before.
        while end - start > 1:
            if not joins or free_tokens < min_tokens:
                row_starts.append(len(pieces) // 3)
                free_tokens = max_length
            piece_end = min(start + free_tokens, end)
            pieces.extend((start, piece_end, end))
            free_tokens -= piece_end - start
            start = end if is_unsplit else piece_end
    return Layout(
        np.array(pieces, dtype=np.int64).reshape(-1, 3),
        np.append(np.array(row_starts, dtype=np.int64), len(pieces) // 3),
        int(num_cut),
        num_left_out,
    )


@final
class TextData(Dataset[TokenSample]):
    """The rows of a layout, indexed by (epoch, sample id); each is the same in every epoch.

    Reads tokens from the store's mapped file; samples are int64 tensors on the CPU.
    """

    def __init__(self, store: TokenStore, layout: Layout) -> None:
        self._store, self._layout = store, layout

    def __len__(self) -> int:
        return len(self._layout.row_starts) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row."""
        sizes = self._layout.pieces[:, 1] - self._layout.pieces[:, 0]
        return np.add.reduceat(sizes, self._layout.row_starts[:-1]).tolist() if len(self) else []

    def __getitem__(self, key: SampleKey) -> TokenSample:
        _, sample_id = key
        first, last = self._layout.row_starts[sample_id : sample_id + 2].tolist()
        pieces = self._layout.pieces[first:last].tolist()
        return TokenSample(
            sample_id,
            torch.cat([self._store.tokens[start:end] for start, end, _ in pieces]).long(),
            torch.cat([torch.arange(end - start) for start, end, _ in pieces]),
            torch.cat([self._labels(*piece) for piece in pieces]),
        )

    def _labels(self, start: int, end: int, document_end: int) -> torch.Tensor:
        """The labels of a piece, int64 [end - start]: its document's next token where that is learnt, else IGNORED."""
        following = slice(start + 1, min(end + 1, document_end))
        labels = torch.full((end - start,), IGNORED)
        learnt = self._store.learnt[following]
        labels[: len(learnt)] = torch.where(learnt, self._store.tokens[following].long(), IGNORED)
        return labels

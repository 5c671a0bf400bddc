"""Which tokens of which documents make up each row, and the rows as a data set."""

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
    """Rows made of pieces of documents; each has something to learn.

    Attributes:
        pieces: int64 [P, 3], of each piece where it starts and ends in the store, and where its document ends.
        row_starts: int64 [R + 1], the pieces of row r are those from row_starts[r] up to row_starts[r + 1].
        num_cut: documents whose end is lost, since they are longer than a row.
        num_left_out: documents in which nothing is learnt, among them those whose prompts fill a row.
    """

    pieces: NDArray[np.int64]
    row_starts: NDArray[np.int64]
    num_cut: int
    num_left_out: int

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def split(self, num_last: int) -> tuple[Layout, Layout]:
        """(all rows but the last so many, those); what is lost of documents is counted with the first."""
        row = len(self) - num_last
        piece = int(self.row_starts[row])
        return (
            replace(self, pieces=self.pieces[:piece], row_starts=self.row_starts[: row + 1]),
            Layout(self.pieces[piece:], self.row_starts[row:] - piece, 0, 0),
        )


def lay_out(store: TokenStore, documents: Iterable[int], max_length: int, splits: bool, joins: bool) -> Layout:
    """Documents as rows of at most `max_length` tokens, in the documents' order.

    Args:
        store: what the documents are numbered in.
        documents: their numbers.
        max_length: tokens.
        splits: a document that is too long goes on in the next row; otherwise it is cut. A document with a prompt is
            always cut, since an answer without its prompt answers nothing.
        joins: a document begins in the row in which the last one ended.
    """
    pieces, row_starts = array("q"), array("q")
    room = num_cut = num_left_out = 0
    for document in documents:
        start, end = int(store.starts[document]), int(store.ends[document])
        first_learnt, has_prompt = int(store.first_learnt[document]), bool(store.has_prompt[document])
        if first_learnt >= end - start or (has_prompt and first_learnt > max_length):
            num_left_out += 1
            continue
        stays_whole = has_prompt or not splits
        num_cut += stays_whole and end - start > max_length
        needed = min(end - start, max_length) if stays_whole else 1
        # A document's last token alone teaches nothing: the piece before it has learnt to say it.
        while end - start > 1:
            if not joins or room < needed:
                row_starts.append(len(pieces) // 3)
                room = max_length
            piece_end = min(start + room, end)
            pieces.extend((start, piece_end, end))
            room -= piece_end - start
            start = end if stays_whole else piece_end
    return Layout(
        np.array(pieces, dtype=np.int64).reshape(-1, 3),
        np.append(np.array(row_starts, dtype=np.int64), len(pieces) // 3),
        int(num_cut),
        num_left_out,
    )


@final
class TextData(Dataset[TokenSample]):
    """Rows, indexed by (epoch, sample id); the same in every epoch. Reads a mapped file; int64 tensors on the CPU."""

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
        """Where a piece ends within its document, the token that follows is its last label."""
        following = slice(start + 1, min(end + 1, document_end))
        labels = torch.full((end - start,), IGNORED)
        learnt = self._store.learnt[following]
        labels[: len(learnt)] = torch.where(learnt, self._store.tokens[following].long(), IGNORED)
        return labels

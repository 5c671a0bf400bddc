"""Task `causal_lm`: its sections of the recipe. Importing this module does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from distiller.config import Data
from distiller.sections import Float, Location, Positive, Switch


class LanguageData(Data):
    """What is learnt from: documents, which become rows of tokens."""

    kind: Literal["text", "jsonl", "datasets", "python-docs"] = Field(
        "text",
        description="text = a document a file; jsonl = one a line; datasets = a saved or local data set; python-docs "
        "= Python's own reference, which travels with it",
    )
    path: Location | None = Field(
        None, description="text, jsonl: a file, a folder or a glob; datasets: a file or a folder; python-docs: none"
    )
    split: Location = Field("train", description="datasets: which part of the data set")
    max_samples: Positive | None = Field(None, description="only the first so many documents")
    max_length: Annotated[Positive, Field(ge=8)] = Field(1024, description="tokens of a row, at most")
    packing: Switch = Field(
        True,
        description="rows of max_length tokens full of documents, blind to each other; false = one a row, padded",
    )
    held_out: Annotated[Float, Field(ge=0, lt=1)] = Field(
        0.05, description="share of the documents that is never trained on, for evaluate; chosen by their numbers"
    )

    @model_validator(mode="after")
    def _has_a_path(self) -> LanguageData:
        if self.kind == "python-docs" and self.path is not None:
            raise ValueError(f"data.kind=python-docs reads no file, given data.path {self.path}; remove it")
        if self.kind != "python-docs" and self.path is None:
            raise ValueError(f"data.kind={self.kind} needs data.path; give it")
        return self

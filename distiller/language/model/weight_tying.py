"""Whether a model's input embedding and output layer are one matrix: by what its files hold, as transformers has it.

A config says `tie_word_embeddings` of the model that it was written for. A file beside it may hold both matrices, as
merged adapters leave it: where they differ, the library keeps both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from pathlib import Path

from distiller.errors import UserError
from distiller.language.model.spec import ModelSpec
from distiller.storage.weight_files import WeightFiles


def tied_as_stored(
    anatomy: ModelSpec, stored: Collection[str], files: Callable[[], list[Path]], origin: str
) -> ModelSpec:
    """The model as its files have it: the same, or one whose config does not tie.

    Args:
        stored: the names of the files' tensors.
        files: the safetensors files; asked for, and the two matrices read and compared, only where both are stored.

    Raises:
        UserError: which `origin` begins; this class of models ties whatever its config says.
    """
    if not anatomy.is_tied or not set(anatomy.head_names) <= {anatomy.renaming.name(name) for name in stored}:
        return anatomy

    def of_heads(name: str) -> str | None:
        # The library merges other tensors while it loads: several stored ones have one name in the module.
        renamed = anatomy.renaming.name(name)
        return renamed if renamed in anatomy.head_names else None

    weights = WeightFiles(files(), of_heads)
    try:
        if weights.are_equal(*anatomy.head_names):
            return anatomy
    finally:
        weights.close()
    return without_tie(anatomy, origin)


def without_tie(anatomy: ModelSpec, origin: str) -> ModelSpec:
    """The model with two matrices. Raises UserError where its class has one whatever the config says."""
    config = copy.deepcopy(anatomy.config)
    config.tie_word_embeddings = False
    untied = ModelSpec(config, anatomy.trusts_code, origin)
    if untied.is_tied:
        raise UserError(
            f"{origin}: its files hold {anatomy.head_names[0]} beside another {anatomy.head_names[1]}, and its class "
            "has one matrix for both; give weights that belong to its config.json"
        )
    return untied

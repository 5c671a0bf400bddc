"""Decides, as transformers does, from a model's files whether its input embedding and output layer are one matrix.

`tie_word_embeddings` of a config holds for the model that the config was written for. The files beside the config may
hold both matrices, for example after an adapter was merged. Where the two differ, transformers keeps both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from pathlib import Path

from distiller.errors import UserError
from distiller.language.model.spec import ModelSpec
from distiller.storage.weight_files import WeightFiles


def tied_as_stored(spec: ModelSpec, stored: Collection[str], files: Callable[[], list[Path]], origin: str) -> ModelSpec:
    """The spec that fits the files: `spec` itself, or one that is not tied where the files hold two different matrices.

    Args:
        stored: the names of the files' tensors.
        files: returns the safetensors files. It is called, and the two matrices are read and compared, only where both
            are stored.

    Raises:
        UserError: the matrices differ, and the model's class ties them whatever its config says. The message begins
            with `origin`.
    """
    if not spec.is_tied or not set(spec.head_names) <= {spec.tensor_names.name(name) for name in stored}:
        return spec

    def of_heads(name: str) -> str | None:
        # Other tensors are left out: transformers merges some while it loads, so several stored tensors may have one
        # name in the module, which WeightFiles refuses.
        renamed = spec.tensor_names.name(name)
        return renamed if renamed in spec.head_names else None

    weights = WeightFiles(files(), of_heads)
    try:
        if weights.are_equal(*spec.head_names):
            return spec
    finally:
        weights.close()
    return without_tie(spec, origin)


def without_tie(spec: ModelSpec, origin: str) -> ModelSpec:
    """The spec with two matrices. Raises UserError where the model's class ties them whatever the config says."""
    config = copy.deepcopy(spec.config)
    config.tie_word_embeddings = False
    untied = ModelSpec(config, spec.trusts_code, origin)
    if untied.is_tied:
        raise UserError(
            f"{origin}: its files hold {spec.head_names[0]} beside another {spec.head_names[1]}, and its class "
            "has one matrix for both; give weights that belong to its config.json"
        )
    return untied

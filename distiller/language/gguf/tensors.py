"""Reads the tensors of a GGUF file that decide the config, and checks that the model has a place for each tensor."""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

import numpy as np
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from distiller.errors import UserError
from distiller.language.gguf.rope import FACTOR_TENSORS

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
"""Names of the input embedding and of the output layer."""


def tensors_of(reader: Any, names: Collection[str]) -> dict[str, np.ndarray]:
    """The file's tensors with these names, dequantised: flat float32 arrays on the host, by name."""
    # Imported here, since gguf is an optional dependency.
    dequantize = importlib.import_module("gguf").quants.dequantize
    return {
        tensor.name: np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(-1)
        for tensor in reader.tensors
        if tensor.name in names
    }


def has_own_output(reader: Any) -> bool:
    """Whether the file has an output layer that differs, as stored, from the input embedding."""
    found = {tensor.name: tensor for tensor in reader.tensors if tensor.name in (EMBEDDING, OUTPUT)}
    if OUTPUT not in found or EMBEDDING not in found:
        return False
    embedding, output = found[EMBEDDING], found[OUTPUT]
    return embedding.tensor_type != output.tensor_type or not np.array_equal(embedding.data, output.data)


def check_tensors(reader: Any, architecture: str, model: Any, origin: str) -> None:
    """Raises UserError for a tensor that the model has no place for: transformers' reader would drop it silently.

    Args:
        reader: a `gguf.GGUFReader` of the file.
        architecture: llama.cpp's name of it.
        model: the model of transformers, on the meta device.
        origin: the file's name, with which messages begin.
    """
    if architecture in GGUF_CONFIG_ARCHS:
        # transformers' newer reader, which reads these architectures, reports unknown tensors itself.
        return
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    known = {*get_gguf_hf_weights_map(model, processor), *FACTOR_TENSORS, OUTPUT}
    if unknown := sorted(tensor.name for tensor in reader.tensors if tensor.name not in known):
        raise UserError(
            f"{origin}: holds {unknown[0]}, for which transformers' {type(model).__name__} of its metadata has no "
            "place; give the model's folder of transformers instead"
        )

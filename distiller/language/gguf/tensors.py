"""The tensors of a GGUF file, as far as they say what its model is; and that none of them is left out."""

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


def tensors_of(reader: Any, names: Collection[str]) -> dict[str, np.ndarray]:
    """Those of these tensors that the file has, in float32."""
    # Imported here, since it is an extra.
    dequantize = importlib.import_module("gguf").quants.dequantize
    return {
        tensor.name: np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(-1)
        for tensor in reader.tensors
        if tensor.name in names
    }


def has_own_output(reader: Any) -> bool:
    """Whether the file's output layer is another matrix than its embedding, bit by bit as stored."""
    found = {tensor.name: tensor for tensor in reader.tensors if tensor.name in (EMBEDDING, OUTPUT)}
    if OUTPUT not in found or EMBEDDING not in found:
        return False
    one, other = found[EMBEDDING], found[OUTPUT]
    return one.tensor_type != other.tensor_type or not np.array_equal(one.data, other.data)


def check_tensors(reader: Any, architecture: str, model: Any, origin: str) -> None:
    """Raises UserError for a tensor that the model has no place for, and that the library's reader would drop.

    Args:
        model: of the library, on the meta device.
    """
    if architecture in GGUF_CONFIG_ARCHS:
        # The library's newer reader reports what it does not know.
        return
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    known = {*get_gguf_hf_weights_map(model, processor), *FACTOR_TENSORS, OUTPUT}
    if unknown := sorted(tensor.name for tensor in reader.tensors if tensor.name not in known):
        raise UserError(
            f"{origin}: holds {unknown[0]}, for which transformers' {type(model).__name__} of its metadata has no "
            "place; give the model's folder of transformers instead"
        )

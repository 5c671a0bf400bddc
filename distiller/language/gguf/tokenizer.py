"""What a GGUF file says of its tokenizer and transformers' reader ignores: how text is split, and the first space.

Names are those of llama.cpp (https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp).
"""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import decoders, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_SENTENCEPIECE_BUILDERS,
)

from distiller.errors import UserError


def _single_digits() -> pre_tokenizers.PreTokenizer:
    """GPT-2's rule after a cut around each digit, for vocabularies that were made with single digits."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = dict.fromkeys(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _single_digits
)
"""A file's `tokenizer.ggml.pre` -> the rule for splitting text, for names that transformers does not know."""

LIKE_GPT2 = ("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "mpt", "olmo", "jais")
"""Names of GPT-2's rule, which transformers uses for every name that it does not know."""


def apply_tokenizer_metadata(tokenizer: Any, metadata: Mapping[str, Any], origin: str) -> None:
    """Changes the tokenizer that transformers' reader has made, so that it splits text as the file says.

    Args:
        tokenizer: a fast tokenizer; changed in place.
        metadata: the file's keys and values.
        origin: the file's name, with which messages begin.

    Raises:
        UserError: the file names a rule, or none, that is not known: its tokens would be others than those that the
            model was trained with.
    """
    kind, architecture = metadata.get("tokenizer.ggml.model"), metadata["general.architecture"]
    if kind == "gpt2":
        name = metadata.get("tokenizer.ggml.pre")
        if name in PRE_TOKENIZERS:
            tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
        elif name not in GGUF_PRE_TOKENIZER_SPLITS and name not in LIKE_GPT2 and (name, architecture) != (None, "gpt2"):
            raise UserError(
                f"{origin}: its key tokenizer.ggml.pre is {'missing' if name is None else name}, so that it is not "
                "known how text is split into tokens; give the model's folder of transformers instead"
            )
    is_metaspace = isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.Metaspace)
    has_own_builder = architecture in GGUF_SENTENCEPIECE_BUILDERS
    if kind == "llama" and metadata.get("tokenizer.ggml.add_space_prefix") is False and not has_own_builder:
        if not is_metaspace:
            raise UserError(
                f"{origin}: its key tokenizer.ggml.add_space_prefix is false, and transformers' tokenizer of it puts a "
                "space before every text; give the model's folder of transformers instead"
            )
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])

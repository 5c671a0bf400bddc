"""The names that transformers gives to the tensors of a model's files, which another version or tool may have saved.

`from_pretrained` renames the tensors that it reads, and merges, splits or transposes some of them: the experts of a
mixture are separate tensors in the files and one tensor in the model. The library's own functions are used to find out
what it does with a tensor.
"""

from __future__ import annotations

import re
from typing import Any, final

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


@final
class TensorNames:
    """Maps the names of stored tensors to names in one model, as transformers' loader does. Holds no weights."""

    def __init__(self, model: Any) -> None:
        """`model` is a model of transformers, on the meta device."""
        self._expected = model.state_dict()
        self._prefix = model.base_model_prefix
        found = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in found if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in found if isinstance(entry, WeightConverter)]
        # The same patterns as in `PreTrainedModel._adjust_missing_and_unexpected_keys`.
        buffers = [name for name, _ in model.named_buffers()]
        ignored: list[str] = list(model._keys_to_ignore_on_load_unexpected or ())
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            ignored.append(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            ignored.append(r"(^|\.)position_ids$")
        self._ignored = [re.compile(pattern) for pattern in ignored]

    def name(self, stored: str) -> str | None:
        """The tensor's name in the whole model; None for a tensor that transformers ignores.

        An unknown tensor gets a name that the model does not have.
        """
        name, _ = self._find(stored)
        if name not in self._expected and any(pattern.search(name) for pattern in self._ignored):
            return None
        return name

    def is_converted(self, stored: str) -> bool:
        """Whether transformers merges, splits or transposes the tensor, and does not only rename it."""
        name, converter = self._find(stored)
        return converter is not None and name in self._expected

    def _find(self, stored: str) -> tuple[str, str | None]:
        """The tensor's name after renaming, and the pattern of its converter, or None."""
        # The first step of the library's `convert_and_load_state_dict_in_model`.
        found = rename_source_key(stored, self._renamings, self._converters, self._prefix, self._expected)
        if found[0] not in self._expected and stored in self._expected:
            return rename_source_key(stored, [], [], self._prefix, self._expected)
        return found

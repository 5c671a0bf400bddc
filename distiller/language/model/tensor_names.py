"""What transformers calls the tensors of a model's files, which may be under names of another version or another saver.

`from_pretrained` renames what it reads, and merges, splits or transposes some of it (a mixture's experts lie apart in
the files and are one tensor in the model). The library's own functions say here which of the two a tensor is.
"""

from __future__ import annotations

import re
from typing import Any, final

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


@final
class Renaming:
    """The names of one model's tensors, as the library's loader makes them. Holds no weights."""

    def __init__(self, model: Any) -> None:
        """`model` is the library's, on the meta device."""
        self._expected = model.state_dict()
        self._prefix = model.base_model_prefix
        found = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in found if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in found if isinstance(entry, WeightConverter)]
        # As `PreTrainedModel._adjust_missing_and_unexpected_keys` has it.
        buffers = [name for name, _ in model.named_buffers()]
        ignored = list(model._keys_to_ignore_on_load_unexpected or ())
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            ignored.append(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            ignored.append(r"(^|\.)position_ids$")
        self._ignored = [re.compile(pattern) for pattern in ignored]

    def name(self, stored: str) -> str | None:
        """The name in the whole model; None for what the library ignores; else the name itself, which is unknown."""
        name, _ = self._find(stored)
        if name not in self._expected and any(pattern.search(name) for pattern in self._ignored):
            return None
        return name

    def is_converted(self, stored: str) -> bool:
        """Whether the library changes more than the tensor's name."""
        name, converter = self._find(stored)
        return converter is not None and name in self._expected

    def _find(self, stored: str) -> tuple[str, str | None]:
        # The first step of the library's `convert_and_load_state_dict_in_model`.
        found = rename_source_key(stored, self._renamings, self._converters, self._prefix, self._expected)
        if found[0] not in self._expected and stored in self._expected:
            return rename_source_key(stored, [], [], self._prefix, self._expected)
        return found

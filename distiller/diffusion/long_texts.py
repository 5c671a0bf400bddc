"""Notices about texts that a pipeline's tokenizers truncate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from distiller.config.diffusion import DiffusionOptions
from distiller.diffusion.family import Family
from distiller.errors import UserError, shown

BATCH_TEXTS = 1000
"""Texts that are tokenised at once, to bound the memory."""


def long_text_notices(family: Family, task: DiffusionOptions, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each group of texts and each tokenizer that truncates some of them. Raises UserError.

    Args:
        groups: texts by the name of their source in messages. A repeated text counts each time, but is tokenised once.
    """
    tokenizers = family.load_tokenizers()
    length = family.text_length(task)
    kept = family.max_tokens(tokenizers, length)
    kept_longer = family.max_tokens(tokenizers, length + 1) if _may_be(family, task, length + 1) else kept
    notices = []
    for name, tokenizer in tokenizers.items():
        advice = "shorten them"
        if task.max_sequence_length and kept_longer[name] > kept[name]:
            advice += ", or raise task.max_sequence_length"
        for group, texts in groups.items():
            lost = _lost_tokens(family, tokenizer, kept[name], texts)
            cut = [text for text in texts if lost[text]]
            if not cut:
                continue
            notices.append(
                f"{group}: {len(cut)} of {len(texts)} texts lose {sum(lost[text] for text in cut):,} tokens in all, "
                f"since the pipeline's {name} keeps {kept[name]} of each, special ones among them; the first, number "
                f"{texts.index(cut[0]) + 1}, loses {lost[cut[0]]:,}: {shown(cut[0])}; {advice}"
            )
    return notices


def _may_be(family: Family, task: DiffusionOptions, length: int) -> bool:
    """Whether the pipeline takes this `task.max_sequence_length`."""
    try:
        family.check_task(task.model_copy(update={"max_sequence_length": length}))
    except UserError:
        return False
    return True


def _lost_tokens(
    family: Family, tokenizer: Callable[..., Mapping[str, list[list[int]]]], kept: int, texts: Sequence[str]
) -> Counter[str]:
    """The number of tokens that each text loses; texts that lose none have no entry."""
    unique, lost = list(dict.fromkeys(texts)), Counter[str]()
    for first in range(0, len(unique), BATCH_TEXTS):
        batch = unique[first : first + BATCH_TEXTS]
        # Without `verbose=False` the tokenizer warns about texts above its limit, which the notices report already.
        ids = tokenizer(family.clean_prompts(batch), truncation=False, verbose=False)["input_ids"]
        lost.update({text: len(tokens) - kept for text, tokens in zip(batch, ids, strict=True) if len(tokens) > kept})
    return lost

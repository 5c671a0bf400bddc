"""Token ids of the prompts that teacher and student continue: the recipe's, or the start of held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from distiller.config.causal_lm import LanguageEvaluation
from distiller.errors import UserError
from distiller.language.data.batch import padded_length
from distiller.language.data.packing import TextData
from distiller.language.model.spec import ModelSpec

PROMPT_TOKENS = 24
"""How many tokens of a held-out row are the prompt, at most; of a shorter row, half of its tokens."""


@final
class Prompts:
    """Prompts that teacher and student can both read, together with `evaluation.max_new_tokens` more tokens."""

    def __init__(self, evaluation: LanguageEvaluation, tokenizer: Any, teacher: ModelSpec, student: ModelSpec) -> None:
        """`tokenizer` is the teacher's; `teacher` and `student` give the number of ids and the longest row."""
        self._evaluation, self._tokenizer = evaluation, tokenizer
        self._models = {"teacher": teacher, "student": student}

    def of_recipe(self, held_out: TextData) -> list[list[int]]:
        """The prompts of the recipe, or else the start of held-out rows. Raises UserError as `tokenised` does."""
        evaluation = self._evaluation
        if evaluation.sample_prompts:
            return self.tokenised(evaluation.sample_prompts)
        prompts = []
        for index in range(min(len(held_out), evaluation.num_samples)):
            tokens = held_out[0, index].input_ids.tolist()
            prompts.append(tokens[: max(min(PROMPT_TOKENS, len(tokens) // 2), 1)])
        return self._checked(prompts)

    def tokenised(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text.

        Raises:
            UserError: a text has no tokens, has an id that one of the models lacks, or is too long to be continued.
        """
        shared = min(spec.vocabulary for spec in self._models.values())
        prompts = [list(self._tokenizer(text).input_ids) for text in texts]
        for text, prompt in zip(texts, prompts, strict=True):
            if not prompt:
                raise UserError(f"the prompt {text!r} has no tokens; give at least one word")
            if max(prompt) >= shared:
                raise UserError(
                    f"the prompt {text!r} has the token id {max(prompt)}, and teacher and student have {shared} ids in "
                    "common; leave that token out"
                )
        return self._checked(prompts)

    def _checked(self, prompts: list[list[int]]) -> list[list[int]]:
        """The same prompts. Raises UserError where prompt and continuation are longer than a model can read."""
        longest, max_new_tokens = max(map(len, prompts), default=0), self._evaluation.max_new_tokens
        for owner, spec in self._models.items():
            limit = spec.max_positions
            if prompts and limit is not None and padded_length(longest + max_new_tokens) > limit:
                raise UserError(
                    f"evaluation.max_new_tokens is {max_new_tokens} after a prompt of {longest} tokens and the {owner} "
                    f"reads at most {limit}, padding included (max_position_embeddings); lower it, or shorten the "
                    "prompt"
                )
        return prompts

"""Task `causal_lm`: its sections of the recipe. Importing this module does not import torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from distiller.config.recipe import Cache, Data, Evaluation, FeatureLoss, RecipeOf, TaskOptions
from distiller.config.sections import Float, Location, NonNegative, Positive, PositiveFloat, Section, Switch

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd", "skewed_kl", "skewed_reverse_kl"]
"""The names in `distiller.language.loss.divergences.DIVERGENCES`, which imports torch."""
SAMPLED_KINDS: tuple[DivergenceKind, ...] = ("forward_kl",)
"""Those of them that ids drawn from the teacher estimate (`Divergence.can_be_sampled`)."""


class DivergenceLoss(Section):
    """How far the student's next-token distribution is from the teacher's, summed over tokens."""

    kind: DivergenceKind = Field(
        default="forward_kl", description="jsd = generalised Jensen-Shannon; the skewed ones compare with a mixture"
    )
    temperature: PositiveFloat = Field(default=1.0, description="of both softmaxes; the term carries its square")
    beta: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=0.5, description="jsd: the teacher's share of the mixture"
    )
    skew: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=0.1, description="skewed kinds: the share of the first distribution in what it is compared with"
    )


class LanguageLosses(Section):
    """The terms of the loss; each is a mean over all learnt tokens of the whole update, in float32."""

    alpha: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="share of the divergence; the rest is the cross-entropy with the data's own next tokens",
    )
    divergence: DivergenceLoss = DivergenceLoss()
    features: FeatureLoss = FeatureLoss()


class LanguageOptions(TaskOptions):
    """What is learnt, for teachers that predict the next token."""

    kind: Literal["causal_lm"] = Field(description="which task; left out: the one that the teacher is of")  # type: ignore[assignment]
    losses: LanguageLosses = LanguageLosses()
    trust_remote_code: Switch = Field(
        default=False, description="whether to run Python code that comes with a model's folder"
    )


class LanguageStudent(Section):
    """The trained model: exactly one of config, path, or the teacher's own layers (num_layers and so on)."""

    config: Location | None = Field(
        default=None, description="the library's own config.json; the tokenizer is the teacher's"
    )
    path: Location | None = Field(default=None, description="a saved model: a folder, a hub id or a GGUF file")
    num_layers: Positive | None = Field(default=None, description="evenly spaced layers of the teacher")
    hidden_size: Positive | None = Field(default=None, description="the teacher's first channels (width)")
    num_attention_heads: Positive | None = Field(default=None, description="the teacher's first heads (width)")
    num_key_value_heads: Positive | None = Field(
        default=None, description="the teacher's first ones; None = in proportion"
    )
    intermediate_size: Positive | None = Field(
        default=None, description="the teacher's first feed-forward channels (width)"
    )

    @property
    def from_teacher(self) -> bool:
        """Whether the student is cut out of the teacher."""
        return any(getattr(self, key) is not None for key in CUTS)

    @model_validator(mode="after")
    def _one_source(self) -> LanguageStudent:
        if sum([self.config is not None, self.path is not None, self.from_teacher]) != 1:
            raise ValueError(
                "give exactly one of student.config, student.path, or the teacher's own layers "
                f"(student.{', '.join(CUTS)})"
            )
        return self


CUTS = ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Keys of a student that is cut out of its teacher."""


class LanguageData(Data):
    """What is learnt from: documents, which become rows of tokens."""

    counts_samples: ClassVar[bool] = False

    kind: Literal["text", "jsonl", "datasets", "python-docs"] = Field(
        default="text",
        description="text = a document a file; jsonl = one a line; datasets = a saved or local data set; python-docs "
        "= Python's own reference, which travels with it",
    )
    path: Location | None = Field(
        default=None,
        description="text, jsonl: a file, a folder or a glob; datasets: a file or a folder; python-docs: none",
    )
    split: Location = Field(default="train", description="datasets: which part of the data set")
    max_samples: Positive | None = Field(default=None, description="only the first so many documents")
    max_length: Annotated[Positive, Field(ge=8)] = Field(default=1024, description="tokens of a row, at most")
    packing: Switch = Field(
        default=True,
        description="rows of max_length tokens full of documents, blind to each other; false = one a row, padded",
    )
    held_out: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=0.05,
        description="share of the documents that is never trained on, for evaluate; chosen by their numbers",
    )

    @model_validator(mode="after")
    def _has_a_path(self) -> LanguageData:
        if self.kind == "python-docs" and self.path is not None:
            raise ValueError(f"data.kind=python-docs reads no file, given data.path {self.path}; remove it")
        if self.kind != "python-docs" and self.path is None:
            raise ValueError(f"data.kind={self.kind} needs data.path; give it")
        return self


MAX_IDS = 255
"""Of a token in a cache: they are counted in a byte."""


class LanguageCache(Cache):
    """The teacher's outputs on disk, in the folder `teacher.cache`; docs/caching.md."""

    form: Literal["hidden", "topk", "sampled", "topk+sampled"] = Field(
        default="hidden", description="of a token: the last hidden state (exact), its likeliest ids, draws, or both"
    )
    k: Annotated[Positive, Field(le=MAX_IDS)] = Field(
        default=20, description="topk, topk+sampled: likeliest ids of a token"
    )
    samples: Annotated[Positive, Field(le=MAX_IDS)] = Field(
        default=23, description="sampled, topk+sampled: draws of a token"
    )

    @model_validator(mode="after")
    def _fits_a_record(self) -> LanguageCache:
        if self.form == "topk+sampled" and not self.fits_both:
            raise ValueError(
                f"given cache.k {self.k} and cache.samples {self.samples}; a token has room for {MAX_IDS} ids in all"
            )
        return self

    @property
    def fits_both(self) -> bool:
        """Whether a token's record has room for likeliest ids and draws together."""
        return self.k + self.samples <= MAX_IDS

    @property
    def is_exact(self) -> bool:
        return self.form == "hidden"

    @property
    def is_drawn(self) -> bool:
        """Whether the stored form is an estimate of the teacher's distribution."""
        return self.form in ("sampled", "topk+sampled")


class LanguageEvaluation(Evaluation):
    """What `evaluate` measures on the held-out documents, and what is written for `samples.txt`."""

    batch_tokens: Positive = Field(
        default=8192,
        description="tokens a batch, padding included; rows of like lengths together; halved until it fits the "
        "GPU's memory",
    )
    max_rows: Positive | None = Field(default=None, description="only the first so many held-out rows; None = all")
    sample_prompts: tuple[str, ...] = Field(
        default=(), description="beginnings that both continue; empty = those of held-out documents"
    )
    num_samples: NonNegative = Field(
        default=2, description="held-out documents that are continued, without sample_prompts"
    )
    max_new_tokens: Positive = Field(
        default=48,
        description="of a continuation; the teacher has no key-value cache, so its time grows with their square",
    )
    min_improvement: PositiveFloat | None = Field(
        default=None,
        description="quality gate: the student's perplexity before training over that after; exit 3 below it",
    )


class LanguageRecipe(RecipeOf[LanguageOptions, LanguageStudent, LanguageData, LanguageEvaluation]):
    """A whole run, but for processes and the student's sharding, which are the launch file's."""

    task: LanguageOptions
    student: LanguageStudent
    data: LanguageData
    cache: LanguageCache = LanguageCache()  # type: ignore[assignment]
    evaluation: LanguageEvaluation = LanguageEvaluation()

    @model_validator(mode="after")
    def _no_contradictions_of_language(self) -> LanguageRecipe:
        features, kind = self.task.losses.features, self.task.losses.divergence.kind
        if self.teacher.cache is not None and self.cache.is_drawn and kind not in SAMPLED_KINDS:
            raise ValueError(
                f"cache.form={self.cache.form} estimates {' and '.join(SAMPLED_KINDS)} alone, given "
                f"task.losses.divergence.kind={kind}; choose cache.form=hidden, which is exact for all of them, or topk"
            )
        features.check_pairs()
        return self

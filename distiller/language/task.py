"""Task `causal_lm`: a language model distilled into a smaller one, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from accelerate import Accelerator
from torch import Tensor

from distiller.config.causal_lm import LanguageRecipe
from distiller.distributed.devices import teacher_dtype
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.language.cache.accuracy import compare_forms, forms_to_compare, table
from distiller.language.cache.forms import stored_form, target_of
from distiller.language.checks import check_models, objective_of
from distiller.language.data.batch import MaskedBatch, TokenSample
from distiller.language.data.packing import TextData
from distiller.language.data.source import EVALUATE_OTHERS, LanguageSource
from distiller.language.evaluation import FrozenModel, compare, figure_names
from distiller.language.exporting import export_student, frozen_model, read_exported
from distiller.language.generation import generate_greedily, teacher_hidden_states, write_texts
from distiller.language.loss.targets import HiddenTarget, Target
from distiller.language.loss.token_losses import Objective
from distiller.language.model.files import find_model
from distiller.language.model.logits import Head, TokenIds
from distiller.language.model.vocabulary import own_tokenizer, vocabulary_notices
from distiller.language.network import FEATURES, HIDDEN, LanguageNetwork
from distiller.language.prompts import Prompts
from distiller.language.student import StudentModel
from distiller.language.student_module import LanguageStudent, LossInputs, LossTerms
from distiller.storage.stages import Stage
from distiller.tasks.activation_checkpointing import enable_checkpointing
from distiller.tasks.base import LossSum
from distiller.tasks.cost_figures import size_figures
from distiller.tasks.fitting_batch import with_fitting_batch
from distiller.tasks.interfaces import (
    Cacheable,
    Checkable,
    Evaluable,
    HoldsOut,
    Plannable,
    ReplicatesHead,
    Samplable,
    Staged,
)
from distiller.tasks.student_module import TrainedStudent
from distiller.teachers.base import Outputs, Request, Teacher
from distiller.teachers.factory import open_alone


@final
class CausalLMTask(
    Cacheable[MaskedBatch, LanguageNetwork],
    Checkable,
    Staged,
    ReplicatesHead,
    HoldsOut,
    Evaluable,
    Samplable,
    Plannable,
):
    """See `distiller.tasks.base.Task`; the loss is a mean over all learnt tokens of an update."""

    sample_suffixes = (".txt",)

    def __init__(self, recipe: LanguageRecipe) -> None:
        self._recipe, self._task = recipe, recipe.task
        trusts_code, teacher = recipe.task.trust_remote_code, recipe.teacher
        self._objective = objective_of(recipe.task.losses)
        stages_dir = recipe.stages_dir
        self.files = find_model("teacher", teacher.path, teacher.revision, teacher.subfolder, stages_dir, trusts_code)
        if self.files.tokenizer is None:
            raise UserError(f"{self.files.origin}: has no tokenizer; save it into that folder (its save_pretrained)")
        self._student = StudentModel(recipe.student, self.files, stages_dir, trusts_code, recipe.seed)
        self.network = LanguageNetwork(self.files, self._student.spec.vocabulary)
        check_models(recipe, self.files, self._student)
        shared = min(self.files.spec.vocabulary, self._student.spec.vocabulary)
        self._source = LanguageSource(recipe, self.files.root, trusts_code, shared)
        self._own, self._tokenizer_difference = own_tokenizer(recipe, self.files, self._student.files)
        self._known = self.network.ids
        if self._own is not None:
            self._known = TokenIds.of(self._own.tokenizer, below=self._student.spec.vocabulary)
        self.num_samples, self.data_digest = self._source.num_samples, self._source.data_digest
        self._prompts = Prompts(recipe.evaluation, self.files.tokenizer, self.files.spec, self._student.spec)
        # Raises at the start for prompts that could not be continued at the end.
        self._prompts.of_recipe(self._source.held_out())
        features = recipe.task.losses.features
        self._feature_names = tuple(f"{FEATURES}{index}" for index in features.teacher_blocks if features.weight)
        self._form = stored_form(recipe.cache.form, recipe, self.network.ids)
        self._head: Head | None = None
        self._dtype = torch.float32

    @property
    def needs_live_teacher(self) -> bool:
        losses = self._task.losses
        return losses.alpha > 0 or losses.features.weight > 0

    def with_defaults(self, recipe: LanguageRecipe) -> LanguageRecipe:
        return recipe

    def notices(self) -> list[str]:
        sizes = self.files.spec.vocabulary, self._student.spec.vocabulary
        lines = vocabulary_notices(self.files.tokenizer, *sizes, self.network.ids)
        if self._tokenizer_difference is not None:
            lines.append(
                f"{self._student.origin}: its tokenizer reads the data otherwise ({self._tokenizer_difference}); the "
                "student learns the teacher's tokens and is exported with the teacher's tokenizer"
            )
        if self._student.dropout:
            keys = ", ".join(self._student.dropout)
            lines.append(f"the student trains without dropout ({keys}), whose masks no two engines share")
        return [*lines, *self._source.notices()]

    def check_samples(self) -> None:
        return None

    def prepare_stages(self, ranks: Ranks, dtype: torch.dtype) -> bool:
        self._dtype = dtype
        self._source.prepare(ranks)
        return False

    def missing_stage(self, dtype: torch.dtype) -> None:
        # Tokenising the same documents again gives the same tokens, so none can be missing.
        del dtype

    def kept_stages(self, dtype: torch.dtype) -> list[Stage]:
        del dtype
        return [self._source.stage]

    def load_data(self, ranks: Ranks, teacher: Teacher | None) -> TextData:
        if self._reads_head:
            self._head = self.network.load_head(self._dtype, ranks.device)
        return self._source.load()

    @property
    def num_held_out(self) -> int:
        return len(self._source.held_out())

    def held_out_sample(self, draw: int, index: int) -> TokenSample:
        return self._source.held_out()[draw, index]

    def student_skeleton(self) -> LanguageStudent:
        with torch.device("meta"):
            return self._with_projections(self._student.skeleton())

    def replicated_head_bytes(self, dtype: torch.dtype) -> int:
        return self.network.head_bytes(dtype) if self._reads_head else 0

    def make_head_without_data(self, dtype: torch.dtype) -> list[Tensor]:
        if not self._reads_head:
            return []
        self._head = self.network.head_without_data(dtype)
        return [tensor for tensor in (self._head.weight, self._head.bias) if tensor is not None]

    def drop_head(self) -> None:
        self._head = None

    @property
    def _reads_head(self) -> bool:
        """Whether this run needs the teacher's output layer; not where a cache holds the teacher's distributions."""
        is_cached = self._recipe.teacher.placement == "cached" and self.needs_live_teacher
        return not is_cached or self._form.needs_head

    @property
    def block_classes(self) -> tuple[str, ...]:
        return (self._student.spec.block_class,)

    def build_student(self) -> LanguageStudent:
        # transformers loads models in eval mode, in which gradient checkpointing has no effect.
        return self._with_projections(self._student.build(self._known)).train()

    def enable_gradient_checkpointing(self, trained: TrainedStudent) -> None:
        enable_checkpointing(trained.model)

    def collate(self, samples: Sequence[TokenSample]) -> MaskedBatch:
        return MaskedBatch.of(samples, self._source.pad_id)

    def example(self, batch_size: int) -> MaskedBatch:
        tokens = torch.zeros(self._recipe.data.max_length, dtype=torch.int64)
        return self.collate([TokenSample(0, tokens, torch.arange(len(tokens)), tokens)] * batch_size)

    def stage_passes(self) -> tuple[int, int]:
        return 0, 1

    def to_device(self, batch: MaskedBatch, device: torch.device) -> MaskedBatch:
        return replace(batch, batch=batch.batch.map(lambda tensor: tensor.to(device, non_blocking=True)))

    def request(self, batch: MaskedBatch) -> Request:
        rows = batch.batch
        inputs = {"input_ids": rows.input_ids, "position_ids": rows.position_ids}
        return Request(rows.sample_ids, inputs, self.wanted)

    @property
    def has_draws(self) -> bool:
        return False

    @property
    def wanted(self) -> tuple[str, ...]:
        return (HIDDEN, *self._feature_names)

    def data_settings(self) -> dict[str, Any]:
        return self._source.settings

    def cached_inputs(self, dtype: torch.dtype) -> dict[str, Any]:
        # `data_digest` covers tokens and rows.
        inputs: dict[str, Any] = {"config": self.files.spec.config_values}
        # A cache without this key is of an older version, in which these tensors had another dtype than in
        # transformers.
        others = self.files.spec.other_dtypes(dtype)
        return inputs | ({"other_dtypes": others} if others else {})

    def cached_form(self) -> dict[str, Any]:
        return self._form.describe()

    def store(self, batch: MaskedBatch, outputs: Outputs) -> list[Outputs]:
        assert self._head is not None, "load_data loads it"
        return self._form.store(batch, outputs, self._head)

    def restore(self, batch: MaskedBatch, samples: Sequence[Outputs]) -> Outputs:
        return self._form.restore(batch, samples, self._feature_names)

    def compare_forms(self, batches: Sequence[MaskedBatch], outputs: Sequence[Outputs]) -> str:
        assert self._head is not None, "load_data loads it"
        objective = replace(self._objective, weight=1.0)
        forms = forms_to_compare(self._recipe, self.network.ids, objective.divergence)
        model = self._student.build(self._known)
        student = self._trained_module(model, objective, feature_blocks=()).to(self._head.weight.device)
        return table(compare_forms(forms, student, self._head, objective, batches, outputs))

    def sample_ids(self, batch: MaskedBatch) -> tuple[int, ...]:
        return batch.batch.sample_ids

    def count(self, batch: MaskedBatch) -> int:
        return batch.num_learnt

    def tokens(self, batch: MaskedBatch) -> int:
        return sum(batch.batch.lengths)

    def student_inputs(
        self, batch: MaskedBatch, teacher_outputs: Outputs | None, dtype: torch.dtype
    ) -> Mapping[str, Any]:
        del dtype
        rows = batch.batch
        if teacher_outputs is None:
            assert self._head is not None, "load_data loads it"
            # With alpha 0 the teacher is not run: the divergence has weight 0, so its hidden states may be zeros.
            shape = rows.input_ids.numel(), self._head.weight.shape[1]
            target: Target = HiddenTarget.of(self._head.weight.new_zeros(shape), self._head)
        else:
            target = target_of(teacher_outputs, self._head, self.network.ids.size)
        features = tuple(teacher_outputs[name].flatten(0, 1) for name in self._feature_names) if teacher_outputs else ()
        labels = rows.labels.flatten()
        return {"inputs": LossInputs(rows.input_ids, rows.position_ids, labels, batch.loss_mask, target, features)}

    def loss(self, student_outputs: LossTerms, teacher_outputs: Outputs | None, batch: MaskedBatch) -> LossSum:
        losses, sums = self._task.losses, LossTerms(*student_outputs)
        terms = {"cross_entropy": sums.cross_entropy}
        if teacher_outputs is not None:
            terms["divergence"] = sums.divergence
        if self.network.ids.num_unused(self._student.spec.vocabulary):
            terms["unused_ids"] = sums.unused_ids
        total = sums.loss
        if losses.features.weight:
            terms["features"] = sums.features
            total = total + losses.features.weight * sums.features
        return LossSum(total, {name: term.detach() for name, term in terms.items()})

    def export(self, state: Mapping[str, Tensor], folder: Path) -> None:
        export_student(self._student, (self._own or self.files).root, self._known, state, folder)

    def write_samples(self, run_dir: Path, teacher: Teacher | None, accelerator: Accelerator) -> None:
        prompt_ids = self._prompts.of_recipe(self._source.held_out())
        if not prompt_ids:
            return
        # Every rank asks the teacher, since some placements communicate; rank 0 runs the student.
        texts = {}
        if teacher is not None:
            assert self._head is not None, "load_data loads it"
            texts["teacher"] = self._continue(FrozenModel(teacher_hidden_states(teacher), self._head), prompt_ids)
        if accelerator.is_main_process:
            texts["student"] = self._continue(self._read_student(run_dir, accelerator.device), prompt_ids)
            write_texts(run_dir / "samples.txt", self.files.tokenizer, prompt_ids, texts)

    def figures(self) -> tuple[str, ...]:
        has_unused_ids = bool(self.network.ids.num_unused(self._student.spec.vocabulary))
        return figure_names(self._recipe.data.max_length, has_unused_ids)

    def evaluate(self, run_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        rows, evaluation = self._source.held_out(), self._recipe.evaluation
        indices = range(min(len(rows), evaluation.max_rows or len(rows)))
        if not indices:
            raise UserError(
                f"data.held_out {self._recipe.data.held_out:g} leaves nothing to evaluate on; measure on others "
                f"({EVALUATE_OTHERS}), or train with a share above 0 held out"
            )
        trained = self._read_student(run_dir, device)
        logit_options = self._student.spec.logit_change, self.network.ids
        untrained = frozen_model(self._student.build(self._known), device, *logit_options)
        teacher = open_alone(self.network, self._recipe, dtype, device)
        with closing(teacher):
            teacher_model = FrozenModel(teacher_hidden_states(teacher), self.network.load_head(dtype, device))
            students = {"student": trained, "untrained_student": untrained}
            report = with_fitting_batch(
                lambda tokens: compare(teacher_model, students, rows, indices, tokens, self._source.pad_id),
                evaluation.batch_tokens,
                "evaluation.batch_tokens",
                # A longer row is a batch of its own.
                smallest=max(rows.lengths[index] for index in indices),
            )
        return report | {
            "improvement": report["untrained_student_perplexity"] / report["student_perplexity"],
            **size_figures(self._student.spec.num_parameters, self.network.num_parameters(), "kl_divergence"),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "teacher_dtype": str(dtype).removeprefix("torch."),
        }

    def missed_gate(self, report: Mapping[str, Any]) -> str | None:
        gate, reached = self._recipe.evaluation.min_improvement, report["improvement"]
        if gate is None or reached >= gate:
            return None
        return (
            f"evaluation.min_improvement is {gate:g} and the student's perplexity is {reached:.2f} times lower than "
            "before training"
        )

    def sample(self, run_dir: Path, prompts: Sequence[str], seed: int, device: torch.device, output: Path) -> None:
        dtype = teacher_dtype(self._recipe.teacher.dtype, device)
        prompt_ids = self._prompts.tokenised(prompts)
        student = self._read_student(run_dir, device)
        teacher = open_alone(self.network, self._recipe, dtype, device)
        with closing(teacher):
            teacher_model = FrozenModel(teacher_hidden_states(teacher), self.network.load_head(dtype, device))
            texts = {
                "teacher": self._continue(teacher_model, prompt_ids),
                "student": self._continue(student, prompt_ids),
            }
        write_texts(output, self.files.tokenizer, prompt_ids, texts)

    def _with_projections(self, model: Any) -> LanguageStudent:
        """The module that is trained: `model` with the recipe's objective and projections."""
        features = self._task.losses.features
        return self._trained_module(model, self._objective, features.student_blocks if features.weight else ())

    def _trained_module(self, model: Any, objective: Objective, feature_blocks: Sequence[int]) -> LanguageStudent:
        spec = self._student.spec
        widths = spec.hidden_size, self.files.spec.hidden_size
        logit_options = spec.logit_change, self.network.ids
        return LanguageStudent(
            model, objective, spec.block_prefix, feature_blocks, widths, self._recipe.seed, *logit_options
        )

    def _continue(self, reader: FrozenModel, prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """The token ids that `reader` generates after each prompt."""
        count, pad_id = self._recipe.evaluation.max_new_tokens, self._source.pad_id
        if reader.generate is not None:
            return reader.generate(prompt_ids, count, pad_id)
        return generate_greedily(reader.hidden_of, reader.head, prompt_ids, count, pad_id)

    def _read_student(self, run_dir: Path, device: torch.device) -> FrozenModel:
        """The exported student of a run, in float32 on `device`."""
        logit_options = self._student.spec.logit_change, self.network.ids
        return read_exported(run_dir, self._task.trust_remote_code, device, *logit_options)

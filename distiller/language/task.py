"""Task `causal_lm`: a language model distilled into a smaller one, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from distiller.language.cache.accuracy import compare_forms, table
from distiller.language.cache.forms import HiddenForm, StoredForm, TokenForm, target_of
from distiller.language.cache.sparse_records import SparseForm
from distiller.language.checks import (
    check_continuations,
    check_feature_blocks,
    check_lengths,
    objective_of,
    tokenised_prompts,
)
from distiller.language.counted import CountedBatch
from distiller.language.data.batch import TokenSample
from distiller.language.data.corpus import documents_of, open_corpus
from distiller.language.data.packing import TextData
from distiller.language.data.source import EVALUATE_OTHERS, LanguageSource
from distiller.language.evaluation import Reader, compare
from distiller.language.exporting import export_student, read_exported, reader_of
from distiller.language.generation import continue_greedily, teachers_hidden, write_texts
from distiller.language.loss.chunked_loss import HiddenTarget, Target
from distiller.language.loss.token_losses import Objective
from distiller.language.model.behaviour_probe import check_behaviour
from distiller.language.model.files import LanguageFiles, find_model
from distiller.language.model.logits import Head, TokenIds
from distiller.language.model.vocabulary import check_same_tokens, other_reading, vocabulary_notices
from distiller.language.network import FEATURES, HIDDEN, LanguageNetwork
from distiller.language.student import StudentModel, enable_checkpointing
from distiller.language.student_module import LanguageStudent, LessonSums, LossInputs
from distiller.storage.stages import Stage
from distiller.tasks.base import LossSum
from distiller.tasks.interfaces import Cacheable, Checkable, Evaluable, ReplicatesHead, Samplable, Staged
from distiller.tasks.student_module import TrainedStudent
from distiller.teachers.base import Outputs, Request, Teacher
from distiller.teachers.factory import open_alone

PROMPT_TOKENS = 24
"""Of a held-out document, what is given to be continued."""


@final
class CausalLMTask(Cacheable[CountedBatch, LanguageNetwork], Checkable, Staged, ReplicatesHead, Evaluable, Samplable):
    """See `distiller.tasks.base.Task`; the loss is a mean over all learnt tokens of an update."""

    sample_suffixes = (".txt",)

    def __init__(self, recipe: LanguageRecipe) -> None:
        self._recipe, self._task = recipe, recipe.task
        trusts_code, teacher = recipe.task.trust_remote_code, recipe.teacher
        self._objective = objective_of(recipe.task.losses)
        stages_dir = recipe.stages_dir
        self.files = find_model("teacher", teacher.path, teacher.revision, teacher.subfolder, stages_dir, trusts_code)
        if self.files.tokenizer is None:
            raise UserError(f"{self.files.origin}: has no tokenizer beside the model; copy the teacher's files there")
        self._student = StudentModel(recipe.student, self.files, stages_dir, trusts_code, recipe.seed)
        self.network = LanguageNetwork(self.files, self._student.anatomy.vocabulary)
        if self._student.files is not None:
            check_same_tokens(self.files, self._student.files)
        check_feature_blocks(recipe.task.losses.features, self.files.anatomy, self._student.anatomy)
        check_lengths(recipe.data, self.files.anatomy, self._student.anatomy)
        check_behaviour(self.files.anatomy, self.files.origin, recipe.data.packing)
        if not recipe.student.from_teacher:
            check_behaviour(self._student.anatomy, self._student.origin, recipe.data.packing)
        self._shared = min(self.files.anatomy.vocabulary, self._student.anatomy.vocabulary)
        self._source = LanguageSource(recipe, self.files.root, trusts_code, self._shared)
        self._own, self._other_reading = self._compare_readings()
        self._known = self.network.ids
        if self._own is not None:
            self._known = TokenIds.of(self._own.tokenizer, below=self._student.anatomy.vocabulary)
        self.num_samples, self.data_digest = self._source.num_samples, self._source.data_digest
        self._beginnings()
        features = recipe.task.losses.features
        self._feature_names = tuple(f"{FEATURES}{number}" for number in features.teacher_blocks if features.weight)
        self._form = self._stored_form(recipe.cache.form)
        self._head: Head | None = None
        self._dtype = torch.float32

    def _compare_readings(self) -> tuple[LanguageFiles | None, str | None]:
        """The student's files, where its own tokenizer reads as the teacher's and is exported; and how it does not."""
        own, data = self._student.files, self._recipe.data
        if own is None or own.tokenizer is None:
            return None, None
        documents = documents_of(open_corpus(data), data.max_samples)
        difference = other_reading(self.files, own, documents, self._recipe.task.trust_remote_code)
        return (own if difference is None else None), difference

    @property
    def needs_live_teacher(self) -> bool:
        losses = self._task.losses
        return losses.alpha > 0 or losses.features.weight > 0

    def with_defaults(self, recipe: LanguageRecipe) -> LanguageRecipe:
        return recipe

    def notices(self) -> list[str]:
        sizes = self.files.anatomy.vocabulary, self._student.anatomy.vocabulary
        found = vocabulary_notices(self.files.tokenizer, *sizes, self.network.ids)
        if self._other_reading is not None:
            found.append(
                f"{self._student.origin}: its tokenizer reads the data otherwise ({self._other_reading}); the student "
                "learns the teacher's tokens and is exported with the teacher's tokenizer"
            )
        if self._student.dropout:
            keys = ", ".join(self._student.dropout)
            found.append(f"the student trains without dropout ({keys}), whose masks no two engines share")
        return [*found, *self._source.notices()]

    def check_samples(self) -> None:
        return None

    def prepare_stages(self, ranks: Ranks, dtype: torch.dtype) -> bool:
        self._dtype = dtype
        self._source.prepare(ranks)
        return False

    def missing_stage(self, dtype: torch.dtype) -> None:
        # Wherever they are made, tokens are the same.
        del dtype

    def kept_stages(self, dtype: torch.dtype) -> list[Stage]:
        del dtype
        return [self._source.stage]

    def load_data(self, ranks: Ranks, teacher: Teacher | None) -> TextData:
        if self._reads_head:
            self._head = self.network.load_head(self._dtype, ranks.device)
        return self._source.load()

    def student_skeleton(self) -> LanguageStudent:
        with torch.device("meta"):
            return self._with_projections(self._student.skeleton())

    def replicated_head_bytes(self, dtype: torch.dtype) -> int:
        return self.network.head_bytes(dtype) if self._reads_head else 0

    @property
    def _reads_head(self) -> bool:
        """Whether this run makes the teacher's logits: not where a cache holds distributions."""
        is_cached = self._recipe.teacher.placement == "cached" and self.needs_live_teacher
        return not is_cached or self._form.needs_head

    @property
    def block_classes(self) -> tuple[str, ...]:
        return (self._student.anatomy.block_class,)

    def build_student(self) -> LanguageStudent:
        # The library loads models in eval mode, in which it checkpoints no activations.
        return self._with_projections(self._student.build(self._known)).train()

    def enable_gradient_checkpointing(self, trained: TrainedStudent) -> None:
        enable_checkpointing(trained.model)

    def collate(self, samples: Sequence[TokenSample]) -> CountedBatch:
        return CountedBatch.of(samples, self._source.pad_id)

    def to_device(self, batch: CountedBatch, device: torch.device) -> CountedBatch:
        return replace(batch, batch=batch.batch.map(lambda tensor: tensor.to(device, non_blocking=True)))

    def request(self, batch: CountedBatch) -> Request:
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
        # Tokens and rows are in the data's digest.
        config = json.loads(self.files.anatomy.config.to_json_string(use_diff=False))
        if self._task.trust_remote_code:
            # Read with its own code, a config holds the path that it was read from.
            config["_name_or_path"] = ""
        inputs = {"config": {key: value for key, value in config.items() if key != "transformers_version"}}
        # Caches without this were made when all of these had another dtype than the library gives them.
        others = self.files.anatomy.other_dtypes(dtype)
        return inputs | ({"other_dtypes": others} if others else {})

    def cached_form(self) -> dict[str, Any]:
        return self._form.describe()

    def store(self, batch: CountedBatch, outputs: Outputs) -> list[Outputs]:
        assert self._head is not None, "load_data loads it"
        return self._form.store(batch, outputs, self._head)

    def restore(self, batch: CountedBatch, samples: Sequence[Outputs]) -> Outputs:
        return self._form.restore(batch, samples, self._feature_names)

    def compare_forms(self, batches: Sequence[CountedBatch], outputs: Sequence[Outputs]) -> str:
        assert self._head is not None, "load_data loads it"
        objective, forms = replace(self._objective, weight=1.0), {}
        kinds = ["hidden", "topk", "sampled"] + ["topk+sampled"] * self._recipe.cache.fits_both
        for kind in kinds:
            form = self._stored_form(kind)
            settings = [f"{key} {value}" for key, value in form.describe().items() if key in ("k", "samples")]
            forms[" ".join([kind, *settings])] = form
        if not objective.divergence.can_be_sampled:
            forms = {name: form for name, form in forms.items() if "sampled" not in name}
        student = self._with_projections(self._student.build(self._known), objective).to(self._head.weight.device)
        return table(compare_forms(forms, student, self._head, objective, batches, outputs))

    def sample_ids(self, batch: CountedBatch) -> tuple[int, ...]:
        return batch.batch.sample_ids

    def count(self, batch: CountedBatch) -> int:
        return batch.num_counted

    def tokens(self, batch: CountedBatch) -> int:
        return sum(batch.batch.lengths)

    def student_inputs(
        self, batch: CountedBatch, teacher_outputs: Outputs | None, dtype: torch.dtype
    ) -> Mapping[str, Any]:
        del dtype
        rows = batch.batch
        if teacher_outputs is None:
            assert self._head is not None, "load_data loads it"
            # With alpha 0 nobody asks the teacher; what it would say weighs nothing.
            shape = rows.input_ids.numel(), self._head.weight.shape[1]
            target: Target = HiddenTarget.of(self._head.weight.new_zeros(shape), self._head)
        else:
            target = target_of(teacher_outputs, self._head, self.network.ids.size)
        features = tuple(teacher_outputs[name].flatten(0, 1) for name in self._feature_names) if teacher_outputs else ()
        labels = rows.labels.flatten()
        return {"lesson": LossInputs(rows.input_ids, rows.position_ids, labels, batch.counts, target, features)}

    def loss(self, student_outputs: LessonSums, teacher_outputs: Outputs | None, batch: CountedBatch) -> LossSum:
        losses, sums = self._task.losses, LessonSums(*student_outputs)
        terms = {"cross_entropy": sums.cross_entropy}
        if teacher_outputs is not None:
            terms["divergence"] = sums.divergence
        if self.network.ids.num_unused(self._student.anatomy.vocabulary):
            terms["unused_ids"] = sums.unused_ids
        total = sums.loss
        if losses.features.weight:
            terms["features"] = sums.features
            total = total + losses.features.weight * sums.features
        return LossSum(total, {name: term.detach() for name, term in terms.items()})

    def export(self, state: Mapping[str, Tensor], folder: Path) -> None:
        export_student(self._student, (self._own or self.files).root, self._known, state, folder)

    def write_samples(self, run_dir: Path, teacher: Teacher | None, accelerator: Accelerator) -> None:
        beginnings = self._beginnings()
        if not beginnings:
            return
        # Every rank asks the teacher, since some placements communicate; rank 0 runs the student.
        texts = {}
        if teacher is not None:
            assert self._head is not None, "load_data loads it"
            texts["teacher"] = self._continue(Reader(teachers_hidden(teacher), self._head), beginnings)
        if accelerator.is_main_process:
            texts["student"] = self._continue(self._read_student(run_dir, accelerator.device), beginnings)
            write_texts(run_dir / "samples.txt", self.files.tokenizer, beginnings, texts)

    def evaluate(self, run_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        rows, evaluation = self._source.held_out(), self._recipe.evaluation
        numbers = range(min(len(rows), evaluation.max_rows or len(rows)))
        if not numbers:
            raise UserError(
                f"data.held_out {self._recipe.data.held_out:g} leaves nothing to evaluate on; measure on others "
                f"({EVALUATE_OTHERS}), or train with a share above 0 held out"
            )
        trained = self._read_student(run_dir, device)
        of_logits = self._student.anatomy.logit_change, self.network.ids
        before = reader_of(self._student.build(self._known), device, *of_logits)
        teacher = open_alone(self.network, self._recipe.teacher, dtype, device)
        reader = Reader(teachers_hidden(teacher), self.network.load_head(dtype, device))
        students = {"student": trained, "untrained_student": before}
        report = compare(reader, students, rows, numbers, evaluation.batch_tokens, self._source.pad_id)
        teacher.close()
        ours, theirs = self._student.anatomy.num_parameters, self.network.num_parameters()
        return report | {
            "improvement": report["untrained_student_perplexity"] / report["student_perplexity"],
            "student_params": ours,
            "teacher_params": theirs,
            "size_ratio": theirs / ours,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "teacher_dtype": str(dtype).removeprefix("torch."),
        }

    def missed_gate(self, report: Mapping[str, Any]) -> str | None:
        gate, reached = self._recipe.evaluation.min_improvement, report["improvement"]
        if gate is None or reached >= gate:
            return None
        return f"the student's perplexity is {reached:.2f} times lower than before training, below the gate of {gate:g}"

    def sample(self, run_dir: Path, prompts: Sequence[str], seed: int, device: torch.device, output: Path) -> None:
        dtype = teacher_dtype(self._recipe.teacher.dtype, device)
        beginnings = self._tokenised(prompts)
        student = self._read_student(run_dir, device)
        teacher = open_alone(self.network, self._recipe.teacher, dtype, device)
        reader = Reader(teachers_hidden(teacher), self.network.load_head(dtype, device))
        texts = {"teacher": self._continue(reader, beginnings), "student": self._continue(student, beginnings)}
        teacher.close()
        write_texts(output, self.files.tokenizer, beginnings, texts)

    def _stored_form(self, kind: str) -> StoredForm:
        cache = self._recipe.cache
        if kind == "hidden":
            return HiddenForm()
        temperature = self._task.losses.divergence.temperature
        return TokenForm(
            SparseForm(kind, cache.k, cache.samples, temperature, self.network.ids.size),
            self._recipe.seed,
            self.network.ids.absent,
        )

    def _with_projections(self, model: Any, objective: Objective | None = None) -> LanguageStudent:
        features, ours = self._task.losses.features, self._student.anatomy
        blocks = features.student_blocks if features.weight else ()
        widths = ours.hidden_size, self.files.anatomy.hidden_size
        of_logits = ours.logit_change, self.network.ids
        return LanguageStudent(
            model, objective or self._objective, ours.block_prefix, blocks, widths, self._recipe.seed, *of_logits
        )

    def _beginnings(self) -> list[list[int]]:
        """What is continued at the end. Raises UserError for what cannot be."""
        evaluation = self._recipe.evaluation
        if evaluation.sample_prompts:
            return self._tokenised(evaluation.sample_prompts)
        rows = self._source.held_out()
        found = []
        for number in range(min(len(rows), evaluation.num_samples)):
            tokens = rows[0, number].input_ids.tolist()
            found.append(tokens[: max(min(PROMPT_TOKENS, len(tokens) // 2), 1)])
        return self._readable(found)

    def _tokenised(self, prompts: Sequence[str]) -> list[list[int]]:
        return self._readable(tokenised_prompts(prompts, self.files.tokenizer, self._shared))

    def _readable(self, beginnings: list[list[int]]) -> list[list[int]]:
        count = self._recipe.evaluation.max_new_tokens
        check_continuations(beginnings, count, self.files.anatomy, self._student.anatomy)
        return beginnings

    def _continue(self, reader: Reader, beginnings: Sequence[Sequence[int]]) -> list[list[int]]:
        count, pad_id = self._recipe.evaluation.max_new_tokens, self._source.pad_id
        return continue_greedily(reader.hidden_of, reader.head, beginnings, count, pad_id)

    def _read_student(self, run_dir: Path, device: torch.device) -> Reader:
        of_logits = self._student.anatomy.logit_change, self.network.ids
        return read_exported(run_dir, self._task.trust_remote_code, device, *of_logits)

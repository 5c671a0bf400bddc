"""Task `diffusion`: the networks of a text-to-image or text-to-video pipeline, distilled into a smaller one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights
from torch import Tensor

from distiller.config.diffusion import DiffusionRecipe, filled
from distiller.data.pictures import WRITTEN_SUFFIXES
from distiller.diffusion.batch import DiffusionBatch, collate
from distiller.diffusion.checks import (
    check_feature_blocks,
    check_guidance,
    check_sizes,
    guidance_notes,
    size_notes,
)
from distiller.diffusion.defaults import with_pipeline_defaults
from distiller.diffusion.drawing_measures import check_measures, open_measures
from distiller.diffusion.evaluation import Comparison, compare, embed_prompts, figure_names, main_figure
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.judges import check_judge, find_judge, judge_notices
from distiller.diffusion.long_texts import long_text_notices
from distiller.diffusion.network import FEATURES, PREDICTION, UNCONDITIONAL, DiffusionNetwork, inputs_of
from distiller.diffusion.noising import DiffusionSample, NoisedData
from distiller.diffusion.objective import distance_of
from distiller.diffusion.samples import draw_student, draw_teacher, load_student, write_grid
from distiller.diffusion.sampling import guide
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.sources import Source
from distiller.diffusion.student import DistilledStudent, build_student, student_config
from distiller.diffusion.text import embed
from distiller.distributed.devices import teacher_dtype
from distiller.distributed.process import is_main_process
from distiller.distributed.ranks import Ranks
from distiller.storage.stages import Stage
from distiller.tasks.base import LossSum
from distiller.tasks.cost_figures import size_figures
from distiller.tasks.feature_matching import feature_loss
from distiller.tasks.fitting_batch import with_fitting_batch
from distiller.tasks.interfaces import CacheableWhole, Checkable, Evaluable, HoldsOut, Plannable, Samplable, Staged
from distiller.tasks.losses import mean_squared_error
from distiller.tasks.student_module import TrainedStudent, model_state
from distiller.teachers.base import Outputs, Request, Teacher
from distiller.teachers.factory import open_alone

MAX_PLANNED_TEXTS = 1000
"""Texts of which the longest stands for all in a plan."""

MAX_SAMPLES = 10
"""Most samples that `write_samples` shows."""


class DiffusionTask(
    CacheableWhole[DiffusionBatch, DiffusionNetwork], Checkable, Staged, HoldsOut, Evaluable, Samplable, Plannable
):
    """Implements `distiller.tasks.base.Task` for diffusers pipelines.

    The value of a sample in each loss term is a mean over the sample's elements, in float32. `loss` returns sums over
    samples, and the loop divides by the number of samples of the whole update.
    """

    sample_suffixes = WRITTEN_SUFFIXES

    def __init__(self, recipe: DiffusionRecipe) -> None:
        """Finds the pipeline and the data and checks that recipe, teacher and student fit together.

        Reads JSON files and headers (a hub's JSON files are downloaded), and no weights. Raises UserError.
        """
        self.family = find_pipeline(recipe.teacher)
        recipe, self._defaults = with_pipeline_defaults(recipe, self.family)
        self._recipe, self._task = recipe, recipe.task
        self.family.check_task(self._task)
        self._length = self.family.text_length(self._task)
        self.network = DiffusionNetwork(self.family, self._length)
        self._latent_shape = self.family.latent_shape(*self._task.size)
        self._student_config = student_config(recipe.student, self.family)
        self._process = self.family.noise_process(self._latent_shape)
        self._process.check_task(self._task)
        check_sizes(self._task, self.family, self._student_config, self._latent_shape)
        check_feature_blocks(self._task, self.family, self._student_config, self._latent_shape)
        check_guidance(recipe, self.family)
        check_judge(recipe)
        self._source = Source(recipe, self.family, self.network, self._process, self._latent_shape)
        self.num_samples = self._source.num_samples
        self.data_digest = self._source.data_digest
        self._data: NoisedData | None = None
        losses = self._task.losses
        self._distance, features = distance_of(losses.prediction), losses.features
        self._feature_names = tuple(f"{FEATURES}{block}" for block in features.teacher_blocks if features.weight)

    @property
    def needs_live_teacher(self) -> bool:
        losses = self._task.losses
        return self._task.targets == "live" and (losses.prediction.weight > 0 or losses.features.weight > 0)

    def with_defaults(self, recipe: DiffusionRecipe) -> DiffusionRecipe:
        return with_pipeline_defaults(recipe, self.family)[0]

    def notices(self) -> list[str]:
        # Only rank 0 prints notices, and tokenising all texts takes time.
        long_texts = self._long_texts() if is_main_process() else []
        sizes, guidance = size_notes(self._recipe, self.family), guidance_notes(self._recipe)
        judge = judge_notices(self._recipe, self._source.prompts)
        return [*self._defaults, *sizes, *guidance, *judge, *self._source.notices, *long_texts]

    def check_samples(self) -> str | None:
        return self._source.check_samples()

    def prepare_stages(self, ranks: Ranks, dtype: torch.dtype) -> bool:
        return self._source.prepare(ranks, dtype)

    def missing_stage(self, dtype: torch.dtype) -> Path | None:
        return self._source.missing_stage(dtype)

    def kept_stages(self, dtype: torch.dtype) -> list[Stage]:
        return self._source.kept_stages(dtype)

    def load_data(self, ranks: Ranks, teacher: Teacher | None) -> NoisedData:
        self._data = self._source.load(ranks, teacher)
        return self._data

    @property
    def num_held_out(self) -> int:
        return self._source.num_held_out

    def held_out_sample(self, draw: int, index: int) -> DiffusionSample:
        assert self._data is not None, "load_data opens it"
        return self._data[draw, self.num_samples + index]

    def student_skeleton(self) -> DistilledStudent:
        with init_empty_weights():
            model = self.family.architecture.model_class.from_config(self._student_config)
            return self._with_projections(model)

    @property
    def block_classes(self) -> tuple[str, ...]:
        model = self.student_skeleton().model
        names = self.family.architecture.block_names(self._student_config)
        return tuple(sorted({type(model.get_submodule(name)).__name__ for name in names}))

    def build_student(self) -> DistilledStudent:
        model = build_student(self._recipe.student, self._student_config, self.family, self._recipe.seed)
        self.family.architecture.prepare(model, self._length)
        return self._with_projections(model)

    def enable_gradient_checkpointing(self, trained: TrainedStudent) -> None:
        trained.model.enable_gradient_checkpointing()

    def collate(self, samples: Sequence[DiffusionSample]) -> DiffusionBatch:
        return collate(samples, self._task, self.family, self.network)

    def example(self, batch_size: int) -> DiffusionBatch:
        texts = [*self._source.prompts[:MAX_PLANNED_TEXTS], self._task.guidance.negative_prompt]
        condition, latents = self.family.longest_condition(texts, self._length), torch.zeros(self._latent_shape)
        scale = self._task.guidance.scale
        sample = DiffusionSample(
            sample_id=0,
            share=0.5,
            # One module of two computes all of them: where it is, the most memory is needed.
            timestep=float(self.family.files.num_train_timesteps - 1),
            noisy=latents,
            positive=condition,
            negative=condition,
            scale=max(scale) if isinstance(scale, tuple) else scale,
            data_target=latents if self._task.losses.true_data.weight else None,
            stored=latents if self._task.targets == "stored" else None,
        )
        return self.collate([sample] * batch_size)

    def stage_passes(self) -> tuple[int, int]:
        size = filled(self._recipe.rollout.batch_size)
        if self._recipe.data.kind != "prompts" or not self._recipe.rollout.enabled:
            return 0, size
        passes_of_step = 2 if max(self._recipe.sampling.scales) > 1 else 1
        num_drawn = self.num_samples + self.num_held_out
        return num_drawn * self._recipe.sampling.num_steps * passes_of_step, size

    def to_device(self, batch: DiffusionBatch, device: torch.device) -> DiffusionBatch:
        return batch.map(lambda tensor: tensor.to(device, non_blocking=True))

    def request(self, batch: DiffusionBatch) -> Request:
        inputs = inputs_of(batch.noisy, batch.timesteps, batch.positive, batch.negative)
        return Request(batch.sample_ids, inputs, self.wanted, batch.modules)

    @property
    def has_draws(self) -> bool:
        return True

    @property
    def wanted(self) -> tuple[str, ...]:
        unconditional = () if self._task.guidance.scale is None else (UNCONDITIONAL,)
        return (PREDICTION, *self._feature_names, *unconditional)

    def data_settings(self) -> dict[str, Any]:
        return {}

    def cached_inputs(self, dtype: torch.dtype) -> dict[str, Any]:
        task = self._task
        option_names = {"height", "width", "num_frames", "guidance", "condition_dropout"}
        scheduler = {**self._process.key(), "boundary": self.family.files.boundary_timestep}
        configs = self.family.files.configs
        timesteps = task.timesteps.model_dump(mode="json", exclude={"weighting"})
        options = task.model_dump(mode="json", include=option_names)
        options |= {"max_sequence_length": self._length, "timesteps": timesteps}
        return {**options, "scheduler": scheduler, "configs": configs, **self._source.key(dtype)}

    def sample_ids(self, batch: DiffusionBatch) -> tuple[int, ...]:
        return batch.sample_ids

    def count(self, batch: DiffusionBatch) -> int:
        return len(batch.sample_ids)

    def tokens(self, batch: DiffusionBatch) -> int:
        return len(batch.sample_ids) * self.family.architecture.num_tokens(self._student_config, self._latent_shape)

    def student_inputs(
        self, batch: DiffusionBatch, teacher_outputs: Outputs | None, dtype: torch.dtype
    ) -> Mapping[str, Any]:
        del teacher_outputs
        conditions = {name: value.to(dtype) for name, value in batch.positive.items()}
        return {"latents": batch.noisy.to(dtype), "timesteps": batch.timesteps, **conditions}

    def loss(
        self, student_outputs: tuple[Tensor, list[Tensor]], teacher_outputs: Outputs | None, batch: DiffusionBatch
    ) -> LossSum:
        prediction, features = student_outputs
        losses, terms = self._task.losses, {}
        # The prediction enters the loss even with weight 0: DDP waits for a gradient of every parameter.
        total = 0.0 * prediction.float().sum()
        if losses.prediction.weight:
            target = self._target(teacher_outputs, batch)
            per_sample = self._distance(prediction, target, losses.prediction)
            terms["prediction"] = (per_sample * batch.weights).sum()
            total = total + losses.prediction.weight * terms["prediction"]
        if losses.features.weight:
            assert teacher_outputs is not None
            terms["features"] = feature_loss(features, teacher_outputs, self._feature_names)
            total = total + losses.features.weight * terms["features"]
        if losses.true_data.weight:
            assert batch.data_target is not None
            terms["true_data"] = mean_squared_error(prediction, batch.data_target).sum()
            total = total + losses.true_data.weight * terms["true_data"]
        return LossSum(total, {name: term.detach() for name, term in terms.items()})

    def export(self, state: Mapping[str, Tensor], folder: Path) -> None:
        model = self.family.architecture.model_class.from_config(self._student_config)
        model.load_state_dict(model_state(state), strict=True)
        model.save_pretrained(folder, safe_serialization=True)

    def write_samples(self, run_dir: Path, teacher: Teacher | None, accelerator: Accelerator) -> None:
        source, device = self._source, accelerator.device
        sample_ids = range(min(MAX_SAMPLES, self.num_samples))
        prompts = [source.prompt_of(sample_id) for sample_id in sample_ids]
        if teacher is not None and self._recipe.evaluation.sample_prompts:
            prompts = list(self._recipe.evaluation.sample_prompts[:MAX_SAMPLES])
            sample_ids = range(len(prompts))
        sampling_inputs = source.sampling_inputs(prompts, sample_ids, device)
        # Every rank runs the teacher, since some placements communicate in `predict`; only rank 0 samples the student.
        if teacher is not None:
            rows = {"teacher": draw_teacher(teacher, self.network, self._process, self._recipe, sampling_inputs)}
        else:
            known = source.known_latents(sample_ids)
            rows = {} if known is None else {"teacher" if self._recipe.data.kind == "prompts" else "data": known}
        if accelerator.is_main_process:
            rows["student"] = self._draw_student(run_dir, sampling_inputs, device)
            write_grid(rows, prompts, self.family.load_vae(device), run_dir / "samples.png")

    def figures(self) -> tuple[str, ...]:
        check_measures(self._recipe)
        return figure_names(self._recipe, self._process)

    def evaluate(self, run_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        check_measures(self._recipe)
        count, labels, judge = self._recipe.evaluation.num_samples, None, None
        prompts = [self._source.prompts[i % len(self._source.prompts)] for i in range(count)]
        if (name := self._recipe.evaluation.judge) != "none":
            judge_class = find_judge(name)
            prompts, labels = judge_class.prompts(count, self._recipe.seed)
            judge = judge_class()
        measures = open_measures(self._recipe, prompts, judge, labels, device)
        student = load_student(self.family.architecture, run_dir, self._length, device)
        embedded = embed_prompts(self.family, self._recipe, prompts, dtype, device)
        teacher = open_alone(self.network, self._recipe, dtype, device)
        comparison = Comparison(self._recipe, self.family, self._process, self.network, teacher, student)
        report = with_fitting_batch(
            lambda size: compare(comparison, embedded.split(size), measures, dtype, device),
            filled(self._recipe.evaluation.batch_size),
            "evaluation.batch_size",
        )
        teacher.close()
        num_student, num_teacher = sum(p.numel() for p in student.parameters()), self.network.num_parameters()
        return report | size_figures(num_student, num_teacher, main_figure(self._recipe, self._process))

    def missed_gate(self, report: Mapping[str, Any]) -> str | None:
        gate, reached = self._recipe.evaluation.min_recognised, report.get("student_recognised")
        if gate is None or reached is None or reached >= gate:
            return None
        return f"evaluation.min_recognised is {gate:.1%} and the student is recognised in {reached:.1%} of its drawings"

    def sample(self, run_dir: Path, prompts: Sequence[str], seed: int, device: torch.device, output: Path) -> None:
        for notice in long_text_notices(self.family, self._task, {"--prompts": prompts}):
            print(f"note: {notice}")
        dtype = teacher_dtype(self._recipe.teacher.dtype, device)
        encoder = self.family.load_text_encoder(dtype, device)
        positive = embed(self.family, encoder, prompts, self._length)
        negative = embed(self.family, encoder, [self._task.guidance.negative_prompt], self._length)
        ids = range(len(prompts))
        sampling_inputs = SamplingInputs.make(seed, "sample", ids, self._latent_shape, positive, negative, device)
        # Free the text encoder first: where the teacher is placed may depend on free memory.
        del encoder
        student_latents = self._draw_student(run_dir, sampling_inputs, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        teacher = open_alone(self.network, self._recipe, dtype, device)
        teacher_latents = draw_teacher(teacher, self.network, self._process, self._recipe, sampling_inputs)
        teacher.close()
        write_grid(
            {"teacher": teacher_latents, "student": student_latents}, prompts, self.family.load_vae(device), output
        )

    def _long_texts(self) -> list[str]:
        texts = "captions" if self._recipe.data.kind == "images" else "prompts"
        groups = {
            f"data.path ({texts})": self._source.prompts,
            "task.guidance.negative_prompt": [self._task.guidance.negative_prompt],
            "evaluation.sample_prompts": self._recipe.evaluation.sample_prompts,
        }
        return long_text_notices(self.family, self._task, groups)

    def _draw_student(self, run_dir: Path, sampling_inputs: SamplingInputs, device: torch.device) -> Tensor:
        """Latents [B, C, F, H, W] float32 that the exported student of a run generates."""
        student = load_student(self.family.architecture, run_dir, self._length, device)
        return draw_student(self.network, student, self._process, self._recipe, sampling_inputs)

    def _with_projections(self, model: Any) -> DistilledStudent:
        """The model with one projection for each pair of matched blocks; without projections if features weigh 0."""
        architecture, features, shape = self.family.architecture, self._task.losses.features, self._latent_shape
        names, blocks, widths = architecture.block_names(self._student_config), [], []
        if features.weight:
            for student_block, teacher_block in zip(features.student_blocks, features.teacher_blocks, strict=True):
                blocks.append(names[student_block])
                configs = ((self._student_config, student_block), (self.family.teacher_config, teacher_block))
                student_width, teacher_width = (
                    architecture.feature_shape(config, block, shape)[1] for config, block in configs
                )
                widths.append((student_width, teacher_width))
        return DistilledStudent(architecture, model, blocks, widths, self._recipe.seed)

    def _target(self, teacher_outputs: Outputs | None, batch: DiffusionBatch) -> Tensor:
        """What the student is trained to predict [B, C, F, H, W]: the rollout's stored prediction, else the teacher's.

        With guidance it is the guided prediction, in float32.
        """
        if batch.stored is not None:
            return batch.stored
        assert teacher_outputs is not None
        if batch.scales is None:
            return teacher_outputs[PREDICTION]
        conditional, unconditional = teacher_outputs[PREDICTION].float(), teacher_outputs[UNCONDITIONAL].float()
        return guide(conditional, unconditional, batch.scales.view(-1, 1, 1, 1, 1))

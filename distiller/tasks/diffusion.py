"""Task `diffusion`: a Wan pipeline's transformer(s) distilled into a smaller Wan transformer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from distiller import draws
from distiller.data.images import SUFFIXES
from distiller.devices import teacher_dtype
from distiller.diffusion_config import DiffusionRecipe
from distiller.digits import DigitJudge, judge_prompts
from distiller.errors import UserError
from distiller.losses import huber, mean_squared_error
from distiller.stages import digest_of
from distiller.tasks.base import LossSum, Task
from distiller.teachers.base import Outputs, Request, Teacher
from distiller.teachers.opening import open_alone
from distiller.wan.batch import DiffusionBatch, collate
from distiller.wan.checks import check_feature_blocks, check_guidance, check_judge, check_patches
from distiller.wan.drawing import guide, load_scheduler
from distiller.wan.evaluation import compare
from distiller.wan.network import FEATURES, PREDICTION, UNCONDITIONAL, WanNetwork
from distiller.wan.noising import DiffusionSample, NoisedData
from distiller.wan.pipeline import find_pipeline
from distiller.wan.samples import Conditions, draw_student, draw_teacher, load_student, write_grid
from distiller.wan.short_text import install_short_text
from distiller.wan.sources import Source
from distiller.wan.student import DistilledStudent, build_student, student_config
from distiller.wan.text import embed, load_text_encoder
from distiller.wan.vae import Vae

MAX_SAMPLES = 10


class DiffusionTask(Task[DiffusionBatch, WanNetwork]):
    """See `distiller.tasks.base.Task`; the loss is a mean over samples of means over their elements."""

    sample_suffixes = (".png", *sorted(SUFFIXES - {".png"}))

    def __init__(self, recipe: DiffusionRecipe) -> None:
        self._recipe, self._task = recipe, recipe.task
        self.files = find_pipeline(recipe.teacher)
        self.network = WanNetwork(self.files, self._task.max_sequence_length)
        self._latent_shape = self.files.latent_shape(self._task.num_frames, self._task.height, self._task.width)
        self._student_config = student_config(recipe.student, self.files)
        load_scheduler(self.files)
        check_patches(self._task, self.files, self._student_config, self._latent_shape)
        check_feature_blocks(self._task, self.files, self._student_config)
        check_guidance(recipe, self.files)
        check_judge(recipe)
        self._source = Source(recipe, self.files, self.network, self._latent_shape)
        self.num_samples = self._source.num_samples
        self.data_digest = digest_of(self._source.prompts)
        self._feature_names = tuple(f"{FEATURES}{number}" for number in self._task.losses.features.teacher_blocks)

    @property
    def needs_live_teacher(self) -> bool:
        losses = self._task.losses
        return self._task.targets == "live" and (losses.prediction.weight > 0 or losses.features.weight > 0)

    def prepare_stages(self, accelerator: Accelerator, dtype: torch.dtype) -> bool:
        return self._source.prepare(accelerator, dtype)

    def missing_stage(self, dtype: torch.dtype) -> Path | None:
        return self._source.missing_stage(dtype)

    def run_stages(self, accelerator: Accelerator, teacher: Teacher | None) -> NoisedData:
        return self._source.load(accelerator, teacher)

    def num_trained_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.student_skeleton().parameters())

    def student_skeleton(self) -> DistilledStudent:
        with init_empty_weights():
            model = WanTransformer3DModel.from_config(self._student_config)
            return self._with_projections(model)

    @property
    def block_classes(self) -> tuple[str, ...]:
        return tuple(WanTransformer3DModel._no_split_modules or ())

    def build_student(self) -> DistilledStudent:
        model = build_student(self._recipe.student, self._student_config, self.files, self._recipe.seed)
        install_short_text(model, self._task.max_sequence_length)
        return self._with_projections(model)

    def student_parameters(self, trained: nn.Module) -> int:
        assert isinstance(trained, DistilledStudent)
        return sum(parameter.numel() for parameter in trained.model.parameters())

    def enable_gradient_checkpointing(self, trained: nn.Module) -> None:
        assert isinstance(trained, DistilledStudent)
        trained.model.enable_gradient_checkpointing()

    def collate(self, samples: Sequence[DiffusionSample]) -> DiffusionBatch:
        return collate(samples, self._task, self.network)

    def to_device(self, batch: DiffusionBatch, device: torch.device) -> DiffusionBatch:
        return batch.map(lambda tensor: tensor.to(device, non_blocking=True))

    def request(self, batch: DiffusionBatch) -> Request:
        inputs = {"latents": batch.noisy, "timesteps": batch.timesteps, "text": batch.text}
        if batch.negative_text is not None:
            inputs["negative_text"] = batch.negative_text
        return Request(batch.sample_ids, inputs, self.wanted, batch.modules)

    @property
    def has_draws(self) -> bool:
        return True

    @property
    def wanted(self) -> tuple[str, ...]:
        unconditional = () if self._task.guidance.scale is None else (UNCONDITIONAL,)
        return (PREDICTION, *self._feature_names, *unconditional)

    def cached_inputs(self, dtype: torch.dtype) -> dict[str, Any]:
        task = self._task
        read = {"height", "width", "num_frames", "guidance", "condition_dropout", "max_sequence_length"}
        scheduler = {"shift": self.files.scheduler_shift, "boundary": self.files.boundary_timestep}
        configs = self.files.transformer_configs
        timesteps = task.timesteps.model_dump(mode="json", exclude={"weighting"})
        options = task.model_dump(mode="json", include=read) | {"timesteps": timesteps}
        return {**options, "scheduler": scheduler, "configs": configs, **self._source.key(dtype)}

    def sample_ids(self, batch: DiffusionBatch) -> tuple[int, ...]:
        return batch.sample_ids

    def count(self, batch: DiffusionBatch) -> int:
        return len(batch.sample_ids)

    def tokens(self, batch: DiffusionBatch) -> int:
        patches = [
            size // patch for size, patch in zip(batch.noisy.shape[2:], self._student_config["patch_size"], strict=True)
        ]
        return len(batch.sample_ids) * torch.Size(patches).numel()

    def student_inputs(
        self, batch: DiffusionBatch, teacher_outputs: Outputs | None, dtype: torch.dtype
    ) -> Mapping[str, Any]:
        del teacher_outputs
        return {"latents": batch.noisy.to(dtype), "timesteps": batch.timesteps, "text": batch.text.to(dtype)}

    def loss(
        self, student_outputs: tuple[Tensor, list[Tensor]], teacher_outputs: Outputs | None, batch: DiffusionBatch
    ) -> LossSum:
        prediction, features = student_outputs
        losses, terms = self._task.losses, {}
        # Every output takes part, if with weight 0: DDP waits for the gradient of every parameter.
        total = 0.0 * prediction.float().sum()
        if losses.prediction.weight:
            target = self._target(teacher_outputs, batch)
            per_sample = (
                mean_squared_error(prediction, target)
                if losses.prediction.kind == "mse"
                else huber(prediction, target, losses.prediction.huber_delta)
            )
            terms["prediction"] = (per_sample * batch.weights).sum()
            total = total + losses.prediction.weight * terms["prediction"]
        if losses.features.weight:
            assert teacher_outputs is not None
            pairs = zip(features, self._feature_names, strict=True)
            terms["features"] = sum(  # type: ignore[assignment]
                mean_squared_error(ours, teacher_outputs[name]).sum() for ours, name in pairs
            ) / len(self._feature_names)
            total = total + losses.features.weight * terms["features"]
        if losses.true_data.weight:
            assert batch.velocity is not None
            terms["true_data"] = mean_squared_error(prediction, batch.velocity).sum()
            total = total + losses.true_data.weight * terms["true_data"]
        return LossSum(total, {name: term.detach() for name, term in terms.items()})

    def export(self, state: Mapping[str, Tensor], folder: Path) -> None:
        model = WanTransformer3DModel.from_config(self._student_config)
        ours = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
        model.load_state_dict(ours, strict=True)
        model.save_pretrained(folder, safe_serialization=True)
        for file in folder.iterdir():
            # safetensors creates its files for the owner only.
            os.chmod(file, 0o644)

    def write_samples(self, run_dir: Path, teacher: Teacher | None, accelerator: Accelerator) -> None:
        source, device = self._source, accelerator.device
        sample_ids = range(min(MAX_SAMPLES, self.num_samples))
        prompts = [source.prompt_of(sample_id) for sample_id in sample_ids]
        if teacher is not None and self._recipe.evaluation.sample_prompts:
            prompts = list(self._recipe.evaluation.sample_prompts[:MAX_SAMPLES])
            sample_ids = range(len(prompts))
        conditions = source.conditions(prompts, sample_ids, device)
        # Every rank asks the teacher, since some placements communicate; rank 0 draws the student.
        if teacher is not None:
            rows = {"teacher": draw_teacher(teacher, self.network, self.files, self._recipe, conditions)}
        else:
            known = source.known_latents(sample_ids)
            rows = {} if known is None else {"teacher" if self._recipe.data.kind == "prompts" else "data": known}
        if accelerator.is_main_process:
            student = load_student(run_dir, self._task.max_sequence_length, device)
            rows["student"] = draw_student(student, self.files, self._recipe, conditions)
            write_grid(rows, prompts, Vae(self.files, device), run_dir / "samples.png")

    def evaluate(self, run_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        count, labels, judge = self._recipe.evaluation.num_samples, None, None
        prompts = [self._source.prompts[i % len(self._source.prompts)] for i in range(count)]
        if self._recipe.evaluation.judge == "digits":
            prompts, labels = judge_prompts(-(-count // 10), self._recipe.seed)
            try:
                judge = DigitJudge().recognise
            except ImportError as error:
                raise UserError(
                    "evaluation.judge=digits needs scikit-learn; pip install 'distiller[demo]', or set it to none"
                ) from error
        student = load_student(run_dir, self._task.max_sequence_length, device)
        teacher = open_alone(self.network, self._recipe.teacher, dtype, device)
        report = compare(
            self._recipe, self.files, self.network, teacher, student, prompts, labels, judge, dtype, device
        )
        teacher.close()
        ours, theirs = sum(p.numel() for p in student.parameters()), self.network.num_parameters()
        return report | {"student_params": ours, "teacher_params": theirs, "size_ratio": theirs / ours}

    def missed_gate(self, report: Mapping[str, Any]) -> str | None:
        gate, reached = self._recipe.evaluation.min_recognised, report.get("student_recognised")
        if gate is None or reached is None or reached >= gate:
            return None
        return f"the student is recognised in {reached:.1%} of its drawings, below the gate of {gate:.1%}"

    def sample(self, run_dir: Path, prompts: Sequence[str], seed: int, device: torch.device, output: Path) -> None:
        student = load_student(run_dir, self._task.max_sequence_length, device)
        dtype = teacher_dtype(self._recipe.teacher.dtype, device)
        length, encoder = self._task.max_sequence_length, load_text_encoder(self.files, dtype, device)
        noise = [draws.noise(seed, 0, i, self._latent_shape, "sample") for i in range(len(prompts))]
        negative_text = embed(encoder, [self._task.guidance.negative_prompt], length)
        conditions = Conditions(torch.stack(noise).to(device), embed(encoder, prompts, length), negative_text)
        teacher = open_alone(self.network, self._recipe.teacher, dtype, device)
        theirs = draw_teacher(teacher, self.network, self.files, self._recipe, conditions)
        teacher.close()
        ours = draw_student(student, self.files, self._recipe, conditions)
        write_grid({"teacher": theirs, "student": ours}, prompts, Vae(self.files, device), output)

    def _with_projections(self, model: Any) -> DistilledStudent:
        features, teacher = self._task.losses.features, self.files.transformer_configs["transformer"]
        dim = teacher["num_attention_heads"] * teacher["attention_head_dim"]
        return DistilledStudent(model, features.student_blocks if features.weight else (), dim, self._recipe.seed)

    def _target(self, teacher_outputs: Outputs | None, batch: DiffusionBatch) -> Tensor:
        if batch.stored is not None:
            return batch.stored
        assert teacher_outputs is not None
        if batch.scales is None:
            return teacher_outputs[PREDICTION]
        conditional, unconditional = teacher_outputs[PREDICTION].float(), teacher_outputs[UNCONDITIONAL].float()
        return guide(conditional, unconditional, batch.scales.view(-1, 1, 1, 1, 1))

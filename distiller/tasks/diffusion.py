"""Task `diffusion`: a Wan pipeline's transformer(s) distilled into a smaller Wan transformer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from diffusers import WanTransformer3DModel
from diffusers.training_utils import compute_loss_weighting_for_sd3
from torch import Tensor, nn
from torch.utils.data import Dataset

from distiller import draws
from distiller.config import Recipe
from distiller.data.images import find_images
from distiller.data.latents import LatentStore
from distiller.data.prompts import read_prompts
from distiller.devices import teacher_dtype
from distiller.digits import IMAGE_SIZE, DigitJudge, judge_prompts
from distiller.errors import UserError
from distiller.losses import huber, mean_squared_error
from distiller.resources import local_path
from distiller.stages import Stage, digest_files
from distiller.tasks.base import LossSum, Task
from distiller.teachers.base import Outputs, Request, Teacher
from distiller.teachers.replicated import ReplicatedTeacher
from distiller.wan.drawing import guide, load_scheduler
from distiller.wan.evaluation import compare
from distiller.wan.network import FEATURES, PREDICTION, UNCONDITIONAL, WanNetwork
from distiller.wan.noising import DiffusionSample, NoisedData
from distiller.wan.pipeline import find_pipeline
from distiller.wan.rollout import RolloutPlan, roll_out
from distiller.wan.samples import Conditions, draw_student, draw_teacher, load_student, write_grid
from distiller.wan.short_text import install_short_text
from distiller.wan.student import DistilledStudent, build_student, student_config
from distiller.wan.text import TextStore, embed, encode_prompts, load_text_encoder, pad_text, text_stage
from distiller.wan.vae import Vae, encode_images

MAX_SAMPLES = 10


@dataclass(frozen=True)
class DiffusionBatch:
    """One micro-batch. Tensors are float32 unless said; `text` has the text encoder's dtype.

    Attributes:
        noisy: x_t [B, C, F, H, W].
        timesteps: [B] in (0, 1000).
        text: [B, L, D]; `negative_text` [B, L', D] only with guidance.
        weights: [B] of the prediction term.
        scales: [B] guidance scales, with guidance.
        velocity: noise - x_0 [B, C, F, H, W], for the true-data term.
        stored: the trajectory's own predictions [B, C, F, H, W], with stored targets.
        modules: the teacher's module of each sample (host).
    """

    sample_ids: tuple[int, ...]
    modules: tuple[int, ...]
    noisy: Tensor
    timesteps: Tensor
    text: Tensor
    weights: Tensor
    negative_text: Tensor | None = None
    scales: Tensor | None = None
    velocity: Tensor | None = None
    stored: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> DiffusionBatch:
        """The batch with every tensor changed."""
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return replace(self, **{name: change(value) for name, value in tensors.items()})

    def pin_memory(self) -> DiffusionBatch:
        """Called by the DataLoader: page-locked memory, from which copies to a GPU do not block."""
        return self.map(Tensor.pin_memory)


class DiffusionTask(Task[DiffusionBatch, WanNetwork]):
    """See `distiller.tasks.base.Task`; the loss is a mean over samples of means over their elements."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._task = recipe, recipe.task
        self.files = find_pipeline(recipe.teacher)
        self.network = WanNetwork(self.files, self._task.max_sequence_length)
        self._latent_shape = self.files.latent_shape(self._task.num_frames, self._task.height, self._task.width)
        self._student_config = student_config(recipe.student, self.files)
        load_scheduler(self.files)
        self._check_patches()
        self._check_feature_blocks()
        self._check_guidance()
        self._check_judge()
        self._find_data()
        extra = (self._task.guidance.negative_prompt, "", *recipe.evaluation.sample_prompts)
        self._texts = list(dict.fromkeys([*self._prompts, *extra]))
        self._text_row = {text: row for row, text in enumerate(self._texts)}
        self._feature_names = tuple(f"{FEATURES}{number}" for number in self._task.losses.features.teacher_blocks)

    @property
    def needs_live_teacher(self) -> bool:
        losses = self._task.losses
        return self._task.targets == "live" and (losses.prediction.weight > 0 or losses.features.weight > 0)

    def stages_need_teacher(self, accelerator: Accelerator, dtype: torch.dtype) -> bool:
        self._text_stage = _on_main(
            accelerator,
            lambda: text_stage(self.files, self._texts, self._task.max_sequence_length, dtype, self._recipe.stages_dir),
        )
        _once_a_node(
            accelerator,
            self._text_stage,
            lambda: encode_prompts(self._text_stage, self.files, self._texts, dtype, accelerator.device),
        )
        self._rollout_stage: Stage | None = None
        if self._recipe.data.kind == "prompts" and self._recipe.rollout.enabled:
            plan = self._rollout_plan()
            self._rollout_stage = _on_main(accelerator, lambda: plan.stage(self.files, self._text_stage, dtype))
            if self._rollout_stage.is_complete:
                accelerator.print(f"rollout: reusing {self._rollout_stage.folder}")
            return not self._rollout_stage.is_complete
        return False

    def run_stages(self, accelerator: Accelerator, teacher: Teacher | None) -> Dataset[DiffusionSample]:
        text = TextStore(self._text_stage)
        store: LatentStore | None = None
        if self._recipe.data.kind == "latents":
            store = LatentStore(local_path(self._recipe.data.path))
        elif self._recipe.data.kind == "images":
            store = LatentStore(self._encode_images(accelerator).folder)
        elif self._rollout_stage is not None:
            if not self._rollout_stage.is_complete:
                assert teacher is not None, "stages_need_teacher said so"
                negative = self._text_row[self._task.guidance.negative_prompt]
                stage, plan = self._rollout_stage, self._rollout_plan()
                roll_out(plan, stage, accelerator, teacher, self.network, self.files, text, negative)
            store = LatentStore(self._rollout_stage.folder)
        negative_row, empty_row = self._text_row[self._task.guidance.negative_prompt], self._text_row[""]
        return NoisedData(
            self._recipe, self.files, self._latent_shape, store, text, self._rows(store), negative_row, empty_row
        )

    def build_student(self) -> DistilledStudent:
        features = self._task.losses.features
        model = build_student(self._recipe.student, self._student_config, self.files, self._recipe.seed)
        install_short_text(model, self._task.max_sequence_length)
        teacher = self.files.transformer_configs["transformer"]
        dim = teacher["num_attention_heads"] * teacher["attention_head_dim"]
        return DistilledStudent(model, features.student_blocks if features.weight else (), dim, self._recipe.seed)

    def student_parameters(self, trained: nn.Module) -> int:
        assert isinstance(trained, DistilledStudent)
        return sum(parameter.numel() for parameter in trained.model.parameters())

    def enable_gradient_checkpointing(self, trained: nn.Module) -> None:
        assert isinstance(trained, DistilledStudent)
        trained.model.enable_gradient_checkpointing()

    def collate(self, samples: Sequence[DiffusionSample]) -> DiffusionBatch:
        timesteps = torch.tensor([sample.timestep for sample in samples], dtype=torch.float32)
        sigmas = torch.tensor([sample.sigma for sample in samples], dtype=torch.float32)
        length, first = self._task.max_sequence_length, samples[0]
        weighting = self._task.timesteps.weighting
        weights = torch.ones_like(sigmas) if weighting == "none" else compute_loss_weighting_for_sd3(weighting, sigmas)
        guided = first.scale is not None
        return DiffusionBatch(
            sample_ids=tuple(sample.sample_id for sample in samples),
            modules=self.network.route(timesteps.tolist()),
            noisy=torch.stack([sample.noisy for sample in samples]),
            timesteps=timesteps,
            text=pad_text([sample.text for sample in samples], length),
            weights=weights,
            negative_text=pad_text([sample.negative_text for sample in samples], length) if guided else None,
            scales=torch.tensor([sample.scale for sample in samples]) if guided else None,
            velocity=None if first.velocity is None else torch.stack([s.velocity for s in samples]),  # type: ignore[misc]
            stored=None if first.stored is None else torch.stack([s.stored for s in samples]),  # type: ignore[misc]
        )

    def to_device(self, batch: DiffusionBatch, device: torch.device) -> DiffusionBatch:
        return batch.map(lambda tensor: tensor.to(device, non_blocking=True))

    def request(self, batch: DiffusionBatch) -> Request:
        inputs = {"latents": batch.noisy, "timesteps": batch.timesteps, "text": batch.text}
        wanted = (PREDICTION, *self._feature_names)
        if batch.negative_text is not None:
            inputs["negative_text"] = batch.negative_text
            wanted = (*wanted, UNCONDITIONAL)
        return Request(batch.sample_ids, inputs, wanted, batch.modules)

    def count(self, batch: DiffusionBatch) -> int:
        return len(batch.sample_ids)

    def tokens(self, batch: DiffusionBatch) -> int:
        patches = [
            size // patch for size, patch in zip(batch.noisy.shape[2:], self._student_config["patch_size"], strict=True)
        ]
        return len(batch.sample_ids) * torch.Size(patches).numel()

    def student_inputs(self, batch: DiffusionBatch, dtype: torch.dtype) -> Mapping[str, Any]:
        return {"latents": batch.noisy.to(dtype), "timesteps": batch.timesteps, "text": batch.text.to(dtype)}

    def loss(
        self, student_outputs: tuple[Tensor, list[Tensor]], teacher_outputs: Outputs | None, batch: DiffusionBatch
    ) -> LossSum:
        prediction, features = student_outputs
        losses, terms = self._task.losses, {}
        total = prediction.new_zeros((), dtype=torch.float32)
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
        chosen = self._recipe.evaluation.sample_prompts if teacher is not None else ()
        prompts = list(chosen or dict.fromkeys(self._prompts))[:MAX_SAMPLES]
        text, device = TextStore(self._text_stage), accelerator.device
        noise = [draws.noise(self._recipe.seed, 0, i, self._latent_shape, "rollout") for i in range(len(prompts))]
        conditions = Conditions(
            noise=torch.stack(noise).to(device),
            text=text.batch([self._text_row[prompt] for prompt in prompts]).to(device),
            negative_text=text.batch([self._text_row[self._task.guidance.negative_prompt]]).to(device),
        )
        # Every rank asks the teacher, since some placements communicate; rank 0 draws the student.
        theirs = None if teacher is None else draw_teacher(teacher, self.network, self.files, self._recipe, conditions)
        if accelerator.is_main_process:
            student = load_student(run_dir, self._task.max_sequence_length, device)
            ours = draw_student(student, self.files, self._recipe, conditions)
            rows = {"student": ours} if theirs is None else {"teacher": theirs, "student": ours}
            write_grid(rows, prompts, Vae(self.files, device), run_dir / "samples.png")

    def evaluate(self, run_dir: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        count, labels, judge = self._recipe.evaluation.num_samples, None, None
        prompts = [self._prompts[i % len(self._prompts)] for i in range(count)]
        if self._recipe.evaluation.judge == "digits":
            prompts, labels = judge_prompts(-(-count // 10), self._recipe.seed)
            try:
                judge = DigitJudge().recognise
            except ImportError as error:
                raise UserError(
                    "evaluation.judge=digits needs scikit-learn; pip install 'distiller[demo]', or set it to none"
                ) from error
        student = load_student(run_dir, self._task.max_sequence_length, device)
        teacher = ReplicatedTeacher(self.network, dtype, device)
        report = compare(
            self._recipe, self.files, self.network, teacher, student, prompts, labels, judge, dtype, device
        )
        ours, theirs = sum(p.numel() for p in student.parameters()), self.network.num_parameters()
        return report | {"student_params": ours, "teacher_params": theirs, "size_ratio": theirs / ours}

    def sample(self, run_dir: Path, prompts: Sequence[str], seed: int, device: torch.device, output: Path) -> None:
        student = load_student(run_dir, self._task.max_sequence_length, device)
        dtype = teacher_dtype(self._recipe.teacher.dtype, device)
        length, encoder = self._task.max_sequence_length, load_text_encoder(self.files, dtype, device)
        noise = [draws.noise(seed, 0, i, self._latent_shape, "sample") for i in range(len(prompts))]
        negative_text = embed(encoder, [self._task.guidance.negative_prompt], length)
        conditions = Conditions(torch.stack(noise).to(device), embed(encoder, prompts, length), negative_text)
        teacher = ReplicatedTeacher(self.network, dtype, device)
        theirs = draw_teacher(teacher, self.network, self.files, self._recipe, conditions)
        teacher.close()
        ours = draw_student(student, self.files, self._recipe, conditions)
        write_grid({"teacher": theirs, "student": ours}, prompts, Vae(self.files, device), output)

    def _target(self, teacher_outputs: Outputs | None, batch: DiffusionBatch) -> Tensor:
        if batch.stored is not None:
            return batch.stored
        assert teacher_outputs is not None
        if batch.scales is None:
            return teacher_outputs[PREDICTION]
        conditional, unconditional = teacher_outputs[PREDICTION].float(), teacher_outputs[UNCONDITIONAL].float()
        return guide(conditional, unconditional, batch.scales.view(-1, 1, 1, 1, 1))

    def _find_data(self) -> None:
        data, path = self._recipe.data, local_path(self._recipe.data.path)
        if data.kind == "prompts":
            self._prompts = read_prompts(path)[: data.max_samples]
            per_prompt = self._recipe.rollout.samples_per_prompt if self._recipe.rollout.enabled else 1
            self.num_samples = len(self._prompts) * per_prompt
        elif data.kind == "images":
            if self._task.num_frames != 1:
                raise UserError(f"data.kind=images needs task.num_frames=1, given {self._task.num_frames}; change it")
            self._images = find_images(path)[: data.max_samples]
            self._prompts = [caption for _, caption in self._images]
            self.num_samples = len(self._images)
        else:
            store = LatentStore(path)
            if store.shape != self._latent_shape:
                raise UserError(
                    f"data.path: the latents have shape {list(store.shape)} and task.height, width and num_frames ask "
                    f"for {list(self._latent_shape)}; change one of them"
                )
            self._prompts, self.num_samples = store.prompts, min(len(store), data.max_samples or len(store))

    def _rows(self, store: LatentStore | None) -> list[int]:
        """The row in the text store of every sample."""
        rows = [self._text_row[prompt] for prompt in self._prompts]
        return rows if store is None else [rows[store.prompt_index(i)] for i in range(self.num_samples)]

    def _rollout_plan(self) -> RolloutPlan:
        return RolloutPlan(tuple(self._prompts), self._latent_shape, self._recipe)

    def _encode_images(self, accelerator: Accelerator) -> Stage:
        task = self._task

        def stage() -> Stage:
            key = {
                "vae": self.files.digest("vae"),
                "images": digest_files(file for file, _ in self._images),
                "order": [[file.name, caption] for file, caption in self._images],
                "size": [task.height, task.width],
            }
            return Stage("images", key, self._recipe.stages_dir)

        found = _on_main(accelerator, stage)
        _once_a_node(
            accelerator,
            found,
            lambda: encode_images(found, self._images, self.files, task.height, task.width, accelerator.device),
        )
        return found

    def _check_patches(self) -> None:
        teachers = {f"teacher {name}": config for name, config in self.files.transformer_configs.items()}
        for owner, config in {"student": self._student_config, **teachers}.items():
            patch, limit = config["patch_size"], config["rope_max_seq_len"]
            for name, size, step in zip(("num_frames", "height", "width"), self._latent_shape[1:], patch, strict=True):
                if size % step:
                    raise UserError(
                        f"the {owner}'s patch_size {list(patch)} does not divide the {size} latents of task.{name} "
                        f"{getattr(self._task, name)}; change one of them"
                    )
                if size // step > limit:
                    raise UserError(
                        f"task.{name} {getattr(self._task, name)} makes {size // step} patches and the {owner}'s "
                        f"rope_max_seq_len is {limit}; lower it"
                    )

    def _check_feature_blocks(self) -> None:
        features = self._task.losses.features
        teacher_layers = self.files.transformer_configs["transformer"]["num_layers"]
        for key, numbers, layers in (
            ("student_blocks", features.student_blocks, self._student_config["num_layers"]),
            ("teacher_blocks", features.teacher_blocks, teacher_layers),
        ):
            for number in numbers:
                if number >= layers:
                    raise UserError(
                        f"task.losses.features.{key} names block {number}; there are {layers}, numbered from 0 to "
                        f"{layers - 1}"
                    )
        if features.weight and list(self._student_config["patch_size"]) != list(
            self.files.transformer_configs["transformer"]["patch_size"]
        ):
            raise UserError("task.losses.features needs equal patch sizes: the student's tokens would not match")

    def _check_guidance(self) -> None:
        given = {
            "task.guidance.scale_2": self._task.guidance.scale_2,
            "sampling.guidance_scale_2": self._recipe.sampling.guidance_scale_2,
        }
        for key, scale in given.items():
            if scale is not None and self.files.boundary_ratio is None:
                raise UserError(f"{key} is {scale:g} and the teacher has one transformer; remove it")

    def _check_judge(self) -> None:
        size = self._task.height, self._task.width
        if self._recipe.evaluation.judge == "digits" and size != (IMAGE_SIZE, IMAGE_SIZE):
            raise UserError(
                f"evaluation.judge=digits looks at {IMAGE_SIZE} x {IMAGE_SIZE} pictures, given task.height {size[0]} "
                f"and task.width {size[1]}; change them, or set it to none"
            )


def _on_main(accelerator: Accelerator, make: Callable[[], Stage]) -> Stage:
    """What rank 0 makes, on every rank: digests of large files are computed once. Communicates."""
    made: list[Any] = [make() if accelerator.is_main_process else None]
    broadcast_object_list(made)
    return made[0]


def _once_a_node(accelerator: Accelerator, stage: Stage, make: Callable[[], None]) -> None:
    """Lets one process of each node make a missing stage; the others wait for its file, not in a collective."""
    if not stage.is_complete and accelerator.is_local_main_process:
        make()
    stage.wait()

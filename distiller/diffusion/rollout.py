"""The rollout stage: the teacher draws its own samples from the prompts, through whatever placement it has.

The loop re-noises these latents and asks the live teacher for its prediction there, so that every input is one that
the teacher meets when it draws. Pure noise at every timestep is not: its predictions there are answers to questions
that sampling never asks.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm

from distiller.config.diffusion import DiffusionRecipe, filled
from distiller.data.latents import PROMPTS_FILE
from distiller.diffusion.architecture import LatentShape
from distiller.diffusion.conditions import Conditions
from distiller.diffusion.drawing import draw, guided_predictor, scale_of
from distiller.diffusion.family import Family
from distiller.diffusion.network import DiffusionNetwork
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.shards import missing_shards, save_whole
from distiller.diffusion.text import TextStore, answers_key
from distiller.distributed.liveness import LivenessBarrier
from distiller.distributed.ranks import Ranks
from distiller.storage.stages import Stage, digest_of
from distiller.teachers.base import Teacher


@dataclass(frozen=True)
class RolloutPlan:
    """What will be drawn. Samples are numbered prompt by prompt: sample i has prompt i // samples_per_prompt.

    Attributes:
        text_rows: each prompt's row in the text store, which holds prompts that stand more than once in one row.
        num_predictions: steps of one sample.
        num_passes: forward passes of one sample.
    """

    prompts: tuple[str, ...]
    text_rows: tuple[int, ...]
    latent_shape: LatentShape
    recipe: DiffusionRecipe
    num_predictions: int
    num_passes: int

    @property
    def num_samples(self) -> int:
        """Samples in all."""
        return len(self.prompts) * self.recipe.rollout.samples_per_prompt

    @property
    def keeps_points(self) -> bool:
        """Whether every step's (x_t, prediction) is stored."""
        return self.recipe.task.targets == "stored"

    @property
    def num_bytes(self) -> int:
        """What the shards take on disk."""
        tensors = 1 + (2 * self.num_predictions if self.keeps_points else 0)
        width = 4 if self.recipe.rollout.dtype == "float32" else 2
        return self.num_samples * tensors * width * torch.Size(self.latent_shape).numel()

    @property
    def num_forwards(self) -> int:
        """Network passes over one sample."""
        return self.num_samples * self.num_passes

    def stage(self, family: Family, text_stage: Stage, dtype: torch.dtype) -> Stage:
        """The stage with its key: everything that the latents depend on. Reads the teacher's files for their digest."""
        key = {
            "teacher": family.files.digest(*family.files.configs),
            "scheduler": family.files.scheduler_config,
            "boundary_ratio": family.files.boundary_ratio,
            "text": answers_key(text_stage),
            "prompts": digest_of(list(self.prompts)),
            "tf32": self.recipe.train.tf32,
            "dtype": str(dtype),
            "quantization": self.recipe.teacher.quantization,
            "sampling": self.recipe.sampling.model_dump(mode="json"),
            "negative_prompt": self.recipe.task.guidance.negative_prompt,
            "rollout": self.recipe.rollout.model_dump(mode="json"),
            "points": self.keeps_points,
            "latent_shape": self.latent_shape,
            "seed": self.recipe.seed,
        }
        if self.text_rows != tuple(range(len(self.prompts))):
            # Older folders of such prompts hold latents of other texts: prompt n was drawn from row n.
            key["text_rows"] = digest_of(list(self.text_rows))
        if family.files.boundary_ratio is not None:
            scales = self.recipe.sampling.scales
            by_expert = scale_of(scales, (0,)), scale_of(scales, (1,))
            if by_expert != tuple(max(1.0, scale) for scale in scales):
                # In older folders each expert was guided where its own scale is above 1.
                key["scales"] = by_expert
        return Stage("rollout", key, self.recipe.stages_dir)


@dataclass(frozen=True)
class Drawing:
    """What draws, and by what."""

    plan: RolloutPlan
    ranks: Ranks
    teacher: Teacher
    network: DiffusionNetwork
    family: Family
    process: NoiseProcess
    text: TextStore
    negative_row: int


def roll_out(drawing: Drawing, stage: Stage) -> None:
    """Draws all samples, the ranks sharing the work, and finishes the stage. Communicates.

    A shard is one batch of `rollout.batch_size` samples, whatever the number of ranks, so its content does not depend
    on it. Shards that an earlier, interrupted run of the same key left are kept; another run that draws the same now is
    waited for.
    """
    with stage.make_on_all_ranks(drawing.ranks) as is_missing:
        if is_missing:
            _roll_out(drawing, stage)
        else:
            drawing.ranks.print(f"rollout: reusing {stage.folder}, which another run has drawn meanwhile")


def _roll_out(drawing: Drawing, stage: Stage) -> None:
    plan, ranks, recipe = drawing.plan, drawing.ranks, drawing.plan.recipe
    size = filled(recipe.rollout.batch_size)
    shards = [range(first, min(first + size, plan.num_samples)) for first in range(0, plan.num_samples, size)]
    missing: list[int] = ranks.broadcast_from_main(
        lambda: missing_shards([stage.partial / _shard_name(number) for number in range(len(shards))])
    )
    rounds = -(-len(missing) // ranks.world_size)
    ranks.print(
        f"rollout: {plan.num_samples} samples x {plan.num_predictions} steps = {plan.num_forwards} "
        f"forward passes, {plan.num_bytes / 2**20:.1f} MiB; {len(missing)} of {len(shards)} shards to draw"
    )
    started = time.perf_counter()
    # Closed by `with` when the stage is cut short: what is said then begins a line.
    with tqdm(
        total=rounds,
        desc="rollout",
        unit="shard",
        disable=not ranks.is_main,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 10,
    ) as bar:
        others = LivenessBarrier(ranks)
        for turn in range(rounds):
            others.arrive()
            mine = turn * ranks.world_size + ranks.rank
            # A rank without work of its own draws again what another one does: placements may communicate in `predict`.
            number = missing[min(mine, len(missing) - 1)]
            tensors = _draw_shard(drawing, shards[number])
            if mine < len(missing):
                save_whole(tensors, stage.partial / _shard_name(number), writer=str(ranks.rank))
            bar.update()
    ranks.interruptible_barrier()
    if ranks.is_main:
        (stage.partial / PROMPTS_FILE).write_text("\n".join(plan.prompts) + "\n", encoding="utf-8")
        stage.finish()
        ranks.print(f"rollout: {time.perf_counter() - started:.1f} s, kept in {stage.folder}")
    ranks.barrier()
    stage.wait_until_complete()


def _shard_name(number: int) -> str:
    return f"rollout-{number:06d}.safetensors"


def _draw_shard(drawing: Drawing, sample_ids: range) -> dict[str, torch.Tensor]:
    plan, family, text, recipe = drawing.plan, drawing.family, drawing.text, drawing.plan.recipe
    length = family.text_length(recipe.task)
    prompt_index = [sample_id // recipe.rollout.samples_per_prompt for sample_id in sample_ids]
    positive = family.stack([text[plan.text_rows[index]] for index in prompt_index], length)
    negative = family.stack([text[drawing.negative_row]], length)
    conditions = Conditions.make(
        recipe.seed, "rollout", sample_ids, plan.latent_shape, positive, negative, drawing.ranks.device
    )
    predict = guided_predictor(drawing.teacher, drawing.network, sample_ids, conditions, recipe.sampling.scales)
    trajectory = draw(predict, drawing.process, conditions, recipe.sampling.num_steps, plan.keeps_points)
    dtype = getattr(torch, recipe.rollout.dtype)
    tensors = {"latents": trajectory.latents.to(dtype).cpu(), "prompt_index": torch.tensor(prompt_index)}
    if plan.keeps_points:
        tensors["points"] = torch.stack(trajectory.points, dim=1).to(dtype).cpu()
        tensors["predictions"] = torch.stack(trajectory.predictions, dim=1).to(dtype).cpu()
        tensors["timesteps"] = trajectory.timesteps.cpu()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}

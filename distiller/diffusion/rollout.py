"""The rollout stage: the teacher, in any placement, generates latents from the prompts.

The loop adds noise to these latents and asks the teacher for predictions of the result, so that the inputs are like
those of sampling. Without a rollout x_t is pure noise at every timestep, an input that sampling never has except at its
start. With `task.targets: stored` the loop takes inputs and predictions from the rollout itself.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm

from distiller.config.diffusion import DiffusionRecipe, filled
from distiller.config.quantization import ARITHMETIC
from distiller.data.latents import PROMPTS_FILE
from distiller.diffusion.architecture import LatentShape
from distiller.diffusion.family import Family
from distiller.diffusion.network import DiffusionNetwork
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.sampling import draw, guided_predictor, scale_of
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.text import TRY_DTYPE, TextStore, embedding_key
from distiller.distributed.liveness import LivenessBarrier
from distiller.distributed.ranks import Ranks
from distiller.storage.stage_shards import find_missing_shards, refuse_not_finite, save_atomically
from distiller.storage.stages import Stage, digest_of
from distiller.teachers.base import Teacher


@dataclass(frozen=True)
class RolloutPlan:
    """What a rollout generates. Samples are numbered prompt by prompt: sample i has prompt i // samples_per_prompt.

    Attributes:
        text_rows: row of each prompt in the text store, where equal prompts share one row.
        latent_shape: of one sample.
        num_predictions: predictions of one sample, one at each of the scheduler's timesteps.
        num_passes: forward passes of one sample; a guided prediction takes two.
    """

    prompts: tuple[str, ...]
    text_rows: tuple[int, ...]
    latent_shape: LatentShape
    recipe: DiffusionRecipe
    num_predictions: int
    num_passes: int

    @property
    def num_samples(self) -> int:
        """Number of samples for all prompts."""
        return len(self.prompts) * self.recipe.rollout.samples_per_prompt

    @property
    def keeps_points(self) -> bool:
        """Whether the network's input and prediction at every step are stored."""
        return self.recipe.task.targets == "stored"

    @property
    def num_bytes(self) -> int:
        """Size of the stored latents, inputs and predictions in bytes."""
        num_tensors = 1 + (2 * self.num_predictions if self.keeps_points else 0)
        element_bytes = 4 if self.recipe.rollout.dtype == "float32" else 2
        return self.num_samples * num_tensors * element_bytes * torch.Size(self.latent_shape).numel()

    @property
    def num_forwards(self) -> int:
        """Number of forward passes of the whole rollout, counted for each sample."""
        return self.num_samples * self.num_passes

    def stage(self, family: Family, text_stage: Stage, dtype: torch.dtype) -> Stage:
        """The stage, whose key holds everything that the latents depend on. `dtype` is the teacher's.

        Reads the teacher's files, weights included, for their digest; downloads them from a hub.
        """
        key = {
            "teacher": family.files.digest(*family.files.configs),
            "scheduler": family.files.scheduler_config,
            "boundary_ratio": family.files.boundary_ratio,
            "text": embedding_key(text_stage),
            "prompts": digest_of(list(self.prompts)),
            "tf32": self.recipe.train.tf32,
            "dtype": str(dtype),
            "quantization": ARITHMETIC[self.recipe.teacher.quantization],
            "sampling": self.recipe.sampling.model_dump(mode="json"),
            "negative_prompt": self.recipe.task.guidance.negative_prompt,
            "rollout": self.recipe.rollout.model_dump(mode="json"),
            "points": self.keeps_points,
            "latent_shape": self.latent_shape,
            "seed": self.recipe.seed,
        }
        if self.text_rows != tuple(range(len(self.prompts))):
            # A prompt is repeated. Older versions took row n for prompt n: their folders hold latents of wrong texts.
            key["text_rows"] = digest_of(list(self.text_rows))
        if family.files.boundary_ratio is not None:
            scales = self.recipe.sampling.scales
            by_expert = scale_of(scales, (0,)), scale_of(scales, (1,))
            if by_expert != tuple(max(1.0, scale) for scale in scales):
                # Older versions guided each expert where its own scale was above 1: their folders hold other latents.
                key["scales"] = by_expert
        return Stage("rollout", key, self.recipe.stages_dir)


@dataclass(frozen=True)
class RolloutSetup:
    """What a rollout needs to run. `negative_row` is the row of the negative prompt in `text`."""

    plan: RolloutPlan
    ranks: Ranks
    teacher: Teacher
    network: DiffusionNetwork
    family: Family
    process: NoiseProcess
    text: TextStore
    negative_row: int


def roll_out(setup: RolloutSetup, stage: Stage) -> None:
    """Generates all samples, with the shards divided among the ranks, and finishes the stage. Communicates.

    A shard is one batch of `rollout.batch_size` samples for any number of ranks, so its content does not depend on that
    number. Shards of an interrupted run with the same key are kept. If another run is making the same stage now, this
    one waits for it.
    """
    with stage.make_on_all_ranks(setup.ranks) as is_missing:
        if is_missing:
            _roll_out(setup, stage)
        else:
            setup.ranks.print(f"rollout: reusing {stage.folder}, which another run has drawn meanwhile")


def _roll_out(setup: RolloutSetup, stage: Stage) -> None:
    plan, ranks, recipe = setup.plan, setup.ranks, setup.plan.recipe
    size = filled(recipe.rollout.batch_size)
    shards = [range(first, min(first + size, plan.num_samples)) for first in range(0, plan.num_samples, size)]
    missing: list[int] = ranks.broadcast_from_main(
        lambda: find_missing_shards([stage.partial / _shard_name(index) for index in range(len(shards))])
    )
    num_rounds = -(-len(missing) // ranks.world_size)
    ranks.print(
        f"rollout: {plan.num_samples} samples x {plan.num_predictions} steps = {plan.num_forwards} "
        f"forward passes, {plan.num_bytes / 2**20:.1f} MiB; {len(missing)} of {len(shards)} shards to draw"
    )
    started = time.perf_counter()
    # `with` also closes the bar when the stage is interrupted, so that the next message begins on a line of its own.
    with tqdm(
        total=num_rounds,
        desc="rollout",
        unit="shard",
        disable=not ranks.is_main,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 10,
    ) as bar:
        liveness = LivenessBarrier(ranks)
        for round_index in range(num_rounds):
            liveness.arrive()
            i = round_index * ranks.world_size + ranks.rank
            # A rank without a shard of its own repeats the last one: placements may communicate in `predict`, so every
            # rank must call it equally often.
            index = missing[min(i, len(missing) - 1)]
            tensors = _draw_shard(setup, shards[index])
            if i < len(missing):
                save_atomically(tensors, stage.partial / _shard_name(index), writer=str(ranks.rank))
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


def _draw_shard(setup: RolloutSetup, sample_ids: range) -> dict[str, torch.Tensor]:
    """Generates the tensors of one shard, on the CPU. Communicates if the teacher's placement does.

    Returns:
        `latents` [n, C, F, H, W] in `rollout.dtype` and `prompt_index` [n] int64; if every step is kept, also `points`
        and `predictions` [n, steps, C, F, H, W] in `rollout.dtype` and `timesteps` [steps] float32.
    """
    plan, family, text, recipe = setup.plan, setup.family, setup.text, setup.plan.recipe
    length = family.text_length(recipe.task)
    prompt_index = [sample_id // recipe.rollout.samples_per_prompt for sample_id in sample_ids]
    positive = family.stack([text[plan.text_rows[index]] for index in prompt_index], length)
    negative = family.stack([text[setup.negative_row]], length)
    sampling_inputs = SamplingInputs.make(
        recipe.seed, "rollout", sample_ids, plan.latent_shape, positive, negative, setup.ranks.device
    )
    predict = guided_predictor(setup.teacher, setup.network, sample_ids, sampling_inputs, recipe.sampling.scales)
    trajectory = draw(predict, setup.process, sampling_inputs, recipe.sampling.num_steps, plan.keeps_points)
    dtype = getattr(torch, recipe.rollout.dtype)
    tensors = {"latents": trajectory.latents.to(dtype).cpu(), "prompt_index": torch.tensor(prompt_index)}
    if plan.keeps_points:
        tensors["points"] = torch.stack(trajectory.points, dim=1).to(dtype).cpu()
        tensors["predictions"] = torch.stack(trajectory.predictions, dim=1).to(dtype).cpu()
        tensors["timesteps"] = trajectory.timesteps.cpu()
    drawn = {name: tensor for name, tensor in tensors.items() if name != "timesteps"}
    refuse_not_finite(drawn, "the teacher's drawing of sample", sample_ids.start, TRY_DTYPE)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}

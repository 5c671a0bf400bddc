"""The recipe's data (prompts, images or latents), and the stages that make text embeddings and latents from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distiller.config.diffusion import DiffusionRecipe
from distiller.data.images import find_images, load_image
from distiller.data.latents import LatentStore
from distiller.data.order import num_held_out
from distiller.data.pictures import READER_VERSION, check_pictures, check_size
from distiller.data.prompts import read_prompts
from distiller.diffusion.architecture import LatentShape
from distiller.diffusion.family import Condition, Family
from distiller.diffusion.network import DiffusionNetwork
from distiller.diffusion.noise_process import NoiseProcess
from distiller.diffusion.noising import NoisedData
from distiller.diffusion.rollout import RolloutPlan, RolloutSetup, roll_out
from distiller.diffusion.sampling import count_passes
from distiller.diffusion.sampling_inputs import SamplingInputs
from distiller.diffusion.text import TextStore, encode_prompts, text_stage
from distiller.diffusion.vae import encode_images
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.storage.packaged_files import local_path
from distiller.storage.stages import Stage, digest_files, digest_of
from distiller.teachers.base import Teacher


class Source:
    """A recipe's data; `prepare` and then `load` run the stages.

    Attributes, set by the constructor:
        prompts: the prompts of all samples; several samples may share one.
        num_samples: samples an epoch, the first ones.
        num_held_out: samples after them, which are not trained on.
        data_digest: changes with the prompts, with latents, and with names and sizes (in bytes) of images.
        notices: one line for each kind of file that is left out.
    """

    def __init__(
        self,
        recipe: DiffusionRecipe,
        family: Family,
        network: DiffusionNetwork,
        process: NoiseProcess,
        latent_shape: LatentShape,
    ) -> None:
        """Reads prompts, headers of latents, or captions and file sizes of images. Raises UserError."""
        self._recipe, self._family, self._network = recipe, family, network
        self._process, self._latent_shape = process, latent_shape
        data, path = recipe.data, local_path(recipe.data.path)
        self.notices: list[str] = []
        if data.kind == "prompts":
            self.prompts = read_prompts(path)[: data.max_samples]
            per_prompt = recipe.rollout.samples_per_prompt if recipe.rollout.enabled else 1
            num_samples = len(self.prompts) * per_prompt
            self.data_digest = digest_of(self.prompts)
        elif data.kind == "images":
            if recipe.task.num_frames != 1:
                raise UserError(f"data.kind=images needs task.num_frames=1, given {recipe.task.num_frames}; change it")
            images, notes = find_images(path)
            self.notices += notes
            self._images = images[: data.max_samples]
            self.prompts = [caption for _, caption in self._images]
            per_prompt, num_samples = 1, len(self._images)
            sizes = [(os.path.relpath(file, path), check_size(file)) for file, _ in self._images]
            self.data_digest = digest_of([self.prompts, sizes])
        else:
            store = LatentStore(path)
            self._check_shape(store)
            self.prompts, per_prompt, num_samples = store.prompts, 1, min(len(store), data.max_samples or len(store))
            self.data_digest = digest_of([self.prompts, store.digest()])
        # Whole prompts, so that no drawing of one of them is trained on.
        self.num_held_out = per_prompt * num_held_out(num_samples // per_prompt, data.held_out)
        self.num_samples = num_samples - self.num_held_out
        self._texts = list(dict.fromkeys([*self.prompts, recipe.task.guidance.negative_prompt, ""]))
        self._row = {text: row for row, text in enumerate(self._texts)}

    def check_samples(self) -> str | None:
        """Reads some of the images whole and says how many; None if the data are not images. Raises UserError."""
        if self._recipe.data.kind != "images":
            return None
        size = self._recipe.task.size[1:]
        return check_pictures(lambda index: load_image(self._images[index][0], *size), len(self._images))

    def prepare(self, ranks: Ranks, dtype: torch.dtype) -> bool:
        """Encodes prompts and images unless their stages are complete; returns whether the rollout is still missing.

        `dtype` is the teacher's and the text encoder's. Communicates.
        """
        recipe = self._recipe
        self._text_stage = self._encode(ranks, self._texts, dtype)
        # Sample prompts have a stage of their own: changing one must not invalidate the data's embeddings and rollout.
        self._sample_stage = self._encode(ranks, self._sample_texts, dtype)
        self._rollout_stage: Stage | None = None
        if recipe.data.kind == "images":
            # Before the teacher is loaded: the VAE's activations are large.
            self._encode_images(ranks)
        if recipe.data.kind != "prompts" or not recipe.rollout.enabled:
            return False
        self._rollout_stage = self._plan().stage(self._family, self._text_stage, dtype)
        # Rank 0 decides for all ranks: another run may complete the stage between the checks of two ranks.
        stage = self._rollout_stage
        self._is_drawn = bool(ranks.broadcast_from_main(lambda: stage.is_complete))
        if self._is_drawn:
            ranks.print(f"rollout: reusing {stage.folder}")
        return not self._is_drawn

    def key(self, dtype: torch.dtype) -> dict[str, Any]:
        """What embeddings and latents depend on, for JSON. Reads files for their digests; loads no weights."""
        recipe = self._recipe
        text_stage = self._text_stage_of(self._texts, dtype)
        key: dict[str, Any] = {"text": text_stage.key}
        if recipe.data.kind == "latents":
            store = LatentStore(local_path(recipe.data.path))
            key["latents"] = {"files": digest_files(store.files), "samples": self._num_stored}
        elif recipe.data.kind == "images":
            key["latents"] = self._image_stage().key
        elif recipe.rollout.enabled:
            key["latents"] = self._plan().stage(self._family, text_stage, dtype).key
        return key

    def missing_stage(self, dtype: torch.dtype) -> Path | None:
        """The folder of the first incomplete stage of the data's embeddings or latents; None if all are complete.

        Stages that were made again on other hardware would differ from those that cached teacher outputs belong to.
        """
        return next((stage.folder for stage in self._stages_of_data(dtype) if not stage.is_complete), None)

    def kept_stages(self, dtype: torch.dtype) -> list[Stage]:
        """Stages that a cache of teacher outputs also contains: embeddings and latents of data and sample prompts."""
        return [*self._stages_of_data(dtype), self._text_stage_of(self._sample_texts, dtype)]

    def load(self, ranks: Ranks, teacher: Teacher | None) -> NoisedData:
        """Generates the rollout if it is missing and opens the training data. Called after `prepare`.

        `teacher` may be None where `prepare` returned False. Communicates if the rollout is missing. Raises UserError
        where stored latents do not have the recipe's size.
        """
        self._text = TextStore(self._text_stage)
        self._store = self._open_latents(ranks, teacher)
        if self._store is not None:
            self._check_shape(self._store)
        recipe = self._recipe
        rows = [self._row[prompt] for prompt in self.prompts]
        if self._store is not None:
            rows = [rows[self._store.prompt_index(sample_id)] for sample_id in range(self._num_stored)]
        negative_row, empty_row = self._row[recipe.task.guidance.negative_prompt], self._row[""]
        return NoisedData(
            recipe,
            self._process,
            self._family.files.boundary_timestep,
            self._latent_shape,
            self._store,
            self._text,
            rows,
            negative_row,
            empty_row,
        )

    def sampling_inputs(
        self, prompts: Sequence[str], sample_ids: Sequence[int], device: torch.device
    ) -> SamplingInputs:
        """Sampling inputs of prompts that are in the data or in `evaluation.sample_prompts`, on the device.

        The noise is that of the rollout's samples with the same ids.
        """
        length = self._family.text_length(self._recipe.task)
        positive = self._family.stack([self._text_of(prompt) for prompt in prompts], length)
        negative_row = self._row[self._recipe.task.guidance.negative_prompt]
        negative = self._family.stack([self._text[negative_row]], length)
        return SamplingInputs.make(
            self._recipe.seed, "rollout", sample_ids, self._latent_shape, positive, negative, device
        )

    def known_latents(self, sample_ids: Sequence[int]) -> Tensor | None:
        """The stored x_0 of these samples [B, C, F, H, W], float32 on the CPU; None when x_t is pure noise."""
        return None if self._store is None else torch.stack([self._store.latents(i) for i in sample_ids])

    def prompt_of(self, sample_id: int) -> str:
        """The prompt of a sample."""
        return self.prompts[sample_id if self._store is None else self._store.prompt_index(sample_id)]

    @property
    def _num_stored(self) -> int:
        """Samples of which there are latents."""
        return self.num_samples + self.num_held_out

    @property
    def _sample_texts(self) -> list[str]:
        return list(self._recipe.evaluation.sample_prompts) or [""]

    def _stages_of_data(self, dtype: torch.dtype) -> list[Stage]:
        """The stages that hold embeddings and latents of the data, complete or not."""
        text = self._text_stage_of(self._texts, dtype)
        if self._recipe.data.kind == "images":
            return [text, self._image_stage()]
        if self._recipe.data.kind == "prompts" and self._recipe.rollout.enabled:
            return [text, self._plan().stage(self._family, text, dtype)]
        return [text]

    def _text_of(self, prompt: str) -> Condition:
        if prompt in self._row:
            return self._text[self._row[prompt]]
        return TextStore(self._sample_stage)[self._recipe.evaluation.sample_prompts.index(prompt)]

    def _encode(self, ranks: Ranks, texts: list[str], dtype: torch.dtype) -> Stage:
        """Embeds texts in one process of each machine, unless their stage is complete; the other processes wait."""
        family, device = self._family, ranks.device
        stage = self._text_stage_of(texts, dtype)
        stage.make_once(ranks.is_local_main, lambda: encode_prompts(stage, family, texts, dtype, device))
        return stage

    def _text_stage_of(self, texts: list[str], dtype: torch.dtype) -> Stage:
        recipe = self._recipe
        length, tf32 = self._family.text_length(recipe.task), recipe.train.tf32
        return text_stage(self._family, texts, length, dtype, tf32, recipe.stages_dir)

    def _open_latents(self, ranks: Ranks, teacher: Teacher | None) -> LatentStore | None:
        """The latents of all samples, after the rollout if it is missing; None when x_t is pure noise."""
        recipe = self._recipe
        if recipe.data.kind == "latents":
            return LatentStore(local_path(recipe.data.path))
        if recipe.data.kind == "images":
            return LatentStore(self._image_stage().folder)
        stage = self._rollout_stage
        if stage is None:
            return None
        if not self._is_drawn:
            assert teacher is not None, "prepare said that a teacher is needed"
            setup = RolloutSetup(
                self._plan(),
                ranks,
                teacher,
                self._network,
                self._family,
                self._process,
                self._text,
                self._row[recipe.task.guidance.negative_prompt],
            )
            roll_out(setup, stage)
        return LatentStore(stage.folder)

    def _encode_images(self, ranks: Ranks) -> None:
        stage, task = self._image_stage(), self._recipe.task

        def make() -> None:
            encode_images(stage, self._images, self._family.load_vae(ranks.device), *task.size[1:])

        stage.make_once(ranks.is_local_main, make)

    def _image_stage(self) -> Stage:
        images, size = self._images, self._recipe.task.size[1:]
        key = {
            "reader": READER_VERSION,
            "vae": self._family.files.digest("vae"),
            # A digest for each file, in order: images of two folders may share a name, and sample ids follow the order.
            "pictures": digest_of([[digest_files([file]), caption] for file, caption in images]),
            "size": size,
            "tf32": self._recipe.train.tf32,
        }
        return Stage("images", key, self._recipe.stages_dir)

    def _plan(self) -> RolloutPlan:
        sampling, process = self._recipe.sampling, self._process
        num_predictions = len(process.timesteps(sampling.num_steps))
        num_passes = count_passes(process, self._network, sampling.num_steps, sampling.scales)
        rows = tuple(self._row[prompt] for prompt in self.prompts)
        return RolloutPlan(tuple(self.prompts), rows, self._latent_shape, self._recipe, num_predictions, num_passes)

    def _check_shape(self, store: LatentStore) -> None:
        if store.shape != self._latent_shape:
            raise UserError(
                f"data.path: the latents have shape {list(store.shape)} and task.height, width and num_frames ask "
                f"for {list(self._latent_shape)}; change one of them"
            )

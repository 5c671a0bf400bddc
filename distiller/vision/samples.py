"""Samples and micro-batches of pictures; random crops and flips depend on (seed, epoch, sample id) alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from distiller.data import rng
from distiller.data.order import SampleKey
from distiller.vision.files import Picture, Processor
from distiller.vision.sources import Pictures


@dataclass(frozen=True)
class Augmentation:
    """How training pictures are changed. `kind` is none, crop or crop-flip.

    `least_area` is the least area of a crop, as a share of the picture's area.
    """

    kind: str
    least_area: float

    def apply(self, picture: Picture, seed: int, epoch: int, sample_id: int) -> Picture:
        """A random crop of width / height 3/4 to 4/3 (Szegedy 2015), mirrored at random for crop-flip.

        Takes and returns uint8 [H, W, C]; the processor scales the crop. The result may be a view of the picture.
        """
        if self.kind == "none":
            return picture
        generator = rng.generator(seed, epoch, sample_id, "augmentation")
        area, ratio, top, left, flip = torch.rand(5, generator=generator, dtype=torch.float64).tolist()
        height, width = picture.shape[:2]
        area_pixels = (self.least_area + (1 - self.least_area) * area) * height * width
        aspect = (4 / 3) ** (2 * ratio - 1)
        rows = min(height, max(1, round((area_pixels / aspect) ** 0.5)))
        columns = min(width, max(1, round((area_pixels * aspect) ** 0.5)))
        first_row, first_column = int(top * (height - rows + 1)), int(left * (width - columns + 1))
        crop = picture[first_row : first_row + rows, first_column : first_column + columns]
        return crop[:, ::-1] if self.kind == "crop-flip" and flip < 0.5 else crop


@dataclass(frozen=True)
class PictureSample:
    """One picture as the networks see it: pixels [C, H, W] float32, and its class (index of the teacher's logit)."""

    sample_id: int
    pixels: Tensor
    label: int


@dataclass(frozen=True)
class PictureBatch:
    """A micro-batch: pixels [B, C, H, W] float32, labels [B] int64."""

    sample_ids: tuple[int, ...]
    pixels: Tensor
    labels: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> PictureBatch:
        """The batch with both tensors changed."""
        return replace(self, pixels=change(self.pixels), labels=change(self.labels))

    def pin_memory(self) -> PictureBatch:
        """Called by the DataLoader: page-locked memory, from which copies to a GPU do not block."""
        return self.map(Tensor.pin_memory)


class PictureData(Dataset[PictureSample]):
    """A data set of some of the pictures, indexed by (epoch, sample id); a sample id is an index into `numbers`."""

    def __init__(
        self,
        pictures: Pictures,
        numbers: Sequence[int],
        labels: Sequence[int],
        processor: Processor,
        augmentation: Augmentation,
        seed: int,
    ) -> None:
        """`numbers`: the data set's pictures, as indices into all pictures.

        `labels`: for each class of the data, the index of the teacher's logit.
        """
        self._pictures, self._numbers, self._labels = pictures, numbers, labels
        self._processor, self._augmentation, self._seed = processor, augmentation, seed

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: SampleKey) -> PictureSample:
        epoch, sample_id = key
        picture = self._augmentation.apply(self.picture(sample_id), self._seed, epoch, sample_id)
        pixels = torch.from_numpy(self._processor(np.ascontiguousarray(picture)))
        return PictureSample(sample_id, pixels, self.label(sample_id))

    def picture(self, sample_id: int) -> Picture:
        """The picture as it was stored. Raises RunError where it cannot be read."""
        return self._pictures.read(self._numbers[sample_id], self._processor.num_channels)

    def label(self, sample_id: int) -> int:
        """The picture's class, as an index of the teacher's logits."""
        return self._labels[self._pictures.classes[self._numbers[sample_id]]]


def collate(samples: Sequence[PictureSample]) -> PictureBatch:
    """Stacks samples on the CPU."""
    return PictureBatch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        pixels=torch.stack([sample.pixels for sample in samples]),
        labels=torch.tensor([sample.label for sample in samples]),
    )


def split_held_out(classes: Sequence[int], share: float) -> tuple[list[int], list[int]]:
    """Indices of the pictures to train on and of those held out; of each class, the share `share` is held out.

    The split does not depend on the recipe's seed. If it did, a teacher trained with another seed would have seen
    pictures on which the student is evaluated. The order of both lists depends on the number of pictures alone. In a
    folder's own order, the first pictures (`data.max_samples`) would all be of one class.
    """
    members: dict[int, list[int]] = {}
    for index, label in enumerate(classes):
        members.setdefault(label, []).append(index)
    held_out: set[int] = set()
    for label, indices in members.items():
        order = torch.randperm(len(indices), generator=rng.generator(0, 0, label, "held-out")).tolist()
        held_out |= {indices[index] for index in order[: round(share * len(indices))]}
    mixed = torch.randperm(len(classes), generator=rng.generator(0, 0, 0, "order-of-pictures")).tolist()
    return [index for index in mixed if index not in held_out], [index for index in mixed if index in held_out]

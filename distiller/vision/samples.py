"""Training samples and micro-batches: pictures, cut and mirrored by draws that depend on (seed, epoch, sample id)."""

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
    """How training pictures are changed; `kind` is none, crop or crop-flip, `least_area` a share of the picture's."""

    kind: str
    least_area: float

    def apply(self, picture: Picture, seed: int, epoch: int, sample_id: int) -> Picture:
        """A random part, of side ratio 3/4 to 4/3, perhaps mirrored; the processor then scales it (Szegedy 2015)."""
        if self.kind == "none":
            return picture
        generator = rng.generator(seed, epoch, sample_id, "augmentation")
        area, ratio, top, left, side = torch.rand(5, generator=generator, dtype=torch.float64).tolist()
        height, width = picture.shape[:2]
        pixels = (self.least_area + (1 - self.least_area) * area) * height * width
        aspect = (4 / 3) ** (2 * ratio - 1)
        rows = min(height, max(1, round((pixels / aspect) ** 0.5)))
        columns = min(width, max(1, round((pixels * aspect) ** 0.5)))
        first_row, first_column = int(top * (height - rows + 1)), int(left * (width - columns + 1))
        part = picture[first_row : first_row + rows, first_column : first_column + columns]
        return part[:, ::-1] if self.kind == "crop-flip" and side < 0.5 else part


@dataclass(frozen=True)
class PictureSample:
    """One picture as the networks see it: pixels [C, H, W] float32, and its class by the teacher's numbers."""

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
    """Some of the pictures, indexed by (epoch, place among them)."""

    def __init__(
        self,
        pictures: Pictures,
        numbers: Sequence[int],
        labels: Sequence[int],
        processor: Processor,
        augmentation: Augmentation,
        seed: int,
    ) -> None:
        """`numbers` are places among all pictures; `labels` the teacher's number of each class of the data."""
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
        """As it is in the files."""
        return self._pictures.read(self._numbers[sample_id], self._processor.num_channels)

    def label(self, sample_id: int) -> int:
        """Its class, by the teacher's numbers."""
        return self._labels[self._pictures.classes[self._numbers[sample_id]]]


def collate(samples: Sequence[PictureSample]) -> PictureBatch:
    """Stacks samples on the CPU."""
    return PictureBatch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        pixels=torch.stack([sample.pixels for sample in samples]),
        labels=torch.tensor([sample.label for sample in samples]),
    )


def split_held_out(classes: Sequence[int], share: float) -> tuple[list[int], list[int]]:
    """(trained on, held out): the same share of each class, whatever the recipe's seed.

    Not by the seed: a teacher that was trained under another one would have seen what a student is judged by. Both are
    in an order that depends on nothing but how many pictures there are: in a folder's own, the first so many would be
    of one class.
    """
    members: dict[int, list[int]] = {}
    for place, number in enumerate(classes):
        members.setdefault(number, []).append(place)
    held_out: set[int] = set()
    for number, places in members.items():
        order = torch.randperm(len(places), generator=rng.generator(0, 0, number, "held-out")).tolist()
        held_out |= {places[place] for place in order[: round(share * len(places))]}
    mixed = torch.randperm(len(classes), generator=rng.generator(0, 0, 0, "order-of-pictures")).tolist()
    return [place for place in mixed if place not in held_out], [place for place in mixed if place in held_out]

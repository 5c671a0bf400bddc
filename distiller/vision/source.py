"""A recipe's pictures: those to learn from, those held out, and those that its teacher is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

from distiller.config.classification import ClassificationRecipe
from distiller.data.pictures import check_pictures
from distiller.errors import UserError
from distiller.storage.stages import digest_of
from distiller.vision.files import Processor
from distiller.vision.labels import class_numbers
from distiller.vision.samples import Augmentation, PictureData, split_held_out
from distiller.vision.sources import open_pictures


@final
class PictureSource:
    """Everything is known once it is made; pictures are read when they are asked for. Does not communicate.

    Attributes:
        training, held_out, teachers: indexed by (epoch, place among them). The teacher's are all that are not held out,
            the student's the first `data.max_samples` of those.
        data_digest: of names, classes and split, which a resumed run is compared by.
        notices: what of the data is left out, a line each.
    """

    def __init__(self, recipe: ClassificationRecipe, labels: Sequence[str], processor: Processor) -> None:
        """`labels` are the teacher's classes, in the order of its logits. Raises UserError where the data's differ."""
        data = recipe.data
        self._pictures = pictures = open_pictures(data)
        self.notices = pictures.notices
        origin = f"data.path: {data.path}" if data.path else f"data.kind: {data.kind}"
        numbers = class_numbers(pictures.class_names, labels, origin)
        trained_on, held_out = split_held_out(pictures.classes, data.held_out)
        if not trained_on:
            raise UserError(f"{origin} leaves nothing to train on with data.held_out {data.held_out:g}; lower it")

        def some(places: Sequence[int], kind: str, crop_scale: float, seed: int) -> PictureData:
            return PictureData(pictures, places, numbers, processor, Augmentation(kind, crop_scale), seed)

        self.training = some(trained_on[: data.max_samples], data.augmentation, data.crop_scale, recipe.seed)
        self.held_out = some(held_out, "none", 1.0, recipe.seed)
        lessons = recipe.teacher_training
        self.teachers = some(trained_on, lessons.augmentation, data.crop_scale, lessons.seed)
        # With the places, since a sample's id is one among them.
        self.data_digest = digest_of([list(pictures.names), list(pictures.classes), trained_on])

    def look_at(self, num_channels: int) -> str:
        """Reads some of the pictures, and says how many. Raises UserError for one that cannot be read."""
        return check_pictures(lambda number: self._pictures.read(number, num_channels), len(self._pictures.classes))

    @cached_property
    def contents_digest(self) -> str:
        """Changes when a picture does. Of a folder, every file is read, or what was noted of them. Raises UserError."""
        return digest_of(self._pictures.contents())

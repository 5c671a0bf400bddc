"""A recipe's pictures: those the student learns from, those held out, and those its teacher is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

from distiller.config.classification import ClassificationRecipe
from distiller.data.pictures import check_pictures
from distiller.errors import UserError
from distiller.storage.stages import digest_of
from distiller.vision.files import Processor
from distiller.vision.labels import are_unnamed, class_numbers
from distiller.vision.samples import Augmentation, PictureData, split_held_out
from distiller.vision.sources import open_pictures

MAX_NAMED = 5
"""Classes that a notice names."""


@final
class PictureSource:
    """The pictures of one recipe. The constructor reads names and classes only. Does not communicate.

    Attributes:
        training, held_out, teacher_training: data sets, indexed by (epoch, index in the data set). `teacher_training`
            holds all pictures that are not held out, `training` the first `data.max_samples` of them.
        data_digest: of names, classes and split; a resumed run must have the same.
        notices: what is left out of the data, a line each.
    """

    def __init__(self, recipe: ClassificationRecipe, labels: Sequence[str], processor: Processor) -> None:
        """`labels` are the names of the teacher's classes, in the order of its logits.

        Raises:
            UserError: the data cannot be read, has other classes, or leaves no picture to train on.
        """
        data = recipe.data
        self._pictures = pictures = open_pictures(data)
        self.notices = list(pictures.notices)
        origin = f"data.path: {data.path}" if data.path else f"data.kind: {data.kind}"
        teacher_classes = class_numbers(pictures.class_names, labels, origin)
        if are_unnamed(pictures.class_names, labels):
            taken = ", ".join(f"{number} = {name}" for number, name in enumerate(pictures.class_names[:MAX_NAMED]))
            more = ", ..." if len(labels) > MAX_NAMED else ""
            self.notices.append(
                "the teacher's classes have no names (id2label: LABEL_0, ...) and are taken in the data's order: "
                f"{taken}{more}; if the teacher was trained in another order, name its classes in its config.json"
            )
        trained_on, held_out = split_held_out(pictures.classes, data.held_out)
        if not trained_on:
            raise UserError(f"{origin} leaves nothing to train on with data.held_out {data.held_out:g}; lower it")

        def picture_data(places: Sequence[int], kind: str, crop_scale: float, seed: int) -> PictureData:
            return PictureData(pictures, places, teacher_classes, processor, Augmentation(kind, crop_scale), seed)

        self.training = picture_data(trained_on[: data.max_samples], data.augmentation, data.crop_scale, recipe.seed)
        self.held_out = picture_data(held_out, "none", 1.0, recipe.seed)
        teacher_training = recipe.teacher_training
        self.teacher_training = picture_data(
            trained_on, teacher_training.augmentation, data.crop_scale, teacher_training.seed
        )
        # With the order of the training pictures, since a sample id is an index into it.
        self.data_digest = digest_of([list(pictures.names), list(pictures.classes), trained_on])

    def check_samples(self, num_channels: int) -> str:
        """Reads some of the pictures, and returns a line that says how many. UserError for one that cannot be read."""
        return check_pictures(lambda index: self._pictures.read(index, num_channels), len(self._pictures.classes))

    @cached_property
    def contents_digest(self) -> str:
        """Digest of the pictures' contents. Reads every file of a folder, unless a digest of these files is recorded.

        Raises UserError for a file that cannot be read.
        """
        return digest_of(self._pictures.contents())

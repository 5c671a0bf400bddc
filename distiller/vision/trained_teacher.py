"""A teacher that is given as a config without weights: trained once on the labels, and kept in a keyed folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import final

from distiller.config.classification import ClassificationRecipe
from distiller.distributed.ranks import Ranks
from distiller.errors import UserError
from distiller.storage.stages import Stage
from distiller.vision.files import ClassifierFiles, Processor
from distiller.vision.source import PictureSource
from distiller.vision.teacher_training import train_teacher
from distiller.vision.weight_files import stored_files


@final
class TrainedTeacher:
    """The trained teacher's weights, in a folder whose name changes with everything that they depend on."""

    def __init__(
        self, recipe: ClassificationRecipe, files: ClassifierFiles, processor: Processor, source: PictureSource
    ) -> None:
        """Trains nothing and reads no picture yet. Raises UserError where the teacher has weights already."""
        self._recipe, self._options = recipe, recipe.teacher_training
        self._files, self._processor, self._source = files, processor, source
        if found := files.found_weights():
            raise UserError(
                f"teacher_training.max_steps is {self._options.max_steps} and {files.source} has weights already "
                f"({found}), which training would not begin with; remove teacher_training, or give a folder without "
                "weights"
            )

    @cached_property
    def stage(self) -> Stage:
        """The folder with the weights. Its key holds `PictureSource.contents_digest`, which may read every picture.

        Raises UserError for a picture that cannot be read.
        """
        key = {
            "config": self._files.describe(),
            "processor": self._processor.describe(),
            "training": self._options.model_dump(mode="json"),
            "data": self._source.data_digest,
            "pictures": self._source.contents_digest,
            "crop_scale": self._recipe.data.crop_scale,
        }
        return Stage("teacher", key, self._recipe.stages_dir)

    @property
    def missing_folder(self) -> Path | None:
        """The folder where the weights will be; None once they are there."""
        return None if self.stage.is_complete else self.stage.folder

    def train_once(self, ranks: Ranks) -> None:
        """Trains the teacher on rank 0 where no run has done so; the other ranks wait.

        Every rank calls it. Communicates. Raises RunError where the training ends with a loss that is not finite.
        """
        was_complete = self.stage.is_complete
        if not was_complete and (others := self.stage.results_of_other_keys):
            ranks.print(f"note: {_said_of(others)}, so the teacher is trained anew")
        self.stage.make_on_main(ranks, lambda: ranks.print(self._train(ranks)))
        if was_complete:
            ranks.print(f"reusing {self.stage.folder}")

    def weight_files(self) -> list[Path]:
        """The safetensors files. Raises UserError where the teacher has not been trained."""
        if not self.stage.is_complete:
            if others := self.stage.results_of_other_keys:
                raise UserError(
                    f"{self.stage.folder}: the trained teacher is not there; {_said_of(others)}: use the version, "
                    "recipe and pictures that it was made with, or train again"
                )
            raise UserError(
                f"{self.stage.folder}: the trained teacher is not there; give the cache_dir (or output_dir) that it "
                "was trained in"
            )
        return stored_files(self.stage.folder)

    def _train(self, ranks: Ranks) -> str:
        return train_teacher(
            self.stage, self._files, self._processor, self._options, self._source.teacher_training, ranks.device
        )


def _said_of(others: Sequence[Path]) -> str:
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    return f"{others[-1]}{more} was made by an older version, by another recipe or from other pictures"

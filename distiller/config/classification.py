"""Task `classification`: its sections of the recipe. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, final

from pydantic import Field, create_model, model_validator

from distiller.config.classification_losses import LOSSES
from distiller.config.recipe import Data, Evaluation, FeatureLoss, RecipeOf, TaskOptions
from distiller.config.sections import Float, Location, NonNegative, Positive, PositiveFloat, Section, Switch, Weight

Augmentation = Literal["none", "crop", "crop-flip"]


def _make_losses() -> type[Section]:
    """The section with one section for each loss in the registry."""
    fields: dict[str, Any] = {name: (spec.options, spec.options()) for name, spec in LOSSES.items()}
    doc = "The weighted terms of the loss; each is a mean over the samples of the whole update, in float32."
    return create_model("ClassificationLosses", __base__=Section, __doc__=doc, **fields)


if TYPE_CHECKING:

    class ClassificationLosses(Section):
        """What every reader may use; a loss reads its own section."""

        features: FeatureLoss = FeatureLoss()

else:
    ClassificationLosses = _make_losses()


@final
class ClassificationOptions(TaskOptions):
    """What is learnt, for image classifiers."""

    kind: Literal["classification"] = Field(  # type: ignore[assignment]
        default="classification", description="which task; left out: the one that the teacher is of"
    )
    losses: ClassificationLosses = ClassificationLosses()
    channels_last: Switch = Field(
        default=False, description="both networks' inputs in channels-last memory, for convolutions"
    )


@final
class ClassificationStudent(Section):
    """The trained network: exactly one of config, path, or the teacher's own layers (num_layers or depths)."""

    config: Location | None = Field(default=None, description="the library's own config.json")
    path: Location | None = Field(default=None, description="a saved model folder")
    num_layers: Positive | None = Field(default=None, description="evenly spaced layers of the teacher")
    depths: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = Field(
        default=None, description="the same for a teacher of several stages: layers of each"
    )
    batch_norm: Literal["batch", "frozen", "group"] = Field(
        default="batch",
        description="batch = statistics of each micro-batch, so that its size matters; frozen = running statistics as "
        "they are; group = GroupNorm instead",
    )

    @property
    def from_teacher(self) -> bool:
        """Whether the student is cut out of the teacher."""
        return self.num_layers is not None or self.depths is not None

    @model_validator(mode="after")
    def _one_source(self) -> ClassificationStudent:
        if sum(value is not None for value in (self.config, self.path, self.num_layers, self.depths)) != 1:
            raise ValueError(
                "give exactly one of student.config, student.path, student.num_layers and student.depths (the "
                "teacher's own layers)"
            )
        return self


@final
class ClassificationData(Data):
    """What is learnt from: pictures with their classes."""

    kind: Literal["images", "datasets", "digits"] = Field(
        default="images",
        description="images = a folder for each class; datasets = a saved data set; digits = scikit-learn's",
    )
    path: Location | None = Field(default=None, description="the folder; of digits none")
    max_samples: Positive | None = Field(default=None, description="train on so many only, the same ones in every run")
    split: Location = Field(default="train", description="datasets: which part of the data set")
    image_column: Location = Field(default="image", description="datasets: where the pictures are")
    label_column: Location = Field(default="label", description="datasets: where the classes are")
    held_out: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=0.2, description="share of each class that is never trained on, for evaluate; the same under every seed"
    )
    augmentation: Augmentation = Field(default="none", description="of training pictures, drawn anew in every epoch")
    crop_scale: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=0.6, description="least area of a crop, of the picture's, before it is cut at the picture's edges"
    )

    @model_validator(mode="after")
    def _has_a_path(self) -> ClassificationData:
        if self.kind == "digits" and self.path is not None:
            raise ValueError(f"data.kind=digits reads no file, given data.path {self.path}; remove it")
        if self.kind != "digits" and self.path is None:
            raise ValueError(f"data.kind={self.kind} needs data.path; give it")
        return self


@final
class TeacherTraining(Section):
    """The stage in which the teacher is trained on the labels, where its folder holds a config and no weights."""

    max_steps: Positive | None = Field(
        default=None, description="updates; null = no stage, teacher.path holds the weights"
    )
    batch_size: Positive = Field(default=64, description="samples an update, in one process")
    lr: PositiveFloat = Field(default=2e-3, description="peak learning rate of AdamW; linear warm-up, then cosine to 0")
    warmup_steps: NonNegative = Field(default=50, description="updates")
    weight_decay: Weight = Field(default=0.05, description="decoupled; not of biases and norms")
    label_smoothing: Annotated[Float, Field(ge=0, lt=1)] = Field(default=0.0, description="of the cross-entropy")
    augmentation: Augmentation = Field(default="crop", description="as data.augmentation, for the teacher")
    seed: Annotated[NonNegative, Field(lt=2**63)] = Field(default=0, description="of its weights, order and crops")


@final
class ClassificationEvaluation(Evaluation):
    """What `evaluate` measures, on the pictures that were held out."""

    num_samples: Positive | None = Field(default=None, description="only so many of the held-out pictures")
    batch_size: Positive = Field(
        default=64, description="pictures a forward pass; halved until it fits the GPU's memory"
    )
    min_accuracy_ratio: PositiveFloat | None = Field(
        default=None, description="quality gate: the student's accuracy over the teacher's; exit 3 below it"
    )


@final
class ClassificationRecipe(
    RecipeOf[ClassificationOptions, ClassificationStudent, ClassificationData, ClassificationEvaluation]
):
    """A whole run, but for processes and the student's sharding, which are the launch file's."""

    task: ClassificationOptions
    student: ClassificationStudent
    data: ClassificationData
    teacher_training: TeacherTraining = TeacherTraining()
    evaluation: ClassificationEvaluation = ClassificationEvaluation()

    @property
    def stage_updates(self) -> int | None:
        return self.teacher_training.max_steps

    def with_short_stages(self, num_updates: int) -> Self:
        training = self.teacher_training
        if training.max_steps is None:
            return self
        short = {"max_steps": min(num_updates, training.max_steps), "warmup_steps": 0}
        return self.model_copy(update={"teacher_training": training.model_copy(update=short)})

    @model_validator(mode="after")
    def _no_contradictions_of_classification(self) -> ClassificationRecipe:
        features = self.task.losses.features
        features.check_pairs()
        return self

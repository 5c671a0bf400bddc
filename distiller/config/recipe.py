"""The recipe: every key that all tasks share, typed and frozen, with its unit and default. Imports no torch.

A task adds its own sections (`distiller.config.diffusion` and so on); `distiller.config.loading` reads a recipe.
Contradictions between keys are checked here and there; what depends on files is checked by the task, what depends on
the hardware in `distiller.build`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar, final

from pydantic import Field, model_validator

from distiller.config.placements.keys import path_keys
from distiller.config.sections import (
    Float,
    NonNegative,
    OutputLocation,
    Positive,
    PositiveFloat,
    Section,
    Switch,
    Weight,
)
from distiller.config.teacher import Teacher
from distiller.storage.stage_folders import CACHED_STAGES, StageFolders


class TaskOptions(Section):
    """What is learnt."""

    kind: str = Field(description="which task; left out: the one that the teacher is of")


@final
class FeatureLoss(Section):
    """Distance between block outputs, through projections that are trained with the student."""

    weight: Weight = Field(default=0.0, description="of this term in the sum; 0 = off")
    student_blocks: tuple[NonNegative, ...] = Field(default=(), description="block numbers; empty = none")
    teacher_blocks: tuple[NonNegative, ...] = Field(default=(), description="one for each student block")

    def check_pairs(self) -> None:
        """Every student block has its teacher block, and a weight something to weigh; ValueError otherwise."""
        if len(self.student_blocks) != len(self.teacher_blocks):
            raise ValueError(
                f"task.losses.features: given {len(self.student_blocks)} student_blocks and "
                f"{len(self.teacher_blocks)} teacher_blocks; name one teacher block for each student block"
            )
        if self.weight and not self.student_blocks:
            raise ValueError(
                f"task.losses.features.weight is {self.weight:g} and student_blocks is empty; name the blocks to "
                "match, or set the weight to 0"
            )


class Data(Section):
    """What is learnt from."""

    counts_samples: ClassVar[bool] = True
    """Whether `max_samples` counts what training counts as samples, so that a trial run can ask for a few."""

    max_samples: Positive | None = Field(default=None, description="only the first so many")


@final
class Train(Section):
    """How long, and how the global batch is split."""

    max_steps: Positive | None = Field(default=None, description="updates; wins over num_epochs")
    num_epochs: Positive | None = Field(default=None, description="passes over the data")
    batch_size: Positive = Field(default=8, description="micro-batch of one process, in samples")
    gradient_accumulation_steps: Positive | None = Field(default=None, description="None = derived, or 1")
    samples_per_update: Positive | None = Field(default=None, description="global batch; None = derived")
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field(
        default="auto", description="auto = bf16 on a GPU that has it"
    )
    tf32: Switch = Field(
        default=False, description="float32 products on a GPU's TF32 units: faster, 10 bits of mantissa"
    )
    gradient_checkpointing: Switch = Field(default=False, description="of the student only")
    compile: Literal["auto", "none", "default", "reduce-overhead", "max-autotune"] = Field(
        default="auto",
        description="the student's blocks, in a mode of torch.compile; auto = what the launch file says; without that "
        "default on a GPU, in a run of 500 updates or more",
    )
    ema_decay: Annotated[Float, Field(gt=0, lt=1)] | None = Field(default=None, description="None = no moving average")
    log_every: Positive = Field(default=10, description="updates")
    num_workers: NonNegative | Literal["auto"] = Field(
        default="auto",
        description="loader processes a rank; auto = up to 8 where a rank has a GPU and reading takes time, else none",
    )

    @model_validator(mode="after")
    def _has_an_end(self) -> Train:
        if self.max_steps is None and self.num_epochs is None:
            raise ValueError("the run has no end; give train.max_steps or train.num_epochs")
        return self


@final
class Optim(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = Field(default=1e-4, description="peak learning rate")
    betas: tuple[Annotated[Float, Field(ge=0, lt=1)], Annotated[Float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), description="of AdamW"
    )
    eps: PositiveFloat = Field(default=1e-8, description="of AdamW")
    weight_decay: Weight = Field(default=0.0, description="decoupled; not of biases and norms")
    max_grad_norm: PositiveFloat | None = Field(
        default=None, description="clip at this true global norm; None = no clipping"
    )
    max_bad_steps: Positive = Field(
        default=5,
        description="updates in a row whose loss or gradient is not finite (they are left out) that end the run",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="after the warm-up, down to 0"
    )
    warmup_steps: NonNegative = Field(default=0, description="updates; of a shorter run, all of them")
    fused: Switch = Field(default=True, description="fused kernel; ZeRO with offload uses DeepSpeedCPUAdam instead")


@final
class Checkpoint(Section):
    """When the run can be continued from."""

    every_steps: Positive | None = Field(default=None, description="updates; None = by the clock")
    every_minutes: PositiveFloat | None = Field(
        default=10.0,
        description="since the last one, by rank 0's clock; None = not by the clock, also the default with every_steps",
    )
    at_end: Switch = Field(default=True, description="after the last update, so that --resume can train longer")
    keep: Positive = Field(default=2, description="newest checkpoints that are kept")
    keep_best: Switch = Field(
        default=False,
        description="keep the one with the lowest loss on held-out data too; it is saved when evaluation.every_steps "
        "measures it",
    )

    @model_validator(mode="before")
    @classmethod
    def _steps_alone(cls, given: Any) -> Any:
        # Checkpoints by the clock would push those of the requested steps out of the newest that are kept.
        if isinstance(given, dict) and given.get("every_steps") is not None:
            return {"every_minutes": None} | given
        return given


class Evaluation(Section):
    """How well the student does on data that it is not trained on."""

    every_steps: Positive | None = Field(
        default=None,
        description="updates between measurements of the loss on held-out data while training; None = none",
    )
    loss_samples: Positive = Field(
        default=256,
        description="samples of that loss, at most; of diffusion each with its own noise and timestep, always the same",
    )
    sample_every_steps: Positive | None = Field(
        default=None,
        description="updates between samples of teacher and student side by side while training, in "
        "evaluations/step-N; None = at the end alone",
    )


@final
class Tracking(Section):
    """Where metrics go beside metrics.jsonl."""

    trackers: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = Field(
        default=(), description="beside metrics.jsonl and the console"
    )
    project: str = Field(default="distiller", description="of the trackers")
    run_name: str | None = Field(default=None, description="of wandb; None = its own")
    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        default="auto", description="auto = offline without a key"
    )
    report: Switch = Field(
        default=True, description="write output_dir/report.html at the end; `distiller report` writes it at any time"
    )


@final
class Profile(Section):
    """What torch.profiler and torch's allocator record."""

    steps: tuple[Positive, Positive] | None = Field(
        default=None, description="first and last update of a trace in output_dir/profile; None = no trace"
    )
    memory: Switch = Field(
        default=False,
        description="record all of a session's allocations on a GPU, for the snapshot that is written when its memory "
        "is used up; false = those of the first two updates",
    )

    @model_validator(mode="after")
    def _is_in_order(self) -> Profile:
        if self.steps is not None and self.steps[0] > self.steps[1]:
            raise ValueError(f"profile.steps is {list(self.steps)}; give the first update and then the last")
        return self


class Cache(Section):
    """The teacher's outputs on disk, in the folder `teacher.cache`; docs/caching.md."""

    draws: Positive | None = Field(
        default=None,
        description="epoch e draws (noise and timestep, or a picture's cut) as epoch e mod draws did; None = each anew",
    )
    shard_mib: Positive = Field(
        default=256, description="about the size of a file that `distiller cache` writes, in MiB"
    )

    @property
    def is_exact(self) -> bool:
        """Whether training learns the same from what is stored as from the live teacher."""
        return True


PATHS = (
    *("output_dir", "cache_dir", "teacher.path", *path_keys()),
    *("student.path", "student.config", "data.path", "evaluation.features", "evaluation.clip"),
)
"""Keys of a recipe that name files or folders of this machine."""

TaskT = TypeVar("TaskT", bound=TaskOptions)
StudentT = TypeVar("StudentT", bound=Section)
DataT = TypeVar("DataT", bound=Data)
EvaluationT = TypeVar("EvaluationT", bound=Evaluation)


class RecipeOf(Section, Generic[TaskT, StudentT, DataT, EvaluationT]):
    """A whole run, but for processes and the student's sharding, which are the launch file's."""

    output_dir: OutputLocation = Field(default="outputs/run", description="relative to the working directory")
    cache_dir: OutputLocation | None = Field(
        default=None, description="of the stages before the loop; None = output_dir/stages"
    )
    seed: Annotated[NonNegative, Field(lt=2**63)] = Field(
        default=0, description="of new weights, order, noise and draws"
    )
    task: TaskT
    teacher: Teacher
    student: StudentT
    data: DataT
    train: Train
    optim: Optim = Optim()
    checkpoint: Checkpoint = Checkpoint()
    cache: Cache = Cache()
    evaluation: EvaluationT
    tracking: Tracking = Tracking()
    profile: Profile = Profile()

    @property
    def stages_dir(self) -> StageFolders:
        """Where the keyed files of the stages before the loop lie."""
        primary = Path(self.cache_dir) if self.cache_dir else Path(self.output_dir) / "stages"
        return StageFolders(primary, None if self.teacher.cache is None else Path(self.teacher.cache) / CACHED_STAGES)

    @property
    def stage_updates(self) -> int | None:
        """Updates of the stages before the loop; None where there are none, and their work grows with the samples."""
        return None

    def with_short_stages(self, num_updates: int) -> Self:
        """The same recipe, with no more than so many updates in any stage before the loop, for a dry run."""
        del num_updates
        return self

    @model_validator(mode="after")
    def _no_contradictions(self) -> RecipeOf[TaskT, StudentT, DataT, EvaluationT]:
        train = self.train
        if train.gradient_accumulation_steps and train.samples_per_update:
            raise ValueError(
                f"given train.gradient_accumulation_steps {train.gradient_accumulation_steps} and "
                f"train.samples_per_update {train.samples_per_update}; give one, the other follows from it"
            )
        if self.checkpoint.keep_best and self.evaluation.every_steps is None:
            raise ValueError(
                "checkpoint.keep_best is true and nothing measures which is best; set evaluation.every_steps"
            )
        return self


Recipe = RecipeOf[Any, Any, Any, Any]
"""A recipe of any task."""

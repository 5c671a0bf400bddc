"""The recipe: every knob, typed and frozen, with its unit and default. Importing this module does not import torch.

`distiller.recipe_file` reads one. What only other keys decide (contradictions) is checked here; what the files decide,
by the task; what the hardware decides, in `distiller.build`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from distiller.errors import shown
from distiller.sections import Float, Location, NonNegative, Positive, PositiveFloat, Section, Switch, Weight
from distiller.teacher_config import Teacher


class PredictionLoss(Section):
    """Distance between the student's and the teacher's prediction (for Wan: the flow's velocity)."""

    weight: Weight = Field(1.0, description="of this term in the sum")
    kind: Literal["mse", "huber"] = Field("mse", description="squared error, or linear beyond huber_delta")
    huber_delta: PositiveFloat = Field(1.0, description="where the Huber loss turns linear, in units of the prediction")


class FeatureLoss(Section):
    """Distance between block outputs, through linear projections that are trained with the student."""

    weight: Weight = Field(0.0, description="of this term in the sum; 0 = off")
    student_blocks: tuple[NonNegative, ...] = Field((), description="block numbers; empty = none")
    teacher_blocks: tuple[NonNegative, ...] = Field((), description="one for each student block")


class TrueDataLoss(Section):
    """Flow-matching loss against the data's own velocity (noise - x_0); needs images or latents."""

    weight: Weight = Field(0.0, description="of this term in the sum; 0 = off")


class Losses(Section):
    """The weighted terms of the loss; each is a mean over the samples of the whole update, in float32."""

    prediction: PredictionLoss = PredictionLoss()
    features: FeatureLoss = FeatureLoss()
    true_data: TrueDataLoss = TrueDataLoss()


class Timesteps(Section):
    """How the noise level sigma in (0, 1) of each sample is drawn; the timestep is sigma x 1000."""

    sampling: Literal["uniform", "logit_normal"] = Field(
        "uniform", description="distribution of sigma before the shift"
    )
    logit_mean: Float = Field(0.0, description="of logit_normal")
    logit_std: PositiveFloat = Field(1.0, description="of logit_normal")
    shift: PositiveFloat | Literal["auto"] = Field(
        "auto", description="sigma' = shift * sigma / (1 + (shift - 1) * sigma); auto = the teacher's scheduler's"
    )
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = Field("none", description="diffusers' SD3 loss weightings")


class Guidance(Section):
    """Classifier-free guidance distillation: the student learns u + scale * (c - u) in one forward pass."""

    scale: PositiveFloat | tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="None = learn the conditional prediction; a pair = drawn per sample from that range"
    )
    scale_2: PositiveFloat | None = Field(None, description="of the low-noise expert; None = as scale")
    negative_prompt: str = Field("", description="of the unconditional pass")


class DiffusionTask(Section):
    """What is learnt, for diffusion teachers."""

    kind: Literal["diffusion"] = Field("diffusion", description="which task")
    height: Positive = Field(64, description="pixels")
    width: Positive = Field(64, description="pixels")
    num_frames: Positive = Field(1, description="1 = text-to-image; otherwise 4 k + 1 for Wan")
    targets: Literal["live", "stored"] = Field("live", description="stored = the rollout's own (x_t, prediction) pairs")
    timesteps: Timesteps = Timesteps()
    guidance: Guidance = Guidance()
    losses: Losses = Losses()
    condition_dropout: Annotated[Float, Field(ge=0, lt=1)] = Field(0.0, description="share of empty prompts")
    max_sequence_length: Positive = Field(512, description="text tokens that the pipeline pads to")


class Sampling(Section):
    """How pictures are drawn: by the rollout, by `evaluate` and by `sample`, with the teacher's own scheduler."""

    num_inference_steps: Positive = Field(20, description="of the scheduler")
    guidance_scale: PositiveFloat = Field(1.0, description="of the teacher; 1 = none, one forward pass a step")
    guidance_scale_2: PositiveFloat | None = Field(None, description="of the low-noise expert; None = as above")

    @property
    def scales(self) -> tuple[float, float]:
        """Guidance scales of the first and the second expert."""
        return self.guidance_scale, self.guidance_scale_2 or self.guidance_scale


class Rollout(Section):
    """The stage in which the teacher draws its own samples from the prompts."""

    enabled: Switch = Field(True, description="False: x_t is pure noise at every t, as the older trainer did")
    samples_per_prompt: Positive = Field(1, description="drawings of each prompt, with noise of their own")
    batch_size: Positive = Field(64, description="samples a forward pass; part of the key")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the stored latents")


class Student(Section):
    """The trained network: exactly one of config, path, or the teacher's own blocks (num_layers and so on)."""

    config: Location | None = Field(None, description="the library's own config.json")
    path: Location | None = Field(None, description="a saved model folder, or a pipeline folder with transformer/")
    num_layers: Positive | None = Field(None, description="evenly spaced blocks of the teacher")
    num_attention_heads: Positive | None = Field(None, description="the teacher's first heads (width)")
    ffn_dim: Positive | None = Field(None, description="the teacher's first feed-forward channels (width)")

    @property
    def from_teacher(self) -> bool:
        """Whether the student is cut out of the teacher."""
        return any(value is not None for value in (self.num_layers, self.num_attention_heads, self.ffn_dim))

    @model_validator(mode="after")
    def _one_source(self) -> Student:
        given = [self.config is not None, self.path is not None, self.from_teacher]
        if sum(given) != 1:
            raise ValueError(
                "give exactly one of student.config, student.path, or the teacher's own blocks "
                "(student.num_layers, num_attention_heads, ffn_dim)"
            )
        return self


class Data(Section):
    """What is learnt from."""

    kind: Literal["prompts", "images", "latents"] = Field("prompts", description="what lies at path")
    max_samples: Positive | None = Field(None, description="only the first so many prompts, images or latents")
    path: Location = Field(
        description="prompts: a text file; images: a folder with metadata.jsonl or .txt captions; latents"
    )


class Train(Section):
    """How long, and how the global batch is split."""

    max_steps: Positive | None = Field(None, description="updates; wins over num_epochs")
    num_epochs: Positive | None = Field(None, description="passes over the data")
    batch_size: Positive = Field(8, description="micro-batch of one process, in samples")
    gradient_accumulation_steps: Positive | None = Field(None, description="None = derived, or 1")
    samples_per_update: Positive | None = Field(None, description="global batch; None = derived")
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field(
        "auto", description="auto = bf16 on a GPU that has it"
    )
    tf32: Switch = Field(False, description="float32 products on a GPU's TF32 units: faster, 10 bits of mantissa")
    gradient_checkpointing: Switch = Field(False, description="of the student only")
    ema_decay: Annotated[Float, Field(gt=0, lt=1)] | None = Field(None, description="None = no moving average")
    log_every: Positive = Field(10, description="updates")
    num_workers: NonNegative = Field(0, description="loader processes a rank")

    @model_validator(mode="after")
    def _has_an_end(self) -> Train:
        if self.max_steps is None and self.num_epochs is None:
            raise ValueError("the run has no end; give train.max_steps or train.num_epochs")
        return self


class Optim(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = Field(1e-4, description="peak learning rate")
    betas: tuple[Annotated[Float, Field(ge=0, lt=1)], Annotated[Float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="of AdamW"
    )
    eps: PositiveFloat = Field(1e-8, description="of AdamW")
    weight_decay: Weight = Field(0.0, description="decoupled; not of biases and norms")
    max_grad_norm: PositiveFloat | None = Field(None, description="clip at this true global norm; None = no clipping")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up, down to 0")
    warmup_steps: NonNegative = Field(0, description="updates; of a shorter run, all of them")
    fused: Switch = Field(True, description="fused kernel; ZeRO with offload uses DeepSpeedCPUAdam instead")


class Checkpoint(Section):
    """When the run can be continued from."""

    every_steps: Positive | None = Field(None, description="updates; None = only at the end")
    every_minutes: PositiveFloat | None = Field(
        None, description="since the last one, beside every_steps; rank 0's clock, read at logged steps"
    )
    at_end: Switch = Field(True, description="after the last update, so that --resume can train longer")
    keep: Positive = Field(2, description="newest checkpoints that are kept")


class Evaluation(Section):
    """What `evaluate` measures."""

    judge: Literal["none", "digits"] = Field("none", description="who says what a drawing shows")
    num_samples: Positive = Field(100, description="drawings of each of teacher and student")
    batch_size: Positive = Field(50, description="drawings a batch")
    sample_prompts: tuple[str, ...] = Field((), description="for samples.png, ten at most; empty = the data's first")
    min_recognised: Annotated[Float, Field(ge=0, le=1)] | None = Field(
        None, description="quality gate: exit 3 below it"
    )


class Tracking(Section):
    """Where metrics go beside metrics.jsonl."""

    trackers: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = Field(
        (), description="beside metrics.jsonl and the console"
    )
    project: str = Field("distiller", description="of the trackers")
    run_name: str | None = Field(None, description="of wandb; None = its own")
    mode: Literal["auto", "online", "offline", "disabled"] = Field("auto", description="auto = offline without a key")


class Recipe(Section):
    """A whole run, but for processes and the student's sharding, which are the launch file's."""

    output_dir: Location = Field("outputs/run", description="relative to the working directory")
    cache_dir: Location | None = Field(None, description="of encoded prompts and rollouts; None = output_dir/stages")
    seed: Annotated[NonNegative, Field(lt=2**63)] = Field(0, description="of new weights, order, noise and draws")
    task: DiffusionTask = DiffusionTask()
    sampling: Sampling = Sampling()
    rollout: Rollout = Rollout()
    teacher: Teacher
    student: Student
    data: Data
    train: Train
    optim: Optim = Optim()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    tracking: Tracking = Tracking()

    @property
    def stages_dir(self) -> Path:
        """Where the keyed files of the stages before the loop lie."""
        return Path(self.cache_dir) if self.cache_dir else Path(self.output_dir) / "stages"

    @model_validator(mode="after")
    def _no_contradictions(self) -> Recipe:
        losses, guidance = self.task.losses, self.task.guidance
        if losses.prediction.weight == losses.features.weight == losses.true_data.weight == 0:
            raise ValueError("task.losses: every weight is 0, nothing would be learnt; set one above 0")
        if len(losses.features.student_blocks) != len(losses.features.teacher_blocks):
            raise ValueError(
                f"task.losses.features: given {len(losses.features.student_blocks)} student_blocks and "
                f"{len(losses.features.teacher_blocks)} teacher_blocks; name one teacher block for each student block"
            )
        if losses.features.weight and not losses.features.student_blocks:
            raise ValueError(
                f"task.losses.features.weight is {losses.features.weight:g} and student_blocks is empty; name the "
                "blocks to match, or set the weight to 0"
            )
        if self.task.targets == "stored":
            if self.data.kind != "prompts" or not self.rollout.enabled:
                raise ValueError(
                    "task.targets=stored needs data.kind=prompts and rollout.enabled=true, given "
                    f"data.kind={self.data.kind} and rollout.enabled={str(self.rollout.enabled).lower()}"
                )
            if losses.features.weight:
                raise ValueError("task.targets=stored keeps no features; set task.losses.features.weight=0")
            if guidance.scale is not None:
                raise ValueError(
                    "task.targets=stored learns the rollout's own predictions; set sampling.guidance_scale instead of "
                    "task.guidance.scale"
                )
            if losses.true_data.weight:
                raise ValueError("task.targets=stored has no x_0 of its own; set task.losses.true_data.weight=0")
            if self.task.condition_dropout:
                raise ValueError("task.targets=stored cannot drop conditions: its predictions were made with them")
        if losses.true_data.weight and self.data.kind == "prompts":
            raise ValueError(
                "task.losses.true_data needs data.kind=images or latents, given prompts; set its weight to 0"
            )
        if guidance.scale_2 is not None and not isinstance(guidance.scale, float):
            raise ValueError(
                f"task.guidance.scale_2 is {guidance.scale_2:g} and needs task.guidance.scale to be one number, given "
                f"{shown(guidance.scale)}"
            )
        if isinstance(guidance.scale, tuple) and guidance.scale[0] > guidance.scale[1]:
            low, high = guidance.scale
            raise ValueError(f"task.guidance.scale: the range's low end {low:g} lies above its high end {high:g}")
        train = self.train
        if train.gradient_accumulation_steps and train.samples_per_update:
            raise ValueError(
                f"given train.gradient_accumulation_steps {train.gradient_accumulation_steps} and "
                f"train.samples_per_update {train.samples_per_update}; give one, the other follows from it"
            )
        if self.evaluation.min_recognised is not None and self.evaluation.judge == "none":
            raise ValueError("evaluation.min_recognised needs a judge; set evaluation.judge=digits, or remove it")
        return self

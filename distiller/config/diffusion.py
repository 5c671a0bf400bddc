"""Task `diffusion`: its sections of the recipe. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, final

from pydantic import Field, model_validator

from distiller.config.prediction_distances import DISTANCES
from distiller.config.recipe import Data, Evaluation, FeatureLoss, RecipeOf, TaskOptions
from distiller.config.sections import Float, Location, Positive, PositiveFloat, Section, Switch, Weight
from distiller.errors import shown

if TYPE_CHECKING:
    DistanceName = str
else:
    DistanceName = Literal[tuple(DISTANCES)]
ValueT = TypeVar("ValueT")


def filled(value: ValueT | None) -> ValueT:
    """The value of a key whose None the task has replaced by the pipeline's default (`with_pipeline_defaults`)."""
    assert value is not None, "the task works on the recipe that with_pipeline_defaults returns"
    return value


@final
class PredictionLoss(Section):
    """Distance between the student's and the teacher's prediction: the flow's velocity, the noise, or v."""

    weight: Weight = Field(default=1.0, description="of this term in the sum")
    kind: DistanceName = Field(
        default="mse", description=", or ".join(distance.description for distance in DISTANCES.values())
    )
    huber_delta: PositiveFloat = Field(
        default=1.0, description="where the Huber loss turns linear, in units of the prediction"
    )


@final
class TrueDataLoss(Section):
    """Distance to what the data's own x_0 and noise say (for a flow: noise - x_0); needs images or latents."""

    weight: Weight = Field(default=0.0, description="of this term in the sum; 0 = off")


@final
class Losses(Section):
    """The weighted terms of the loss; each is a mean over the samples of the whole update, in float32."""

    prediction: PredictionLoss = PredictionLoss()
    features: FeatureLoss = FeatureLoss()
    true_data: TrueDataLoss = TrueDataLoss()


@final
class Timesteps(Section):
    """How the noise level in (0, 1) of each sample is drawn: sigma, or the share of the schedule. Times 1000: t."""

    sampling: Literal["uniform", "logit_normal"] = Field(
        default="uniform", description="distribution of the level before the shift"
    )
    logit_mean: Float = Field(default=0.0, description="of logit_normal")
    logit_std: PositiveFloat = Field(default=1.0, description="of logit_normal")
    shift: PositiveFloat | Literal["auto"] = Field(
        default="auto", description="s' = shift * s / (1 + (shift - 1) * s); auto = the teacher's scheduler's"
    )
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = Field(
        default="none", description="SD3's loss weightings, of flows"
    )


@final
class Guidance(Section):
    """Classifier-free guidance distillation: the student learns u + scale * (c - u) in one forward pass."""

    scale: PositiveFloat | tuple[PositiveFloat, PositiveFloat] | None = Field(
        default=None, description="None = learn the conditional prediction; a pair = drawn per sample from that range"
    )
    scale_2: PositiveFloat | None = Field(default=None, description="of the low-noise expert; None = as scale")
    negative_prompt: str = Field(default="", description="of the unconditional pass")


@final
class DiffusionOptions(TaskOptions):
    """What is learnt, for diffusion teachers."""

    kind: Literal["diffusion"] = Field(  # type: ignore[assignment]
        default="diffusion", description="which task; left out: the one that the teacher is of"
    )
    height: Positive | None = Field(
        default=None, description="pixels, with width; None for both = the latents', or the pipeline's own"
    )
    width: Positive | None = Field(default=None, description="pixels, with height; None for both: see there")
    num_frames: Positive | None = Field(
        default=None,
        description="1 = text-to-image; otherwise 4 k + 1, for Wan; None = the latents', 1 for images, or the "
        "pipeline's own",
    )
    targets: Literal["live", "stored"] = Field(
        default="live", description="stored = the rollout's own (x_t, prediction) pairs"
    )
    timesteps: Timesteps = Timesteps()
    guidance: Guidance = Guidance()
    losses: Losses = Losses()
    condition_dropout: Annotated[Float, Field(ge=0, lt=1)] = Field(default=0.0, description="share of empty prompts")
    max_sequence_length: Positive | None = Field(
        default=None, description="text tokens that the pipeline pads to; None = its own"
    )

    @property
    def size(self) -> tuple[int, int, int]:
        """Frames, height and width."""
        return filled(self.num_frames), filled(self.height), filled(self.width)


@final
class Sampling(Section):
    """How pictures are drawn: by the rollout, by `evaluate` and by `sample`, with the teacher's own scheduler."""

    num_inference_steps: Positive | None = Field(
        default=None, description="of the scheduler; None = the pipeline's default"
    )
    guidance_scale: PositiveFloat | None = Field(
        default=None, description="of the teacher; 1 = none, one forward pass a step; None = the pipeline's default"
    )
    guidance_scale_2: PositiveFloat | None = Field(default=None, description="of the low-noise expert; None = as above")

    @property
    def num_steps(self) -> int:
        """`num_inference_steps`."""
        return filled(self.num_inference_steps)

    @property
    def scales(self) -> tuple[float, float]:
        """Guidance scales of the first and the second expert."""
        scale = filled(self.guidance_scale)
        return scale, self.guidance_scale_2 or scale


@final
class Rollout(Section):
    """The stage in which the teacher draws its own samples from the prompts."""

    enabled: Switch = Field(default=True, description="False: x_t is pure noise at every t, as the older trainer did")
    samples_per_prompt: Positive = Field(default=1, description="drawings of each prompt, with noise of their own")
    batch_size: Positive | None = Field(
        default=None,
        description="samples a forward pass; part of the key; None = about 32,768 tokens, and at most 64 samples",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="of the stored latents")


@final
class DiffusionStudent(Section):
    """The trained network: exactly one of config, path, or the teacher's own blocks (num_layers and so on)."""

    config: Location | None = Field(default=None, description="the library's own config.json")
    path: Location | None = Field(default=None, description="a saved model folder, or a pipeline folder")
    num_layers: Positive | None = Field(
        default=None, description="evenly spaced blocks of the teacher; of a UNet, layers a block"
    )
    num_attention_heads: Positive | None = Field(default=None, description="the teacher's first heads (width)")
    ffn_dim: Positive | None = Field(default=None, description="the teacher's first feed-forward channels (width)")

    @property
    def from_teacher(self) -> bool:
        """Whether the student is cut out of the teacher."""
        return any(value is not None for value in (self.num_layers, self.num_attention_heads, self.ffn_dim))

    @model_validator(mode="after")
    def _one_source(self) -> DiffusionStudent:
        given = [self.config is not None, self.path is not None, self.from_teacher]
        if sum(given) != 1:
            raise ValueError(
                "give exactly one of student.config, student.path, or the teacher's own blocks "
                "(student.num_layers, num_attention_heads, ffn_dim)"
            )
        return self


@final
class DiffusionData(Data):
    """What is learnt from."""

    kind: Literal["prompts", "images", "latents"] = Field(default="prompts", description="what lies at path")
    max_samples: Positive | None = Field(default=None, description="only the first so many prompts, images or latents")
    path: Location = Field(
        description="prompts: a text file; images: a folder with metadata.jsonl or .txt captions; latents"
    )
    held_out: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="share of them, the last ones, that is never trained on, for evaluation.every_steps",
    )


@final
class DiffusionEvaluation(Evaluation):
    """What `evaluate` measures."""

    judge: Literal["none", "digits"] = Field(default="none", description="who says what a drawing shows")
    num_samples: Positive = Field(default=100, description="drawings of each of teacher and student")
    seeds: Positive = Field(
        default=1,
        description="how many seeds draw that many each; from 2 on every sampled figure is a mean over them, with its "
        "standard deviation beside it as ..._std",
    )
    features: Location | None = Field(
        default=None,
        description="folder of an image model of transformers (safetensors, with its image processor), whose pooled "
        "output fid and kid compare; None = what the judge sees, and without a judge neither is computed",
    )
    clip: Location | None = Field(
        default=None, description="folder of a CLIP model of transformers, for clip_score; None = not computed"
    )
    batch_size: Positive | None = Field(
        default=None,
        description="drawings a batch; None = about 32,768 tokens, and at most 50 drawings; halved until it fits "
        "the GPU's memory",
    )
    sample_prompts: tuple[str, ...] = Field(
        default=(),
        description="for samples.png where the teacher is asked in the loop, ten at most; empty = the data's first",
    )
    min_recognised: Annotated[Float, Field(ge=0, le=1)] | None = Field(
        default=None, description="quality gate: exit 3 below it"
    )


@final
class DiffusionRecipe(RecipeOf[DiffusionOptions, DiffusionStudent, DiffusionData, DiffusionEvaluation]):
    """A whole run, but for processes and the student's sharding, which are the launch file's."""

    task: DiffusionOptions = DiffusionOptions()
    student: DiffusionStudent
    data: DiffusionData
    evaluation: DiffusionEvaluation = DiffusionEvaluation()
    sampling: Sampling = Sampling()
    rollout: Rollout = Rollout()

    @model_validator(mode="after")
    def _no_contradictions_of_diffusion(self) -> DiffusionRecipe:
        losses, guidance = self.task.losses, self.task.guidance
        if losses.prediction.weight == losses.features.weight == losses.true_data.weight == 0:
            raise ValueError("task.losses: every weight is 0, nothing would be learnt; set one above 0")
        losses.features.check_pairs()
        self._check_sides()
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
        if self.evaluation.min_recognised is not None and self.evaluation.judge == "none":
            raise ValueError("evaluation.min_recognised needs a judge; set evaluation.judge=digits, or remove it")
        return self

    def _check_sides(self) -> None:
        """Raises ValueError for one side alone: the pipeline's own other side would make a picture of odd proportions.

        Latents have a size, with which a side that is given is compared.
        """
        sides = {"task.height": self.task.height, "task.width": self.task.width}
        given = {key: side for key, side in sides.items() if side is not None}
        if self.data.kind != "latents" and len(given) == 1:
            (key, side), (missing,) = *given.items(), sides.keys() - given.keys()
            raise ValueError(
                f"{key} is {side} and {missing} is left out; give both, or leave both out for the pipeline's own size"
            )

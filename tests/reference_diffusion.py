"""The diffusion task once more, in plain PyTorch and diffusers: what a recipe means, without the product's code.

Draws are written out anew, prompts are encoded and rollouts drawn by the pipelines' own methods, and the loop is one
function. Everything is float32 on the CPU, in one process.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.reference_pipelines import (
    Options,
    encode,
    encode_picture,
    generator,
    kind_of,
    latent_shape,
    load,
    predict,
    roll_out,
    scheduler_shift,
    stack,
    with_features,
)


def uniform(seed: int, epoch: int, sample: int, purpose: str) -> float:
    return torch.rand((), generator=generator(seed, epoch, sample, purpose), dtype=torch.float64).item()


@dataclass
class Result:
    """What a run comes to.

    Attributes:
        losses, gradient_norms: of each update.
        terms: each update's unweighted terms, by name.
        student: weights by name, without the projections.
        latents: x_0 of all samples, where there is a stage or a folder of them.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    terms: list[dict[str, float]] = field(default_factory=list)
    student: dict[str, Tensor] = field(default_factory=dict)
    latents: Tensor | None = None


def read_data(pipeline: Any, options: Options) -> tuple[list[str], Tensor | None]:
    """Every sample's prompt, and its x_0 where the data has it."""
    data, task, path = options["data"], options["task"], Path(options["data"]["path"])
    if data["kind"] == "prompts":
        prompts = path.read_text().splitlines()[: data["max_samples"]]
        copies = options["rollout"]["samples_per_prompt"] if options["rollout"]["enabled"] else 1
        return [prompt for prompt in prompts for _ in range(copies)], None
    if data["kind"] == "latents":
        lines = (path / "prompts.txt").read_text().splitlines()
        shards = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
        index = [int(i) for shard in shards for i in shard["prompt_index"]][: data["max_samples"]]
        latents = torch.cat([shard["latents"] for shard in shards]).float()[: data["max_samples"]]
        return [lines[i] for i in index], latents
    rows = [json.loads(line) for line in (path / "metadata.jsonl").read_text().splitlines()][: data["max_samples"]]
    pictures = [encode_picture(pipeline, path / row["file_name"], task["height"], task["width"]) for row in rows]
    return [row["text"] for row in rows], torch.stack(pictures)


def draw_sigma(timesteps: Options, default_shift: float, seed: int, epoch: int, sample: int) -> float:
    """The level of noise in (0, 1): drawn, kept 1e-4 away from both ends, shifted."""
    if timesteps["sampling"] == "logit_normal":
        normal = torch.randn((), generator=generator(seed, epoch, sample, "sigma"), dtype=torch.float64)
        sigma = torch.sigmoid(timesteps["logit_mean"] + timesteps["logit_std"] * normal).item()
    else:
        sigma = uniform(seed, epoch, sample, "sigma")
    sigma = max(1e-4, min(1 - 1e-4, sigma))
    shift = default_shift if timesteps["shift"] == "auto" else timesteps["shift"]
    return shift * sigma / (1 + (shift - 1) * sigma)


def least_sigma(timesteps: Options, default_shift: float, num_train_timesteps: int) -> float:
    """The least one that diffusers' training scripts weight a loss by: of the schedule's first timestep."""
    shift, sigma = default_shift if timesteps["shift"] == "auto" else timesteps["shift"], 1 / num_train_timesteps
    return shift * sigma / (1 + (shift - 1) * sigma)


def loss_weight(weighting: str, sigma: float) -> float:
    """Esser et al. 2024, section 3.1 of the appendix: sigma^-2, and 2 / (pi (1 - 2 sigma + 2 sigma^2))."""
    if weighting == "sigma_sqrt":
        return sigma**-2
    return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2)) if weighting == "cosmap" else 1.0


@dataclass
class Sample:
    """One training sample: x_t, its network time and level, the condition, and what its target needs."""

    noisy: Tensor
    timestep: float
    sigma: float
    condition: dict[str, Tensor]
    truth: Tensor | None = None
    stored: Tensor | None = None
    scale: float | None = None


def noised(pipeline: Any, x0: Tensor | None, noise: Tensor, sigma: float) -> tuple[Tensor, float, Tensor | None]:
    """x_t, the network's time, and what a perfect network would predict; pure noise where there is no x_0."""
    if kind_of(pipeline) != "sd":
        timestep = pipeline.scheduler.config.num_train_timesteps * sigma
        return (noise, timestep, None) if x0 is None else ((1 - sigma) * x0 + sigma * noise, timestep, noise - x0)
    scheduler = diffusers.DDPMScheduler.from_config(pipeline.scheduler.config)
    timestep = int(sigma * scheduler.config.num_train_timesteps)
    if x0 is None:
        return noise, timestep, None
    time = torch.tensor([timestep])
    noisy = scheduler.add_noise(x0[None], noise[None], time)[0]
    is_noise = pipeline.scheduler.config.prediction_type == "epsilon"
    return noisy, timestep, noise if is_noise else scheduler.get_velocity(x0[None], noise[None], time)[0]


def draw_sample(
    pipeline: Any, options: Options, epoch: int, i: int, prompt: str, texts: Options, shape: Any, x0: Tensor | None
) -> Sample:
    """Sample i of an epoch, re-noised."""
    seed, task = options["seed"], options["task"]
    condition, guidance = texts[prompt], task["guidance"]
    if task["condition_dropout"] and uniform(seed, epoch, i, "condition") < task["condition_dropout"]:
        condition = texts[""]
    sigma = draw_sigma(task["timesteps"], scheduler_shift(pipeline, task), seed, epoch, i)
    noise = torch.randn(shape, generator=generator(seed, epoch, i, "noise"))
    noisy, timestep, truth = noised(pipeline, x0, noise, sigma)
    scale, boundary = guidance["scale"], pipeline.config.get("boundary_ratio")
    if isinstance(scale, tuple | list):
        scale = scale[0] + (scale[1] - scale[0]) * uniform(seed, epoch, i, "guidance")
    elif guidance["scale_2"] is not None and timestep < boundary * pipeline.scheduler.config.num_train_timesteps:
        scale = guidance["scale_2"]
    steps = pipeline.scheduler.config.num_train_timesteps
    weighted = max(sigma, least_sigma(task["timesteps"], scheduler_shift(pipeline, task), steps))
    return Sample(noisy, timestep, weighted, condition, truth, None, scale)


def stored_sample(
    pipeline: Any, options: Options, epoch: int, i: int, condition: Options, trajectory: Options
) -> Sample:
    """A step of sample i's own trajectory."""
    times = trajectory["timesteps"]
    step = int(uniform(options["seed"], epoch, i, "step") * len(times))
    sigma = times[step] / pipeline.scheduler.config.num_train_timesteps
    stored = trajectory["outputs"][i, step]
    return Sample(trajectory["inputs"][i, step], times[step], sigma, condition, None, stored)


def ask(kind: str, experts: list[Any], boundary: float | None, samples: list[Sample], negative: Options, blocks: Any):
    """The teacher's target [B, ...] and features, sample by sample of the expert that its time belongs to."""
    noisy, times = torch.stack([one.noisy for one in samples]), torch.tensor([one.timestep for one in samples])
    dtype, condition = next(experts[0].parameters()).dtype, stack([one.condition for one in samples])
    negatives = stack([negative] * len(samples))
    answers = []
    for expert in experts:
        with torch.no_grad():
            target, features = with_features(kind, expert, blocks, (noisy.to(dtype), times, condition))
            if samples[0].scale is not None:
                empty = predict(kind, expert, noisy.to(dtype), times, negatives).float()
                scales = torch.tensor([one.scale for one in samples]).view(-1, 1, 1, 1, 1)
                target = empty + scales * (target.float() - empty)
        answers.append([target, *features])
    if boundary is None:
        return answers[0][0], answers[0][1:]
    is_first = times >= boundary
    chosen = [torch.stack([a if first else b for a, b, first in zip(*pair, is_first)]) for pair in zip(*answers)]  # noqa: B905
    return chosen[0], chosen[1:]


def squared_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """A mean a sample."""
    return ((ours.float() - theirs.float()) ** 2).flatten(1).mean(1)


def distance(error: Tensor, options: Options) -> Tensor:
    """The prediction loss of each element, from its absolute error."""
    if options["kind"] == "huber":
        delta = options["huber_delta"]
        return torch.where(error <= delta, error**2 / 2, delta * (error - delta / 2))
    return error**2


def build_student(pipeline: Any, options: Options) -> tuple[Any, nn.ModuleList]:
    """The student of a config or a folder, and a projection for each pair of matched blocks."""
    part = "unet" if kind_of(pipeline) == "sd" else "transformer"
    teacher, features = getattr(pipeline, part), options["task"]["losses"]["features"]
    torch.manual_seed(options["seed"])
    student = type(teacher).from_config(json.loads(Path(options["student"]["config"]).read_text()))
    torch.manual_seed(options["seed"] + 1)
    projections = nn.ModuleList()
    if features["weight"]:
        ours, theirs = features["student_blocks"], features["teacher_blocks"]
        for own, other in zip(ours, theirs, strict=True):
            widths = [width_of(kind_of(pipeline), *pair) for pair in ((student, own), (teacher, other))]
            projections.append(nn.Linear(*widths, bias=False))
    return student, projections


def width_of(kind: str, model: Any, number: int) -> int:
    """Channels of a block's output."""
    if kind != "sd":
        return model.config.num_attention_heads * model.config.attention_head_dim
    channels = model.config.block_out_channels
    return [*channels, channels[-1], *reversed(channels)][number]


def run(options: Options) -> Result:
    """The whole of it."""
    task, seed, train = options["task"], options["seed"], options["train"]
    losses, optim = task["losses"], options["optim"]
    pipeline = load(options["teacher"]["path"], options["teacher"]["dtype"])
    kind, result = kind_of(pipeline), Result()
    prompts, latents = read_data(pipeline, options)
    negative = task["guidance"]["negative_prompt"]
    texts = encode(pipeline, list(dict.fromkeys([*prompts, negative, ""])), task["max_sequence_length"])
    trajectory: Options = {}
    if options["data"]["kind"] == "prompts" and options["rollout"]["enabled"]:
        trajectory = roll_out(pipeline, options, prompts, texts)
        latents = trajectory["latents"]
    result.latents = latents
    experts = [pipeline.unet] if kind == "sd" else [pipeline.transformer]
    boundary = pipeline.config.get("boundary_ratio")
    if boundary is not None:
        experts.append(pipeline.transformer_2)
        boundary *= pipeline.scheduler.config.num_train_timesteps
    student, projections = build_student(pipeline, options)
    parameters = [*student.parameters(), *projections.parameters()]
    adam = torch.optim.AdamW(parameters, lr=optim["lr"], eps=optim["eps"], weight_decay=0.0)
    batch_size, count = train["batch_size"], len(prompts)
    matched = losses["features"] if losses["features"]["weight"] else {"student_blocks": [], "teacher_blocks": []}
    for update in range(train["max_steps"]):
        epoch, place = divmod(update, count // batch_size)
        order = torch.randperm(count, generator=generator(seed, epoch, 0, "order")).tolist()
        draw = epoch % (options["cache"]["draws"] or epoch + 1)
        samples = []
        for i in order[place * batch_size : (place + 1) * batch_size]:
            if task["targets"] == "stored":
                samples.append(stored_sample(pipeline, options, draw, i, texts[prompts[i]], trajectory))
            else:
                shape, x0 = latent_shape(task), None if latents is None else latents[i]
                samples.append(draw_sample(pipeline, options, draw, i, prompts[i], texts, shape, x0))
        if task["targets"] == "stored":
            target, theirs = torch.stack([one.stored for one in samples]), []
        else:
            target, theirs = ask(kind, experts, boundary, samples, texts[negative], matched["teacher_blocks"])
        noisy, times = torch.stack([one.noisy for one in samples]), torch.tensor([one.timestep for one in samples])
        condition = {name: value.float() for name, value in stack([one.condition for one in samples]).items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=train["mixed_precision"] == "bf16"):
            inputs = noisy, times, condition
            prediction, ours = with_features(kind, student, matched["student_blocks"], inputs)
            ours = [project(one) for project, one in zip(projections, ours, strict=True)]
        terms: dict[str, Tensor] = {}
        if losses["prediction"]["weight"]:
            value = distance((prediction.float() - target.float()).abs(), losses["prediction"])
            weights = torch.tensor([loss_weight(task["timesteps"]["weighting"], one.sigma) for one in samples])
            terms["prediction"] = (weights * value.flatten(1).mean(1)).mean()
        if ours:
            pairs = [squared_error(a, b).mean() for a, b in zip(ours, theirs, strict=True)]
            terms["features"] = torch.stack(pairs).mean()
        if losses["true_data"]["weight"]:
            terms["true_data"] = squared_error(prediction, torch.stack([one.truth for one in samples])).mean()
        loss = sum(losses[name]["weight"] * term for name, term in terms.items())
        adam.zero_grad()
        loss.backward()
        gradients = [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
        result.losses.append(loss.item())
        result.gradient_norms.append(torch.cat(gradients).norm().item())
        result.terms.append({name: term.item() for name, term in terms.items()})
        adam.step()
    result.student = {name: value.detach().clone() for name, value in student.state_dict().items()}
    return result

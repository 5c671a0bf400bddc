"""Task `classification` in plain PyTorch, transformers and PIL: pictures are read, cut and scaled by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification

from tests.plain_loop import AdamW, LossOf, SampleKey, Trained, generator, rate, train

Picture = tuple[np.ndarray, int]
"""uint8 [H, W, 3] (of the digits 0 to 16, [8, 8]), and its class."""


def all_pictures(data: Any) -> list[Picture]:
    """Of a folder for each class, of a data set, or scikit-learn's digits."""
    if data.kind == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        return list(zip(digits.images, digits.target.tolist(), strict=True))
    if data.kind == "datasets":
        rows = datasets.load_from_disk(data.path)[data.split]
        return [(np.asarray(row[data.image_column].convert("RGB")), row[data.label_column]) for row in rows]
    classes = sorted(folder for folder in Path(data.path).iterdir() if folder.is_dir())
    return [
        (np.asarray(Image.open(file).convert("RGB")), number)
        for number, folder in enumerate(classes)
        for file in sorted(folder.iterdir())
    ]


def trained_on(pictures: list[Picture], share: float) -> list[Picture]:
    """Without the share of each class that is held out, in one order for all seeds."""
    held_out: set[int] = set()
    for number in sorted({of for _, of in pictures}):
        places = [place for place, (_, of) in enumerate(pictures) if of == number]
        order = torch.randperm(len(places), generator=generator(0, 0, number, "held-out")).tolist()
        held_out |= {places[i] for i in order[: round(share * len(places))]}
    mixed = torch.randperm(len(pictures), generator=generator(0, 0, 0, "order-of-pictures")).tolist()
    return [pictures[place] for place in mixed if place not in held_out]


def enlarged(digit: np.ndarray) -> np.ndarray:
    """A digit of 64 x 64, smoothly."""
    from scipy.ndimage import zoom

    grey = zoom(digit * (255 / 16), 8, order=3, mode="grid-constant", grid_mode=True)
    return grey.round().clip(0, 255).astype(np.uint8)[:, :, None].repeat(3, axis=2)


def cut(pixels: np.ndarray, kind: str, least_area: float, draws: torch.Generator) -> np.ndarray:
    """A part of an area between the least and all, of side ratio 3/4 to 4/3, anywhere; perhaps mirrored."""
    if kind == "none":
        return pixels
    area, ratio, top, left, side = torch.rand(5, generator=draws, dtype=torch.float64).tolist()
    height, width, _ = pixels.shape
    wanted, aspect = (least_area + (1 - least_area) * area) * height * width, (3 / 4) ** (1 - 2 * ratio)
    rows = max(min(round((wanted / aspect) ** 0.5), height), 1)
    columns = max(min(round((wanted * aspect) ** 0.5), width), 1)
    y, x = int(top * (height - rows + 1)), int(left * (width - columns + 1))
    part = pixels[y : y + rows, x : x + columns]
    return np.fliplr(part) if kind == "crop-flip" and side < 0.5 else part


def as_input(pixels: np.ndarray) -> Tensor:
    """32 x 32, bilinear, values from -1 to 1: what the toys' preprocessor_config.json says."""
    scaled = Image.fromarray(np.ascontiguousarray(pixels)).resize((32, 32), Image.Resampling.BILINEAR)
    return torch.from_numpy((np.asarray(scaled, dtype=np.float32) / 255 - 0.5) / 0.5).permute(2, 0, 1)


def batch_of(
    pictures: list[Picture], keys: list[SampleKey], kind: str, least_area: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Inputs [B, 3, 32, 32] and classes [B]."""
    inputs = []
    for epoch, number in keys:
        pixels = pictures[number][0] if pictures[number][0].ndim == 3 else enlarged(pictures[number][0])
        inputs.append(as_input(cut(pixels, kind, least_area, generator(seed, epoch, number, "augmentation"))))
    return torch.stack(inputs), torch.tensor([pictures[i][1] for _, i in keys])


def blocks_of(model: Any) -> list[nn.Module]:
    """A ResNet's layers, stage by stage, or a ViT's."""
    names = [name for name, _ in model.named_modules()]
    stages = [name for name in names if name.rpartition(".")[0].endswith(("stages.0.layers", "stages.1.layers"))]
    return [
        model.get_submodule(name) for name in stages or [n for n in names if n.rpartition(".")[0].endswith(".layers")]
    ]


def run(model: Any, inputs: Tensor, blocks: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, classes], and what these blocks return."""
    layers, kept = blocks_of(model), {}

    def keep(number: int) -> Any:
        return lambda module, args, output: kept.update({number: output if isinstance(output, Tensor) else output[0]})

    hooks = [layers[number].register_forward_hook(keep(number)) for number in set(blocks)]
    logits = model(pixel_values=inputs).logits
    for hook in hooks:
        hook.remove()
    return logits, [kept[number] for number in blocks]


def new_student(recipe: Any, teacher: Any) -> Any:
    """The student with its first weights and the norms that the recipe asks for."""
    options = recipe.student
    if options.path is not None:
        student = AutoModelForImageClassification.from_pretrained(options.path, dtype=torch.float32)
    else:
        if options.config is not None:
            values = json.loads(Path(options.config).read_text())
            values = {key: 0.0 if "dropout" in key else value for key, value in values.items()}
        else:
            values = teacher.config.to_dict()
            changed = {"num_hidden_layers": options.num_layers, "depths": options.depths and list(options.depths)}
            values |= {key: value for key, value in changed.items() if value}
        config = AutoConfig.for_model(**values)
        torch.manual_seed(recipe.seed)
        student = AutoModelForImageClassification.from_config(config)
        if options.config is None:
            take_layers(student, teacher, values["depths"] if options.depths else [options.num_layers])
    for layer in list(student.modules()):
        for name, norm in list(layer.named_children()):
            if isinstance(norm, nn.BatchNorm2d) and options.batch_norm == "group":
                channels = norm.num_features
                groups = max((n for n in range(1, 33) if channels % n == 0 and channels >= 4 * n), default=1)
                setattr(layer, name, new := nn.GroupNorm(groups, channels, eps=norm.eps))
                new.weight, new.bias = norm.weight, norm.bias
    return student


def take_layers(student: Any, teacher: Any, depths: list[int]) -> None:
    """The teacher's weights: of each stage evenly spaced layers, and everything that is in no layer."""
    stages = teacher.config.depths if len(depths) > 1 else [teacher.config.num_hidden_layers]
    numbers, first = [], 0
    for wanted, there in zip(depths, stages, strict=True):
        # A single layer is the last: its outputs are what the next stage was trained on.
        places = [round(i * (there - 1) / (wanted - 1)) for i in range(wanted)] if wanted > 1 else [0]
        numbers += [first + place for place in places]
        first += there
    names = [{id(block): name for name, block in model.named_modules()} for model in (student, teacher)]
    source = {
        f"{names[0][id(block)]}.": f"{names[1][id(blocks_of(teacher)[number])]}."
        for block, number in zip(blocks_of(student), numbers, strict=True)
    }
    theirs = teacher.state_dict()
    for name, value in student.state_dict().items():
        prefix = next((prefix for prefix in source if name.startswith(prefix)), "")
        value.copy_(theirs[source.get(prefix, "") + name.removeprefix(prefix)])


class Plain(nn.Module):
    """The student and its projections, under the names of the product; the teacher beside them."""

    def __init__(self, recipe: Any, teacher: Any) -> None:
        super().__init__()
        self.recipe, self.teacher = recipe, [teacher.eval()]
        self.pictures = trained_on(all_pictures(recipe.data), recipe.data.held_out)[: recipe.data.max_samples]
        self.model = new_student(recipe, teacher)
        features = recipe.task.losses.features
        self.pairs = list(zip(features.student_blocks, features.teacher_blocks, strict=True)) if features.weight else []
        shapes = [
            [output.shape[1:] for output in run(model.eval(), torch.zeros(1, 3, 32, 32), numbers)[1]]
            for model, numbers in ((self.model, features.student_blocks), (teacher, features.teacher_blocks))
            if self.pairs
        ]
        torch.manual_seed(recipe.seed + 1)
        self.projections = nn.ModuleList(
            nn.Conv2d(ours[0], theirs[0], 1, bias=False)
            if len(ours) == 3
            else nn.Linear(ours[-1], theirs[-1], bias=False)
            for ours, theirs in zip(*shapes, strict=True)
        )
        self.model.train()
        if recipe.student.batch_norm == "frozen":
            for norm in self.model.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    norm.eval()

    def loss_of(self, keys: list[SampleKey]) -> LossOf:
        losses, data = self.recipe.task.losses, self.recipe.data
        draws = self.recipe.cache.draws
        # Draws that are repeated are those of the first epochs.
        drawn = [(epoch % draws if draws else epoch, sample_id) for epoch, sample_id in keys]
        inputs, labels = batch_of(self.pictures, drawn, data.augmentation, data.crop_scale, self.recipe.seed)
        ours, our_blocks = run(self.model, inputs, tuple(a for a, _ in self.pairs))
        with torch.no_grad():
            theirs, their_blocks = run(self.teacher[0], inputs, tuple(b for _, b in self.pairs))
        weighted = logit_terms(losses, ours, theirs, labels)
        if self.pairs:
            matched = [
                (project(mine) - other).square().flatten(1).mean(1).sum()
                for project, mine, other in zip(self.projections, our_blocks, their_blocks, strict=True)
            ]
            weighted["features"] = losses.features.weight, sum(matched) / len(matched)
        total = sum(weight * term for weight, term in weighted.values())
        return LossOf(total, len(keys), {name: float(term.detach()) for name, (_, term) in weighted.items()})


def logit_terms(losses: Any, ours: Tensor, theirs: Tensor, labels: Tensor) -> dict[str, tuple[float, Any]]:
    """Name -> weight and sum over the pictures, of the terms that compare logits [B, classes]."""
    alpha, temperature = losses.distillation.alpha, losses.distillation.temperature
    log_p, log_q = ((logits.double() / temperature).log_softmax(-1) for logits in (theirs, ours))
    terms = {"labels": (1 - alpha, F.cross_entropy(ours, labels, reduction="sum"))}
    if alpha:
        terms["distillation"] = alpha, temperature**2 * (log_p.exp() * (log_p - log_q)).sum()
    return terms


def train_plainly(recipe: Any, teacher: Any = None) -> tuple[Trained, dict[str, Tensor]]:
    """The results of a run of this recipe, and its first weights."""
    with torch.random.fork_rng(devices=[]):
        teacher = teacher or AutoModelForImageClassification.from_pretrained(recipe.teacher.path, dtype=torch.float32)
        plain = Plain(recipe, teacher)
        first = {name: value.clone() for name, value in plain.state_dict().items()}
        return train(recipe, plain, len(plain.pictures), plain.loss_of), first


def train_teacher(recipe: Any) -> Any:
    """The teacher that the stage before the loop trains on the labels alone."""
    lessons, data = recipe.teacher_training, recipe.data
    pictures = trained_on(all_pictures(data), data.held_out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lessons.seed)
        model = AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(recipe.teacher.path)).train()
    optim = _Optim(lessons)
    optimizer, size = AdamW(list(model.parameters()), optim), min(lessons.batch_size, len(pictures))
    for step, keys in enumerate(_updates(lessons, len(pictures), size), start=1):
        inputs, labels = batch_of(pictures, keys, lessons.augmentation, data.crop_scale, lessons.seed)
        model.zero_grad()
        F.cross_entropy(model(pixel_values=inputs).logits, labels, label_smoothing=lessons.label_smoothing).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(rate(optim, step, lessons.max_steps))
    return model


class _Optim:
    """AdamW with its defaults, under a warm-up and a cosine schedule."""

    betas, eps, schedule = (0.9, 0.999), 1e-8, "cosine"

    def __init__(self, lessons: Any) -> None:
        self.lr, self.weight_decay, self.warmup_steps = lessons.lr, lessons.weight_decay, lessons.warmup_steps


def _updates(lessons: Any, num_samples: int, size: int) -> Iterator[list[SampleKey]]:
    for update in range(lessons.max_steps):
        epoch, place = divmod(update, num_samples // size)
        order = torch.randperm(num_samples, generator=generator(lessons.seed, epoch, 0, "order")).tolist()
        yield [(epoch, i) for i in order[place * size : (place + 1) * size]]

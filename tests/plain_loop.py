"""The training loop as the recipe's keys define it, in plain PyTorch: no ranks, no accumulation, no Accelerate.

Nothing of distiller is imported here or in the plain tasks beside it (`plain_language`, `plain_classification`): they
say again, independently, what its keys mean, and the product is compared with them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SampleKey = tuple[int, int]
"""(epoch, sample id)."""


@dataclass(frozen=True)
class LossOf:
    """A loss summed over tokens or samples, their number, and the loss's terms."""

    total: Tensor
    count: int
    terms: dict[str, float]


@dataclass
class Trained:
    """One entry an update; and the end of the training."""

    losses: list[float] = field(default_factory=list)
    terms: list[dict[str, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] | None = None


def generator(seed: int, epoch: int, sample_id: int, purpose: str) -> torch.Generator:
    """The CPU generator of one draw."""
    name = f"{seed}/{epoch}/{sample_id}/{purpose}".encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)


def samples_per_update(train: Any) -> int:
    """The global batch of one process."""
    return train.samples_per_update or train.batch_size * (train.gradient_accumulation_steps or 1)


def updates(recipe: Any, num_samples: int) -> Iterator[list[SampleKey]]:
    """The samples of every update of the run; an incomplete last batch of an epoch is dropped."""
    size, epoch, num_given = samples_per_update(recipe.train), 0, 0
    last = recipe.train.max_steps or recipe.train.num_epochs * (num_samples // size)
    while True:
        order = torch.randperm(num_samples, generator=generator(recipe.seed, epoch, 0, "order")).tolist()
        for start in range(0, num_samples - size + 1, size):
            if num_given == last:
                return
            yield [(epoch, sample_id) for sample_id in order[start : start + size]]
            num_given += 1
        epoch += 1


def rate(optim: Any, step: int, last_step: int) -> float:
    """The learning rate of update `step`, of which the first is 1."""
    done = step - 1
    if done < optim.warmup_steps:
        return optim.lr * (done + 1) / optim.warmup_steps
    share = (done - optim.warmup_steps) / max(last_step - optim.warmup_steps, 1)
    return (
        optim.lr * {"constant": 1, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[optim.schedule]
    )


class AdamW:
    """Loshchilov and Hutter 2019, algorithm 2, written out; matrices are decayed, biases and norms are not."""

    def __init__(self, parameters: Sequence[Tensor], optim: Any) -> None:
        self.parameters, self.optim, self.step_number = list(parameters), optim, 0
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Steps the parameters that have gradients; does not zero gradients."""
        self.step_number += 1
        first_beta, second_beta = self.optim.betas
        for parameter, (first, second) in zip(self.parameters, self.moments, strict=True):
            if parameter.grad is None:
                continue
            if parameter.ndim > 1:
                parameter.mul_(1 - learning_rate * self.optim.weight_decay)
            first.mul_(first_beta).add_(parameter.grad, alpha=1 - first_beta)
            second.mul_(second_beta).addcmul_(parameter.grad, parameter.grad, value=1 - second_beta)
            mean = first / (1 - first_beta**self.step_number)
            root = (second / (1 - second_beta**self.step_number)).sqrt()
            parameter.sub_(learning_rate * mean / (root + self.optim.eps))


def train(recipe: Any, student: nn.Module, num_samples: int, loss_of: Callable[[list[SampleKey]], LossOf]) -> Trained:
    """Trains `student` in place. `loss_of` is called for each micro-batch of `train.batch_size` samples."""
    done, optim, size = Trained(), recipe.optim, recipe.train.batch_size
    optimizer = AdamW([p for p in student.parameters() if p.requires_grad], optim)
    decay = recipe.train.ema_decay
    average = {name: value.clone() for name, value in student.state_dict().items()}
    all_updates = list(updates(recipe, num_samples))
    for step, keys in enumerate(all_updates, start=1):
        parts = [loss_of(keys[start : start + size]) for start in range(0, len(keys), size)]
        count = sum(part.count for part in parts)
        student.zero_grad()
        (sum(part.total for part in parts) / count).backward()
        gradients = [p.grad for p in optimizer.parameters if p.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt().item()
        if optim.max_grad_norm is not None and norm > optim.max_grad_norm:
            for gradient in gradients:
                gradient.mul_(optim.max_grad_norm / norm)
        optimizer.step(rate(optim, step, len(all_updates)))
        for name, value in student.state_dict().items():
            is_real = decay is not None and value.is_floating_point()
            average[name] = decay * average[name] + (1 - decay) * value if is_real else value.clone()
        done.losses.append(sum(part.total.detach().item() for part in parts) / count)
        done.terms.append({name: sum(part.terms[name] for part in parts) / count for name in parts[0].terms})
        done.norms.append(norm)
        done.rates.append(rate(optim, step, len(all_updates)))
        done.epochs.append(keys[0][0])
    done.weights = {name: value.detach().clone() for name, value in student.state_dict().items()}
    done.average = None if decay is None else average
    return done

"""Task `causal_lm` in plain PyTorch and transformers: one document at a time, whole logits, autograd alone."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.plain_loop import LossOf, SampleKey, Trained, generator, train


@dataclass(frozen=True)
class Piece:
    """A part of one document, read by itself: its tokens [L], the next token of each, and which of those are learnt."""

    tokens: Tensor
    following: Tensor
    learnt: Tensor


Row = list[Piece]


def documents(recipe: Any) -> Iterator[tuple[list[int], list[bool]]]:
    """Of each document its tokens and which are learnt: a text's all, an answer's own, and the end-of-text token."""
    tokenizer, path = AutoTokenizer.from_pretrained(recipe.teacher.path), Path(recipe.data.path)
    if recipe.data.kind == "text":
        found = [{"text": file.read_text()} for file in sorted(path.rglob("*.txt"))]
    else:
        found = [json.loads(line) for line in path.read_text().splitlines()]
    for document in found[: recipe.data.max_samples]:
        prompt = tokenizer(document.get("prompt", "")).input_ids
        answer = tokenizer(document.get("text", document.get("completion"))).input_ids
        answer = [*answer, tokenizer.eos_token_id]
        yield prompt + answer, [False] * len(prompt) + [True] * len(answer)


def is_held_out(recipe: Any, number: int) -> bool:
    """By the document's number alone. (With at least one document on each side, as here, there is no more to it.)"""
    digest = hashlib.blake2b(f"held out/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64 < recipe.data.held_out


def rows(recipe: Any) -> list[Row]:
    """Documents in rows of at most `max_length` tokens: one a row, or one after the other."""
    found: list[Row] = []
    room, length, packs = 0, recipe.data.max_length, recipe.data.packing
    for number, (tokens, learnt) in enumerate(documents(recipe)):
        first_learnt = next((i for i in range(1, len(tokens)) if learnt[i]), len(tokens))
        is_answer = not all(learnt)
        nothing = first_learnt == len(tokens) or (is_answer and first_learnt > length)
        if is_held_out(recipe, number) or nothing:
            continue
        is_cut = is_answer or not packs
        start = 0
        while start < len(tokens) - 1:
            if not packs or room < (min(len(tokens), length) if is_cut else 1):
                found.append([])
                room = length
            end = min(start + room, len(tokens))
            following = [*tokens[start + 1 : end + 1], 0][: end - start]
            is_learnt = [*learnt[start + 1 : end + 1], False][: end - start]
            found[-1].append(Piece(torch.tensor(tokens[start:end]), torch.tensor(following), torch.tensor(is_learnt)))
            room -= end - start
            start = len(tokens) if is_cut else end
    return found


def new_student(recipe: Any, teacher: Any) -> Any:
    """The student with its first weights: a new one by the seed, a saved one, or a part of the teacher."""
    options = recipe.student
    if options.path is not None:
        return AutoModelForCausalLM.from_pretrained(options.path, dtype=torch.float32)
    if options.config is not None:
        values = json.loads(Path(options.config).read_text())
        # Trained without it: no two engines would share its masks.
        values = {key: 0.0 if key.endswith("dropout") else value for key, value in values.items()}
        config = AutoConfig.for_model(**values)
    else:
        config = copy.deepcopy(teacher.config)
        heads = config.num_attention_heads // config.num_key_value_heads
        config.num_hidden_layers = options.num_layers or config.num_hidden_layers
        config.hidden_size = options.hidden_size or config.hidden_size
        config.intermediate_size = options.intermediate_size or config.intermediate_size
        pairs = options.num_key_value_heads or (options.num_attention_heads or 0) // heads
        if pairs:
            config.num_key_value_heads, config.num_attention_heads = pairs, heads * pairs
    torch.manual_seed(recipe.seed)
    student = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if options.config is None:
        theirs, last = teacher.state_dict(), teacher.config.num_hidden_layers - 1
        of_layer = [round(i * last / max(config.num_hidden_layers - 1, 1)) for i in range(config.num_hidden_layers)]
        for name, parameter in student.named_parameters():
            parts = name.split(".")
            if "layers" in parts:
                place = parts.index("layers") + 1
                parts[place] = str(of_layer[int(parts[place])])
            whole = theirs[".".join(parts)]
            parameter.data.copy_(whole[tuple(slice(size) for size in parameter.shape)])
    return student


def divergence(kind: str, log_p: Tensor, log_q: Tensor, loss: Any) -> Tensor:
    """Of the student's q from the teacher's p over the last axis, as the papers write it; no factor T^2."""

    def kl(a: Tensor, log_b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (a.log() - log_b), torch.zeros_like(a)).sum(-1)

    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl" or (kind == "jsd" and loss.beta == 0):
        return kl(p, log_q)
    if kind == "reverse_kl" or (kind == "jsd" and loss.beta == 1):
        return kl(q, log_p)
    if kind == "jsd":
        log_m = (loss.beta * p + (1 - loss.beta) * q).log()
        return loss.beta * kl(p, log_m) + (1 - loss.beta) * kl(q, log_m)
    if kind == "skewed_kl":
        return kl(p, (loss.skew * p + (1 - loss.skew) * q).log())
    return kl(q, (loss.skew * q + (1 - loss.skew) * p).log())


def divergence_from_stored(recipe: Any, logits: Tensor, log_q: Tensor, first_draws: Tensor) -> Tensor:
    """The divergence [L] from what a cache keeps of the teacher's logits [L, V]; `first_draws` [L] are in [0, 1).

    topk: the k likeliest ids and all others as one outcome. sampled: equal steps through the cumulative distribution,
    each id weighing its share of the steps. topk+sampled: the first exactly, the steps through what is left.
    """
    cache, loss = recipe.cache, recipe.task.losses.divergence
    p = (logits.float() / loss.temperature).softmax(-1)
    entropy_step = math.log(p.shape[1]) / 65535
    entropy = (-torch.special.xlogy(p, p).sum(1) / entropy_step).round() * entropy_step
    values, ids = p.topk(cache.k if "topk" in cache.form else 0, dim=1)
    outside = p.scatter(1, ids, 0.0).double()
    tail = outside.sum(1).bfloat16().double()[:, None] if "topk" in cache.form else torch.ones(len(p), 1).double()
    head = values.half().double()
    head = head * ((1 - tail) / head.sum(1, keepdim=True)) if "topk" in cache.form else head
    if cache.form == "topk":
        outcomes = torch.cat([head, tail], 1).clamp(min=1e-300)
        log_rest = log_q.exp().scatter(1, ids, 0.0).sum(1, keepdim=True).log()
        return divergence(loss.kind, outcomes.log(), torch.cat([log_q.gather(1, ids), log_rest], 1), loss)
    steps = (torch.arange(cache.samples) + first_draws[:, None]) / cache.samples
    cumulative = outside.cumsum(1)
    drawn = torch.searchsorted(cumulative, steps * cumulative[:, -1:], right=True).clamp(max=p.shape[1] - 1)
    cross_term = (head * log_q.gather(1, ids)).sum(1) + (tail / cache.samples * log_q.gather(1, drawn)).sum(1)
    return -entropy - cross_term


class Plain(nn.Module):
    """The student and its projections, under the names of the product; the teacher beside them."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.recipe, self.rows = recipe, rows(recipe)
        self.teacher = [AutoModelForCausalLM.from_pretrained(recipe.teacher.path, dtype=torch.float32).eval()]
        self.model = new_student(recipe, self.teacher[0]).train()
        features = recipe.task.losses.features
        torch.manual_seed(recipe.seed + 1)
        widths = self.model.config.hidden_size, self.teacher[0].config.hidden_size
        self.projections = nn.ModuleList(
            nn.Linear(*widths, bias=False) for _ in features.student_blocks if features.weight
        )

    def loss_of(self, keys: list[SampleKey]) -> LossOf:
        losses = self.recipe.task.losses
        sums = {"divergence": torch.zeros(()), "cross_entropy": torch.zeros(()), "features": torch.zeros(())}
        count = 0
        for _, sample_id in keys:
            first_draws = torch.rand(
                sum(len(piece.tokens) for piece in self.rows[sample_id]),
                generator=generator(self.recipe.seed, 0, sample_id, "cached tokens"),
                dtype=torch.float64,
            )
            for piece in self.rows[sample_id]:
                own, first_draws = first_draws[: len(piece.tokens)], first_draws[len(piece.tokens) :]
                for name, value in self._terms(piece, own).items():
                    sums[name] = sums[name] + value
                count += int(piece.learnt.sum())
        total = losses.alpha * sums["divergence"] + (1 - losses.alpha) * sums["cross_entropy"]
        total = total + losses.features.weight * sums["features"]
        shown = {"cross_entropy"} | ({"features"} if losses.features.weight else set())
        shown |= {"divergence"} if losses.alpha or losses.features.weight else set()
        return LossOf(total, count, {name: float(sums[name].detach()) for name in shown})

    def _terms(self, piece: Piece, first_draws: Tensor) -> dict[str, Tensor]:
        losses, learnt = self.recipe.task.losses, piece.learnt
        blocks = losses.features.student_blocks if losses.features.weight else ()
        ours, our_blocks = run(self.model, piece.tokens, blocks)
        with torch.no_grad():
            theirs, their_blocks = run(self.teacher[0], piece.tokens, losses.features.teacher_blocks if blocks else ())
        loss, temperature = losses.divergence, losses.divergence.temperature
        log_q, log_p = ((logits.double() / temperature).log_softmax(-1) for logits in (ours, theirs))
        if self.recipe.teacher.placement == "cached" and self.recipe.cache.form != "hidden":
            distances = divergence_from_stored(self.recipe, theirs, log_q, first_draws)
        else:
            distances = divergence(loss.kind, log_p, log_q, loss)
        pairs = zip(self.projections, our_blocks, their_blocks, strict=True)
        matched = [(project(mine) - other).square().mean(-1)[learnt].sum() for project, mine, other in pairs]
        return {
            "divergence": temperature**2 * distances[learnt].sum(),
            "cross_entropy": F.cross_entropy(ours[learnt], piece.following[learnt], reduction="sum"),
            "features": sum(matched) / len(matched) if matched else torch.zeros(()),
        }


def run(model: Any, tokens: Tensor, blocks: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """The logits [L, V] of one document, and what these blocks return."""
    layers = next(module for name, module in model.named_modules() if name.endswith((".layers", ".h")))
    kept: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            kept[number] = (output if isinstance(output, Tensor) else output[0])[0]

        return hook

    hooks = [layers[number].register_forward_hook(keep(number)) for number in set(blocks)]
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, [kept[number] for number in blocks]


def train_plainly(recipe: Any) -> tuple[Trained, dict[str, Tensor]]:
    """The results of a run of this recipe, and its first weights."""
    with torch.random.fork_rng(devices=[]):
        plain = Plain(recipe)
        first = {name: value.clone() for name, value in plain.state_dict().items()}
        return train(recipe, plain, len(plain.rows), plain.loss_of), first

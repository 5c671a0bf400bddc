"""A language model's distillation loss, forward and backward, with whole logits and in chunks, side by side.

    python scripts/benchmarks/divergences.py --tokens 8192 --vocabulary 128256 --hidden 4096 --output divergences.json

From the last hidden states of student and teacher to the gradients by the student's hidden states and output layer, on
random numbers. `plain` is what one writes first: both models' logits, their log-softmax in float32, autograd.
Liger-Kernel's fused layer and Jensen-Shannon divergence joins where it is installed (beta 0 and 1 are the KLs).
Memory is the peak above inputs and gradients, which every way needs. The limit is that of the four matrix products (two
forward, two backward) at the GPU's dense peak. With `--ids`, the rows "padded" are the loss over the ids that stand for
a token, as training has it where the output layer is wider than the tokenizer; the other rows take every id for one.
Times are means over the repeats, without a synchronisation between them, after two that are not counted.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distiller.language.loss.chunked_loss import chunked_loss, default_chunk_tokens
from distiller.language.loss.divergences import DIVERGENCES
from distiller.language.loss.targets import HiddenTarget
from distiller.language.loss.token_losses import Objective
from distiller.language.model.logits import TokenIds
from distiller.training.tracking import peak_flops

GIB = 2**30
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Inputs(NamedTuple):
    """The inputs of every implementation."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    labels: Tensor
    mask: Tensor


def make_inputs(options: argparse.Namespace, device: torch.device) -> Inputs:
    """Random, at the scale of trained models: logits spread by about 3."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, scale: float) -> Tensor:
        value = torch.randn(rows, options.hidden, generator=generator, device=device, dtype=DTYPES[options.dtype])
        return value * scale

    weights = [normal(options.vocabulary, 3 * options.hidden**-0.5) for _ in range(2)]
    hidden, teacher_hidden = normal(options.tokens, 1), normal(options.tokens, 1)
    labels = torch.randint(options.ids or options.vocabulary, (options.tokens,), generator=generator, device=device)
    # On the CPU, as a loader leaves it: asking a GPU which tokens count would make the host wait.
    mask = torch.ones(options.tokens, dtype=torch.bool)
    return Inputs(hidden.requires_grad_(), weights[0].requires_grad_(), teacher_hidden, weights[1], labels, mask)


def plain(inputs: Inputs, kind: str, objective: Objective) -> Tensor:
    """The sum over tokens from whole logits in float32, by autograd."""
    student = F.linear(inputs.hidden, inputs.weight).float()
    with torch.no_grad():
        teacher = F.linear(inputs.teacher_hidden, inputs.teacher_weight).float()
        log_p = F.log_softmax(teacher / objective.temperature, -1)
        del teacher
    log_q = F.log_softmax(student / objective.temperature, -1)

    def kl(first: Tensor, second: Tensor) -> Tensor:
        return F.kl_div(second, first, reduction="sum", log_target=True)

    beta = BETAS[kind]
    if beta == 0:
        loss = kl(log_p, log_q)
    elif beta == 1:
        loss = kl(log_q, log_p)
    else:
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        loss = beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
    loss = objective.weight * objective.temperature**2 * loss
    if objective.weight < 1:
        loss = loss + (1 - objective.weight) * F.cross_entropy(student, inputs.labels, reduction="sum")
    return loss


def chunks(
    inputs: Inputs, objective: Objective, chunk_tokens: int, compile: bool, ids: TokenIds | None = None
) -> Tensor:
    """The sum over tokens, as this package computes it."""
    target = HiddenTarget(inputs.teacher_hidden, inputs.teacher_weight)
    return chunked_loss(
        inputs.hidden,
        inputs.weight,
        target,
        inputs.labels,
        inputs.mask,
        objective,
        ids=ids,
        chunk_tokens=chunk_tokens,
        compile=compile,
    ).loss


def liger(inputs: Inputs, kind: str, objective: Objective) -> Tensor:
    """The same by Liger-Kernel, whose mean has no temperature^2."""
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD  # type: ignore[import-not-found]

    layer = LigerFusedLinearJSD(jsd_beta=BETAS[kind], temperature=objective.temperature)
    mean = layer(inputs.hidden, inputs.weight, inputs.teacher_hidden, inputs.teacher_weight)
    return mean * len(inputs.hidden) * objective.temperature**2


def measure(name: str, loss_of: Callable[[], Tensor], inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Milliseconds forward and backward, GiB above inputs and gradients (None on a CPU), and loss a token."""
    device, trained = inputs.hidden.device, (inputs.hidden, inputs.weight)
    on_gpu = device.type == "cuda"

    def once() -> Tensor:
        for tensor in trained:
            tensor.grad = None
        loss = loss_of()
        # A mean: what arrives in the backward pass is not 1.
        (loss / len(inputs.hidden)).backward()
        return loss.detach()

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    row: dict[str, Any] = {"name": name}
    try:
        once()
        row["loss"] = once().item() / len(inputs.hidden)
        row["gib"] = peak_gib(once, trained) if on_gpu else None
        wait()
        began = time.perf_counter()
        for _ in range(repeats):
            once()
        wait()
        row["ms"] = 1e3 * (time.perf_counter() - began) / repeats
    except torch.OutOfMemoryError as error:
        row["error"] = str(error).split(".")[0]
    return row


def peak_gib(once: Callable[[], Tensor], trained: tuple[Tensor, ...]) -> float:
    """The peak above what was there and the gradients, in GiB."""
    for tensor in trained:
        tensor.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    return (torch.cuda.max_memory_allocated() - before - sum(tensor.nbytes for tensor in trained)) / GIB


def main() -> None:
    """Measures every implementation and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--ids", type=int, help="ids that stand for a token; the vocabulary's others are padding")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--chunk", type=int, help="tokens; default as training has it")
    parser.add_argument("--divergence", choices=BETAS, default="forward_kl")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--weight", type=float, default=1.0, help="of the divergence; below 1 with cross-entropy")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = make_inputs(options, device)
    objective = Objective(DIVERGENCES[options.divergence](), options.temperature, options.weight)
    chunk = options.chunk or default_chunk_tokens(options.vocabulary)
    ways = {"plain": lambda: plain(inputs, options.divergence, objective)}
    ways["chunks"] = lambda: chunks(inputs, objective, chunk, compile=False)
    if options.compile:
        ways["chunks, compiled"] = lambda: chunks(inputs, objective, chunk, compile=True)
    if options.ids:
        # One id in the middle is absent too, as in tokenizers with reserved places.
        ids = TokenIds(options.ids, (options.ids // 2,))
        ways["chunks, padded"] = lambda: chunks(inputs, objective, chunk, compile=False, ids=ids)
        if options.compile:
            ways["chunks, padded, compiled"] = lambda: chunks(inputs, objective, chunk, compile=True, ids=ids)
    # Its cross-entropy is not the same work.
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel") and options.weight == 1:
        ways["Liger-Kernel"] = lambda: liger(inputs, options.divergence, objective)
    rows = [measure(name, way, inputs, options.repeats) for name, way in ways.items()]
    peak = peak_flops(device, options.dtype) if options.dtype == "bf16" else None
    flop = 8 * options.tokens * options.vocabulary * options.hidden
    limit = None if peak is None else 1e3 * flop / peak
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    title = (
        f"{options.divergence} at temperature {options.temperature}, {options.dtype}, {options.tokens} tokens x "
        f"{options.vocabulary} ids x {options.hidden}, {chunk} tokens a chunk; {where}, torch {torch.__version__}"
    )
    print_table(title, rows, flop, limit)
    if options.output:
        options.output.write_text(json.dumps({"title": title, "limit_ms": limit, "flop": flop, "rows": rows}, indent=1))


def print_table(title: str, rows: list[dict[str, Any]], flop: int, limit: float | None) -> None:
    """One line for each implementation; ratios are to `plain`."""

    def cell(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def ratio(row: dict[str, Any], key: str) -> float | None:
        return row[key] / rows[0][key] if row.get(key) and rows[0].get(key) else None

    print(title)
    print("| way | ms | of plain | GiB | of plain | TFLOP/s | loss a token |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if "error" in row:
            print(f"| {row['name']} | {row['error']} |  |  |  |  |  |")
            continue
        cells = [cell(row["ms"], 1), cell(ratio(row, "ms"), 2), cell(row["gib"], 2), cell(ratio(row, "gib"), 3)]
        cells += [cell(flop / row["ms"] / 1e9, 1), cell(row["loss"], 5)]
        print(f"| {' | '.join([row['name'], *cells])} |")
    print(f"limit of the matrix products: {cell(limit, 1)} ms for {flop / 1e12:.2f} TFLOP")


if __name__ == "__main__":
    main()

"""The blocks of a Wan transformer with each `teacher.quantization`: time, memory, distance from bfloat16.

    python scripts/benchmarks/quantization.py --tokens 1560 6240

One block of the published layout with random weights, compiled as `teacher.compile: default` compiles it, timed by
itself and multiplied by the number of blocks; medians of five, the kinds in turn. The distance is ||q - f|| / ||f|| of
what the block adds to its input, f being the bfloat16 block without compilation. Beside it stands the limit: matrix
products and attention at the GPU's dense peak of the products' precision, which is twice as high in 8 bits.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from distiller.config.quantization import quantizations
from distiller.launch.block_compilation import compile_blocks
from distiller.teachers.quantization.layers import layer_class
from distiller.teachers.quantization.modules import convert_linears
from distiller.training.tracking import peak_flops

HEAD_DIM, TEXT_ROWS = 128, 64
REPEATS, PASSES = 5, 8


def make_block(heads: int, ffn_dim: int, device: torch.device) -> nn.Module:
    """A block in bfloat16 whose matrices are N(0, 0.02), the same each time."""
    torch.manual_seed(0)
    with device:
        block = WanTransformerBlock(heads * HEAD_DIM, ffn_dim, heads, "rms_norm_across_heads", True, 1e-6, None)
    for parameter in block.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    return block.to(torch.bfloat16).eval().requires_grad_(False)


def quantize_block(block: nn.Module, kind: str) -> nn.Module:
    """The block with its linear layers quantised."""
    if kind == "none":
        return block
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    for name in convert_linears(block, (), layer_class(kind)):
        path = name.removesuffix(".weight")
        quantized = layer_class(kind).quantize(linears[path].weight)
        layer = block.get_submodule(path)
        layer._buffers["quantized_weight"], layer._buffers["weight_scales"] = quantized
    return block


def make_inputs(tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Hidden states, text, modulation and rotary embedding of one sample."""
    torch.manual_seed(1)
    hidden = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16)
    text = torch.randn(1, TEXT_ROWS, width, device=device, dtype=torch.bfloat16)
    modulation = torch.randn(1, 6, width, device=device) * 0.1
    rotary = torch.ones(1, tokens, 1, HEAD_DIM, device=device), torch.zeros(1, tokens, 1, HEAD_DIM, device=device)
    return hidden, text, modulation, rotary


def timed_ms(run: Callable[[], object]) -> float:
    """Milliseconds of a pass, of several in a row."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(PASSES):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3 / PASSES


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=40, help="of 128 numbers each")
    parser.add_argument("--ffn-dim", type=int, default=13824)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1560, 6240])
    parser.add_argument("--kinds", nargs="+", default=["none", *quantizations()])
    arguments = parser.parse_args()
    device, width = torch.device("cuda"), arguments.heads * HEAD_DIM
    peak = peak_flops(device, "bf16")
    blocks: dict[str, nn.Module] = {"bfloat16, not compiled": make_block(arguments.heads, arguments.ffn_dim, device)}
    plain = next(iter(blocks.values()))
    for kind in arguments.kinds:
        name = "bfloat16" if kind == "none" else kind
        blocks[name] = quantize_block(make_block(arguments.heads, arguments.ffn_dim, device), kind)
        compile_blocks([blocks[name]], "default", sizes_vary=True)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; {arguments.blocks} blocks, batch 1")
    print(f"{'':24} {'tokens':>7} {'ms':>8} {'limit':>7} {'of bf16':>8} {'error':>8} {'GiB':>6} {'first, s':>9}")
    for tokens in arguments.tokens:
        inputs = make_inputs(tokens, width, device)
        # Two for a product; attention reads all tokens of the sample for each.
        linear = sum(p.numel() for p in plain.parameters() if p.ndim == 2 and len(p) >= width)
        text_linear = 2 * width * width
        flop = 2 * ((linear - text_linear) * tokens + text_linear * TEXT_ROWS)
        attention = 4 * tokens * (tokens + TEXT_ROWS) * width
        with torch.no_grad():
            expected = plain(*inputs).float()
            times: dict[str, list[float]] = {name: [] for name in blocks}
            errors, first_s = {}, {}
            for name, block in blocks.items():
                started = time.perf_counter()
                output = block(*inputs).float()
                torch.cuda.synchronize()
                first_s[name] = time.perf_counter() - started
                added = expected - inputs[0].float()
                errors[name] = ((output - expected).norm() / added.norm()).item()
            for _ in range(REPEATS):
                for name, block in blocks.items():
                    times[name].append(timed_ms(partial(block, *inputs)))
        base = median(times["bfloat16"]) if "bfloat16" in times else float("nan")
        for name, block in blocks.items():
            speedup = 2 if name in ("int8", "fp8") else 1
            limit = float("nan") if peak is None else (flop / speedup + attention) / peak * 1e3 * arguments.blocks
            ms = median(times[name])
            tensors = [*block.parameters(), *block.buffers()]
            size = sum(tensor.nbytes for tensor in tensors) * arguments.blocks / 2**30
            print(
                f"{name:24} {tokens:7} {ms * arguments.blocks:8.1f} {limit:7.1f} {ms / base:8.2f} {errors[name]:8.4f} "
                f"{size:6.1f} {first_s[name]:9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

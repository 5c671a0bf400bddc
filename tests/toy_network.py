"""A small network with every oddity that a placement can trip over, saved as safetensors.

Two modules ("first", "second") of seven blocks; tied weights, a saved and an unsaved buffer, float32 islands that stay
float32 in a bfloat16 model, a last layer that is a bare parameter, and samples that skip blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor, nn

from distiller.config.teacher import Teacher as TeacherOptions
from distiller.distributed.ranks import Ranks
from distiller.launch.block_compilation import compile_mode
from distiller.tasks.feature_capture import capture_outputs
from distiller.teachers.base import Call, Network, Outputs, Request, Setup

DIM = 16
NUM_BLOCKS = 7


class ToyBlock(nn.Module):
    """A residual block whose norm stays in float32."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.shared = shared
        self.gain = nn.Parameter(torch.empty(DIM))
        self.register_buffer("scale", torch.empty(1))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden.float()).to(hidden.dtype)
        update = self.down(torch.nn.functional.gelu(self.up(normed))) * self.gain
        return hidden + (update + 0.1 * self.shared(normed)) * self.scale


class ToyModel(nn.Module):
    """Embeds, runs the blocks that are not skipped, and ends in a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        shared = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(ToyBlock(shared) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, DIM, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.linspace(-1, 1, DIM), persistent=False)
        self.bias = nn.Parameter(torch.empty(DIM))

    def forward(self, x: Tensor, first_block: int) -> Tensor:
        hidden = self.embed(x) + self.positions.to(x.dtype)
        for block in self.blocks[first_block:]:
            hidden = block(hidden)
        return self.head(hidden) + self.bias


class ToyNetwork(Network):
    """Request inputs: `x` [B, DIM] float32. Outputs: `output`, `again` (a second pass), `features/N` of block N.

    A request whose `first_block` names begin with `skip` (in `wanted`, as `skip/3`) leaves the blocks before it out.
    """

    def __init__(self, folder: Path, num_modules: int = 1) -> None:
        self.folder, self.origin = folder, str(folder)
        self.module_names = ("first", "second")[:num_modules]

    def skeleton(self, name: str, dtype: torch.dtype) -> nn.Module:
        with init_empty_weights():
            model = ToyModel()
        model.head.weight = model.embed.weight
        for block in model.blocks:
            block.shared = model.blocks[0].shared
        for path, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                kept = torch.float32 if "norm" in path.split(".") else dtype
                if parameter is not None and parameter.dtype != kept:
                    module._parameters[attribute] = nn.Parameter(parameter.detach().to(kept), requires_grad=False)
            if "scale" in module._buffers:
                module._buffers["scale"] = module._buffers["scale"].to("meta", dtype)
        model.head.weight = model.embed.weight
        return model.eval().requires_grad_(False)

    def weight_files(self, name: str) -> list[Path]:
        return [self.folder / f"{name}.safetensors"]

    def block_names(self, name: str) -> tuple[str, ...]:
        return tuple(f"blocks.{number}" for number in range(NUM_BLOCKS))

    def calls(self, request: Request) -> list[Call]:
        calls = []
        for name, rows in self._rows(request):
            inputs = {key: value[rows] for key, value in request.inputs.items()}
            wanted = tuple(name for name in request.wanted if name != "again")
            calls += [Call(name, inputs, wanted)] + [Call(name, inputs, ("again",))] * ("again" in request.wanted)
        return calls

    def run(self, module: nn.Module, call: Call) -> Outputs:
        dtype = next(module.embed.parameters()).dtype
        x = call.inputs["x"].to(dtype)
        if call.wanted == ("again",):
            return {"again": module(-x, 0)}
        skipped = [int(name.removeprefix("skip/")) for name in call.wanted if name.startswith("skip/")]
        blocks = [(name, module.blocks[int(name[9:])]) for name in call.wanted if name.startswith("features/")]
        with capture_outputs(blocks) as captured:
            output = module(x, *(skipped or [0]))
        return {"output": output, **captured}

    def merge(self, request: Request, outputs: Sequence[Outputs]) -> Outputs:
        parts, merged = iter(outputs), {}
        for _, rows in self._rows(request):
            for _ in range(1 + ("again" in request.wanted)):
                for key, value in next(parts).items():
                    merged.setdefault(key, value.new_empty(len(request.sample_ids), *value.shape[1:]))[rows] = value
        return merged

    def _rows(self, request: Request) -> list[tuple[str, list[int]]]:
        modules = request.modules or (0,) * len(request.sample_ids)
        rows = {name: [i for i, m in enumerate(modules) if m == n] for n, name in enumerate(self.module_names)}
        return [(name, places) for name, places in rows.items() if places]


def save_toy(folder: Path) -> Path:
    """Writes random weights for both modules (float32; tied weights once)."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("first", "second")):
        model = ToyModel()
        generator = torch.Generator().manual_seed(seed)
        state = {k: torch.randn(v.shape, generator=generator) * 0.3 for k, v in model.state_dict().items()}
        for key in [k for k in state if k == "head.weight" or (".shared." in k and not k.startswith("blocks.0."))]:
            del state[key]
        save_file(state, folder / f"{name}.safetensors")
    return folder


def setup(
    dtype: torch.dtype = torch.float32, device: str = "cpu", under_deepspeed: bool = False, stages_dir=None, **options
) -> Setup:
    """What a teacher is built with, among whatever ranks there are; `options` are keys of the recipe's `teacher`."""
    teacher, ranks = TeacherOptions(path="-", **options), _ranks(device)
    # A run of one update: `auto` does not compile.
    mode = compile_mode(teacher.compile, ranks.device, num_updates=1)
    return Setup(dtype, teacher, ranks, under_deepspeed, compile_mode=mode, stages_dir=stages_dir)


@cache
def _ranks(device: str) -> Ranks:
    # Making process groups takes longer than most tests.
    return Ranks.join(torch.device(device))

"""The interfaces `Teacher`, which answers requests under any placement, and `Network`, the model that it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from distiller.config.teacher import Teacher as TeacherOptions
from distiller.distributed.ranks import Ranks
from distiller.storage.stage_folders import StageFolders
from distiller.storage.weight_files import Rename

Outputs = dict[str, Tensor]
"""Name -> output [B, ...] of one request or call, without gradients, on the caller's device."""


Figures = dict[str, float]
"""Name, with its unit, -> value."""


@final
@dataclass(frozen=True)
class Request:
    """What one micro-batch asks of the teacher.

    Attributes:
        sample_ids: one id for each of the B samples.
        inputs: name -> input [B, ...] of the network, on the caller's device.
        wanted: names of the outputs to return; the network defines which exist (for example `prediction`,
            `unconditional`, `features/3`).
        modules: for each sample, the index in `Network.module_names` of the module that it needs; integers on the host,
            so that reading them does not wait for a GPU. Empty when the network has one module.
        stored: the outputs, where a loader has read them from a cache; otherwise None.
    """

    sample_ids: tuple[int, ...]
    inputs: Mapping[str, Tensor]
    wanted: tuple[str, ...]
    modules: tuple[int, ...] = ()
    stored: Outputs | None = None


@final
@dataclass(frozen=True)
class Call:
    """One forward pass through one module, of those samples of a request that need the module.

    The samples may need several passes (for example with and without a prompt). All modules of a network accept the
    same inputs, so that where ranks must run the same passes, a rank can run one on the inputs of another call.
    """

    module: str
    inputs: Mapping[str, Tensor]
    wanted: tuple[str, ...]


class Network(ABC):
    """A frozen network of one or more modules, and how a request runs through them; independent of the placement."""

    origin: str
    """Where the files are (for example `teacher.path: FOLDER`); error messages begin with it."""

    module_names: tuple[str, ...]

    rename: Rename | None = None
    """A tensor's name in the files -> its name in the module. None: the names are equal, and all tensors are used."""

    sizes_vary: bool = False
    """Whether inputs of the blocks have other sizes from batch to batch, but for a last, smaller one."""

    num_replicated_head_parameters: int = 0
    """Number of parameters outside of the modules: the output layer, where the task holds it on every rank."""

    @abstractmethod
    def skeleton(self, name: str, dtype: torch.dtype) -> nn.Module:
        """One module without weights, in eval mode and without gradients.

        Parameters and saved buffers are on the meta device, each in the dtype that it has when `teacher.dtype` is
        `dtype`. Buffers that are not saved are on the CPU, with their values.
        """

    @abstractmethod
    def weight_files(self, name: str) -> list[Path]:
        """Paths of one module's safetensors files, complete on this machine; may download or convert them first."""

    @abstractmethod
    def block_names(self, name: str) -> tuple[str, ...]:
        """Names of the submodules that a forward pass runs one after the other, in order; they hold most weights."""

    @abstractmethod
    def calls(self, request: Request) -> list[Call]:
        """The forward passes that a request needs. Reads no weights."""

    @abstractmethod
    def run(self, module: nn.Module, call: Call) -> Outputs:
        """Runs one pass. Deterministic; called without gradients, maybe by several threads, one at a time."""

    @abstractmethod
    def merge(self, request: Request, outputs: Sequence[Outputs]) -> Outputs:
        """The request's outputs from those of its calls, in the order of `calls`."""

    def num_parameters(self) -> int:
        """Number of parameters of all modules and of the replicated head; reads no weights."""
        modules = (self.skeleton(name, torch.float32) for name in self.module_names)
        inside = sum(parameter.numel() for module in modules for parameter in module.parameters())
        return inside + self.num_replicated_head_parameters


class HasErrorBands(ABC):
    """A network whose quantised outputs are off by different amounts at different inputs, such as timesteps."""

    @abstractmethod
    def error_band(self, request: Request) -> str:
        """In words, the band of inputs to which a request of one sample belongs."""


class HasTokenErrors(ABC):
    """A network of which what matters is the distribution over tokens that follows from its outputs."""

    @abstractmethod
    def token_errors(self, quantised: Sequence[Outputs], reference: Sequence[Outputs], dtype: torch.dtype) -> Figures:
        """Figure's name -> value, over all positions of the outputs. Reads the output layer; does not communicate."""


@final
@dataclass
class TeacherMemory:
    """Bytes of the teacher's weights: on this rank's GPU, and in the node's host memory (shared memory once)."""

    gpu_bytes: int = 0
    host_bytes: int = 0


@final
@dataclass(frozen=True)
class Setup:
    """What a placement is built with.

    Attributes:
        dtype: of the weights, except those that the library keeps in float32.
        options: the recipe's `teacher` section.
        ranks: this process's rank and groups; inputs and outputs of requests are on `ranks.device`.
        under_deepspeed: whether the student's engine is DeepSpeed; a sharded teacher then uses ZeRO-3.
        reserved_bytes: of each rank's device, for the student's state and the teacher's replicated output layer.
        reserved_host_bytes: of host memory, for the offloaded state of the student of one rank.
        update_bytes: what an update takes of each rank's GPU beside `reserved_bytes` and the teacher's weights; None
            where that is not known, and `auto` keeps a share of the free memory instead.
        student_excess_bytes: how much more of `update_bytes` the student's passes take than the teacher's answer.
        step_ms: placement -> predicted time of an update; empty where it is not known, and `auto` takes the order of
            what was measured.
        compile_mode: of `distiller.launch.block_compilation`, for the blocks; `none` = they run as they are.
        excluded: placements that `auto` does not choose.
        alternatives: the placements that a refusal may propose; None = all.
        stages_dir: where quantised weights are kept that are read again for every update; None where none are.
        notices: lines on what was chosen, which are printed when the teacher is loaded.
        gpu_bytes: placement -> bytes that it would take on a GPU, of those that may run here, fastest first; empty
            until the placement is resolved.
    """

    dtype: torch.dtype
    options: TeacherOptions
    ranks: Ranks
    under_deepspeed: bool = False
    reserved_bytes: int = 0
    reserved_host_bytes: int = 0
    update_bytes: int | None = None
    student_excess_bytes: int = 0
    step_ms: Mapping[str, float] = field(default_factory=dict)
    compile_mode: str = "none"
    stages_dir: Path | StageFolders | None = None
    excluded: tuple[str, ...] = ()
    alternatives: tuple[str, ...] | None = None
    gpu_bytes: Mapping[str, int] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


class Teacher(ABC):
    """A frozen teacher under one placement.

    Never an `nn.Module` and never handed to `Accelerator.prepare`, so it cannot enter the student's checkpoint,
    optimizer or sharding.
    """

    @property
    def num_parallel_updates(self) -> int:
        """How many updates it can answer at the same time, each asked by a thread of its own."""
        return 1

    @abstractmethod
    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        """Outputs of all micro-batches of an update, one `Outputs` for each of `requests`, in order.

        Equal to a plain eval-mode forward of the same weights in `teacher.dtype`, outside the caller's autocast.
        Some placements communicate here: every rank calls it equally often, in the same order.
        """

    @abstractmethod
    def memory(self) -> TeacherMemory:
        """Bytes that the weights take now."""

    @abstractmethod
    def close(self) -> None:
        """Frees the weights; `predict` cannot be called any more. Every rank calls it; it may communicate."""


ModuleCalls = list[tuple[str, list[Call]]]
"""(module name, its calls), in the order in which modules run."""


def answer(
    network: Network,
    requests: Sequence[Request],
    run: Callable[[ModuleCalls], list[list[Outputs]]],
    ranks: Ranks | None = None,
) -> list[Outputs]:
    """Outputs of the requests: runs all calls of the first module, then all of the second, and merges the outputs.

    Args:
        run: returns the outputs of each call of an agenda; called without gradients and without autocast.
        ranks: None, unless all ranks of the placement must run the same passes. With `ranks` and several modules this
            function communicates: a rank with fewer calls than another one runs one of its own again, and discards
            the outputs.
    """
    calls = [network.calls(request) for request in requests]
    all_calls = [call for request_calls in calls for call in request_calls]
    if ranks is None or len(network.module_names) == 1:
        # With one module the ranks run the same passes anyway, since their requests want the same outputs.
        agenda = [(name, [call for call in all_calls if call.module == name]) for name in network.module_names]
    else:
        agenda = _agreed_calls(network, all_calls, ranks)
    agenda = [(name, module_calls) for name, module_calls in agenda if module_calls]
    # no_grad, not inference_mode: inference tensors cannot be saved for the student's backward.
    device = next(iter(requests[0].inputs.values())).device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        outputs_of: dict[int, Outputs] = {}
        for (_, module_calls), outputs in zip(agenda, run(agenda), strict=True):
            outputs_of |= {id(call): output for call, output in zip(module_calls, outputs, strict=True)}
        return [
            network.merge(request, [outputs_of[id(call)] for call in request_calls])
            for request, request_calls in zip(requests, calls, strict=True)
        ]


def _agreed_calls(network: Network, calls: Sequence[Call], ranks: Ranks) -> ModuleCalls:
    """This rank's calls and repeated ones, so that all ranks run the same passes in the same order. Communicates.

    A kind of pass is (module, wanted). Every rank runs as many of a kind as the rank that has the most of them.
    """
    own_counts = Counter((network.module_names.index(call.module), call.wanted) for call in calls)
    most: Counter[tuple[int, tuple[str, ...]]] = Counter()
    for counts in ranks.gather(own_counts):
        most |= counts
    agenda: ModuleCalls = [(name, []) for name in network.module_names]
    for (index, wanted), count in sorted(most.items()):
        name, module_calls = agenda[index]
        own_calls = [call for call in calls if call.module == name and call.wanted == wanted]
        repeated = [replace(calls[0], module=name, wanted=wanted) for _ in range(count - len(own_calls))]
        module_calls += own_calls + repeated
    return agenda


def move_call(call: Call, device: torch.device) -> Call:
    """The call with its inputs on another device."""
    return replace(call, inputs={name: value.to(device) for name, value in call.inputs.items()})


def run_module_calls(network: Network, modules: Mapping[str, nn.Module], agenda: ModuleCalls) -> list[list[Outputs]]:
    """Outputs of each call of the agenda; `modules` (name -> module) have all their weights on the inputs' device."""
    return [[network.run(modules[name], call) for call in calls] for name, calls in agenda]

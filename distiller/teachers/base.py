"""The teacher as the loop sees it: requests in, outputs out, wherever the weights live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from distiller.config.teacher import Teacher as TeacherOptions
from distiller.distributed.ranks import Ranks
from distiller.storage.weight_files import Rename

Outputs = dict[str, Tensor]
"""Named outputs of one request or call, batch first, detached, on the caller's device."""


@dataclass(frozen=True)
class Request:
    """What one micro-batch asks of the teacher.

    Attributes:
        sample_ids: one id a sample; caches and prefetched outputs are matched by them.
        inputs: the network's inputs, batch first, on the caller's device.
        wanted: names of outputs; which ones exist is the network's to say (for example `prediction`,
            `unconditional`, `features/3`).
        modules: which module each sample needs, as indices into `Network.module_names`, known on the host; empty when
            the network has one module.
        stored: the answer, where it was read from a cache beside the inputs.
    """

    sample_ids: tuple[int, ...]
    inputs: Mapping[str, Tensor]
    wanted: tuple[str, ...]
    modules: tuple[int, ...] = ()
    stored: Outputs | None = None


@dataclass(frozen=True)
class Call:
    """One forward pass through one module: a request's samples that need it, or one of the passes they need.

    Modules of a network accept each other's inputs, so that a rank without a call of its own can repeat another one
    where the ranks must compute together.
    """

    module: str
    inputs: Mapping[str, Tensor]
    wanted: tuple[str, ...]


class Network(ABC):
    """A frozen network of one or more modules, and how a request runs through them; knows no placement."""

    origin: str
    """The files, for messages."""

    module_names: tuple[str, ...]

    rename: Rename | None = None
    """Set where tensors have other names in the files than in the modules, or where the files hold more than these."""

    num_replicated_head_parameters: int = 0
    """Parameters of the model that are in none of the modules: those that the task holds itself."""

    @abstractmethod
    def skeleton(self, name: str, dtype: torch.dtype) -> nn.Module:
        """One module without weights: parameters and saved buffers on the meta device, each in the dtype that it is
        held in when the teacher's is `dtype`; other buffers real, on the CPU; eval mode, no gradients."""

    @abstractmethod
    def weight_files(self, name: str) -> list[Path]:
        """One module's safetensors files, complete on this machine."""

    @abstractmethod
    def block_names(self, name: str) -> tuple[str, ...]:
        """The submodules that a forward pass runs one after the other, in that order; most of the weights."""

    @abstractmethod
    def calls(self, request: Request) -> list[Call]:
        """The passes that answer a request. Needs no weights."""

    @abstractmethod
    def run(self, module: nn.Module, call: Call) -> Outputs:
        """Runs one pass. Deterministic; called without gradients, perhaps from several threads that take turns."""

    @abstractmethod
    def merge(self, request: Request, outputs: Sequence[Outputs]) -> Outputs:
        """The request's outputs from those of its calls, in the order of `calls`."""

    def num_parameters(self) -> int:
        """Parameters of all modules and beside them, without reading weights."""
        modules = (self.skeleton(name, torch.float32) for name in self.module_names)
        inside = sum(parameter.numel() for module in modules for parameter in module.parameters())
        return inside + self.num_replicated_head_parameters


@dataclass
class TeacherMemory:
    """Bytes of the teacher's weights: on this rank's GPU, and in the node's host memory (shared ones counted once)."""

    gpu_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class Setup:
    """What a placement is built with.

    Attributes:
        dtype: of the weights (float32 islands of the library excepted).
        options: the recipe's `teacher` section.
        ranks: this process among the others; `ranks.device` is where requests come from and outputs go.
        under_deepspeed: whether the student's engine is DeepSpeed, whose ZeRO-3 then shards a sharded teacher.
        reserved_bytes: of each rank's device, what the student's state will take, and the teacher's output layer.
        reserved_host_bytes: of the host's memory, what a rank's offloaded state of the student will take.
    """

    dtype: torch.dtype
    options: TeacherOptions
    ranks: Ranks
    under_deepspeed: bool = False
    reserved_bytes: int = 0
    reserved_host_bytes: int = 0


class Teacher(ABC):
    """A frozen teacher in one place of memory.

    Never an `nn.Module` and never handed to `Accelerator.prepare`, so it cannot enter the student's checkpoint,
    optimizer or sharding.
    """

    @abstractmethod
    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        """Outputs for all micro-batches of an update, in order.

        Equal to a plain eval-mode forward of the same weights in `teacher.dtype`, outside the caller's autocast.
        Some placements communicate here: every rank calls it equally often, in the same order.
        """

    @abstractmethod
    def memory(self) -> TeacherMemory:
        """What the weights take now."""

    @abstractmethod
    def close(self) -> None:
        """Frees the weights; the teacher cannot be asked again."""


ModuleCalls = list[tuple[str, list[Call]]]
"""(module name, its calls), in the order in which modules run."""


def answer(
    network: Network,
    requests: Sequence[Request],
    run: Callable[[ModuleCalls], list[list[Outputs]]],
    ranks: Ranks | None = None,
) -> list[Outputs]:
    """Answers requests module by module: all calls of the first, then all of the second.

    Args:
        run: outputs of each call of the agenda; called without gradients and without autocast.
        ranks: given by placements whose ranks must run the same modules equally often. Ranks with fewer calls than
            another repeat one of their own, and throw its outputs away. Communicates, when there are several modules.
    """
    calls = [network.calls(request) for request in requests]
    flat = [call for of_request in calls for call in of_request]
    if ranks is None or len(network.module_names) == 1:
        # With one module the ranks agree already: their requests ask for the same passes.
        agenda = [(name, [call for call in flat if call.module == name]) for name in network.module_names]
    else:
        agenda = _agreed_calls(network, flat, ranks)
    agenda = [(name, of_module) for name, of_module in agenda if of_module]
    # no_grad, not inference_mode: inference tensors cannot be saved for the student's backward.
    device = next(iter(requests[0].inputs.values())).device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        outputs_of: dict[int, Outputs] = {}
        for (_, of_module), outputs in zip(agenda, run(agenda), strict=True):
            outputs_of |= {id(call): output for call, output in zip(of_module, outputs, strict=True)}
        return [
            network.merge(request, [outputs_of[id(call)] for call in of_request])
            for request, of_request in zip(requests, calls, strict=True)
        ]


def _agreed_calls(network: Network, calls: Sequence[Call], ranks: Ranks) -> ModuleCalls:
    """The same passes in the same order on all ranks: as many of each kind as the rank with most of them has."""
    own = Counter((network.module_names.index(call.module), call.wanted) for call in calls)
    most: Counter[tuple[int, tuple[str, ...]]] = Counter()
    for counts in ranks.gather(own):
        most |= counts
    agenda: ModuleCalls = [(name, []) for name in network.module_names]
    for (index, wanted), count in sorted(most.items()):
        name, of_module = agenda[index]
        ours = [call for call in calls if call.module == name and call.wanted == wanted]
        repeated = [replace(calls[0], module=name, wanted=wanted) for _ in range(count - len(ours))]
        of_module += ours + repeated
    return agenda


def move_call(call: Call, device: torch.device) -> Call:
    """The call with its inputs on another device."""
    return replace(call, inputs={name: value.to(device) for name, value in call.inputs.items()})


def run_module_calls(network: Network, modules: Mapping[str, nn.Module], agenda: ModuleCalls) -> list[list[Outputs]]:
    """Runs everything on modules that are whole where they are."""
    return [[network.run(modules[name], call) for call in calls] for name, calls in agenda]

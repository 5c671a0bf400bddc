"""What a placement says of itself: keys, memory, speed, checks and its row of the support table. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Generic, Self, TypeVar

from distiller.config.sections import Section


@dataclass(frozen=True)
class Sizes:
    """A teacher's bytes as it is held: in all, of its largest module, of its largest block, outside of blocks.

    Attributes:
        item_bytes: of one number of `teacher.dtype`.
    """

    total: int
    largest_module: int
    largest_block: int
    rest: int
    num_blocks: int
    item_bytes: int = 4


@dataclass(frozen=True)
class Footprint:
    """Bytes that a placement takes on the fullest GPU, and of the node's host memory."""

    gpu: int
    host: int


@dataclass(frozen=True)
class MemoryBudget:
    """Free bytes for the teacher: on the GPU with least of them (None on a machine without), and in host memory.

    Both are what the student leaves: its state is on the GPU, or in host memory without one or where it is offloaded.

    Attributes:
        gpu, host: as above; `gpu` is never negative, so that what takes nothing of a GPU always fits there.
        num_ranks: of this node.
        num_gpus: of this node; 0 without any.
        gpu_of_ranks: the same as `gpu`, of every rank's own GPU.
    """

    gpu: int | None
    host: int
    num_ranks: int
    num_gpus: int
    gpu_of_ranks: tuple[int, ...] = ()

    def of_rank(self, rank: int) -> MemoryBudget:
        """The same with one rank's GPU in place of the GPU that has least."""
        gpu = self.gpu_of_ranks[rank] if self.gpu_of_ranks else self.gpu
        return MemoryBudget(gpu, self.host, self.num_ranks, self.num_gpus, self.gpu_of_ranks)


@dataclass(frozen=True)
class World:
    """Where a teacher is to live: ranks in all, ranks of this node, and GPUs of this node (0 without any)."""

    num_processes: int
    num_local_ranks: int
    num_gpus: int


@dataclass(frozen=True)
class TeacherWork:
    """What an update asks of the teacher on each rank: passes one after the other, and milliseconds of one on a GPU."""

    num_passes: int
    pass_ms: float

    @property
    def ms(self) -> float:
        """Of all passes, with the whole teacher on a GPU."""
        return self.num_passes * self.pass_ms


@dataclass(frozen=True)
class Links:
    """Rates of a machine.

    Attributes:
        host: bytes a second that each GPU reads of page-locked memory while all of them do.
        peers: bytes a second between two GPUs of the machine, one way.
        disk: bytes a second that the machine reads of its disk.
        cpu_slowdown: how many times longer a pass takes on the CPU.
    """

    host: float
    peers: float
    disk: float
    cpu_slowdown: float


@dataclass(frozen=True)
class TeacherTime:
    """Milliseconds that the teacher takes in an update, and what they go to.

    Attributes:
        computing_ms: of `ms`, while a GPU on which the student trains computes: asked ahead, they add to the student's.
    """

    ms: float
    computing_ms: float
    bound_by: str = "computation"

    def beside(self, num_bytes: float, rate: float, link: str) -> TeacherTime:
        """While it computes, bytes pass at so many a second: the longer of both."""
        passing_ms = num_bytes / rate * 1e3
        return replace(self, ms=passing_ms, bound_by=link) if passing_ms > self.ms else self

    def after(self, num_bytes: float, rate: float, link: str) -> TeacherTime:
        """It waits until the bytes have passed."""
        passing_ms = num_bytes / rate * 1e3
        return replace(self, ms=self.ms + passing_ms, bound_by=link if passing_ms > self.ms else self.bound_by)


@dataclass(frozen=True)
class SpeedRank:
    """Where a placement stands among those that fit; lower is faster. Multiples of 10, so that others fit between.

    Attributes:
        on_gpus: as docs/MODEL_LOADING_STRATEGIES.md measured them on two GPUs at 6,240 tokens.
        one_process: on GPUs, where one process runs: no other rank waits for the GPUs that a device map uses.
        on_cpus: where ranks stand for GPUs. All compute on the same cores, so what copies least comes first.
    """

    on_gpus: int
    one_process: int
    on_cpus: int


@dataclass(frozen=True)
class SupportRow:
    """A placement's row of the support table, in the users' words.

    Attributes:
        gpu, host: the teacher's memory on each rank's GPU, and in the node's host memory.
        communicates: what passes between ranks in a step.
        beside_ddp, beside_zero: how it runs beside a student under DDP or FSDP (or alone), and under DeepSpeed.
    """

    gpu: str
    host: str
    communicates: str
    beside_ddp: str = "yes"
    beside_zero: str = "yes"


class PlacementOptions(Section):
    """Keys of the recipe's `teacher` section that a placement reads.

    The section inherits from every placement's options. A key that several placements read is declared in one class,
    from which their options inherit.
    """

    @classmethod
    def of(cls, teacher: Section) -> Self:
        """The `teacher` section, which is an instance of this class, by its type."""
        assert isinstance(teacher, cls)
        return teacher


class NoOptions(PlacementOptions):
    """Of placements that read no key of their own."""


OptionsT = TypeVar("OptionsT", bound=PlacementOptions)


def _accept(options: Any) -> None:
    del options


def _accept_world(options: Any, num_processes: int, under_deepspeed: bool) -> None:
    del options, num_processes, under_deepspeed


def _change_nothing(options: Any, num_gpus: int) -> Mapping[str, object]:
    del options, num_gpus
    return {}


@dataclass(frozen=True)
class PlacementSpec(Generic[OptionsT]):
    """Everything about a placement but its code, from which checks, messages, documents and `auto` are derived.

    Attributes:
        name: the value of `teacher.placement`.
        teacher_class: "module:Class", imported when a teacher is opened.
        options: its keys.
        row: of the support table.
        memory: (teacher's sizes, options, world) -> what it takes, without activations. None where sizes do not tell.
        time: (work, teacher's sizes, options, world, rates) -> predicted time of the teacher in an update, on GPUs of
            one machine; None where it depends on what a plan does not know.
        speed: None where it is never proposed instead of another placement.
        is_auto_candidate: whether `auto` may choose it.
        uses_device_map: whether its class is a `DeviceMapTeacher`, which checks its own memory.
        loads_teacher: False where outputs are read from a cache, and no weights are.
        why_not_quantized: why its layers cannot be quantised; empty where they can.
        why_not_prefetched: why it cannot be asked ahead of the student; empty where it can.
        prefetches_in_thread: whether the host waits or computes while it answers, so that another thread asks it ahead.
            It must exchange nothing between ranks after its first answer.
        leaves_gpu: whether its weights are on a GPU only while it answers; the student's passes use that memory.
        computes_elsewhere: whether other processes run the network, so that a thread that asks runs no code of it.
        why_not_compiled: why its blocks cannot be compiled; empty where they can.
        why_not_compiled_beside_deepspeed: the same where the student's engine is DeepSpeed.
        check_options: raises ValueError where its keys are incomplete.
        check_world: (options, number of processes, whether the student's engine is DeepSpeed); raises UserError.
        holder: options -> the one rank that holds the teacher. None: every rank takes the same.
        alone: (options, number of GPUs; 0 on a CPU) -> keys that change for a command that runs in one process.
        paths: of its keys, those that name files or folders of this machine.
        shared_keys: of its keys, those that are also read under any other placement.
        fixed_on_resume: of its keys, those that a resumed run may not change. As a rule none: placements agree.
    """

    name: str
    teacher_class: str
    options: type[OptionsT]
    row: SupportRow
    memory: Callable[[Sizes, OptionsT, World], Footprint] | None = None
    time: Callable[[TeacherWork, Sizes, OptionsT, World, Links], TeacherTime] | None = None
    speed: SpeedRank | None = None
    is_auto_candidate: bool = False
    uses_device_map: bool = False
    loads_teacher: bool = True
    why_not_compiled: str = ""
    why_not_compiled_beside_deepspeed: str = ""
    why_not_quantized: str = ""
    why_not_prefetched: str = ""
    prefetches_in_thread: bool = False
    leaves_gpu: bool = False
    computes_elsewhere: bool = False
    check_options: Callable[[OptionsT], None] = _accept
    check_world: Callable[[OptionsT, int, bool], None] = _accept_world
    holder: Callable[[OptionsT], int] | None = None
    alone: Callable[[OptionsT, int], Mapping[str, object]] = _change_nothing
    paths: tuple[str, ...] = ()
    shared_keys: tuple[str, ...] = ()
    fixed_on_resume: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it reads, of the `teacher` section."""
        return tuple(self.options.model_fields)

    def import_class(self) -> Any:
        """The class that implements it. Imports torch."""
        module, _, name = self.teacher_class.partition(":")
        return getattr(import_module(module), name)

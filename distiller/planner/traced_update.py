"""What one rank's micro-batch allocates and computes on a GPU, found without weights, data or a GPU."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from distiller.planner.allocation_trace import AllocationTrace, Kernel
from distiller.planner.compiled_blocks import keep_what_a_compiler_keeps
from distiller.planner.gpu_arithmetic import GpuArithmetic
from distiller.tasks.base import Task
from distiller.tasks.gpu_kernels import observed_by
from distiller.tasks.interfaces import Plannable, ReplicatesHead
from distiller.teachers.base import Outputs
from distiller.training.student_compilation import blocks_of


@final
@dataclass(frozen=True)
class TracedUpdate:
    """Of one micro-batch of one rank, in bytes; weights and optimizer state are in none of the figures.

    Attributes:
        teacher_peak: while the teacher answers, its answer included.
        answer: of the teacher's outputs.
        student_peak: while the student computes, the teacher's answer and the gradients so far included.
        student_activations: the same without gradients.
        teacher_kernels, student_kernels: operation -> how often it runs.
    """

    teacher_peak: int
    answer: int
    student_peak: int
    student_activations: int
    teacher_kernels: Counter[Kernel]
    student_kernels: Counter[Kernel]


def trace_update(
    task: Task[Any, Any],
    batch_size: int,
    teacher_dtype: torch.dtype,
    student_dtype: torch.dtype,
    autocast_dtype: torch.dtype | None,
    *,
    recomputes: bool,
    compiles: bool = False,
) -> TracedUpdate:
    """Follows one micro-batch of the largest shapes through teacher, student, loss and backward pass.

    Reads no weights and computes nothing: shapes and dtypes are followed operation by operation. Does not communicate.

    Args:
        task: a `Plannable` one.
        student_dtype: of the student's weights as its forward pass sees them.
        autocast_dtype: of the student's forward pass; None without autocast.
        recomputes: whether the student's activations are computed again in the backward pass.
        compiles: whether the student's blocks are compiled. Kernels are those of uncompiled blocks all the same.
    """
    assert isinstance(task, Plannable)
    # Skeletons come first: torch 2.11 makes no parameters on the meta device inside a mode of fake tensors.
    batch, student, block_classes = task.example(batch_size), task.student_skeleton(), task.block_classes
    teacher: dict[str, nn.Module] = {}
    if task.needs_live_teacher:
        teacher = {name: task.network.skeleton(name, teacher_dtype) for name in task.network.module_names}
    with _without_data() as trace, ExitStack() as at_end:
        if isinstance(task, ReplicatesHead):
            at_end.callback(task.drop_head)
            trace.exclude(task.make_head_without_data(teacher_dtype))
        answer, teacher_peak, teacher_kernels = _ask_teacher(task, batch, teacher, trace)
        held = sum(tensor.untyped_storage().nbytes() for tensor in tree_leaves(answer) if isinstance(tensor, Tensor))
        if recomputes:
            task.enable_gradient_checkpointing(student)
        _replace_tensors(student, student_dtype)
        if compiles:
            keep_what_a_compiler_keeps(blocks_of(student, block_classes))
        trace.exclude([*student.parameters(), *student.buffers()])
        for parameter in student.parameters():
            parameter.register_post_accumulate_grad_hook(lambda weight: trace.is_gradient(weight.grad))
        trace.restart()
        with torch.autocast("cpu", dtype=autocast_dtype or torch.bfloat16, enabled=autocast_dtype is not None):
            outputs = student.train()(**task.student_inputs(batch, answer, student_dtype))
        task.loss(outputs, answer, batch).total.backward()
        peaks, student_kernels = (trace.peak, trace.peak_without_gradients), trace.kernels
    return TracedUpdate(teacher_peak, held, *peaks, teacher_kernels, student_kernels)


def _ask_teacher(
    task: Task[Any, Any], batch: Any, modules: Mapping[str, nn.Module], trace: AllocationTrace
) -> tuple[Outputs | None, int, Counter[Kernel]]:
    """The teacher's answer to one micro-batch, the peak of its forward passes, and their kernels."""
    if not task.needs_live_teacher:
        return None, 0, Counter()
    network, request = task.network, task.request(batch)
    for module in modules.values():
        _replace_tensors(module, None)
        trace.exclude([*module.parameters(), *module.buffers()])
    trace.restart()
    with torch.no_grad():
        answers = [network.run(modules[call.module], call) for call in network.calls(request)]
        merged = network.merge(request, answers)
    peak, kernels = trace.peak, trace.kernels
    return merged, peak, kernels


@contextmanager
def _without_data() -> Iterator[AllocationTrace]:
    trace = AllocationTrace()
    with ExitStack() as stack:
        # Fake tensors say once that a kernel for the CPU is slow, and that weights have another dtype than inputs.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(trace)
        stack.enter_context(GpuArithmetic(trace))
        stack.enter_context(observed_by(trace.one_kernel))
        yield trace


def _replace_tensors(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Replaces parameters and buffers by tensors without data, shared ones by one. `dtype`: of floating parameters."""
    made: dict[int, Tensor] = {}

    def empty_like(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            is_weight = isinstance(tensor, nn.Parameter)
            own = dtype if dtype is not None and is_weight and tensor.is_floating_point() else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=own)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_weight else empty
        return made[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = empty_like(tensor)  # type: ignore[assignment]

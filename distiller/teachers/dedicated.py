"""`teacher.placement: dedicated`: processes of the teacher's own, on GPUs that train nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import final

import torch

from distiller.config.placements.dedicated import DedicatedOptions
from distiller.distributed.devices import with_index
from distiller.errors import RunError, UserError
from distiller.teachers.base import Network, Outputs, Request, Setup, Teacher, TeacherMemory
from distiller.teachers.processes.channel import Channel
from distiller.teachers.processes.messages import HOST, Start
from distiller.teachers.processes.supervision import Address, TeacherProcesses, new_authkey
from distiller.teachers.weights.gpu_copy import check_same_gpus


@final
class DedicatedTeacher(Teacher):
    """Asks processes of this machine, each of which holds the whole teacher, under a placement of its own.

    The machine's first rank starts them and waits for their end. Requests go to the processes in turn: all hold the
    same weights and run each request by itself, so it does not matter which one answers. Only loading communicates
    between ranks. `predict` may be called by several threads: updates that different processes answer are answered at
    the same time. On Linux the processes end with the thread that opens the teacher.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        options, ranks = DedicatedOptions.of(setup.options), setup.ranks
        if ranks.device.type == "cuda":
            # Memory is opened by the number of its GPU.
            check_same_gpus(ranks)
        used = ranks.gather_on_node(str(with_index(ranks.device)))
        devices = ranks.all_succeed(lambda: choose_devices(options, ranks.device, used))
        authkey = ranks.broadcast_from_local_main(new_authkey)
        inside = setup.options.model_copy(update={"placement": options.inner, "prefetch_steps": 0})
        starts = [
            Start(
                authkey=authkey,
                network=network,
                options=inside,
                dtype=setup.dtype,
                device=device,
                compile_mode=setup.compile_mode,
                stages_dir=setup.stages_dir,
                reserved_bytes=setup.reserved_bytes * used.count(device) if device != "cpu" else 0,
                num_ranks=ranks.local_world_size,
                is_first=ranks.is_main and number == 0,
                num_threads=torch.get_num_threads(),
                allows_tf32=bool(torch.backends.cuda.matmul.allow_tf32),
                is_deterministic=torch.are_deterministic_algorithms_enabled(),
            )
            for number, device in enumerate(devices)
        ]
        self._processes: TeacherProcesses | None = None
        self._channels: list[Channel] = []
        try:
            ranks.all_succeed(lambda: self._start(starts) if ranks.is_local_main else None)
            addresses = ranks.broadcast_from_local_main(lambda: self._processes.addresses if self._processes else [])
            ranks.all_succeed(lambda: self._connect(addresses, authkey, ranks.device))
        except BaseException:
            # Another machine's may have failed: this one's must not wait for ranks that never come.
            self._abandon()
            raise
        self._memory = TeacherMemory(host_bytes=sum(address.memory.host_bytes for address in addresses))
        # Ranks begin with different processes.
        self._next, self._lock = ranks.local_rank % len(devices), threading.Lock()

    @property
    def num_parallel_updates(self) -> int:
        """As many as there are processes."""
        return len(self._channels)

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        with self._lock:
            first = self._next
            self._next = (first + len(requests)) % len(self._channels)
        shares: dict[int, list[int]] = {}
        for i in range(len(requests)):
            shares.setdefault((first + i) % len(self._channels), []).append(i)
        results: list[Outputs] = [{} for _ in requests]
        with ExitStack() as all_held:
            held = {number: all_held.enter_context(ExitStack()) for number in sorted(shares)}
            # In one order in all threads, so that none waits for another that waits for it.
            for number, lock in held.items():
                lock.enter_context(self._channels[number].lock)
            try:
                for number in sorted(shares):
                    self._channels[number].send([requests[i] for i in shares[number]])
            except BaseException:
                # Answers to what was sent already would be taken for those to the next question.
                self._abandon()
                raise
            errors: list[RunError] = []
            for number in sorted(shares):
                # All are read, or what is left would be taken for the answer to the next question.
                try:
                    answers = self._channels[number].receive()
                except RunError as error:
                    errors.append(error)
                else:
                    for i, outputs in zip(shares[number], answers, strict=True):
                        results[i] = outputs
                # Another thread's update may use this process while the others still answer.
                held[number].close()
        if errors:
            raise errors[0]
        return results

    def memory(self) -> TeacherMemory:
        return self._memory

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        if self._processes is not None:
            self._processes.close()
        self._channels, self._memory = [], TeacherMemory()

    def _start(self, starts: Sequence[Start]) -> None:
        self._processes = TeacherProcesses.start(starts)

    def _connect(self, addresses: Sequence[Address], authkey: bytes, device: torch.device) -> None:
        for number, address in enumerate(addresses):
            name = f"the teacher's process {number} on {address.device}"
            self._channels.append(Channel((HOST, address.port), authkey, name, device))

    def _abandon(self) -> None:
        for channel in self._channels:
            channel.close()
        if self._processes is not None:
            self._processes.kill()


def choose_devices(options: DedicatedOptions, device: torch.device, used: Sequence[str]) -> list[str]:
    """The device of each process of the teacher, by name.

    Args:
        device: of this rank.
        used: the devices on which the machine's ranks train.

    Raises:
        UserError: the machine has not got them.
    """
    if device.type == "cpu":
        return ["cpu"] * options.num_processes
    return choose_gpus(options, torch.cuda.device_count(), used)


def choose_gpus(options: DedicatedOptions, num_gpus: int, used: Sequence[str]) -> list[str]:
    """As `choose_devices`, on a machine with so many GPUs."""
    names = [f"cuda:{number}" for number in range(num_gpus)]
    if not isinstance(options.devices, int):
        missing = [number for number in options.devices if number >= num_gpus]
        if missing:
            raise UserError(f"teacher.devices names GPU {missing[0]}, and this machine has {num_gpus}, counted from 0")
        return [names[number] for number in options.devices]
    free = [name for name in names if name not in used]
    if len(free) < options.devices:
        raise UserError(
            f"teacher.devices is {options.devices} and this machine has {num_gpus} GPU(s), of which its {len(used)} "
            f"process(es) train on {num_gpus - len(free)}; start fewer processes (--num_processes), or name a GPU that "
            "is to do both (teacher.devices=[0])"
        )
    return free[-options.devices :]

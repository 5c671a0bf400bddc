"""`teacher.placement: sharded`: every rank holds a shard of each tensor, on its device or offloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from distiller.teachers.base import (
    ModuleCalls,
    Network,
    Outputs,
    Request,
    Setup,
    Teacher,
    TeacherMemory,
    answer,
    run_module_calls,
)
from distiller.teachers.sharding.fsdp2 import FullyShardedModules
from distiller.teachers.sharding.sharded_modules import ShardedModules, storage_bytes
from distiller.teachers.sharding.zero3 import Zero3Modules


@final
class ShardedTeacher(Teacher):
    """Sharded by FSDP2, or, where the student's engine is DeepSpeed, by ZeRO-3 in a separate engine.

    A forward pass gathers each block before it runs. So `predict` communicates, and all ranks run the same passes.
    """

    def __init__(self, network: Network, setup: Setup) -> None:
        self._network, self._ranks = network, setup.ranks
        make = Zero3Modules if setup.under_deepspeed else FullyShardedModules
        self._shards: ShardedModules = make(network, setup)
        self._host_bytes = sum(self._ranks.gather_on_node(storage_bytes(self._shards.tensors(), "cpu")))

    def predict(self, requests: Sequence[Request]) -> list[Outputs]:
        return answer(self._network, requests, self._run, self._ranks)

    def memory(self) -> TeacherMemory:
        return TeacherMemory(storage_bytes(self._shards.tensors(), "cuda"), self._host_bytes)

    def close(self) -> None:
        self._shards.close()
        self._host_bytes = 0

    def _run(self, agenda: ModuleCalls) -> list[list[Outputs]]:
        results = run_module_calls(self._network, self._shards.modules, agenda)
        for name, _ in agenda:
            self._shards.release_forward_state(name)
        return results

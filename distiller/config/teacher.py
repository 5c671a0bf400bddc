"""The recipe's section on the teacher: which one, and where it lives. Importing this module does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from distiller.config.sections import DType, Location, NonNegative, Positive, Section, Switch

Placement = Literal[
    "auto",
    "replicated",
    "cpu",
    "streamed",
    "disk",
    "balanced",
    "sequential",
    "custom",
    "rank0",
    "sharded",
    "swap",
    "cached",
]


class Teacher(Section):
    """The frozen network and where it lives. Keys that another placement reads are left alone."""

    path: Location = Field(description="a diffusers pipeline folder, a hub id, or asset:NAME for a packaged one")
    revision: Location | None = Field(default=None, description="of a hub id: branch, tag or commit")
    subfolder: Location | None = Field(default=None, description="where in the folder or repository the pipeline lies")
    placement: Placement = Field(
        default="replicated", description="where it lives; docs/MODEL_LOADING_STRATEGIES.md compares the places"
    )
    dtype: DType = Field(default="auto", description="auto = bfloat16 on a GPU that has it, float32 otherwise")
    quantization: Literal["none", "int8"] = Field(
        default="none", description="int8 = bitsandbytes, for placement replicated and balanced"
    )
    prefetch_steps: Annotated[NonNegative, Field(le=0)] = Field(
        default=0, description="updates asked for ahead; none yet"
    )
    pin_memory: Switch = Field(
        default=True, description="of host memory that a GPU copies from; false is several times slower"
    )
    ring_blocks: Annotated[Positive, Field(ge=2)] = Field(
        default=3, description="streamed, disk: blocks on the GPU at a time, one in use and the others on their way"
    )
    resident_blocks: NonNegative | Literal["auto"] = Field(
        default=0, description="streamed, disk: blocks that stay on the GPU; auto = what the student leaves room for"
    )
    shard_transfers: Switch | Literal["auto"] = Field(
        default="auto",
        description="streamed: each rank copies its share of a block, NVLink does the rest; auto = with 2 GPUs or more",
    )
    amortise: Switch = Field(
        default=True, description="streamed, disk: all micro-batches of an update pass a block while it is there"
    )
    read_threads: Positive = Field(default=4, description="disk: files read ahead by so many threads a rank")
    device_map: dict[str, NonNegative | Literal["cpu", "disk"]] | None = Field(
        default=None, description="custom: module name to GPU number, cpu or disk, as in Accelerate"
    )
    rank: NonNegative = Field(default=0, description="rank0: the rank that holds the teacher")
    micro_batch: Positive | None = Field(
        default=None, description="rank0: samples a forward pass; None = all ranks' at once"
    )
    offload: Literal["none", "cpu", "nvme"] = Field(default="none", description="sharded: where the shards wait")
    nvme_path: Location | None = Field(default=None, description="sharded with offload nvme: a folder on a local disk")
    cache: Location | None = Field(
        default=None, description="cached: the folder that `distiller cache` writes and training reads"
    )

    @model_validator(mode="after")
    def _is_complete(self) -> Teacher:
        if self.placement == "custom" and not self.device_map:
            raise ValueError(
                "teacher.placement=custom needs teacher.device_map, for example {'blocks.0': 0, 'blocks.1': cpu, '': 0}"
            )
        if self.placement == "sharded" and self.offload == "nvme" and self.nvme_path is None:
            raise ValueError("teacher.offload=nvme needs teacher.nvme_path; give a folder on a local disk")
        if self.placement == "cached" and self.cache is None:
            raise ValueError(
                "teacher.placement=cached needs teacher.cache; give the folder that `distiller cache` writes"
            )
        return self

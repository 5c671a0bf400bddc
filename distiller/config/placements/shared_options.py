"""Keys that several placements read, a class for each group. Descriptions name no placement: that is derived."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from distiller.config.placements.base import PlacementOptions, Sizes, World
from distiller.config.sections import NonNegative, Positive, Switch


class PinnedMemoryOptions(PlacementOptions):
    """Of placements that copy from host memory to a GPU."""

    pin_memory: Switch = Field(
        default=True, description="of host memory that a GPU copies from; false is several times slower"
    )


class BlockBufferOptions(PlacementOptions):
    """Of placements whose blocks pass through a few buffers on each GPU."""

    ring_blocks: Annotated[Positive, Field(ge=2)] = Field(
        default=3, description="blocks on the GPU at a time, one in use and the others on their way"
    )
    resident_blocks: NonNegative | Literal["auto"] = Field(
        default=0, description="blocks that stay on the GPU; auto = what the student leaves room for"
    )
    amortise: Switch = Field(default=True, description="all micro-batches of an update pass a block while it is there")

    def device_bytes(self, sizes: Sizes) -> int:
        """Bytes on the device: what is outside of blocks, resident blocks, and the buffers."""
        num_buffers = min(self.ring_blocks, sizes.num_blocks - self._num_resident(sizes))
        return sizes.rest + self._resident_bytes(sizes) + num_buffers * sizes.largest_block

    def passing_bytes(self, sizes: Sizes) -> int:
        """Bytes of the blocks that pass through the buffers."""
        return sizes.total - sizes.rest - self._resident_bytes(sizes)

    def _resident_bytes(self, sizes: Sizes) -> int:
        """Of the resident blocks, as if each were the largest, but at most of all blocks."""
        return min(self._num_resident(sizes) * sizes.largest_block, sizes.total - sizes.rest)

    def _num_resident(self, sizes: Sizes) -> int:
        # `auto` gives them what is left once the placement fits.
        return 0 if self.resident_blocks == "auto" else min(self.resident_blocks, sizes.num_blocks)


class FileReadingOptions(PlacementOptions):
    """Of placements that read weights from files while they are in use."""

    read_threads: Positive = Field(default=4, description="files read ahead by so many threads a rank")


def time_through_parts(num_passes: int, world: World) -> float:
    """Time of an update's passes through a teacher of which each GPU of a node holds a part, as a multiple of its own.

    The passes of all ranks go through the GPUs one after the other, and each GPU works on another pass: with P passes
    and G GPUs the last pass ends after (P + G - 1) / G passes. One rank starts its next pass when the last has ended.
    """
    if world.num_local_ranks == 1:
        return 1.0
    total = num_passes * world.num_local_ranks
    return (total + world.num_gpus - 1) / world.num_gpus / num_passes

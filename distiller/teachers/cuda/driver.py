"""Calls of the CUDA driver that torch does not offer: stream memory operations, and copies to mapped memory.

See https://docs.nvidia.com/cuda/cuda-driver-api/. Functions with a stream act on its device, the others on the calling
thread's current device. All raise RuntimeError when the driver returns an error.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import final

import torch

_WAIT_AT_LEAST = 0
_WRITE_AFTER_ALL_BEFORE = 0
_LAZY_PEER_ACCESS = 1


@final
class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


def write_value(address: int, value: int, stream: torch.cuda.Stream) -> None:
    """Queues a write of 32 bits to an address; the stream's writes before it are visible to readers of the value."""
    _call("cuStreamWriteValue32_v2", stream, *_pointers(address), ctypes.c_uint32(value), _WRITE_AFTER_ALL_BEFORE)


def wait_value(address: int, value: int, stream: torch.cuda.Stream) -> None:
    """Makes the stream wait until the 32 bits at the address are at least this value."""
    _call("cuStreamWaitValue32_v2", stream, *_pointers(address), ctypes.c_uint32(value), _WAIT_AT_LEAST)


def copy(target: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """Queues a copy between GPU addresses, also of memory that is mapped from another process, by a copy engine."""
    if num_bytes:
        with torch.cuda.device(stream.device):
            _check("cuMemcpyDtoDAsync_v2", *_pointers(target, source), ctypes.c_size_t(num_bytes), _stream(stream))


def export_memory(address: int) -> tuple[bytes, int]:
    """(Handle of the allocation for `map_memory` in another process, offset of the address in it in bytes)."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _check("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), *_pointers(address))
    _check("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle), address - base.value


def map_memory(handle: bytes) -> int:
    """Maps the allocation of another process and returns its address in this process."""
    address = ctypes.c_uint64()
    _check("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return address.value


def unmap_memory(address: int) -> None:
    """Undoes `map_memory`."""
    _check("cuIpcCloseMemHandle", *_pointers(address))


def _call(name: str, stream: torch.cuda.Stream, *arguments: object) -> None:
    with torch.cuda.device(stream.device):
        _check(name, _stream(stream), *arguments)


def _check(name: str, *arguments: object) -> None:
    error = _driver()[name](*arguments)
    if error != 0:
        raise RuntimeError(f"{name} failed with CUDA driver error {error}")


def _pointers(*addresses: int) -> tuple[ctypes.c_uint64, ...]:
    return tuple(ctypes.c_uint64(address) for address in addresses)


def _stream(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")

"""The calls of CUDA's runtime that rrfp makes, on files that processes map.

Holds those who exchange memory to their protocol, and says nothing about CUDA: memory that is freed
while somebody has it open is an error, and FAULT plants one. Memory that is freed is poisoned.
"""

import ctypes
import mmap
import os
import time
from enum import IntEnum
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# ruff: noqa: N801, N802, N815, N816 - the names are CUDA's.


DIRECTORY, FAULT = "CUDA_IN_FILES", "CUDA_IN_FILES_FAULT"
CORRUPT, REFUSED, GONE = "corrupt", "refused", "gone"

POISON = 0xA5
cudaStreamNonBlocking, cudaIpcMemLazyEnablePeerAccess = 1, 1
cudaEventBlockingSync, cudaEventDisableTiming = 1, 2
_HANDLE_BYTES = 64
_maps: dict[int, tuple[Path, mmap.mmap]] = {}
_numbers = count()
NUM_DEVICES = 2
freed_open: list[int] = []
"""The addresses of memory that was to be freed while somebody had it open."""


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidDevice = 101
    cudaErrorMapBufferObjectFailed = 205


class cudaMemcpyKind(IntEnum):
    cudaMemcpyDefault = 4


class cudaIpcMemHandle_t:
    """As the bindings', it only tells where its octets lie."""

    def __init__(self) -> None:
        self._octets = ctypes.create_string_buffer(_HANDLE_BYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self._octets)


def cudaGetErrorName(error: cudaError_t) -> tuple[int, bytes]:
    return 0, error.name.encode()


def cudaGetErrorString(error: cudaError_t) -> tuple[int, bytes]:
    return 0, {205: b"mapping of buffer object failed"}.get(error, b"invalid argument")


def cudaSetDevice(device: int) -> tuple[int]:
    return (0 if device < NUM_DEVICES else cudaError_t.cudaErrorInvalidDevice,)


def cudaGetDeviceCount() -> tuple[int, int]:
    return 0, NUM_DEVICES


def cudaGetDeviceProperties(device: int) -> tuple[int, Any]:
    return 0, SimpleNamespace(uuid=SimpleNamespace(bytes=bytes([device]) * 16))


def cudaDeviceCanAccessPeer(device: int, peer: int) -> tuple[int, int]:
    return 0, int(device != peer)  # as CUDA has it


def cudaStreamCreateWithFlags(_: int) -> tuple[int, object]:
    return 0, object()


def cudaDeviceSynchronize() -> tuple[int]:
    return (0,)


def cudaStreamSynchronize(_: object) -> tuple[int]:
    return (0,)


def cudaMalloc(num_bytes: int) -> tuple[int, int]:
    path = Path(os.environ[DIRECTORY], f"{os.getpid()}-{next(_numbers)}")
    path.write_bytes(bytes(num_bytes))
    return 0, _mapped(path)


def cudaFree(address: int) -> tuple[int]:
    path, mapped = _maps[address]
    if [*path.parent.glob(f"{path.name}.*.open")]:
        freed_open.append(address)
        return (cudaError_t.cudaErrorInvalidValue,)
    ctypes.memset(address, POISON, len(mapped))
    path.unlink()
    return (0,)


def cudaMemset(address: int, octet: int, num_bytes: int) -> tuple[int]:
    ctypes.memset(address, octet, num_bytes)
    return (0,)


def cudaMemcpyAsync(
    target: int, source: int, num_bytes: int, _: cudaMemcpyKind, __: object
) -> tuple[int]:
    ctypes.memmove(target, source, num_bytes - (os.environ.get(FAULT) == CORRUPT))
    return (0,)


def cudaIpcGetMemHandle(address: int) -> tuple[int, cudaIpcMemHandle_t]:
    handle = cudaIpcMemHandle_t()
    name = _maps[address][0].name.encode().ljust(_HANDLE_BYTES, b"\0")
    ctypes.memmove(handle.getPtr(), name, _HANDLE_BYTES)
    return 0, handle


def cudaIpcOpenMemHandle(handle: cudaIpcMemHandle_t, _: int) -> tuple[int, int | None]:
    if os.environ.get(FAULT) == REFUSED:
        return cudaError_t.cudaErrorMapBufferObjectFailed, None
    if os.environ.get(FAULT) == GONE:
        os.abort()
    octets = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
    path = Path(os.environ[DIRECTORY], octets.rstrip(b"\0").decode())
    if not path.is_file():
        return cudaError_t.cudaErrorInvalidValue, None
    address = _mapped(path)
    _opened(address).touch()
    return 0, address


def cudaIpcCloseMemHandle(address: int) -> tuple[int]:
    _opened(address).unlink()
    return (0,)


def cudaEventCreate() -> tuple[int, list[float]]:
    return 0, []


def cudaEventCreateWithFlags(_: int) -> tuple[int, list[float]]:
    return 0, []


def cudaEventSynchronize(event: list[float]) -> tuple[int]:
    assert event, "it was not recorded"
    return (0,)


def cudaEventRecord(event: list[float], _: object) -> tuple[int]:
    event[:] = [time.perf_counter()]
    return (0,)


def cudaEventElapsedTime(started: list[float], ended: list[float]) -> tuple[int, float]:
    return 0, (ended[0] - started[0]) * 1e3


def _opened(address: int) -> Path:
    """There while this process has memory open at this address."""
    path, _ = _maps[address]
    return path.with_name(f"{path.name}.{os.getpid()}-{address}.open")


def _mapped(path: Path) -> int:
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    held: Any = ctypes.c_char.from_buffer(mapped)
    address = ctypes.addressof(held)
    _maps[address] = path, mapped
    return address

"""The calls of CUDA's runtime that `rrfp.doctor.cuda_ipc` makes, on files that processes map.

Holds the two processes to their protocol, and says nothing about CUDA: memory that is freed while
another process maps it is an error, and FAULT plants one.
"""
# ruff: noqa: N801, N802, N815, N816 - the names are CUDA's.

import ctypes
import mmap
import os
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

DIRECTORY, FAULT = "CUDA_IN_FILES", "CUDA_IN_FILES_FAULT"
CORRUPT, REFUSED, GONE = "corrupt", "refused", "gone"

cudaStreamNonBlocking, cudaIpcMemLazyEnablePeerAccess = 1, 1
_HANDLE_BYTES = 64
_maps: dict[int, tuple[Path, mmap.mmap]] = {}


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMapBufferObjectFailed = 205


class cudaMemcpyKind(IntEnum):
    cudaMemcpyDefault = 4


class cudaIpcMemHandle_t:
    reserved = bytes(_HANDLE_BYTES)


def cudaGetErrorString(error: cudaError_t) -> tuple[int, bytes]:
    return 0, {205: b"mapping of buffer object failed"}.get(error, b"invalid argument")


def cudaSetDevice(_: int) -> tuple[int]:
    return (0,)


def cudaStreamCreateWithFlags(_: int) -> tuple[int, object]:
    return 0, object()


def cudaDeviceSynchronize() -> tuple[int]:
    return (0,)


def cudaStreamSynchronize(_: object) -> tuple[int]:
    return (0,)


def cudaMalloc(num_bytes: int) -> tuple[int, int]:
    path = Path(os.environ[DIRECTORY], f"{os.getpid()}-{len(_maps)}")
    path.write_bytes(bytes(num_bytes))
    return 0, _mapped(path)


def cudaFree(address: int) -> tuple[int]:
    path, _ = _maps[address]
    if path.with_suffix(".open").exists():
        return (cudaError_t.cudaErrorInvalidValue,)
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
    handle.reserved = _maps[address][0].name.encode().ljust(_HANDLE_BYTES, b"\0")
    return 0, handle


def cudaIpcOpenMemHandle(handle: cudaIpcMemHandle_t, _: int) -> tuple[int, int | None]:
    if os.environ.get(FAULT) == REFUSED:
        return cudaError_t.cudaErrorMapBufferObjectFailed, None
    if os.environ.get(FAULT) == GONE:
        os.abort()
    path = Path(os.environ[DIRECTORY], handle.reserved.rstrip(b"\0").decode())
    path.with_suffix(".open").touch()
    return 0, _mapped(path)


def cudaIpcCloseMemHandle(address: int) -> tuple[int]:
    _maps[address][0].with_suffix(".open").unlink()
    return (0,)


def cudaEventCreate() -> tuple[int, list[float]]:
    return 0, []


def cudaEventRecord(event: list[float], _: object) -> tuple[int]:
    event[:] = [time.perf_counter()]
    return (0,)


def cudaEventElapsedTime(started: list[float], ended: list[float]) -> tuple[int, float]:
    return 0, (ended[0] - started[0]) * 1e3


def _mapped(path: Path) -> int:
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    held: Any = ctypes.c_char.from_buffer(mapped)
    address = ctypes.addressof(held)
    _maps[address] = path, mapped
    return address

"""The plane of CUDA IPC with files in the place of CUDA, and what is left in them."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rrfp.runtime.device.interface import CPU
from rrfp.runtime.planes import selection as rank_planes
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import RankPlanes
from tests import cuda_in_files
from tests.cuda_in_files import cudaError_t
from tests.test_planes import OUTBOX_BYTES

CUDA_IPC = TransportName.CUDA_IPC
CHOICES = {"cpu": {CUDA_IPC: ((CUDA_IPC, TransportName.BOUNCE), (TransportName.BOUNCE,))}}
"""Simulated devices lie on the CPU. As on GPUs, bounce comes after."""


def put_files_in_place_of_cuda(directory: Path, set_attribute: Callable[..., None]) -> None:
    """Have files there in the place of CUDA."""
    os.environ[cuda_in_files.DIRECTORY] = str(directory)
    for name in ("cuda", "cuda.bindings"):
        set_attribute(sys.modules, name, ModuleType(name))
    set_attribute(sys.modules, "cuda.bindings.runtime", cuda_in_files)
    sys.modules["cuda.bindings"].runtime = cuda_in_files  # type: ignore[attr-defined] # bare
    rank_planes.CHOICES = CHOICES


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """CUDA in files; at the end nothing was freed while somebody had it open."""
    monkeypatch.setenv(cuda_in_files.DIRECTORY, "")
    monkeypatch.setattr(rank_planes, "CHOICES", CHOICES)
    monkeypatch.setattr(cuda_in_files, "freed_open", [])
    put_files_in_place_of_cuda(tmp_path, monkeypatch.setitem)
    yield tmp_path
    assert cuda_in_files.freed_open == []


def memory_left(directory: Path) -> list[str]:
    """What is allocated or open."""
    return [path.name for path in directory.iterdir()]


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, error: cudaError_t) -> None:
    monkeypatch.setattr(cuda_in_files, call, lambda *_: (error, None))


def planes() -> RankPlanes:
    return RankPlanes(CPU, CUDA_IPC, OUTBOX_BYTES)

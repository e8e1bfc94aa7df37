"""Memory of the host that is used again."""

import mmap
from typing import NoReturn

import pytest

from rrfp.runtime.device.host_memory import HostMemory


class SmallPages(mmap.mmap):
    """As of a kernel that is built without huge pages."""

    def madvise(self, *_: int) -> NoReturn:
        raise OSError(22, "Invalid argument")


def test_a_kernel_without_huge_pages_gives_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", SmallPages)
    assert bool((HostMemory(0).empty(2**20).fill_(1) == 1).all())

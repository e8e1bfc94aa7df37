"""Gloo groups that share the threads of one device.

Each group that torch makes has a gloo device of its own, whose thread wakes up a hundred times a
second. Megatron makes some fifty groups on each rank: several ranks on a few cores would spend much
of them on that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store


@contextmanager
def sharing_a_device() -> Iterator[None]:
    """Inside, gloo groups are made on the device of the default group."""
    assert dist.group.WORLD is not None
    # torch declares neither that its name may be replaced nor these options.
    module: Any = dist.distributed_c10d
    torchs_own: Any = module.ProcessGroupGloo
    world: Any = dist.group.WORLD._get_backend(torch.device("cpu")).options

    class OnOneDevice(torchs_own):  # type: ignore[misc]
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
            options = torchs_own._Options()
            options._devices = world._devices
            options._threads = world._threads
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    module.ProcessGroupGloo = OnOneDevice
    try:
        yield
    finally:
        module.ProcessGroupGloo = torchs_own

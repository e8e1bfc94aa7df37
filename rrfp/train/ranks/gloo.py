"""Gloo groups on one device, at one address.

torch gives each group its own gloo device. A device listens at whatever address the host's name or
GLOO_SOCKET_IFNAME yields, and its thread wakes up a hundred times a second. Megatron makes some
fifty groups on each rank, so several ranks on a few cores would spend much of their time on that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from rrfp.errors import RrfpError, first_line

_NUM_THREADS = 2
"""The number that torch gives a group."""


@contextmanager
def one_device_at(address: str) -> Iterator[None]:
    """Make gloo groups on one device, which listens only at this address of the host. Raises
    RrfpError if it cannot."""
    # torch declares neither these options nor that the name is assignable.
    module: Any = dist.distributed_c10d
    torchs_own: Any = module.ProcessGroupGloo
    try:
        device = torchs_own.create_device(hostname=address)
    except RuntimeError as error:
        raise RrfpError(
            f"gloo cannot listen at {address} ({first_line(str(error))}); see whether it is an "
            "address of this host"
        ) from None

    class OnOneDevice(torchs_own):  # type: ignore[misc]
        def __init__(
            self, store: Store, rank: int, size: int, timeout: timedelta, **newer: Any
        ) -> None:
            # Newer releases of torch pass more, such as enable_reconfigure: all are options.
            options = torchs_own._Options()
            for name, value in newer.items():
                setattr(options, name, value)
            options._devices = [device]
            options._threads = _NUM_THREADS
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    module.ProcessGroupGloo = OnOneDevice
    try:
        yield
    finally:
        module.ProcessGroupGloo = torchs_own

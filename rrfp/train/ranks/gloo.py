"""Gloo groups on one device, at one address, whose port is open only while a group is made.

torch gives each group its own gloo device. A device listens at whatever address the host's name or
GLOO_SOCKET_IFNAME yields, and its thread wakes up a hundred times a second. Megatron makes some
fifty groups on each rank, so several ranks on a few cores would spend much of their time on that.

A device accepts whoever connects, and takes him for the member of a group whose number he sends;
the numbers count up from 0. So its port lets in nobody except while a group is made: when torch's
constructor returns, all members are connected. Between hosts it lets in only those of the run. All
this where the kernel permits such a filter (`rrfp.runtime.transport.doorman`).
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from rrfp.errors import RrfpError, first_line
from rrfp.runtime.transport.doorman import let_in, let_in_nobody, named_sources

_NUM_THREADS = 2
"""The number that torch gives a group."""


@contextmanager
def one_device_at(address: str) -> Iterator[None]:
    """Make gloo groups on one device, which listens only at this address of the host. Raises
    RrfpError if it cannot."""
    # torch declares neither these options nor that the name is assignable.
    module: Any = dist.distributed_c10d
    torchs_own: Any = module.ProcessGroupGloo
    others = _listening()
    try:
        # A lazy device would accept connections later.
        device = torchs_own.create_device(hostname=address, lazy_init=False)
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
            # The others learn of the port in the constructor, so none comes before.
            let_in(door, named_sources())
            try:
                super().__init__(store, rank, size, options)
            finally:
                let_in_nobody(door)

    (descriptor,) = _listening() - others
    with socket.socket(fileno=os.dup(descriptor)) as door:
        let_in_nobody(door)
        module.ProcessGroupGloo = OnOneDevice
        try:
            yield
        finally:
            module.ProcessGroupGloo = torchs_own


def _listening() -> set[int]:
    """The descriptors of this process' TCP sockets that listen."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as opened:
                is_tcp = opened.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(link.name))
    return found

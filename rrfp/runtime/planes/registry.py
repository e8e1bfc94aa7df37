"""The data planes by name: their classes, and the ones that may serve a link.

Settings and the command line import this module, so that it imports no torch.
"""

import importlib
import os
from collections.abc import Mapping
from enum import StrEnum
from importlib.util import find_spec
from typing import Any

from rrfp.requirements import install_hint


class TransportName(StrEnum):
    """Transports that a user can ask for."""

    AUTO = "auto"
    """The best plane for the device and for each peer's host."""
    INLINE = "inline"
    """The link's own socket: CPU tensors."""
    SHM = "shm"
    """Memory that the processes of a host share: CPU tensors, between ranks on one host."""
    CUDA_IPC = "cuda-ipc"
    """Device memory that the processes of a host share: CUDA tensors, between ranks on one host."""
    NIXL = "nixl"
    """One-sided reads by NVIDIA's NIXL, over any fabric that it finds: CPU and CUDA tensors."""
    BOUNCE = "bounce"
    """Through pinned memory of the host and the link's own socket: always works, and is slow."""


PLANES: Mapping[TransportName, str] = {
    TransportName.SHM: "rrfp.runtime.planes.host_planes:SharedMemoryPlane",
    TransportName.CUDA_IPC: "rrfp.runtime.planes.cuda_ipc:CudaIpcPlane",
    TransportName.NIXL: "rrfp.runtime.planes.nixl:NixlPlane",
    TransportName.BOUNCE: "rrfp.runtime.planes.host_planes:BouncePlane",
}
"""Class of each plane as `module:class`, imported when a rank first needs it. It is called with the
device and the bytes of a slab, and may raise PlaneRefusal."""

_A, _I, _S = TransportName.AUTO, TransportName.INLINE, TransportName.SHM
_C, _N, _B = TransportName.CUDA_IPC, TransportName.NIXL, TransportName.BOUNCE

CHOICES: Mapping[str, Mapping[TransportName, tuple[tuple[TransportName, ...], ...]]] = {
    "cpu": {_A: ((_S,), ()), _I: ((), ()), _S: ((_S,), ()), _N: ((_N,), (_N,)), _B: ((_B,), (_B,))},
    "cuda": {
        _A: ((_C, _B), (_N, _B)),
        _C: ((_C, _B), (_B,)),
        _N: ((_N, _B), (_N, _B)),
        _B: ((_B,), (_B,)),
    },
}
"""Planes of a link, by the device's type and the requested transport: first those to a peer on this
host, then those to a peer on another one. A link takes the first that works, and otherwise the
socket itself."""

UNENCRYPTED = frozenset({TransportName.NIXL})
"""Planes whose bytes bypass the link's socket, and so its TLS, on their way to another host."""

DEFAULT_OUTBOX_MB = 256
"""Size of a slab; each rank has one for each plane in use."""
MOST_OUTBOX_MB = 2**20
"""1 TiB, more than any host has for it."""


# NIXL's Python package; there is one for each release of CUDA.

_NETWORK_DEVICES = "UCX_NET_DEVICES"
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The package that finds this machine's CUDA, then one for each release. On the CPU any works."""
HOW_TO_INSTALL = install_hint("nixl")


def is_installed() -> bool:
    """Return whether a package of NIXL is installed, for any release of CUDA, without importing
    it."""
    return any(find_spec(package) is not None for package in _PACKAGES)


def nixl_api() -> Any:
    """Import and return NIXL's module with `nixl_agent`, from the first of its packages that can be
    imported. Raises ImportError that names the package to install."""
    reasons = []
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            reasons.append(str(error))
    raise ImportError(f"NIXL cannot be imported ({reasons[0]}); {HOW_TO_INSTALL}")


def keep_to_this_host() -> None:
    """Set UCX_NET_DEVICES to loopback, unless the user has set it, so that UCX, which NIXL uses,
    does not listen at every interface. A process whose peers are all on its host calls it before it
    makes its first agent."""
    os.environ.setdefault(_NETWORK_DEVICES, "lo")

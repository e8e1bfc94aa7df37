"""The names of the data planes. Imports no torch."""

import importlib
from enum import StrEnum
from importlib.util import find_spec
from typing import Any


class TransportName(StrEnum):
    """What carries the tensors of messages, as a user asks for it."""

    AUTO = "auto"
    """What suits the device and the place of each peer."""
    INLINE = "inline"
    """The link's own socket: CPU tensors."""
    SHM = "shm"
    """Memory that the processes of a host share: CPU tensors, between ranks on one host."""
    CUDA_IPC = "cuda-ipc"
    """Device memory that the processes of a host share: CUDA tensors, between ranks on one host."""
    NIXL = "nixl"
    """One-sided reads by NVIDIA's NIXL, over whatever fabric it finds: CPU and CUDA tensors."""
    BOUNCE = "bounce"
    """Through pinned memory of the host and the link's own socket: always works, and is slow."""


DEFAULT_OUTBOX_MB = 256
"""Of each rank, and of each plane in use."""
MOST_OUTBOX_MB = 2**20
"""A TiB: more than any host has for it."""


# Where NIXL's Python is, of which there is one for each release of CUDA. Imports no torch.


_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The one that finds this machine's CUDA, and each: on the CPU any of them serves."""
HOW_TO_INSTALL = "pip install 'rrfp[nixl]'"


def is_installed() -> bool:
    """Whether there is any, without importing it."""
    return any(find_spec(package) is not None for package in _PACKAGES)


def nixl_api() -> Any:
    """The module that has `nixl_agent`. Raises ImportError, which says what to do."""
    reasons = []
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            reasons.append(str(error))
    raise ImportError(f"NIXL cannot be imported ({reasons[0]}); {HOW_TO_INSTALL}")

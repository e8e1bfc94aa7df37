"""The names of the data planes. Imports no torch."""

from enum import StrEnum


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

"""What a device has left for activations, for `--hold auto`.

Asked after a first step, when parameters, gradients and optimizer states are there.
"""

import os
from pathlib import Path

import torch

from rrfp.errors import RrfpError
from rrfp.runtime.rendezvous import count_in, num_counted_in

_MARGIN = 0.1
"""The share of the device that is left free: for temporary tensors, messages that wait to be sent
or taken up, and what an allocator loses between its blocks."""

_MEMORY_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def room_of(device: torch.device) -> int:
    """The bytes that activations may take on this device between two steps; on a GPU, `share_gpu`
    goes before. Raises RrfpError if nothing is left."""
    room = _room_on_gpu(device) if device.type == "cuda" else _room_on_host()
    if room <= 0:
        raise RrfpError(
            f"{device} has no memory left for activations after a margin of {_MARGIN:.0%}; use "
            "fewer layers a rank, or more ranks"
        )
    return room


def share_gpu(device: torch.device) -> None:
    """Count this rank among those of its GPU; elsewhere than on a GPU, do nothing.

    How many GPUs a rank sees does not tell who else takes them: srun may show each of its tasks one
    of its own. Each rank does this a step before any asks for its room. By then its pipeline has
    passed messages to and fro, and replicas have added up gradients.
    """
    if device.type == "cuda":
        count_in(_ranks_of(device))


def _ranks_of(device: torch.device) -> str:
    """The name under which the ranks of a GPU are counted, anew when torchrun starts them again
    after a failure. Where it does so because hosts have come or gone, ranks that got other numbers
    are counted twice, and take less than their share."""
    uuid = torch.cuda.get_device_properties(device).uuid
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"rrfp/ranks-of-gpu/{uuid}/{start}"


def _room_on_gpu(device: torch.device) -> int:
    """This rank's even share of what the ranks on its GPU have left, and its allocator's blocks."""
    share_gpu(device)  # in case the process groups, and their store, were made anew since
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free - int(_MARGIN * total)) // num_counted_in(_ranks_of(device)) + unused


def _room_on_host() -> int:
    """This rank's even share of what the host, or its control group, has left."""
    available, total = _meminfo()
    for limit_file, used_file in _MEMORY_CGROUPS:
        try:
            limit, used = (int(file.read_text()) for file in (limit_file, used_file))
        except (OSError, ValueError):  # there is no such group, or it has no limit
            continue
        if limit < total:
            available, total = min(available, limit - used), limit
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return (available - int(_MARGIN * total)) // num_ranks


def _meminfo() -> tuple[int, int]:
    """Available and total memory of the host in bytes."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = 1024 * int(value.split()[0])
    return fields["MemAvailable"], fields["MemTotal"]

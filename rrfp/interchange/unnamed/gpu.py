"""The times of the GPU in place of the host's, which only launched the work."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rrfp.interchange.unnamed.calls import Transfer, UnnamedRank


class Kernel(NamedTuple):
    """What the GPU ran."""

    start_ns: int
    end_ns: int
    correlation: int
    """A number that it shares with its launch."""
    is_transfer: bool


def is_nccl_transfer(name: str) -> bool:
    """Whether a kernel of this name sends or receives."""
    return "nccl" in name and "SendRecv" in name


def put_on_gpu(rank: UnnamedRank, kernels: Sequence[Kernel], launches: Mapping[int, int]) -> int:
    """Give each task the time of the kernels that were launched in it, and transfers that of
    NCCL's kernels; returns how many tasks had no kernel, which are left out.

    `kernels` are in the order of their beginnings; `launches` has when the host launched each.
    """
    launched_ns = [call.launched_ns for call in rank.calls]
    work: dict[int, list[Kernel]] = {}
    moved = []
    for kernel in kernels:
        time_ns = launches.get(kernel.correlation)
        if kernel.is_transfer:
            moved.append(kernel)
        elif time_ns is not None:
            place = bisect_right(launched_ns, time_ns) - 1
            if place >= 0 and time_ns < rank.calls[place].end_ns:
                work.setdefault(place, []).append(kernel)
    num_idle = len(rank.calls) - len(work)
    rank.calls = [
        rank.calls[place]._replace(
            start_ns=found[0].start_ns, end_ns=max(kernel.end_ns for kernel in found)
        )
        for place, found in sorted(work.items())
    ]
    on_host = rank.transfers
    called_ns = [transfer.start_ns for transfer in on_host]
    rank.transfers = []
    for kernel in moved:
        # The kernel does not tell whether it receives; the call that launched it does.
        place = bisect_right(called_ns, launches.get(kernel.correlation, kernel.start_ns)) - 1
        is_receive = place >= 0 and on_host[place].is_receive
        rank.transfers.append(Transfer(kernel.start_ns, kernel.end_ns, is_receive))
    return num_idle

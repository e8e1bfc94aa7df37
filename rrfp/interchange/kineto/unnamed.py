"""A run read from profiles without ranges of tasks: plain ones, of Megatron or of torch.

Which tasks a rank ran is told, in this order of preference, by the Python functions of a profile
with stacks, by ranges of Megatron's names, or by the operators that autograd paired. Where the GPU
ran kernels, a task lasts from its first kernel to its last.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from rrfp.errors import RrfpError
from rrfp.interchange.kineto.autograd import calls_of_autograd
from rrfp.interchange.kineto.file import Profile
from rrfp.interchange.kineto.host import HostProfile
from rrfp.interchange.spans import RankSpans, Source
from rrfp.interchange.unnamed.calls import Call, Extent, UnnamedRank
from rrfp.interchange.unnamed.gpu import put_on_gpu
from rrfp.interchange.unnamed.numbering import check_pipeline, number_calls


def read_unnamed(
    profiles: Sequence[Profile],
    host_of: Callable[[Profile], HostProfile],
    world_size: int,
    name: str,
) -> tuple[list[RankSpans], Source]:
    """The spans of a run from profiles that name no tasks; `name` says what sort of profile.

    Raises RrfpError when these tell no forwards and backwards, or not which ones they are.
    """
    ranks = []
    hosts = []
    idle = on_gpu = 0
    for profile in profiles:
        host = host_of(profile)
        hosts.append(host)
        calls = list(_calls(host))
        if not calls:
            raise RrfpError(
                f"{profile.path} has no ranges of pipeline tasks, and no forward or backward; "
                "record a job of Megatron's with rrfp run --dispatch megatron SCRIPT, or elsewhere "
                'put each task into torch.profiler.record_function(f"PP:{stage}F{microbatch}") (B '
                "for its backward)"
            )
        rank = UnnamedRank(
            profile.number, profile.host, profile.pid, host.groups, calls, host.transfers
        )
        rank.schedules = [Extent(*event[:2]) for event in host.schedules]
        rank.syncs = [Extent(*event[:2]) for event in host.syncs]
        ranks.append(rank)
    check_pipeline(ranks, name)
    for rank, host in zip(ranks, hosts, strict=True):
        if host.kernels:
            idle += put_on_gpu(rank, host.kernels, host.launches)
            on_gpu += 1
    spans, notes = number_calls(ranks, world_size, name)
    if idle:
        notes.append(f"{idle} tasks for which the GPU did nothing are left out")
    device = "cuda" if on_gpu else "cpu"
    return spans, Source(name, len(profiles), device, True, world_size, tuple(notes))


def _calls(host: HostProfile) -> Iterator[Call]:
    paired = calls_of_autograd(host.forwards, host.backwards, host.transfers)
    named = host.frames or host.ranges
    if not named:
        yield from paired
        return
    starts_ns = [call.start_ns for call in paired]
    for event, kind in named:
        inside = paired[
            bisect_left(starts_ns, event.start_ns) : bisect_left(starts_ns, event.end_ns)
        ]
        pair = next((call.pair for call in inside if call.kind is kind), None)
        yield Call(event.start_ns, event.start_ns, event.end_ns, kind, pair)

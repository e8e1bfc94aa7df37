"""A run read from what torch.profiler wrote, a file a rank."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.interchange.inferred_tasks import (
    Call,
    Extent,
    Groups,
    UnnamedRank,
    check_pipeline,
    number_calls,
    put_on_gpu,
)
from rrfp.interchange.kineto_profile import (
    HostProfile,
    Profile,
    ProfiledRank,
    calls_of_autograd,
    number_steps,
    read_host_profile,
    read_profile,
    time_by_operators,
)
from rrfp.interchange.range_names import Maker
from rrfp.interchange.spans import RankSpans, Source
from rrfp.trace.records import RankInfo

# A run read from profiles without ranges of tasks: plain ones, of Megatron or of torch.
#
# Which tasks a rank ran is told, in this order of preference, by the Python functions of a profile
# with stacks, by ranges of Megatron's names, or by the operators that autograd paired. Where the
# GPU ran kernels, a task lasts from its first kernel to its last.


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


def read_profiles(paths: Sequence[Path]) -> tuple[list[RankSpans], Source]:
    """The spans of a run from its profiles, a file a rank.

    Raises RrfpError for a file that is not a profile or tells no tasks, and for files of different
    runs.
    """
    return spans_of(
        [read_profile(path) for path in paths],
        lambda profile: read_host_profile(profile.path),
        "profile of torch.profiler",
    )


def spans_of(
    profiles: Sequence[Profile], host_of: Callable[[Profile], HostProfile], name: str
) -> tuple[list[RankSpans], Source]:
    """The spans of a run from what its profiles hold; `host_of` reads the rest of a profile, which
    is only needed where ranges do not tell everything, and `name` says what sort of profile it is.
    """
    if not any(profile.names_tasks for profile in profiles):
        _check_ranks(profiles)
        return read_unnamed(profiles, host_of, _world_size(profiles), name)
    ranks = [ProfiledRank(profile) for profile in profiles]
    notes = [note for rank in ranks for note in rank.notes]
    makers = {rank.maker for rank in ranks}
    if len(makers) > 1:
        odd = next(rank for rank in ranks if rank.maker is not ranks[0].maker)
        raise RrfpError(
            f"{ranks[0].path} has ranges of {ranks[0].maker} and {odd.path} those of {odd.maker}: "
            "they are not of one run; import one run at a time"
        )
    _check_ranks(ranks)
    world_size = _world_size(ranks)
    ranks.sort(key=lambda rank: rank.number)
    hosts = {}
    if ranks[0].maker is Maker.PIPELINING and not any(rank.is_gpu for rank in ranks):
        hosts = {rank.number: host_of(rank.profile) for rank in ranks}
    notes += _place(ranks, {number: host.groups for number, host in hosts.items()})
    notes += number_steps(ranks)
    for rank in ranks:
        if host := hosts.get(rank.number):
            time_by_operators(rank, host)
    device = "cuda" if any(rank.is_gpu for rank in ranks) else "cpu"
    blocks = ranks[0].maker is Maker.RRFP
    source = Source(name, len(profiles), device, blocks, world_size, tuple(notes))
    return [rank.spans() for rank in ranks], source


_Ranks = Sequence[ProfiledRank] | Sequence[Profile]


def _world_size(ranks: _Ranks) -> int:
    """How many ranks the run had, as far as the profiles tell."""
    told = {rank.world_size: rank.path for rank in ranks if rank.world_size}
    if len(told) > 1:
        (size, path), (other, elsewhere), *_ = told.items()
        raise RrfpError(
            f"{path} is of a run of {size} ranks and {elsewhere} of one of {other}; import one run "
            "at a time"
        )
    return next(iter(told), 1 + max(rank.number for rank in ranks))


def _check_ranks(ranks: _Ranks) -> None:
    by_number: dict[int, Path] = {}
    for rank in ranks:
        if rank.number < 0 and len(ranks) > 1:
            raise RrfpError(
                f"{rank.path} does not tell its rank; profile after torch.distributed is "
                "initialised"
            )
        rank.number = max(rank.number, 0)
        if rank.number in by_number:
            raise RrfpError(
                f"{by_number[rank.number]} and {rank.path} are both of rank {rank.number}; import "
                "one file a rank, of one run"
            )
        by_number[rank.number] = rank.path


def _place(ranks: list[ProfiledRank], groups: Mapping[int, Groups]) -> Iterator[str]:
    """Give a place to each rank that does not tell its own, and yield notes on it: ranks that hold
    the same stages are replicas."""
    tell_stages = True
    for rank in ranks:
        pipeline = groups[rank.number].pipeline if rank.number in groups else ()
        is_told = rank.number in pipeline
        stage = pipeline.index(rank.number) if is_told else rank.number
        for found, task in rank.tasks:
            if task.stage is None:
                found.tells = replace(task, stage=stage)
                tell_stages &= is_told
    if not tell_stages:
        yield (
            "the ranges do not tell stages: all ranks are taken for one pipeline, and each one's "
            "number for its stage"
        )
    placeless = [rank for rank in ranks if rank.info is None]
    stages = {
        rank.number: tuple(sorted({task.stage or 0 for _, task in rank.tasks}))
        for rank in placeless
    }
    in_order = sorted(set(stages.values()))
    num_replicas: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for rank in placeless:
        own = stages[rank.number]
        place = in_order.index(own), 0, num_replicas[own], own
        rank.info = RankInfo(rank.number, *place, rank.host, rank.pid)
        num_replicas[own] += 1

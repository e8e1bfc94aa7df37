"""Reads a run from profiles of torch.profiler, one file per rank."""

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
    InferredRank,
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

# Profiles without ranges of tasks, of Megatron or of torch.
#
# A rank's tasks are found, in this order of preference, by Python functions in a profile with
# stacks, by ranges with Megatron's names, or by operators that autograd paired. If the GPU ran
# kernels, a task lasts from its first kernel to its last.


def infer_spans(
    profiles: Sequence[Profile],
    host_of: Callable[[Profile], HostProfile],
    world_size: int,
    name: str,
) -> tuple[list[RankSpans], Source]:
    """The spans of a run from profiles without ranges of tasks. `host_of` reads the rest of a
    profile; `name` is the kind of profile for messages. Tasks without work on a GPU that ran others
    are left out. Raises RrfpError if a profile has no tasks, no rank sends or receives, or the
    order does not determine the microbatches."""
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
        rank = InferredRank(
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
    """Yield the forwards and backwards in a profile: from Python functions, or else ranges with
    Megatron's names, or else operators. The pair of each comes from autograd's operators in it."""
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
    """The spans of a run from its profiles, one file per rank. Raises RrfpError for a file that is
    not a profile or contains no tasks, and for files of different runs."""
    return spans_of(
        [read_profile(path) for path in paths],
        lambda profile: read_host_profile(profile.path),
        "profile of torch.profiler",
    )


def spans_of(
    profiles: Sequence[Profile], host_of: Callable[[Profile], HostProfile], name: str
) -> tuple[list[RankSpans], Source]:
    """The spans of a run from the ranges of tasks in its profiles, or else those of `infer_spans`.
    `host_of` reads the rest of a profile, if the ranges are not sufficient; `name` is the kind of
    profile for messages. Raises RrfpError as `read_profiles` does."""
    if not any(profile.names_tasks for profile in profiles):
        _check_ranks(profiles)
        return infer_spans(profiles, host_of, _world_size(profiles), name)
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


def spans_of_numbered(
    profiles: Sequence[tuple[Profile, HostProfile]], name: str, notes: Sequence[str]
) -> tuple[list[RankSpans], Source]:
    """The spans of a run from profiles with ranks that were not in them, each with the rest of the
    profile. `notes` explain the ranks, and are left out if rrfp's own ranges contain the ranks.
    Raises RrfpError as `spans_of` does."""
    hosts = {id(profile): host for profile, host in profiles}
    spans, source = spans_of(
        [profile for profile, _ in profiles], lambda profile: hosts[id(profile)], name
    )
    if any(rank.tells_waits for rank in spans):
        return spans, source
    return spans, replace(source, notes=(*source.notes, *notes))


_Ranks = Sequence[ProfiledRank] | Sequence[Profile]


def _world_size(ranks: _Ranks) -> int:
    """The number of ranks of the run: the one that profiles state, or the highest rank plus 1.
    Raises RrfpError if they state different ones."""
    sizes = {rank.world_size: rank.path for rank in ranks if rank.world_size}
    if len(sizes) > 1:
        (size, path), (other, elsewhere), *_ = sizes.items()
        raise RrfpError(
            f"{path} is of a run of {size} ranks and {elsewhere} of one of {other}; import one run "
            "at a time"
        )
    return next(iter(sizes), 1 + max(rank.number for rank in ranks))


def _check_ranks(ranks: _Ranks) -> None:
    """Raise RrfpError for unknown or repeated ranks. A single profile of unknown rank becomes rank
    0."""
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
    """Assign a stage to each task without one, its rank's position in the pipeline group or else
    the rank's number, and a place to each rank without one, and yield notes. Ranks with the same
    stages are replicas."""
    are_stages_known = True
    for rank in ranks:
        pipeline = groups[rank.number].pipeline if rank.number in groups else ()
        is_known = rank.number in pipeline
        stage = pipeline.index(rank.number) if is_known else rank.number
        for found, task in rank.tasks:
            if task.stage is None:
                found.content = replace(task, stage=stage)
                are_stages_known &= is_known
    if not are_stages_known:
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

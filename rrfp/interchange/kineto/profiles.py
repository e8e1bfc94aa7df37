"""A run read from what torch.profiler wrote, a file a rank."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.interchange.kineto.file import Profile, read_profile
from rrfp.interchange.kineto.host import HostProfile, read_host_profile
from rrfp.interchange.kineto.operators import time_by_operators
from rrfp.interchange.kineto.rank import ProfiledRank
from rrfp.interchange.kineto.steps import number_steps
from rrfp.interchange.kineto.unnamed import read_unnamed
from rrfp.interchange.ranges import Maker
from rrfp.interchange.spans import RankSpans, Source
from rrfp.interchange.unnamed.calls import Groups
from rrfp.trace.records import RankInfo


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

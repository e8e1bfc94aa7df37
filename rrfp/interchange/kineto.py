"""A run read from what torch.profiler wrote, a file a rank."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.interchange.kineto_file import read_profile
from rrfp.interchange.kineto_rank import ProfiledRank
from rrfp.interchange.kineto_steps import number_steps
from rrfp.interchange.ranges import Maker
from rrfp.interchange.spans import RankSpans, Source
from rrfp.trace.records import RankInfo


def read_profiles(paths: Sequence[Path]) -> tuple[list[RankSpans], Source]:
    """The spans of a run from its profiles, a file a rank.

    Raises RrfpError for a file that is not a profile or has no ranges of tasks, and for files of
    different runs.
    """
    ranks = [ProfiledRank(read_profile(path)) for path in paths]
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
    notes += _place(ranks)
    notes += number_steps(ranks)
    device = "cuda" if any(rank.is_gpu for rank in ranks) else "cpu"
    blocks = ranks[0].maker is Maker.RRFP
    name = "profile of torch.profiler"
    source = Source(name, len(paths), device, blocks, world_size, tuple(notes))
    return [rank.spans() for rank in ranks], source


def _world_size(ranks: list[ProfiledRank]) -> int:
    """How many ranks the run had, as far as the profiles tell."""
    told = {rank.world_size: rank.path for rank in ranks if rank.world_size}
    if len(told) > 1:
        (size, path), (other, elsewhere), *_ = told.items()
        raise RrfpError(
            f"{path} is of a run of {size} ranks and {elsewhere} of one of {other}; import one run "
            "at a time"
        )
    return next(iter(told), 1 + max(rank.number for rank in ranks))


def _check_ranks(ranks: list[ProfiledRank]) -> None:
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


def _place(ranks: list[ProfiledRank]) -> Iterator[str]:
    """Give a place to each rank that does not tell its own, and yield notes on it: ranks that hold
    the same stages are replicas."""
    tell_stages = True
    for rank in ranks:
        for found, task in rank.tasks:
            if task.stage is None:
                found.tells = replace(task, stage=rank.number)
                tell_stages = False
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

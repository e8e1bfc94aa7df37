"""Reads what torch.profiler wrote (Kineto's JSON), as far as it tells of a pipeline's tasks.

Times are microseconds with fractions from `baseTimeNanoseconds`. A range stands in a profile once
as the CPU's, `user_annotation`, and where the GPU worked for it once a stream as
`gpu_user_annotation`, from its first kernel to its last; `External id` says which belong together.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rrfp.errors import RrfpError
from rrfp.interchange.json_stream import JsonStream
from rrfp.interchange.ranges import (
    Maker,
    Range,
    ScheduleRange,
    TaskRange,
    WaitRange,
    is_overlapped,
    parse_profiler_step,
    parse_range,
)
from rrfp.interchange.spans import RankSpans, Source, TaskSpan, TransferSpan
from rrfp.schedule.causes import Cause
from rrfp.schedule.tasks import Kind
from rrfp.trace.perfetto_format import MOST_OF_A_KIND
from rrfp.trace.records import Phase, PhaseRecord, RankInfo, WaitRecord

_ON_CPU, _ON_GPU = "user_annotation", "gpu_user_annotation"
_NS_PER_US = 1_000
_MOST_NS = 1 << 61
"""In 2043, counted from 1970."""
_MOST_PID = (1 << 31) - 1
_DIGITS = re.compile(r"\d{1,20}", re.ASCII)
_OF_TENSORBOARD = re.compile(r"(?P<host>.+)_(?P<pid>\d+)\.\d+\.pt\.trace\.json")


class _Event(NamedTuple):
    start_ns: int
    end_ns: int
    name: str
    external_id: int | None


@dataclass(slots=True)
class _Found:
    """A range that tells of the pipeline, and when its work was done."""

    tells: Range
    launched_ns: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class _Profile:
    """What one file holds."""

    path: Path
    rank: int | None = None
    world_size: int | None = None
    pid: int = 0
    on_cpu: list[_Event] = field(default_factory=list)
    on_gpu: list[_Event] = field(default_factory=list)
    steps: list[_Event] = field(default_factory=list)
    """The profiler's own steps."""

    @property
    def host(self) -> str:
        match = _OF_TENSORBOARD.match(self.path.name)
        return match["host"] if match else "unknown"


def read_profiles(paths: Sequence[Path]) -> tuple[list[RankSpans], Source]:
    """The spans of a run from its profiles, a file a rank.

    Raises RrfpError for a file that is no profile or has no ranges of tasks, and for files that
    are not of one run.
    """
    ranks = [_Rank(_read(path)) for path in paths]
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
    notes += _number_steps(ranks)
    device = "cuda" if any(rank.is_gpu for rank in ranks) else "cpu"
    blocks = ranks[0].maker is Maker.RRFP
    name = "profile of torch.profiler"
    source = Source(name, len(paths), device, blocks, world_size, tuple(notes))
    return [rank.spans() for rank in ranks], source


def _read(path: Path) -> _Profile:
    profile = _Profile(path)
    stream = JsonStream(path)
    base_ns = 0
    if stream.first() == "[":
        _keep_events(profile, stream)
    else:
        for key in stream.keys():  # noqa: SIM118 (no mapping)
            if key == "traceEvents" and stream.first() == "[":
                _keep_events(profile, stream)
                continue
            value = stream.value()
            if key == "baseTimeNanoseconds":
                base_ns = _whole(value) or 0
                if base_ns > _MOST_NS:
                    raise RrfpError(f"{path} says that its times count from {str(value)[:20]} ns")
            elif key == "distributedInfo" and isinstance(value, dict):
                profile.rank = _whole(value.get("rank"))
                profile.world_size = _whole(value.get("world_size"))
                if (profile.world_size or 0) > MOST_OF_A_KIND:
                    raise RrfpError(f"{path} says that its run had {profile.world_size} ranks")
    for events in (profile.on_cpu, profile.on_gpu, profile.steps):
        events[:] = [
            event._replace(start_ns=event.start_ns + base_ns, end_ns=event.end_ns + base_ns)
            for event in sorted(events, key=lambda event: event[:3])
        ]
    return profile


def _keep_events(profile: _Profile, stream: JsonStream) -> None:
    """Keep the ranges that tell of tasks, of all the events there are."""
    for event in stream.items():
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        category, name = event.get("cat"), event.get("name")
        if category not in (_ON_CPU, _ON_GPU) or not isinstance(name, str):
            continue
        if is_overlapped(name):
            raise RrfpError(
                f"{profile.path} has ranges of a forward and a backward at once, such as "
                f"'{name[:40]}', which nothing tells apart; profile a schedule without "
                "OVERLAP_F_B"
            )
        is_step = parse_profiler_step(name) is not None
        if not is_step and parse_range(name) is None:
            continue
        kept = _event(profile.path, event, name)
        if category == _ON_GPU:
            if not is_step:
                profile.on_gpu.append(kept)
        elif is_step:
            profile.steps.append(kept)
        else:
            profile.on_cpu.append(kept)
            pid = _whole(event.get("pid")) or 0
            profile.pid = pid if pid <= _MOST_PID else 0


def _event(path: Path, event: dict[str, Any], name: str) -> _Event:
    start_us, duration_us = event.get("ts"), event.get("dur")
    most_us = _MOST_NS // _NS_PER_US
    for what, value in (("ts", start_us), ("dur", duration_us)):
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            # NaN is nowhere in between.
            or not (0 if what == "dur" else -most_us) <= value <= most_us
        ):
            raise RrfpError(
                f"{path} has a range '{name[:40]}' whose {what} is {str(value)[:20]}; profile the "
                "run again"
            )
    assert start_us is not None
    assert duration_us is not None
    start_ns = _ns(start_us)
    arguments = event.get("args")
    external_id = arguments.get("External id") if isinstance(arguments, dict) else None
    if isinstance(external_id, str) and _DIGITS.fullmatch(external_id):
        external_id = int(external_id)
    return _Event(start_ns, start_ns + _ns(duration_us), name, _whole(external_id))


def _ns(time_us: float) -> int:
    """Where microseconds count from 1970, a float has no room for their nanoseconds."""
    whole_us = math.floor(time_us)
    return whole_us * _NS_PER_US + round((time_us - whole_us) * _NS_PER_US)


def _whole(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


class _Rank:
    """The ranges of one profile, and which rank they are of."""

    def __init__(self, profile: _Profile) -> None:
        self.path = profile.path
        self.world_size = profile.world_size
        self.host, self.pid = profile.host, profile.pid
        self.steps = profile.steps
        self.found, self.is_gpu, num_idle = _found(profile)
        self.notes: list[str] = []
        if num_idle:
            self.notes.append(
                f"{self.path} has {num_idle} tasks for which the GPU did nothing; they are left out"
            )
        makers = {found.tells.maker for found in self.found if isinstance(found.tells, TaskRange)}
        if not makers:
            raise RrfpError(
                f"{self.path} has no ranges of pipeline tasks; call rrfp.megatron.trace_native() "
                "in a script of Megatron, or elsewhere put each task into "
                'torch.profiler.record_function(f"PP:{stage}F{microbatch}") (B for its backward)'
            )
        # Ours are exact; whoever has both has ours around or inside the others.
        self.maker = Maker.RRFP if Maker.RRFP in makers else Maker.PIPELINING
        self.calls = [found for found in self.found if isinstance(found.tells, ScheduleRange)]
        self.number = -1 if profile.rank is None else profile.rank
        self.sends_inside = any(task.stage is None for _, task in self.tasks) and not self.is_gpu
        self.info: RankInfo | None = None
        if self.calls:
            call = self.calls[0].tells
            assert isinstance(call, ScheduleRange)
            self.number = call.rank
            place = call.pp_rank, call.tp_rank, call.dp_rank, call.stages
            self.info = RankInfo(call.rank, *place, self.host, self.pid)

    @property
    def tasks(self) -> list[tuple[_Found, TaskRange]]:
        return [
            (found, found.tells)
            for found in self.found
            if isinstance(found.tells, TaskRange) and found.tells.maker is self.maker
        ]

    def spans(self) -> RankSpans:
        """Everything, once stages and steps are known of every task."""
        assert self.info is not None
        ours = self.maker is Maker.RRFP
        rank = RankSpans(self.info, tells_waits=ours, receives_inside=not ours and not self.is_gpu)
        rank.sends_inside = self.sends_inside
        extents: dict[int, tuple[int, int]] = {}
        for found in self.found:
            tells, span = found.tells, (found.start_ns, found.end_ns)
            if isinstance(tells, ScheduleRange):
                rank.phases.append(PhaseRecord(*span, tells.step, Phase.SCHEDULE))
                continue
            if tells.maker is not self.maker or tells.step is None:
                continue
            first_ns, last_ns = extents.get(tells.step, span)
            extents[tells.step] = min(first_ns, found.start_ns), max(last_ns, found.end_ns)
            if isinstance(tells, TaskRange):
                assert tells.stage is not None
                of = tells.step, tells.kind, tells.stage, tells.microbatch
                rank.tasks.append(TaskSpan(found.start_ns, found.end_ns, *of))
            elif ours or tells.cause is Cause.GRADIENT_SYNC:
                rank.waits.append(WaitRecord(*span, tells.step, tells.cause))
            else:
                rank.transfers.append(TransferSpan(*span, tells.step))
        if not ours:
            rank.phases = [
                PhaseRecord(*extent, step, Phase.SCHEDULE) for step, extent in extents.items()
            ]
        return rank


def _found(profile: _Profile) -> tuple[list[_Found], bool, int]:
    """The ranges of a profile, at the times of the GPU where it did the tasks; whether it did; and
    how many tasks have no such time."""
    worked: defaultdict[tuple[str, int | None], list[_Event]] = defaultdict(list)
    for event in profile.on_gpu:
        worked[event.name, event.external_id].append(event)
    is_gpu = any(isinstance(parse_range(name), TaskRange) for name, _ in worked)
    num_launched = Counter(event[2:] for event in profile.on_cpu)
    ranges = []
    num_idle = 0
    for event in profile.on_cpu:
        tells = parse_range(event.name)
        assert tells is not None
        start_ns, end_ns = event[:2]
        if is_gpu:
            on_gpu = worked[event[2:]]
            if on_gpu:
                if num_launched[event[2:]] > 1:
                    raise _unnumbered(profile, event.name)
                start_ns = min(each.start_ns for each in on_gpu)
                end_ns = max(each.end_ns for each in on_gpu)
            elif not isinstance(tells, ScheduleRange):
                # The GPU had nothing to do there, and the CPU's launch is no time of its own.
                num_idle += isinstance(tells, TaskRange)
                continue
        ranges.append(_Found(tells, event.start_ns, start_ns, end_ns))
    if num_idle and not any(isinstance(found.tells, TaskRange) for found in ranges):
        raise _unnumbered(profile, next(iter(worked))[0])
    return ranges, is_gpu, num_idle


def _unnumbered(profile: _Profile, name: str) -> RrfpError:
    return RrfpError(
        f"{profile.path} does not tell which of its ranges '{name[:40]}' the GPU worked for; "
        "profile with a torch that writes their External id"
    )


def _world_size(ranks: list[_Rank]) -> int:
    """How many ranks the run had, as far as it is known."""
    told = {rank.world_size: rank.path for rank in ranks if rank.world_size}
    if len(told) > 1:
        (size, path), (other, elsewhere), *_ = told.items()
        raise RrfpError(
            f"{path} is of a run of {size} ranks and {elsewhere} of one of {other}; import one run "
            "at a time"
        )
    return next(iter(told), 1 + max(rank.number for rank in ranks))


def _check_ranks(ranks: list[_Rank]) -> None:
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


def _place(ranks: list[_Rank]) -> Iterator[str]:
    """Where ranks stand that do not tell: those that hold the same stages are replicas."""
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


def _number_steps(ranks: list[_Rank]) -> Iterator[str]:
    """Give each range that does not tell its step one: the profiler's, where each of its steps has
    every task once at most; else they are counted."""
    if ranks[0].maker is Maker.RRFP:
        return
    chosen = [_steps_of_profiler(rank) for rank in ranks]
    if any(steps is None for steps in chosen):
        counted = [_counted_steps(rank) for rank in ranks]
        torn = [rank for rank, each in zip(ranks, counted, strict=True) if each.is_torn]
        if torn:
            yield (
                f"{len(torn)} of {len(ranks)} profiles begin in the middle of a step, which is "
                f"left out there ({torn[0].path}{', ...' if torn[1:] else ''})"
            )
            _align(counted)
        chosen = [each.steps for each in counted]
    for rank, steps in zip(ranks, chosen, strict=True):
        assert steps is not None
        for found, step in zip(rank.found, steps, strict=True):
            tells = found.tells
            if not isinstance(tells, ScheduleRange) and tells.step is None:
                found.tells = replace(tells, step=step)


def _steps_of_profiler(rank: _Rank) -> Sequence[int | None] | None:
    steps = []
    seen: set[tuple[int, Range]] = set()
    index = -1
    for found in rank.found:
        while index + 1 < len(rank.steps) and rank.steps[index + 1].start_ns <= found.launched_ns:
            index += 1
        if index < 0 or found.launched_ns >= rank.steps[index].end_ns:
            return None
        step = parse_profiler_step(rank.steps[index].name)
        assert step is not None
        if isinstance(found.tells, TaskRange):
            if (step, found.tells) in seen:
                return None
            seen.add((step, found.tells))
        steps.append(step)
    return steps


@dataclass(slots=True)
class _Counted:
    """The steps of a rank's ranges, counted from the first that it has whole."""

    steps: list[int | None]
    """None: before that one."""
    begins_ns: list[int]
    """When each step began."""
    is_torn: bool
    """Whether tasks came before the first."""


def _counted_steps(rank: _Rank) -> _Counted:
    """A step begins with the first forward of the rank's first stage, as in every order; or else
    where a task comes again."""
    first = min(
        ((task.stage or 0, task.microbatch) for _, task in rank.tasks if task.kind is Kind.F),
        default=None,
    )
    seen: set[Range] = set()
    counted = _Counted([], [], is_torn=False)
    for found in rank.found:
        task = found.tells
        if isinstance(task, TaskRange):
            is_first = task.kind is Kind.F and (task.stage, task.microbatch) == first
            if is_first or (counted.begins_ns and task in seen):
                seen.clear()
                counted.begins_ns.append(found.launched_ns)
            seen.add(task)
            counted.is_torn |= not counted.begins_ns
        counted.steps.append(len(counted.begins_ns) - 1 if counted.begins_ns else None)
    # What is received is for the task that comes next.
    step = counted.steps[-1]
    for index, found in reversed(list(enumerate(rank.found))):
        if isinstance(found.tells, TaskRange):
            step = counted.steps[index]
        elif isinstance(found.tells, WaitRange) and found.tells.is_receive:
            counted.steps[index] = step
    return counted


def _align(ranks: list[_Counted]) -> None:
    """Count all from the step that the earliest has whole and others may have torn. One step
    begins on all ranks within half of it, as it takes no longer to fill the pipeline."""
    reference_ns = min((rank.begins_ns for rank in ranks if rank.begins_ns), default=[])
    for rank in ranks:
        if rank.begins_ns:
            skipped = _nearest(reference_ns, rank.begins_ns[0])
            rank.steps = [None if step is None else step + skipped for step in rank.steps]


def _nearest(times_ns: list[int], time_ns: int) -> int:
    """The place of the time that is nearest."""
    return min(range(len(times_ns)), key=lambda place: abs(times_ns[place] - time_ns))

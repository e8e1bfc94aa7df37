"""One profile of torch.profiler (Kineto's JSON): its ranges of pipeline tasks, functions and
operators.

Times are microseconds with fractions, counted from `baseTimeNanoseconds`. A range is in a profile
once for the CPU, as `user_annotation`. If it launched work on a GPU, it is also there once per
stream as `gpu_user_annotation`, from its first kernel to its last. Both have the same `External
id`.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rrfp.errors import RrfpError
from rrfp.interchange.inferred_tasks import (
    Call,
    Groups,
    Kernel,
    Transfer,
    groups_of,
    is_nccl_transfer,
    is_transfer,
    kind_of_call,
)
from rrfp.interchange.json_stream import JsonStream, writable
from rrfp.interchange.range_names import (
    Maker,
    Range,
    ScheduleRange,
    TaskRange,
    WaitRange,
    check_separable,
    parse_profiler_step,
    parse_range,
)
from rrfp.interchange.spans import RankSpans, TaskSpan, TransferSpan
from rrfp.schedule.tasks import Cause, Kind
from rrfp.trace.perfetto.format import MOST_OF_A_KIND
from rrfp.trace.records import Phase, PhaseRecord, RankInfo, WaitRecord

_ON_CPU, _ON_GPU = "user_annotation", "gpu_user_annotation"
NS_PER_US = 1_000
MOST_NS = 1 << 61
"""The greatest time: in 2043, counted from 1970."""
_MOST_PID = (1 << 31) - 1
_DIGITS = re.compile(r"\d{1,20}", re.ASCII)
_OF_TENSORBOARD = re.compile(r"(?P<host>.+)_(?P<pid>\d+)\.\d+\.pt\.trace\.json")


class Event(NamedTuple):
    """A named interval. `external_id` links a range to its GPU times."""

    start_ns: int
    end_ns: int
    name: str
    external_id: int | None


@dataclass(slots=True)
class Profile:
    """The ranges of tasks in a profile, and the profile's rank."""

    path: Path
    number: int = -1
    """The rank; -1 if it is unknown."""
    world_size: int | None = None
    pid: int = 0
    on_cpu: list[Event] = field(default_factory=list)
    on_gpu: list[Event] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    """The profiler's own steps."""

    host_name: str = "unknown"

    @property
    def host(self) -> str:
        """The host in the file's name, as TensorBoard's handler writes it, or else in the
        profile."""
        match = _OF_TENSORBOARD.match(self.path.name)
        return writable(match["host"] if match else self.host_name)

    @property
    def names_tasks(self) -> bool:
        """True if any range on the CPU is one of a task."""
        return any(isinstance(parse_range(event.name), TaskRange) for event in self.on_cpu)


def _read_document(
    path: Path, read_events: Callable[[JsonStream], None]
) -> tuple[bool, int, dict[str, Any]]:
    """Read a profile's JSON, with `read_events` for its list of events; the JSON may be that list
    alone. Raises RrfpError for an impossible origin of times, or broken JSON.

    Returns whether there is such a list, the origin of its times in ns since 1970, and the members
    `host_name` and `distributedInfo`, if they have the right types.
    """
    stream = JsonStream(path)
    if stream.first() == "[":
        read_events(stream)
        return True, 0, {}
    has_events, base_ns, about = False, 0, {}
    for key in stream.keys():  # noqa: SIM118 (no mapping)
        if key == "traceEvents" and stream.first() == "[":
            read_events(stream)
            has_events = True
            continue
        value = stream.value()
        if key == "baseTimeNanoseconds":
            base_ns = whole_number(value) or 0
            if base_ns > MOST_NS:
                raise RrfpError(f"{path} says that its times count from {str(value)[:20]} ns")
        elif isinstance(value, {"host_name": str, "distributedInfo": dict}.get(key, ())):
            about[key] = value
    return has_events, base_ns, about


def read_profile(path: Path) -> Profile:
    """Read the ranges of tasks and the rank, -1 if unknown. Raises RrfpError if the file is not a
    profile, has ranges of a forward and a backward at once, or states impossible times or ranks."""
    profile = Profile(path)
    has_events, base_ns, about = _read_document(path, lambda events: _add_events(profile, events))
    profile.host_name = about.get("host_name", profile.host_name)
    distributed = about.get("distributedInfo", {})
    number = whole_number(distributed.get("rank"))
    profile.number = -1 if number is None else number
    profile.world_size = whole_number(distributed.get("world_size"))
    if (profile.world_size or 0) > MOST_OF_A_KIND:
        raise RrfpError(f"{path} says that its run had {profile.world_size} ranks")
    if not has_events:
        raise RrfpError(
            f"{path} is no profile: it has no traceEvents; import what torch.profiler's "
            "export_chrome_trace wrote"
        )
    for events in (profile.on_cpu, profile.on_gpu, profile.steps):
        events[:] = [
            event._replace(start_ns=event.start_ns + base_ns, end_ns=event.end_ns + base_ns)
            for event in sorted(events, key=lambda event: event[:3])
        ]
    return profile


def _add_events(profile: Profile, stream: JsonStream) -> None:
    """Add the ranges of pipeline tasks and the profiler's own steps; other events are skipped.
    Raises RrfpError for a range of a forward and a backward at once, and for impossible times."""
    for event in stream.items():
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        category, name = event.get("cat"), event.get("name")
        if category not in (_ON_CPU, _ON_GPU) or not isinstance(name, str):
            continue
        check_separable(profile.path, name)
        is_step = parse_profiler_step(name) is not None
        if not is_step and parse_range(name) is None:
            continue
        found = event_of(profile.path, event, name)
        if category == _ON_GPU:
            if not is_step:
                profile.on_gpu.append(found)
        elif is_step:
            profile.steps.append(found)
        else:
            profile.on_cpu.append(found)
            pid = whole_number(event.get("pid")) or 0
            profile.pid = pid if pid <= _MOST_PID else 0


def event_of(path: Path, event: dict[str, Any], name: str) -> Event:
    """Decode an event's times and external id, None if that is no number. Raises RrfpError for
    impossible times."""
    start_us, duration_us = event.get("ts"), event.get("dur")
    most_us = MOST_NS // NS_PER_US
    for what, value in (("ts", start_us), ("dur", duration_us)):
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            # NaN fails this comparison too.
            or not (0 if what == "dur" else -most_us) <= value <= most_us
        ):
            raise RrfpError(
                f"{path} has a range '{name[:40]}' whose {what} is {str(value)[:20]}; profile the "
                "run again"
            )
    assert start_us is not None
    assert duration_us is not None
    start_ns = ns_of_us(start_us)
    arguments = event.get("args")
    external_id = arguments.get("External id") if isinstance(arguments, dict) else None
    if isinstance(external_id, str) and _DIGITS.fullmatch(external_id):
        external_id = int(external_id)
    return Event(start_ns, start_ns + ns_of_us(duration_us), name, whole_number(external_id))


def ns_of_us(time_us: float) -> int:
    """Convert microseconds to ns. Splits off the fraction first, because a float of microseconds
    since 1970 is not precise to 1 ns."""
    whole_us = math.floor(time_us)
    return whole_us * NS_PER_US + round((time_us - whole_us) * NS_PER_US)


def whole_number(value: object) -> int | None:
    """The value if it is a non-negative integer; otherwise None."""
    return value if type(value) is int and value >= 0 else None


# Profiles without ranges of tasks: Python functions (with_stack), ranges with Megatron's names,
# operators paired by autograd, transfers, and the GPU's kernels.
#
# Names are those of torch 2.13 and 2.15 and Megatron-Core 0.16 and 0.19. The calls `c10d::send` and
# `c10d::recv_` are the host's. On gloo they move the data; on NCCL the kernels
# `ncclDevKernel_SendRecv` do.


_FRAME = re.compile(r"(?:.*/)?(\w+/\w+)\.py\(\d+\): (\w+)")
_CALL_FRAMES = {
    ("pipeline_parallel/schedules", "forward_step"): Kind.F,
    ("pipeline_parallel/schedules", "backward_step"): Kind.B,
    ("pipelining/stage", "forward_one_chunk"): Kind.F,
    ("pipelining/stage", "backward_one_chunk"): Kind.B,
}
_SCHEDULE_FRAMES = {
    ("pipeline_parallel/schedules", "forward_backward_pipelining_without_interleaving"),
    ("pipeline_parallel/schedules", "forward_backward_pipelining_with_interleaving"),
    ("pipelining/schedules", "_step_microbatches"),
}
_P2P_FRAMES = "pipeline_parallel/p2p_communication"
_SYNC_FRAMES = {("distributed/finalize_model_grads", "finalize_model_grads")}
TRANSFERS = {"c10d::send": False, "c10d::recv_": True, "gloo:send": False, "gloo:recv": True}
"""The host's sends and receives; true for receives."""
EVALUATED = "autograd::engine::evaluate_function: "
"""The prefix of the names of a backward's nodes."""
MOST_SEQUENCE = 1 << 62
"""The numbers above it are of nodes that accumulate gradients, which belong to no forward."""


class Operator(NamedTuple):
    """An operator with its number in autograd's sequence."""

    start_ns: int
    end_ns: int
    sequence: int


@dataclass(slots=True)
class HostProfile:
    """The calls, transfers, operators and kernels in a profile."""

    path: Path
    groups: Groups = field(default_factory=Groups)
    frames: list[tuple[Event, Kind]] = field(default_factory=list)
    """Forwards and backwards, found by their Python functions."""
    ranges: list[tuple[Event, Kind]] = field(default_factory=list)
    """Forwards and backwards, found by the names of ranges."""
    schedules: list[Event] = field(default_factory=list)
    syncs: list[Event] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    """The host's sends and receives."""
    forwards: list[Operator] = field(default_factory=list)
    backwards: list[Operator] = field(default_factory=list)
    """Nodes of the backward graph as autograd's engine evaluated them."""
    launches: dict[int, int] = field(default_factory=dict)
    """The host's launch time of each kernel, by its correlation."""
    kernels: list[Kernel] = field(default_factory=list)

    def add(self, event: Event, sequence: int | None, is_receive: bool | None) -> None:
        """Add a range by its name: a call, a transfer (`is_receive` is not None), a node of a
        backward, or an operator of a forward (`sequence` is its number in autograd's sequence). Any
        other range is skipped."""
        start_ns, end_ns, name, _ = event
        if kind := kind_of_call(name):
            self.ranges.append((event, kind))
        elif is_receive is not None:
            self.transfers.append(Transfer(start_ns, end_ns, is_receive))
        elif name.startswith(EVALUATED):
            number = MOST_SEQUENCE if sequence is None else sequence
            self.backwards.append(Operator(start_ns, end_ns, number))
        elif sequence is not None:
            self.forwards.append(Operator(start_ns, end_ns, sequence))


def read_host_profile(path: Path) -> HostProfile:
    """Read calls, transfers, operators and kernels, sorted by start. Raises RrfpError if the file
    is not valid JSON, or has impossible times."""
    host = HostProfile(path)
    _, base_ns, about = _read_document(path, lambda events: _add_host_events(host, events))
    host.groups = groups_of(_ranks_by_group(about.get("distributedInfo", {})))
    _move_and_sort(host, base_ns)
    return host


def _ranks_by_group(distributed: Mapping[str, Any]) -> dict[str, list[int]]:
    """The ranks of each process group by its description; invalid entries are skipped."""
    described: dict[str, list[int]] = {}
    groups = distributed.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if not isinstance(group, dict):
            continue
        name, ranks = group.get("pg_desc"), group.get("ranks")
        if isinstance(name, str) and isinstance(ranks, list) and set(map(type, ranks)) == {int}:
            described[name] = ranks
    return described


def _add_host_events(host: HostProfile, stream: JsonStream) -> None:
    """Add an array's Python functions, ranges, operators, launches and kernels to `host`; other
    events are skipped."""
    for event in stream.items():
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        name = event.get("name")
        if not isinstance(name, str):
            continue
        match event.get("cat"):
            case "python_function":
                _add_frame(host, event, name)
            case "user_annotation":
                _add_range(host, event, name)
            case "cpu_op":
                _add_operator(host, event, name)
            case "cuda_runtime" | "cuda_driver":
                correlation = _number(event, "correlation")
                if correlation is not None:
                    launched = event_of(host.path, event, name)
                    host.launches[correlation] = launched.start_ns
            case "kernel" | "gpu_memcpy" | "gpu_memset":
                correlation = _number(event, "correlation")
                if correlation is not None:
                    ran = event_of(host.path, event, name)
                    host.kernels.append(
                        Kernel(ran.start_ns, ran.end_ns, correlation, is_nccl_transfer(name))
                    )


def _add_frame(host: HostProfile, event: dict[str, Any], name: str) -> None:
    """Add a call of one of Megatron's or torch's Python functions for pipelines: a task, a
    schedule, a gradient reduction or a transfer. Other functions are skipped."""
    match = _FRAME.fullmatch(name)
    if match is None:
        return
    found = match[1], match[2]
    if kind := _CALL_FRAMES.get(found):
        host.frames.append((event_of(host.path, event, name), kind))
    elif found in _SCHEDULE_FRAMES:
        host.schedules.append(event_of(host.path, event, name))
    elif found in _SYNC_FRAMES:
        host.syncs.append(event_of(host.path, event, name))
    elif found[0] == _P2P_FRAMES and is_transfer(found[1]):
        _add_transfer(host, event, name, "recv" in name)


def _add_range(host: HostProfile, event: dict[str, Any], name: str) -> None:
    """Add a range with Megatron's name of a task, or one of a transfer; others are skipped."""
    if kind := kind_of_call(name):
        host.ranges.append((event_of(host.path, event, name), kind))
    elif name in TRANSFERS or is_transfer(name):
        _add_transfer(host, event, name, TRANSFERS.get(name, "recv" in name))


def _add_operator(host: HostProfile, event: dict[str, Any], name: str) -> None:
    """Add a transfer, a node of a backward, or a forward's operator with a number in autograd's
    sequence. Others are skipped, such as those that a backward recomputes."""
    if name in TRANSFERS:
        _add_transfer(host, event, name, TRANSFERS[name])
        return
    sequence = _number(event, "Sequence number")
    if sequence is None or name.startswith(("c10d::", "gloo:", "nccl:")):
        return
    start_ns, end_ns, *_ = event_of(host.path, event, name)
    operator = Operator(start_ns, end_ns, sequence)
    if name.startswith(EVALUATED):
        host.backwards.append(operator)
    elif sequence < MOST_SEQUENCE and not _number(event, "Fwd thread id"):
        host.forwards.append(operator)


def _add_transfer(host: HostProfile, event: dict[str, Any], name: str, is_receive: bool) -> None:
    """Add an event to the sends and receives of `host`."""
    start_ns, end_ns, *_ = event_of(host.path, event, name)
    host.transfers.append(Transfer(start_ns, end_ns, is_receive))


def _number(event: dict[str, Any], name: str) -> int | None:
    """An argument of an event, if it is a non-negative integer; otherwise None."""
    arguments = event.get("args")
    return whole_number(arguments.get(name) if isinstance(arguments, dict) else None)


def _move_and_sort(host: HostProfile, base_ns: int) -> None:
    """Add the origin of times to all times, and sort all lists by start."""
    for found in (host.frames, host.ranges):
        found[:] = sorted(((_later(event, base_ns), kind) for event, kind in found), key=_start)
    for events in (host.schedules, host.syncs):
        events[:] = sorted((_later(event, base_ns) for event in events), key=lambda each: each[:2])
    host.transfers = sorted(_later(each, base_ns) for each in host.transfers)
    host.forwards = sorted(_later(each, base_ns) for each in host.forwards)
    host.backwards = sorted(_later(each, base_ns) for each in host.backwards)
    host.kernels = sorted(_later(each, base_ns) for each in host.kernels)
    host.launches = {key: start_ns + base_ns for key, start_ns in host.launches.items()}


def _start(found: tuple[Event, Kind]) -> int:
    """The start of an event with its kind, to sort by."""
    return found[0].start_ns


_Span = TypeVar("_Span", Event, Transfer, Operator, Kernel)


def _later(span: _Span, by_ns: int) -> _Span:
    """A copy of a span with `by_ns` added to both times."""
    return span._replace(start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns)


# One rank's profile: its ranges at the times of the device that ran the tasks.


@dataclass(slots=True)
class FoundRange:
    """A range of a task, a wait or a schedule, and the time of its work."""

    content: Range
    launched_ns: int
    start_ns: int
    end_ns: int


class ProfiledRank:
    """The ranges of one profile, and its rank. Raises RrfpError without ranges of tasks."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
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
        makers = {
            found.content.maker for found in self.found if isinstance(found.content, TaskRange)
        }
        if not makers:
            raise RrfpError(
                f"{self.path} has no ranges of pipeline tasks; call rrfp.megatron.trace_native() "
                "in a script of Megatron, or elsewhere put each task into "
                'torch.profiler.record_function(f"PP:{stage}F{microbatch}") (B for its backward)'
            )
        # Prefer rrfp's ranges, which are exact, if a profile has both kinds.
        self.maker = Maker.RRFP if Maker.RRFP in makers else Maker.PIPELINING
        self.calls = [found for found in self.found if isinstance(found.content, ScheduleRange)]
        self.number = profile.number
        self.is_timed_by_operators = False
        self.is_of_gpipe = any(task.stage is None for _, task in self.tasks)
        self.info: RankInfo | None = None
        if self.calls:
            call = self.calls[0].content
            assert isinstance(call, ScheduleRange)
            self.number = call.rank
            place = call.pp_rank, call.tp_rank, call.dp_rank, call.stages
            self.info = RankInfo(call.rank, *place, self.host, self.pid)

    @property
    def tasks(self) -> list[tuple[FoundRange, TaskRange]]:
        """The ranges of tasks of the rank's chosen maker, each with its content."""
        return [
            (found, found.content)
            for found in self.found
            if isinstance(found.content, TaskRange) and found.content.maker is self.maker
        ]

    def spans(self) -> RankSpans:
        """The rank's spans; ranges without a step or of another maker are left out. The rank's
        place and the stage of every task must be known (`rrfp.interchange.kineto` sets them)."""
        assert self.info is not None
        ours = self.maker is Maker.RRFP
        holds_waits = not (ours or self.is_gpu or self.is_timed_by_operators)
        rank = RankSpans(self.info, tells_waits=ours, receives_inside=holds_waits)
        rank.sends_inside = holds_waits and self.is_of_gpipe
        for found in self.found:
            content, span = found.content, (found.start_ns, found.end_ns)
            if isinstance(content, ScheduleRange):
                rank.phases.append(PhaseRecord(*span, content.step, Phase.SCHEDULE))
                continue
            if content.maker is not self.maker or content.step is None:
                continue
            if isinstance(content, TaskRange):
                assert content.stage is not None
                of = content.step, content.kind, content.stage, content.microbatch
                rank.tasks.append(TaskSpan(found.start_ns, found.end_ns, *of))
            elif ours or content.cause is Cause.GRADIENT_SYNC:
                rank.waits.append(WaitRecord(*span, content.step, content.cause))
            else:
                rank.transfers.append(TransferSpan(*span, content.step))
        if not ours:
            rank.phases = rank.schedules()
        return rank


def _found(profile: Profile) -> tuple[list[FoundRange], bool, int]:
    """The ranges of a profile, at the GPU's times if the GPU ran tasks; whether it did; and the
    number of tasks without GPU times, which are left out, like waits without them. Calls of the
    schedule then keep the CPU's times. Raises RrfpError if the GPU's ranges cannot be matched."""
    worked: defaultdict[tuple[str, int | None], list[Event]] = defaultdict(list)
    for event in profile.on_gpu:
        worked[event.name, event.external_id].append(event)
    is_gpu = any(isinstance(parse_range(name), TaskRange) for name, _ in worked)
    num_launched = Counter(event[2:] for event in profile.on_cpu)
    ranges = []
    num_idle = 0
    for event in profile.on_cpu:
        content = parse_range(event.name)
        assert content is not None
        start_ns, end_ns = event[:2]
        if is_gpu:
            on_gpu = worked[event[2:]]
            if on_gpu:
                if num_launched[event[2:]] > 1:
                    raise _unnumbered(profile, event.name)
                start_ns = min(each.start_ns for each in on_gpu)
                end_ns = max(each.end_ns for each in on_gpu)
            elif not isinstance(content, ScheduleRange):
                # No GPU work was launched in it, and the CPU's time of the launch does not count.
                num_idle += isinstance(content, TaskRange)
                continue
        ranges.append(FoundRange(content, event.start_ns, start_ns, end_ns))
    if num_idle and not any(isinstance(found.content, TaskRange) for found in ranges):
        raise _unnumbered(profile, next(iter(worked))[0])
    return ranges, is_gpu, num_idle


def _unnumbered(profile: Profile, name: str) -> RrfpError:
    """The error for a profile whose GPU ranges cannot be matched to those of the CPU."""
    return RrfpError(
        f"{profile.path} does not tell which of its ranges '{name[:40]}' the GPU worked for; "
        "profile with a torch that writes their External id"
    )


# Tasks of torch.distributed.pipelining on the CPU, timed by the operators in their ranges.
#
# Its ranges include the wait for a task's input, and GPipe's also the send of its output. A task
# lasts from the first operator in its range with an autograd number to the last; the time before it
# is the wait for its input.


def time_by_operators(rank: ProfiledRank, host: HostProfile) -> None:
    """Move each task of a rank, whose steps are known, to the time of its operators, and add a wait
    before it. A backward without operators begins when the last receive in its range ends. Changes
    nothing if the profile lacks the operators of a forward."""
    operators = sorted([*host.forwards, *host.backwards])
    starts_ns = [operator.start_ns for operator in operators]
    received_ns = sorted(transfer.end_ns for transfer in host.transfers)
    timed: list[tuple[FoundRange, TaskRange, int, int]] = []
    for found, task in rank.tasks:
        first = bisect_left(starts_ns, found.start_ns)
        last = bisect_left(starts_ns, found.end_ns)
        if first == last:
            if task.kind is Kind.F:
                return
            # A backward of the first stage may have no operators, as its input needs no gradient.
            received = bisect_right(received_ns, found.end_ns) - 1
            start_ns = (
                max(received_ns[received], found.start_ns) if received >= 0 else found.start_ns
            )
            timed.append((found, task, start_ns, found.end_ns))
            continue
        end_ns = min(found.end_ns, max(each.end_ns for each in operators[first:last]))
        timed.append((found, task, operators[first].start_ns, end_ns))
    for found, task, start_ns, end_ns in timed:
        if start_ns == found.start_ns:
            continue
        wait = WaitRange(Maker.PIPELINING, Cause.TRANSFER, task.step, is_receive=True)
        rank.found.append(FoundRange(wait, found.launched_ns, found.start_ns, start_ns))
        found.start_ns, found.end_ns = start_ns, end_ns
    rank.is_timed_by_operators = True


# The step of each range, for ranges whose names do not contain it.


def number_steps(ranks: list[ProfiledRank]) -> Iterator[str]:
    """Assign a step to each range without one, and yield notes. It is the profiler's step if on all
    ranks every range is in one and none has a task twice; otherwise steps are counted on all ranks.
    rrfp's own ranges have theirs."""
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
            content = found.content
            if not isinstance(content, ScheduleRange) and content.step is None:
                found.content = replace(content, step=step)


def _steps_of_profiler(rank: ProfiledRank) -> Sequence[int | None] | None:
    """The profiler's step of each range; None if a range is outside of all steps, or a step has a
    task twice."""
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
        if isinstance(found.content, TaskRange):
            if (step, found.content) in seen:
                return None
            seen.add((step, found.content))
        steps.append(step)
    return steps


@dataclass(slots=True)
class _Counted:
    """The steps of a rank's ranges, counted from the first complete one."""

    steps: list[int | None]
    """The step of each range; None before the first complete step."""
    begins_ns: list[int]
    """The start of each step."""
    is_torn: bool
    """True if there are tasks before the first complete step."""


def _counted_steps(rank: ProfiledRank) -> _Counted:
    """Count a rank's steps. A step begins with the forward of the rank's first stage and lowest
    microbatch, as in every order, or when a task repeats. A receive is in the step of the next
    task."""
    first = min(
        ((task.stage or 0, task.microbatch) for _, task in rank.tasks if task.kind is Kind.F),
        default=None,
    )
    seen: set[Range] = set()
    counted = _Counted([], [], is_torn=False)
    for found in rank.found:
        task = found.content
        if isinstance(task, TaskRange):
            is_first = task.kind is Kind.F and (task.stage, task.microbatch) == first
            if is_first or (counted.begins_ns and task in seen):
                seen.clear()
                counted.begins_ns.append(found.launched_ns)
            seen.add(task)
            counted.is_torn |= not counted.begins_ns
        counted.steps.append(len(counted.begins_ns) - 1 if counted.begins_ns else None)
    # A receive belongs to the next task.
    step = counted.steps[-1]
    for index, found in reversed(list(enumerate(rank.found))):
        if isinstance(found.content, TaskRange):
            step = counted.steps[index]
        elif isinstance(found.content, WaitRange) and found.content.is_receive:
            counted.steps[index] = step
    return counted


def _align(ranks: list[_Counted]) -> None:
    """Renumber the steps of all ranks, in place, from the earliest rank's first complete step,
    which may be incomplete on others. A step begins on all ranks within half its length, because
    filling the pipeline takes no longer."""
    reference_ns = min((rank.begins_ns for rank in ranks if rank.begins_ns), default=[])
    for rank in ranks:
        if rank.begins_ns:
            distances_ns = [abs(each - rank.begins_ns[0]) for each in reference_ns]
            skipped = distances_ns.index(min(distances_ns))
            rank.steps = [None if step is None else step + skipped for step in rank.steps]


# Forwards and backwards found by autograd's operators alone.
#
# Every operator of a forward that autograd records gets the next number of a sequence, and the
# engine evaluates its node in the backward under the same number. Within one backward, the engine
# evaluates nodes by descending numbers, because it runs the youngest ready node first. So an
# ascending number begins the next backward, and so does a send or a receive. The numbers of a
# backward are those of the operators of its forward, which lasts from the first of these to the
# last.
#
# Operators that a backward recomputes (activation checkpointing) are inside its nodes and are
# skipped. Forwards without gradients have no numbers, so evaluations are not found.


def calls_of_autograd(
    forwards: Sequence[Operator], backwards: Sequence[Operator], transfers: Sequence[Transfer]
) -> list[Call]:
    """The forwards and backwards of a rank in the order of time, found by their operators: each
    backward and, if its operators are known, its forward share a pair number. All arguments are in
    the order of time."""
    groups = list(_backwards(backwards, transfers))
    outside = list(_outside(forwards, groups))
    top = list(_top_level(outside))
    starts_ns = [operator.start_ns for operator in top]
    made: dict[int, Operator] = {}
    for operator in outside:
        # If several operators have the same number, the last one to begin got it.
        made[operator.sequence] = operator
    calls = []
    for pair, nodes in enumerate(groups):
        start_ns, end_ns = nodes[0].start_ns, max(node.end_ns for node in nodes)
        calls.append(Call(start_ns, start_ns, end_ns, Kind.B, pair))
        found = [made[node.sequence] for node in nodes if node.sequence in made]
        if found:
            first = top[bisect_right(starts_ns, min(found).start_ns) - 1]
            last = top[bisect_right(starts_ns, max(found).start_ns) - 1]
            calls.append(Call(first.start_ns, first.start_ns, last.end_ns, Kind.F, pair))
    return sorted(calls)


def _backwards(
    nodes: Sequence[Operator], transfers: Sequence[Transfer]
) -> Iterator[list[Operator]]:
    """Group the nodes of the backward graph by backward: a new one begins at an ascending sequence
    number, or after a transfer. Nested nodes are skipped."""
    between_ns = [transfer.start_ns for transfer in transfers]
    group: list[Operator] = []
    lowest = MOST_SEQUENCE
    for node in _top_level(nodes):
        if group:
            moved = bisect_left(between_ns, group[-1].end_ns) < bisect_left(
                between_ns, node.start_ns
            )
            if moved or lowest < node.sequence < MOST_SEQUENCE:
                yield group
                group, lowest = [], MOST_SEQUENCE
        group.append(node)
        lowest = min(lowest, node.sequence)
    if group:
        yield group


def _outside(
    forwards: Sequence[Operator], groups: Sequence[Sequence[Operator]]
) -> Iterator[Operator]:
    """Yield the operators that did not begin within a backward."""
    starts_ns = [nodes[0].start_ns for nodes in groups]
    ends_ns = [max(node.end_ns for node in nodes) for nodes in groups]
    for operator in forwards:
        place = bisect_right(starts_ns, operator.start_ns) - 1
        if place < 0 or operator.start_ns >= ends_ns[place]:
            yield operator


def _top_level(operators: Sequence[Operator]) -> Iterator[Operator]:
    """Yield the operators, given in the order of their starts, that are not nested in another
    one."""
    end_ns: int | None = None
    for operator in operators:
        if end_ns is None or operator.start_ns >= end_ns:
            yield operator
            end_ns = operator.end_ns

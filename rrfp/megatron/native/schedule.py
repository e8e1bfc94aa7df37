"""Megatron-Core's own schedule function, run unchanged and recorded.

During a call, its `forward_step` and `backward_step`, its blocking transfers and its gradient
finalisation are replaced by timed versions where the schedule looks them up, and restored
afterwards. A call's arguments say which task it runs.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from rrfp.interchange.range_names import task_range, wait_range
from rrfp.megatron.adapters.groups import pipeline_size
from rrfp.megatron.adapters.models import config_of
from rrfp.megatron.adapters.native_schedule import megatron_schedule_for, patched_parts
from rrfp.megatron.step_report import StepReport
from rrfp.runtime.pace import Pace, StepPace, sleep_until
from rrfp.runtime.protocols import Clock, StepSummary, monotonic
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, WHOLE_BACKWARD, Shape
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.trace.records import (
    BegunRecord,
    Doing,
    FixedScheduleCounts,
    Phase,
    PhaseRecord,
    Record,
    TaskRecord,
    WaitRecord,
    evaluation_step,
    step_name,
)

# When work began and ended, on the host or on the GPU, whichever runs it.
#
# On CUDA the host only launches a task; events on the current stream tell when the GPU ran it.
# Nothing here waits for the GPU while a step runs.


_LONGEST_LOOK_NS = 100_000


class Timer(Protocol):
    """Marks points in the work, and later gives their times on the host's clock."""

    knows_at_once: bool
    """Whether the time of a mark is known when it is made."""

    def mark(self) -> Any:
        """Mark the end of the work issued so far."""

    def times_ns(self, marks: Sequence[Any], *, wait: bool) -> list[int] | None:
        """The times of marks, passed in the order in which they were made. Without `wait`, None if
        some are not known yet."""


class HostTimer:
    """For work that is done when its call returns."""

    knows_at_once = True

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock

    def mark(self) -> int:
        return self._clock()

    def times_ns(self, marks: Sequence[int], *, wait: bool) -> list[int]:
        return list(marks)


class CudaTimer:
    """For work that is done when the current stream reaches it.

    An event's time is that of a reference event, whose time on the host's clock is known, plus the
    time between the two. The last mark whose time was read becomes the next reference. Before a
    step, if the GPU is idle, a new reference is made, because the two clocks drift.
    """

    knows_at_once = False

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._spare: list[Any] = []
        torch.cuda.synchronize()
        self._reference = self.mark()
        self._reference.synchronize()
        self._reference_ns = clock()

    def compare_clocks(self) -> None:
        """Compare the clocks if the stream is idle, by an event that completes at once. Gives up
        after a tenth of a millisecond."""
        if not torch.cuda.current_stream().query():
            return
        event = self.mark()
        began_ns = self._clock()
        while not event.query():
            if self._clock() - began_ns > _LONGEST_LOOK_NS:
                return
        self._reference, self._reference_ns = event, (began_ns + self._clock()) // 2

    def mark(self) -> Any:
        event = self._spare.pop() if self._spare else _new_event()
        event.record()
        return event

    def times_ns(self, marks: Sequence[Any], *, wait: bool) -> list[int] | None:
        if marks and wait:
            marks[-1].synchronize()
        if not all(mark.query() for mark in marks):
            return None
        times = [
            self._reference_ns + round(self._reference.elapsed_time(mark) * 1_000_000)
            for mark in marks
        ]
        if marks:
            # The time between two events has single precision: the closer they are, the better.
            self._spare += [self._reference, *marks[:-1]]
            self._reference, self._reference_ns = marks[-1], times[-1]
        return times


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


# The pace of a step under Megatron's own schedule, whose transfers block the compute path.
#
# Megatron's `_communicate` does not say which microbatches it exchanges. But in each direction a
# rank sends and receives in the order of its tasks, so the calls are counted.


class NativePace:
    """Paces what one rank does in one step."""

    def __init__(self, pace: StepPace, shape: Shape, pp_rank: int) -> None:
        self._pace = pace
        self._messages = _messages(shape, pp_rank)

    def task(self, stage: int, kind: Kind, microbatch: int) -> AbstractContextManager[None]:
        """Wrap a task's work."""
        return self._pace.task(Task(stage, kind, microbatch))

    def transfer(self, communicate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `_communicate` so that both ends return only when the modelled time has
        passed since the exchange; for concurrent messages, the longest time."""

        def paced(*args: Any, **kwargs: Any) -> Any:
            result = communicate(*args, **kwargs)
            now_ns = time.monotonic_ns()
            exchanged = [
                next(messages)
                for name, messages in self._messages.items()
                # Arguments are tensors to send, or whether to receive one.
                if kwargs[name] is not None and kwargs[name] is not False
            ]
            sleep_until(now_ns + max(map(self._pace.message_ns, exchanged), default=0))
            return result

        return paced


def _messages(shape: Shape, pp_rank: int) -> dict[str, Iterator[Task]]:
    """By argument of `_communicate`: the messages that it requests, in order, named by the tasks
    that consume them."""
    if shape.num_ranks == 1:
        return {}
    name = "1f1b" if shape.num_chunks == 1 else "interleaved"
    row = order_of(hint_named(name).on(shape), shape).rows[pp_rank]
    forwards = [task for task in row if task.kind is Kind.F]
    backwards = [task for task in row if task.kind is Kind.B]
    return {
        "tensor_send_next": _sent(shape, forwards),
        "tensor_send_prev": _sent(shape, backwards),
        "recv_prev": _received(shape, forwards),
        "recv_next": _received(shape, backwards),
    }


def _sent(shape: Shape, tasks: Iterable[Task]) -> Iterator[Task]:
    return (receiver for task in tasks if (receiver := shape.receiver(task)) is not None)


def _received(shape: Shape, tasks: Iterable[Task]) -> Iterator[Task]:
    return (task for task in tasks if shape.sender(task) is not None)


Named = Callable[[str], AbstractContextManager[Any]]
"""Opens a range of a given name in a profile, as `torch.profiler.record_function` does."""


class NativeSchedule:
    """Called like Megatron's function, once per step; keeps the figures of the last step."""

    def __init__(
        self,
        pp_rank: int,
        record: Callable[[Record], None],
        timer: Timer | None = None,
        named: Named = nullcontext,
        name_of_step: Callable[[int], str] = step_name,
        pace: Pace | None = None,
        num_ranks: int | None = None,
    ) -> None:
        """`timer` is the host's by default. `named` opens a range around each task, each wait and
        each step; `name_of_step` names the last. Records come when their times are known, the
        host's at once, in the order of the calls; training steps and evaluations are numbered
        separately (`rrfp.trace.records`). `pace` holds tasks and transfers of training steps to
        modelled times, if work runs on the host. `num_ranks` of the pipeline are those of
        Megatron's parallel state by default."""
        self._pp_rank = pp_rank
        self._record = record
        self._timer = timer or HostTimer()
        self._named = named
        self._name_of_step = name_of_step
        self._pace = pace
        self._num_ranks = num_ranks or pipeline_size()
        self._steps: deque[_StepRecorder] = deque()
        self._num_trained = 0
        self._num_evaluations = 0
        self.report: StepReport | None = None
        """How the last step whose times are known went on this rank."""

    def start_at(self, step: int) -> None:
        """Number the next training step so, as a run that goes on from a checkpoint does."""
        self._num_trained = step

    def __call__(self, **arguments: Any) -> list[Any]:
        """Run one step by Megatron's own schedule, with Megatron's arguments and return value."""
        forward_only = bool(arguments.get("forward_only", False))
        step = evaluation_step(self._num_evaluations) if forward_only else self._num_trained
        self._num_evaluations += forward_only
        self._num_trained += not forward_only
        schedule = megatron_schedule_for(len(_chunks(arguments["model"])))
        data = self.run(partial(schedule, **arguments), step, arguments)
        self.settle()
        return data

    def run(
        self, schedule: Callable[[], list[Any]], step: int, arguments: Mapping[str, Any]
    ) -> list[Any]:
        """Run a step of this number by one of Megatron's schedule functions, which gets these
        arguments; `settle` records it."""
        chunks = _chunks(arguments["model"])
        forward_only = bool(arguments.get("forward_only", False))
        kinds = FORWARD_ONLY if forward_only else WHOLE_BACKWARD
        shape = Shape(self._num_ranks, arguments["num_microbatches"], len(chunks), kinds=kinds)
        pace = None
        if self._pace is not None and not forward_only:
            pace = NativePace(self._pace.start_step(step, shape), shape, self._pp_rank)
        tally = _StepRecorder(
            step,
            chunks,
            shape,
            self._pp_rank,
            self._timer,
            self._named,
            pace,
            self._record,
        )
        with tally.recording(config_of(chunks[0])), self._named(self._name_of_step(step)):
            # Marks are inside their ranges, because the profiler's own cost is not work.
            start = self._timer.mark()
            data = schedule()
            end = self._timer.mark()
        tally.add(start, end, PhaseRecord, step, Phase.SCHEDULE)
        self._steps.append(tally)
        return data

    def close(self) -> None:
        """Record the remaining steps, waiting for their times."""
        self.settle(wait=True)

    def settle(self, *, wait: bool = False) -> None:
        """Record the steps whose times are known; with `wait`, all of them."""
        while self._steps and (records := self._steps[0].records(wait=wait)) is not None:
            if not self._timer.knows_at_once:
                for record in records:
                    self._record(record)
            self.report = StepReport(self._steps.popleft().summary(records))


def _chunks(model: Any) -> list[Any]:
    return model if isinstance(model, list) else [model]


class _StepRecorder:
    """Marks the tasks and waits of one step as they begin and end."""

    def __init__(
        self,
        step: int,
        chunks: list[Any],
        shape: Shape,
        pp_rank: int,
        timer: Timer,
        named: Named,
        pace: NativePace | None,
        record: Callable[[Record], None],
    ) -> None:
        """`record` takes at once what is known at once, and what begins."""
        self._step = step
        self._chunks = {id(chunk): index for index, chunk in enumerate(chunks)}
        self._shape = shape
        self._pp_rank = pp_rank
        self._timer = timer
        self._named = named
        self._pace = pace
        self._record = record
        self._num_forwards = [0] * len(chunks)
        self._forwarded: dict[int, tuple[int, int]] = {}
        """Chunk and microbatch, by the id of their output, which the schedule keeps alive."""
        self._counts = FixedScheduleCounts(releases=Kind.B)
        self._num_waits = 0
        self._marks: list[Any] = []
        self._rows: list[tuple[type[Any], int, int, tuple[Any, ...]]] = []
        """For each record: its type, the indices of its two marks, and its other fields."""

    def recording(self, config: Any) -> AbstractContextManager[None]:
        """Record what Megatron's schedule does during the block."""
        return patched_parts(
            forward=self.forward,
            backward=self.backward,
            communicate=self.communicate,
            config=config,
            finalize=partial(self.wait, Cause.GRADIENT_SYNC),
        )

    def forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `forward_step` to record it."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            chunk = self._chunks.get(id(kwargs["model"] if "model" in kwargs else args[2]))
            if chunk is None:  # a model that a task of this call runs, such as a teacher
                return function(*args, **kwargs)
            count = self._num_forwards[chunk]
            self._num_forwards[chunk] += 1
            microbatch = kwargs.get("current_microbatch")
            microbatch = count if microbatch is None else microbatch
            result = self._run(Kind.F, chunk, microbatch, partial(function, *args, **kwargs))
            self._forwarded[id(result[0])] = chunk, microbatch
            return result

        return recorded

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `backward_step` to record it."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = kwargs["output_tensor"] if "output_tensor" in kwargs else args[1]
            of = self._forwarded.pop(id(output), None)
            if of is None:  # belongs to no forward of this call, so it is not one of its tasks
                return function(*args, **kwargs)
            return self._run(Kind.B, *of, partial(function, *args, **kwargs))

        return recorded

    def communicate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `_communicate` to record it, and later waits for transfers under way."""
        if self._pace is not None:
            function = self._pace.transfer(function)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            peer = _peer_of(next(iter(args), None), kwargs)
            *received, under_way = self._transfer(function, peer)(*args, **kwargs)
            if isinstance(under_way, dict):  # with overlap_p2p_comm; otherwise all is done
                under_way = {
                    name: _InFlightTransfer(handle, self._transfer(handle.wait, peer))
                    for name, handle in under_way.items()
                }
            return *received, under_way

        return recorded

    def _transfer(self, function: Callable[..., Any], peer: int) -> Callable[..., Any]:
        """Wrap a function to record it as a wait for a transfer from or to that rank."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            cause = self._counts.cause_of_transfer(self._shape.num_tasks_of_a_rank)
            return self.wait(cause, function, peer)(*args, **kwargs)

        return recorded

    def wait(
        self, cause: Cause, function: Callable[..., Any], peer: int = -1
    ) -> Callable[..., Any]:
        """Wrap a function to record it as a wait of this cause."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self._begin(cause, peer=peer)
            with self._named(wait_range(cause, self._num_waits, self._step)):
                start = self._timer.mark()
                result = function(*args, **kwargs)
                end = self._timer.mark()
            self.add(start, end, WaitRecord, self._step, cause)
            self._num_waits += 1
            return result

        return recorded

    def _begin(
        self, doing: str, kind: str = "", stage: int = -1, microbatch: int = -1, peer: int = -1
    ) -> None:
        now_ns = monotonic()
        task = kind, stage, microbatch
        self._record(BegunRecord(now_ns, now_ns, self._step, doing, *task, peer))

    def add(self, start: Any, end: Any, record: type[Any], *fields: Any) -> None:
        """Record what lies between two marks, as soon as their times are known."""
        if self._timer.knows_at_once:
            times_ns = self._timer.times_ns((start, end), wait=False)
            assert times_ns is not None
            self._record(record(*times_ns, *fields))
        self._rows.append((record, len(self._marks), len(self._marks) + 1, fields))
        self._marks += (start, end)

    def records(self, *, wait: bool) -> list[Any] | None:
        """The records; None while some times are unknown."""
        times_ns = self._timer.times_ns(self._marks, wait=wait)
        if times_ns is None:
            return None
        return [
            record(times_ns[start], times_ns[end], *fields)
            for record, start, end, fields in self._rows
        ]

    def summary(self, records: list[Any]) -> StepSummary:
        """The figures of the step."""
        schedule = records[-1]
        busy_ns = sum(r.end_ns - r.start_ns for r in records if isinstance(r, TaskRecord))
        peak_held = self._counts.peak_held / len(self._chunks)
        return StepSummary(schedule.start_ns, schedule.end_ns, busy_ns, peak_held)

    def _run(self, kind: Kind, chunk: int, microbatch: int, function: Callable[[], Any]) -> Any:
        stage = self._shape.stage_of(self._pp_rank, chunk)
        self._begin(Doing.TASK, kind, stage, microbatch)
        with self._named(task_range(kind, stage, chunk, microbatch, self._step)):
            start = self._timer.mark()
            with nullcontext() if self._pace is None else self._pace.task(stage, kind, microbatch):
                result = function()
            end = self._timer.mark()
        task = kind, stage, chunk, microbatch
        self.add(start, end, TaskRecord, self._step, *task, *self._counts.ran(kind))
        return result


class _InFlightTransfer:
    """The handle of a transfer, with its own `wait`."""

    def __init__(self, handle: Any, wait: Callable[..., Any]) -> None:
        self._handle = handle
        self.wait = wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _peer_of(communicator: Any, transfer: Mapping[str, Any]) -> int:
    """The rank that a transfer of Megatron's waits for, the receiving half first."""
    is_next = transfer.get("recv_next") or (
        not transfer.get("recv_prev") and transfer.get("tensor_send_next") is not None
    )
    peer = getattr(communicator, "next_rank" if is_next else "prev_rank", None)
    return -1 if peer is None else int(peer)

"""One rank's worker where a device works beside its host.

A launched task is not a finished one. The host launches the next task while one runs, so that the
device need not wait for it: at most one stands behind the running one, decided as late as its
launch allows (`rrfp.schedule.punctuality`). Should nothing be ready then, it is decided
with the next arrival, or when the device has nothing left.

Tasks are recorded by the device's own times, launches beside them by the host's. A rank is idle
while its device is.
"""

from collections import defaultdict, deque
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from statistics import median_low
from threading import Thread
from typing import Any

from rrfp.runtime.device import interface as seam
from rrfp.runtime.pace import StepPace
from rrfp.runtime.protocols import Compute, Ended, StallError, StepSummary
from rrfp.runtime.stall import LOOK_S
from rrfp.runtime.worker import Worker, begun_task
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.punctuality import JustInTime
from rrfp.schedule.tasks import (
    ComputeIdle,
    DecideAhead,
    Kind,
    RunTask,
    StepDone,
    Stimulus,
    TaskAgreed,
    Wait,
    Waited,
)
from rrfp.trace.records import NS_PER_S, Phase, PhaseRecord, WaitRecord, step_name

_MOST_LAUNCHED = 2
"""The running task, and one behind it."""
_CLOSE_S = 1.0
_NUM_WORKS = 9
"""A pace goes by the median of so many, to which one that took very long means nothing."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A task that was given to the device."""

    run: RunTask
    began: seam.Event
    worked: seam.Event
    """Its work is done; a pace may lengthen it."""
    ended: seam.Event
    launch_start_ns: int
    known_ns: int | None
    """What was known beforehand of how long it takes."""
    held_bytes: int
    waiting_bytes: int


class DeviceWorker(Worker):
    """Drives one rank's stages through steps on a device that is not synchronous."""

    def __init__(
        self, *arguments: Any, device: seam.Device, in_time: JustInTime | None = None, **others: Any
    ) -> None:
        """`in_time` says when to decide; the other arguments are those of `Worker`."""
        super().__init__(*arguments, device=device, **others)
        # This worker decides ahead by itself, and needs no thread for it.
        self._decides_ahead = False
        self._launched: deque[_Launched] = deque()
        self._in_time = in_time or JustInTime()
        self._works_ns: defaultdict[tuple[Kind, int], deque[int]]
        self._works_ns = defaultdict(partial(deque, maxlen=_NUM_WORKS))
        """What the latest tasks of each kind and chunk took before a pace lengthened them, without
        the very first: that one may compile its kernels."""
        self._due_ns: int | None = None
        """When to decide on what follows the running task; None: when it has ended."""
        self._ended_ns = 0
        """When the device had nothing left to do, the last time it had not."""
        self._asked_ns = 0
        """Since when the next decision could be made."""
        self._busy_ns = 0
        self._waited_s = 0.0
        """How long nothing has arrived and no task has ended."""
        self._to_watch: SimpleQueue[seam.Event | None] = SimpleQueue()
        self._watcher = Thread(target=self._watch, name="rrfp-device", daemon=True)

    def open(self) -> None:
        super().open()
        self._watcher.start()

    def close(self) -> None:
        if self._watcher.is_alive():
            self._to_watch.put(None)
            # A daemon: a collective of a peer that is lost may never end.
            self._watcher.join(_CLOSE_S)
        super().close()

    def _watch(self) -> None:
        """Tell the compute thread when a task has ended, whatever it waits for then."""
        with self._device.selected():
            while (event := self._to_watch.get()) is not None:
                self._device.synchronize(event)
                self._inbox.put(Ended())

    def run_step(
        self,
        step: int,
        dispatcher: Dispatcher,
        compute: Compute,
        pace: StepPace | None = None,
    ) -> StepSummary:
        """As `Worker.run_step`; returns when the device has run the last task."""
        self._device.relate_clocks()
        step_start_ns = self._clock()
        self._begin_step(step, dispatcher, pace)
        self._launched.clear()
        self._asked_ns = step_start_ns
        self._busy_ns = 0
        self._waited_s = 0.0
        group = self._agreement.group
        follows = group is not None and not group.leads
        while True:
            self._take_in(self._inbox.take())
            self._retire()
            if len(self._launched) == _MOST_LAUNCHED:
                self._look(LOOK_S)
                continue
            agreed = self._agreement.next()
            stimulus: Stimulus = ComputeIdle() if agreed is None else TaskAgreed(agreed)
            if agreed is None and self._launched:
                left_s = self._left_s()
                if follows or left_s > 0:
                    self._look(left_s if left_s > 0 else LOOK_S)
                    continue
                if self._due_ns is not None:
                    self._asked_ns = max(self._asked_ns, self._due_ns)
                stimulus = DecideAhead()
            instructions = self._handle(stimulus)
            if not instructions:
                self._look(LOOK_S)
            for instruction in instructions:
                match instruction:
                    case Waited(cause, start_ns, end_ns):
                        # The device was idle from its last task's end on, before the host saw it.
                        start_ns = min(start_ns, max(self._ended_ns, step_start_ns))
                        self._record(WaitRecord(start_ns, end_ns, step, cause))
                        self._ended_ns = end_ns
                    case RunTask():
                        self._agreement.dispatched(step, instruction.task)
                        self._launch(compute, instruction)
                    case Wait(cause, int() as deadline_ns):
                        self._tell_wait(cause)
                        self._wait_until(deadline_ns)
                        self._asked_ns = self._clock()
                    case Wait(cause):
                        self._wait(cause)
                        self._asked_ns = self._clock()
                    case StepDone():
                        return self._summary(step_start_ns, self._busy_ns)

    def _look(self, timeout_s: float) -> None:
        """Wait until something arrives or a task ends, at most for so long. Raises StallError if
        nothing has for `stall_s`, added up as in `_wait`."""
        events = self._inbox.take(timeout_s)
        self._asked_ns = self._clock()
        self._waited_s = 0.0 if events else self._waited_s + timeout_s
        if self._launched and self._waited_s >= self._stall_s:
            raise StallError(
                f"pipeline rank {self._dispatcher.rank} waited {self._stall_s:g} s in "
                f"{step_name(self._step)} for its device to end {self._launched[0].run.task}; see "
                "whether that exchanges something with a rank that is lost"
            )
        self._take_in(events)

    def _left_s(self) -> float:
        """How long it is too early to decide on the next task; at most for a look."""
        if self._due_ns is None:
            return LOOK_S
        return min(LOOK_S, (self._due_ns - self._clock()) / NS_PER_S)

    def _launch(self, compute: Compute, run: RunTask) -> None:
        """Give the device a task, and pass on its output, which is still to be made."""
        device, task, pace = self._device, run.task, self._pace
        inputs = self._take_inputs(task)
        waiting_bytes = compute.waiting_gradient_bytes
        if self._punctuality is not None:
            self._announce(task, run.chunk)
        known_ns = None if pace is None else pace.expected_ns(task)
        stream = device.compute_stream()
        start_ns = self._clock()
        with ExitStack() as stack:
            stack.enter_context(self._told_when_out_of_memory(compute, run))
            if self._delay is not None:
                self._delay()
            began = device.record_timed(stream)
            outputs = compute.run(task, inputs)
            ended = worked = device.record_timed(stream)
            if pace is not None:
                # The first ones are taken to be no work at all.
                works_ns = self._works_ns[task.kind, run.chunk] or (0,)
                device.keep_busy(stream, pace.left_ns(task, median_low(works_ns)))
                ended = device.record_timed(stream)
        end_ns = self._clock()
        self._record(PhaseRecord(start_ns, end_ns, self._step, Phase.LAUNCH))
        # A thread that wakes up late launches late.
        self._in_time.launched(task.kind, run.chunk, end_ns - min(start_ns, self._asked_ns))
        held_bytes = self._measured_bytes(compute, run)
        launched = _Launched(
            run, began, worked, ended, start_ns, known_ns, held_bytes, waiting_bytes
        )
        self._launched.append(launched)
        self._to_watch.put(ended)
        self._pass_on(task, outputs)
        if len(self._launched) == 1:
            self._runs(launched, end_ns)

    def _runs(self, launched: _Launched, since_ns: int) -> None:
        """The device runs a task since then: find out when to decide on the next one."""
        run = launched.run
        self._record(begun_task(since_ns, self._step, run.task))
        self._due_ns = self._in_time.due_ns(run.task.kind, run.chunk, since_ns, launched.known_ns)

    def _retire(self) -> None:
        """Record what the device has ended."""
        device = self._device
        while self._launched and device.query(self._launched[0].ended):
            launched = self._launched.popleft()
            run = launched.run
            # On an idle device a task begins with its launch; behind another, with that one's end.
            start_ns = max(device.time_ns(launched.began), launched.launch_start_ns)
            worked_ns = max(device.time_ns(launched.worked) - start_ns, 0)
            end_ns = max(device.time_ns(launched.ended), start_ns)
            self._busy_ns += end_ns - start_ns
            self._ended_ns = self._asked_ns = end_ns
            kind = run.task.kind
            if self._durations.expected_ns(kind, run.chunk) is not None:
                self._works_ns[kind, run.chunk].append(worked_ns)
            if self._pace is not None:
                self._pace.worked(run.task, worked_ns)
            self._in_time.ran(kind, run.chunk, end_ns - start_ns, launched.known_ns)
            self._durations.took(kind, run.chunk, end_ns - start_ns)
            self._record_task(run, start_ns, end_ns, launched.held_bytes, launched.waiting_bytes)
            if self._launched:
                self._runs(self._launched[0], end_ns)


def make_worker(*arguments: Any, device: seam.Device, **others: Any) -> Worker:
    """The worker for tasks on this device; the arguments are those of `Worker`."""
    maker = Worker if device.is_synchronous else DeviceWorker
    return maker(*arguments, device=device, **others)

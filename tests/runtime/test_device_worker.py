"""Real ranks on simulated devices: at most one task behind the running one, on every rank."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from statistics import median_low
from threading import Event, Lock
from typing import Any, cast

import pytest
import torch

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.frames import frames_of
from rrfp.runtime.device import interface as seam
from rrfp.runtime.worker import DeviceWorker
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.punctuality import JustInTime
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import (
    NS_PER_S,
    Phase,
    PhaseRecord,
    RankInfo,
    RankRecords,
    Recording,
    TaskRecord,
    WaitRecord,
)
from tests.doubles.simulated_device import SimulatedDevice
from tests.e2e.ranks import RankFailedError, run_ranks
from tests.runtime.rank_rig import RankRig, open_rig

SHAPE = Shape(2, 4)
TASK_S = 3e-3
LAUNCH_S = 1e-3


class CountedWork:
    """Tasks that a device runs later, and whose output names its task. Counts what is launched and
    has not ended."""

    held_bytes = 0
    waiting_gradient_bytes = 0

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._lock = Lock()
        self.num_open = self.most_open = 0
        self.ran: list[tuple[int, int, Task]] = []
        self.got: dict[Task, list[float]] = {}

    def run(
        self, task: Task, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        stream = self._device.compute_stream()
        output = self._device.empty((4,), torch.float32, stream)
        with self._lock:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)

        def work() -> None:
            start_ns = time.monotonic_ns()
            self.got[task] = [] if not inputs or inputs[0] is None else inputs[0].tolist()
            time.sleep(TASK_S)
            output.fill_(float(task.microbatch + 100 * task.stage))
            with self._lock:
                self.num_open -= 1
            self.ran.append((start_ns, time.monotonic_ns(), task))

        self._device.launch(work, stream)
        return () if task.kind is Kind.W else (output,)


@dataclass(frozen=True)
class Seen:
    """Records and times of one rank's step."""

    ran: list[Task]
    most_open: int
    got: dict[Task, list[float]]
    busy_ns: int
    true_busy_ns: int
    problems: list[str]


def problems_of(rig: RankRig, work: CountedWork) -> list[str]:
    """Return errors in the rank's records of its device's work."""
    tasks = [record for record in rig.records if isinstance(record, TaskRecord)]
    launches = [
        record
        for record in rig.records
        if isinstance(record, PhaseRecord) and record.phase == Phase.LAUNCH
    ]
    found = []
    if len(launches) != len(tasks):
        found.append(f"{len(launches)} launches of {len(tasks)} tasks")
    for record, (start_ns, end_ns, task) in zip(tasks, work.ran, strict=True):
        if (record.stage, record.kind, record.microbatch) != task:
            found.append(f"{task} is recorded as {record}")
        if not record.start_ns <= start_ns <= end_ns <= record.end_ns:
            found.append(f"the device ran {task} from {start_ns} to {end_ns}, recorded {record}")
    for before, after in pairwise(tasks):
        if after.start_ns < before.end_ns:
            found.append(f"{after} begins before {before} has ended")
    for wait in rig.records:
        if isinstance(wait, WaitRecord):
            found += [
                f"{wait} while {task} ran"
                for start_ns, end_ns, task in work.ran
                if min(wait.end_ns, end_ns) - max(wait.start_ns, start_ns) > 0
            ]
    return found


def steps_on_devices(hint_name: str, num_members: int, delay_s: float) -> Seen:
    hint = hint_named(hint_name)
    shape = replace(SHAPE, kinds=kinds_of(hint))
    device = SimulatedDevice(seed=1, mean_delay_s=delay_s)
    with open_rig(shape.num_ranks, num_members, device=device) as rig:
        for step in range(2):
            rig.records.clear()
            work = CountedWork(device)
            summary = rig.run_step(step, shape, work, hint_name)
        seen = Seen(
            [task for *_, task in work.ran],
            work.most_open,
            work.got,
            summary.busy_ns,
            sum(end_ns - start_ns for start_ns, end_ns, _ in work.ran),
            problems_of(rig, work),
        )
    device.close()
    return seen


@pytest.mark.parametrize("num_members", [1, 2])
@pytest.mark.parametrize("hint_name", ["bf", "bfw"])
def test_ranks_keep_one_task_behind_the_running_one(hint_name: str, num_members: int) -> None:
    shape = replace(SHAPE, kinds=kinds_of(hint_named(hint_name)))
    ranks = run_ranks(
        shape.num_ranks * num_members, steps_on_devices, hint_name, num_members, 200e-6
    )
    for rank, seen in enumerate(ranks):
        pp_rank = rank // num_members
        assert seen.problems == []
        assert set(seen.ran) == set(shape.tasks_of(pp_rank))
        assert seen.most_open == 2
        assert seen.ran == ranks[pp_rank * num_members].ran
        assert seen.busy_ns >= seen.true_busy_ns
        for task, got in seen.got.items():
            sender = shape.sender(task)
            expected = [] if sender is None else [sender.microbatch + 100.0 * sender.stage] * 4
            assert got == expected


class Sleeper(CountedWork):
    """Run a rank whose first task takes long, so that the next stage waits for its first input."""

    FIRST_S = 0.3

    def run(self, task: Task, inputs: Any) -> Any:
        if task == Task(0, Kind.F, 0):
            self._device.launch(lambda: time.sleep(self.FIRST_S), self._device.compute_stream())
        return super().run(task, inputs)


def learnt_launch_s() -> float:
    device = SimulatedDevice(mean_delay_s=0)
    shape = Shape(2, 12, kinds=(Kind.F,))
    try:
        with open_rig(shape.num_ranks, device=device) as rig:
            rig.run_step(0, shape, Sleeper(device))
            worker = cast(DeviceWorker, rig.worker)
            return max(taken_ns[0] for taken_ns in worker._in_time._latest_ns.values()) / 1e9
    finally:
        device.close()


def test_a_wait_for_the_first_input_is_no_part_of_a_launch() -> None:
    assert run_ranks(2, learnt_launch_s)[1] < Sleeper.FIRST_S / 2


class Compiling(CountedWork):
    """Run a rank whose first task takes long."""

    def run(self, task: Task, inputs: Any) -> Any:
        if task.microbatch == 0:
            self._device.launch(lambda: time.sleep(0.3), self._device.compute_stream())
        return super().run(task, inputs)


class TwiceAsLong:
    """A pace by which a task takes twice its work."""

    def __init__(self) -> None:
        self.expected_ns_of: dict[Task, int] = {}
        self.worked_ns_of: dict[Task, int] = {}

    def task(self, task: Task) -> Any:
        raise NotImplementedError

    def left_ns(self, task: Task, work_ns: int) -> int:
        self.expected_ns_of[task] = work_ns
        return work_ns

    def worked(self, task: Task, worked_ns: int) -> None:
        self.worked_ns_of[task] = worked_ns

    def expected_ns(self, task: Task) -> None:
        return None

    def message_ns(self, task: Task) -> int:
        return 0


def test_a_pace_on_a_device_gets_the_measured_times_of_the_work() -> None:
    """The expected time of a task is that of such work, without the time that the pace added."""
    for found in run_ranks(1, paced_on_a_device):
        assert found == []


def paced_on_a_device() -> list[str]:
    device = SimulatedDevice(mean_delay_s=0)
    shape = Shape(1, 8, kinds=(Kind.F,))
    pace = TwiceAsLong()
    try:
        with open_rig(1, device=device) as rig:
            rig.worker.run_step(0, rig.dispatcher(shape), Compiling(device), pace)
    finally:
        device.close()
    tasks = [record for record in rig.records if isinstance(record, TaskRecord)]
    expected_ns = [pace.expected_ns_of[Task(0, Kind.F, task.microbatch)] for task in tasks]
    worked_ns = [pace.worked_ns_of[Task(0, Kind.F, task.microbatch)] for task in tasks]
    taken_ns = [task.end_ns - task.start_ns for task in tasks]
    found = []
    # The first one does not count, and at most two are launched and have not ended.
    if any(expected_ns[:2]):
        found.append(f"{expected_ns[:2]} ns were expected of tasks before any counted")
    for index in range(3, len(tasks)):
        medians_ns = {median_low(worked_ns[1:end]) for end in (index - 1, index)}
        if expected_ns[index] not in medians_ns:
            found.append(f"{expected_ns[index]} was expected of {worked_ns[:index]}")
    if min(worked_ns) < TASK_S * 1e9:
        found.append(f"a task worked for {min(worked_ns)} ns")
    found += [
        f"a task took {whole_ns} ns, with {own_ns} of work and {left_ns} of pace"
        for whole_ns, own_ns, left_ns in zip(taken_ns, worked_ns, expected_ns, strict=True)
        if whole_ns < own_ns + left_ns
    ]
    return found


class SelectingDevice(SimulatedDevice):
    """Knows for which threads it was selected, and which of them have waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.selecting: set[str] = set()
        self.waiting: set[str] = set()

    @contextmanager
    def selected(self) -> Iterator[None]:
        name = threading.current_thread().name
        self.selecting.add(name)
        yield
        self.selecting.discard(name)

    def synchronize(self, event: seam.Event, *, soon: bool = False) -> None:
        name = threading.current_thread().name
        self.waiting.add(name if name in self.selecting else f"{name}, at another device")
        super().synchronize(event)


def test_the_thread_that_watches_a_device_is_at_it() -> None:
    """CUDA would make a context on the first GPU for it."""
    for waiting in run_ranks(1, watched):
        assert "rrfp-device" in waiting


def watched() -> set[str]:
    device = SelectingDevice()
    try:
        with open_rig(1, device=device) as rig:
            rig.worker.run_step(0, rig.dispatcher(Shape(1, 2)), CountedWork(device))
            return device.waiting
    finally:
        device.close()


def leads_without_a_thread() -> bool:
    device = SimulatedDevice()
    try:
        with open_rig(1, 2, device=device, decides_ahead=True) as rig:
            return "rrfp-ahead" not in {thread.name for thread in threading.enumerate()} and (
                rig.place.rank != 0 or rig.worker._ahead is None
            )
    finally:
        device.close()


def test_a_leader_on_a_device_needs_no_thread_to_decide_ahead() -> None:
    assert run_ranks(2, leads_without_a_thread) == [True, True]


def a_step_launched_slowly() -> RankRecords:
    class SlowToHear(SimulatedDevice):
        def record_timed(self, stream: seam.Stream) -> seam.Event:
            time.sleep(LAUNCH_S)
            return super().record_timed(stream)

    device, shape = SlowToHear(), Shape(1, 4, kinds=(Kind.F,))
    with open_rig(1, device=device, in_time=JustInTime(risk=inf)) as rig:
        step = rig.run_step(0, shape, CountedWork(device))
        records = rig.records
    device.close()
    schedule = PhaseRecord(step.start_ns, step.end_ns, 0, Phase.SCHEDULE)
    return RankRecords(
        RankInfo(0, 0, 0, 0, (0,), "node", 0),
        tasks=[each for each in records if isinstance(each, TaskRecord)],
        waits=[each for each in records if isinstance(each, WaitRecord)],
        phases=[schedule, *(each for each in records if isinstance(each, PhaseRecord))],
    )


def test_the_overhead_of_a_device_is_launches_and_decisions() -> None:
    (records,) = run_ranks(1, a_step_launched_slowly)
    # Each task is launched when the one before has ended.
    launch_ns = decision_ns = 0
    _, _, *launches = records.phases
    for (before, after), launch in zip(pairwise(records.tasks), launches, strict=True):
        begun_ns = min(launch.end_ns, after.start_ns)
        launch_ns += begun_ns - launch.start_ns
        decision_ns += launch.start_ns - before.end_ns + after.start_ns - begun_ns
    (rank,) = bubbles(frames_of(Recording({}, [records]))).ranks
    assert rank.overhead_parts_ns == {"launch": launch_ns, "decision": decision_ns}
    assert launch_ns >= len(launches) * LAUNCH_S * NS_PER_S


def a_task_fails() -> None:
    device = SimulatedDevice()
    shape = replace(SHAPE, kinds=(Kind.F,))

    class Fails(CountedWork):
        def run(self, task: Task, inputs: Any) -> Any:
            if task.microbatch == 2:
                raise ArithmeticError("too much")
            return super().run(task, inputs)

    try:
        with open_rig(shape.num_ranks, device=device) as rig:
            rig.run_step(0, shape, Fails(device))
    finally:
        device.close()


def test_a_task_that_fails_on_its_launch_ends_the_step() -> None:
    with pytest.raises(RankFailedError, match="ArithmeticError: too much"):
        run_ranks(2, a_task_fails)


def a_task_fails_behind_one_that_never_ends() -> None:
    device = SimulatedDevice()
    shape = replace(SHAPE, kinds=(Kind.F,))
    is_over = Event()

    class Hangs(CountedWork):
        def run(self, task: Task, inputs: Any) -> Any:
            if task.microbatch == 1:
                raise ArithmeticError("too much")
            device.launch(lambda: cast(None, is_over.wait()), device.compute_stream())
            return super().run(task, inputs)

    try:
        with open_rig(shape.num_ranks, device=device) as rig:
            rig.run_step(0, shape, Hangs(device))
    finally:
        is_over.set()
        device.close()


def test_a_failure_does_not_wait_for_a_device_that_hangs() -> None:
    # Either rank may report first: the one that fails, or its peer.
    with pytest.raises(RankFailedError, match=r"too much|rank 0 closed its connection"):
        run_ranks(2, a_task_fails_behind_one_that_never_ends, timeout_s=30)


def a_device_hangs() -> None:
    device = SimulatedDevice()
    is_over = Event()

    class Hangs(CountedWork):
        def run(self, task: Task, inputs: Any) -> Any:
            device.launch(lambda: cast(None, is_over.wait()), device.compute_stream())
            return super().run(task, inputs)

    try:
        with open_rig(1, device=device, stall_s=1.0) as rig:
            rig.run_step(0, Shape(1, 4, kinds=(Kind.F,)), Hangs(device))
    finally:
        is_over.set()
        device.close()


def test_a_device_that_hangs_is_an_error() -> None:
    told = "pipeline rank 0 waited 1 s in step 0 for its device to end 0F0; see whether that"
    with pytest.raises(RankFailedError, match=told):
        run_ranks(1, a_device_hangs, timeout_s=30)

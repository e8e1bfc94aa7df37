"""Real ranks on simulated devices: at most one task behind the running one, whoever decides."""

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Event, Lock
from typing import Any, cast

import pytest
import torch

from rrfp.runtime.device.simulated import SimulatedDevice
from rrfp.schedule.hints.hint import kinds_of
from rrfp.schedule.hints.table import hint_named
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.records import Phase, PhaseRecord, TaskRecord, WaitRecord
from tests.rank_rig import RankRig, open_rig
from tests.ranks import RankFailedError, run_ranks

SHAPE = Shape(2, 4)
TASK_S = 3e-3


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
    """What one rank saw of a step."""

    ran: list[Task]
    most_open: int
    got: dict[Task, list[float]]
    busy_ns: int
    true_busy_ns: int
    problems: list[str]


def problems_of(rig: RankRig, work: CountedWork) -> list[str]:
    """What the rank's records say wrongly of what its device did."""
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
    # Whichever rank is heard first: the one that fails, or the one that is told.
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


def test_a_device_that_hangs_is_told() -> None:
    told = "pipeline rank 0 waited 1 s in step 0 for its device to end 0F0; see whether that"
    with pytest.raises(RankFailedError, match=told):
        run_ranks(1, a_device_hangs, timeout_s=30)

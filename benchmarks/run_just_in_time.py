"""Moments of decision on a device: just in time, at the previous launch, and at the previous end.

`python -m benchmarks.run_just_in_time`. Eight real ranks with simulated devices, 32 microbatches,
tasks of 20 ms with a lognormal factor of 0.5, and launches of 0, 1 and 5 ms, over real links. For
each: the time of a step over that of a simulation of the same launches, decisions and (median)
times of messages, and for how much of the step a device was idle between two tasks of which the
second was ready when the first ended. The table of docs/performance.md, "Just in time".
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from random import Random
from statistics import fmean, median

import torch
from torch.distributed import Store, TCPStore

from rrfp.runtime.pace import reduce_timer_slack, sleep_until
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Policy
from rrfp.schedule.punctuality import RISK, JustInTime
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.simulate.step import play
from rrfp.trace.records import ReceiveRecord, StimulusRecord, task_of
from tests.doubles.simulated_device import SimulatedDevice
from tests.e2e.ranks import run_ranks
from tests.runtime.rank_rig import RankRig, open_rig

RISKS = {"at the launch before": 0.0, "just in time": RISK, "at the end before": inf}
LAUNCHES_MS = (0.0, 1.0, 5.0)
SHAPE = Shape(8, 32)
MEAN_MS = 20.0
SIGMA = 0.5
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rank's step."""

    start_ns: int
    end_ns: int
    idle_ns: int
    """Between two tasks that were both ready."""
    ended_ns: dict[Task, int]
    """Time at which the device ended each task."""
    came_ns: dict[Task, int]
    """Time at which the input of each task arrived."""


def times_of(step: int, sigma: float = SIGMA) -> TaskTimes:
    """The task times of a step."""
    draw = Random(step)
    microbatches = range(SHAPE.num_microbatches)
    mean_ns = MEAN_MS * 1e6

    def rows() -> list[list[int]]:
        return [
            [round(mean_ns * draw.lognormvariate(-(sigma**2) / 2, sigma)) for _ in microbatches]
            for _ in range(SHAPE.num_stages)
        ]

    return TaskTimes(rows(), rows(), rows())


class DeviceWork:
    """Tasks that take a host so long to launch, and a device as long as they are drawn."""

    held_bytes = 0
    waiting_gradient_bytes = 0

    def __init__(self, device: SimulatedDevice, times: TaskTimes, launch_s: float) -> None:
        self._device = device
        self._times_ns = times.by_kind(split=True)
        self._launch_ns = round(launch_s * 1e9)
        self.ran: list[tuple[int, int, Task]] = []
        """Start and end of each task on the device."""

    def run(
        self, task: Task, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        sleep_until(time.monotonic_ns() + self._launch_ns)
        taken_ns = self._times_ns[task.kind][task.stage][task.microbatch]

        def work() -> None:
            start_ns = time.monotonic_ns()
            sleep_until(start_ns + taken_ns)
            self.ran.append((start_ns, time.monotonic_ns(), task))

        stream = self._device.compute_stream()
        self._device.launch(work, stream)
        return () if task.kind is Kind.W else (self._device.empty((64,), torch.float32, stream),)


def idle_ns(rig: RankRig, step: int, shape: Shape, ran: list[tuple[int, int, Task]]) -> int:
    """How long the device stood still between two tasks of which the second was ready."""
    came_ns = {
        task_of(record): record.time_ns
        for record in rig.records
        if isinstance(record, StimulusRecord)
        and record.step == step
        and record.name == "InputArrived"
    }
    ended_ns = {task: end_ns for _, end_ns, task in ran}
    idle = 0
    for (_, before_ns, _), (start_ns, _, task) in pairwise(ran):
        needed = [each for each in shape.prerequisites(task) if each in ended_ns]
        ready_ns = max([came_ns.get(task, 0), *(ended_ns[each] for each in needed)])
        if ready_ns <= before_ns:
            idle += start_ns - before_ns
    return idle


def meet(store: Store, step: int, num_ranks: int) -> None:
    """Wait until all ranks are here."""
    if store.add(f"step {step}", 1) == num_ranks:
        store.set(f"begin {step}", "")
    store.wait([f"begin {step}"])


def run_rank(hint_name: str, launch_s: float, risk: float, num_steps: int) -> list[Outcome]:
    """One rank's steps; the first is to learn from."""
    reduce_timer_slack()
    hint = hint_named(hint_name).for_shape(SHAPE)
    shape = replace(SHAPE, kinds=kinds_of(hint))
    device = SimulatedDevice(mean_delay_s=0)
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
    )
    found = []
    with open_rig(shape.num_ranks, device=device, in_time=JustInTime(risk), num_credits=64) as rig:
        for step in range(num_steps):
            work = DeviceWork(device, times_of(step), launch_s)
            meet(store, step, shape.num_ranks)
            summary = rig.run_step(step, shape, work, hint_name)
            idle = idle_ns(rig, step, shape, work.ran)
            ended_ns = {task: end_ns for _, end_ns, task in work.ran}
            came_ns = {
                task_of(record): record.end_ns
                for record in rig.records
                if isinstance(record, ReceiveRecord) and record.step == step
            }
            found.append(Outcome(summary.start_ns, summary.end_ns, idle, ended_ns, came_ns))
    device.close()
    return found[1:]


def hop_ns(shape: Shape, ranks: Sequence[Outcome]) -> int:
    """Median time of the step's messages, from the end of the sending task."""
    ended_ns = {task: end_ns for rank in ranks for task, end_ns in rank.ended_ns.items()}
    hops_ns = []
    for rank in ranks:
        for task, came_ns in rank.came_ns.items():
            sender = shape.sender(task)
            assert sender is not None
            hops_ns.append(came_ns - ended_ns[sender])
    return round(median(hops_ns))


def _constant(time_ns: int, _sender: int, _receiver: int, _task: Task) -> int:
    return time_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hint", default="bfw")
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args()
    hint = hint_named(asked.hint).for_shape(SHAPE)
    policy, shape = Policy(hint), replace(SHAPE, kinds=kinds_of(hint))
    print("| launch | decided | step, s | over simulated | idle though ready |")
    print("|---|---|---|---|---|")
    for launch_ms in LAUNCHES_MS:
        for told, risk in RISKS.items():
            ranks = run_ranks(
                shape.num_ranks,
                run_rank,
                asked.hint,
                launch_ms / 1e3,
                risk,
                asked.steps + 1,
                timeout_s=TIMEOUT_S,
            )
            over, idle, seconds = [], [], []
            for number, of_step in enumerate(zip(*ranks, strict=True), start=1):
                taken_ns = max(each.end_ns for each in of_step) - min(
                    each.start_ns for each in of_step
                )
                world = StepConditions(
                    times_of(number),
                    transfer=partial(_constant, hop_ns(shape, of_step)),
                    launch_ns=round(launch_ms * 1e6),
                    launch_risk=risk,
                )
                over.append(taken_ns / play(shape, policy, world).makespan_ns)
                idle.append(fmean(each.idle_ns for each in of_step) / taken_ns)
                seconds.append(taken_ns / 1e9)
            print(
                f"| {launch_ms:g} ms | {told} | {median(seconds):.2f} | {median(over):.3f} | "
                f"{median(idle):.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""A recorded run in virtual time: its own tasks, messages and delays, under any policy.

Under the run's own policy a replay takes the measured time again, for what lay between the tasks
is taken from the run: that it does shows the replay to be sound. Under another policy the times
stay as they were recorded. Where ranks shared cores that may be far off: other tasks would have run
side by side, and have taken longer or less long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from rrfp.errors import UsageError
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs import Links, StepCosts
from rrfp.simulate.draws import uniforms
from rrfp.simulate.measured import MeasuredStep, measure
from rrfp.simulate.recorded import RecordedRun, read_run
from rrfp.simulate.step import SimulatedStep, simulate_step
from rrfp.simulate.world import Policy, TaskTimes, World
from rrfp.trace.records import Recording

W_SHARE = 0.4
"""The weight gradient's share of a backward that was recorded whole, where nobody knows better: on
CPU, input and weight gradient take 0.9 and 0.6 of a forward's time."""


def replay(
    run: RecordedRun,
    step: MeasuredStep,
    policy: Policy | None = None,
    shape: Shape | None = None,
    w_share: float = W_SHARE,
) -> SimulatedStep:
    """Play a step of a run again: over asynchronous links under a policy, or under the run's own
    policy over its own links.

    `shape` may split the backward otherwise than the run did; `w_share` then is the weight
    gradient's share of a whole one. The makespan ends with the step's window, as it was measured.
    """
    shape = shape or run.shape
    worlds = [
        World(
            task_times(replica.durations_ns, shape, w_share),
            replica.transfer,
            replica.stretch,
            blocking=run.is_blocking and policy is None,
            num_members=run.num_members,
        )
        for replica in step.replicas
    ]
    played = simulate_step(shape, policy or run.policy, worlds)
    return replace(played, makespan_ns=played.makespan_ns + step.tail_ns)


def task_times(durations_ns: Mapping[Task, int], shape: Shape, w_share: float) -> TaskTimes:
    """The times of a shape's tasks. A backward that was recorded whole gives its weight gradient
    that share; one that was recorded in two parts keeps them."""

    def rows(kind: Kind) -> list[list[int]]:
        return [
            [durations_ns.get(Task(stage, kind, m), 0) for m in range(shape.num_microbatches)]
            for stage in range(shape.num_stages)
        ]

    forward, backward, weight_gradient = rows(Kind.F), rows(Kind.B), rows(Kind.W)
    if not any(task.kind is Kind.W for task in durations_ns):
        weight_gradient = [[round(time_ns * w_share) for time_ns in row] for row in backward]
        backward = [
            [whole - part for whole, part in zip(*both, strict=True)]
            for both in zip(backward, weight_gradient, strict=True)
        ]
    return TaskTimes(forward, backward, weight_gradient)


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """The costs of a recorded run (`rrfp.simulate.costs.Costs`).

    Seed s takes the run's step s, counted around, and each of its tasks' own time. `drawn`: every
    task is drawn from those of its stage and kind in all steps, for any number of microbatches.
    A message takes the run's median. What the runtime itself took between tasks is no cost.
    """

    shape: Shape
    steps: Sequence[MeasuredStep]
    left_out: tuple[int, ...] = ()
    """The run's steps that are not whole training steps."""
    drawn: bool = False
    w_share: float = W_SHARE

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Raises UsageError when the shape is not that of the run."""
        self._check(shape)
        recorded = self.steps[seed % len(self.steps)]
        durations_ns: Mapping[Task, int]
        if self.drawn:
            durations_ns = self._draw(shape, seed, replica)
        else:
            durations_ns = recorded.replicas[replica % len(recorded.replicas)].durations_ns
        return StepCosts(
            task_times(durations_ns, shape, self.w_share),
            Links(latency_ns=self._message_ns()),
            gradient_sync_ns=recorded.tail_ns,
            is_known=not self.drawn,
        )

    def _check(self, shape: Shape) -> None:
        own = self.shape
        needed = (
            ("pp", shape.num_ranks, own.num_ranks),
            ("chunks", shape.num_chunks, own.num_chunks),
            ("placement", shape.placement, own.placement),
            ("microbatches", shape.num_microbatches, own.num_microbatches),
        )
        for name, value, recorded in needed[:3] if self.drawn else needed:
            if value != recorded:
                raise UsageError(
                    f"the costs are of a run with --{name} {recorded}, not {value}; choose "
                    f"--{name} {recorded} or other costs"
                )

    def _draw(self, shape: Shape, seed: int, replica: int) -> dict[Task, int]:
        recorded_ns: dict[tuple[int, Kind], list[int]] = {}
        for step in self.steps:
            for each in step.replicas:
                for task, time_ns in each.durations_ns.items():
                    recorded_ns.setdefault((task.stage, task.kind), []).append(time_ns)
        return {
            Task(stage, kind, microbatch): found_ns[int(draw * len(found_ns))]
            for (stage, kind), found_ns in sorted(recorded_ns.items())
            for microbatch, draw in enumerate(
                uniforms(shape.num_microbatches, seed, replica, "recorded", stage, kind).tolist()
            )
        }

    def _message_ns(self) -> int:
        found_ns = [
            time_ns
            for step in self.steps
            for replica in step.replicas
            for time_ns in replica.transfers_ns.values()
        ]
        return median_low(found_ns) if found_ns else 0


def costs_of(recording: Recording, *, drawn: bool = False) -> RecordedCosts:
    """The costs of a recorded run, of those of its steps that are whole.

    Raises RrfpError when there is none, or none that trains, or the trace does not tell what was
    run.
    """
    run = read_run(recording)
    return RecordedCosts(run.shape, measure(run), run.left_out, drawn)

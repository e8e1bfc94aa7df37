"""A recorded run in virtual time: its own tasks, messages and delays, under any policy.

Under the run's own policy a replay takes the measured time again, because what lay between the
tasks comes from the run too; that shows the replay to be sound. Under another policy the times stay
as recorded. That may be far off if ranks shared cores: other tasks would have run side by side, and
taken more or less time.
"""

from collections.abc import Mapping
from dataclasses import replace

from rrfp.errors import UsageError
from rrfp.replay.measured_step import MeasuredStep
from rrfp.replay.recorded import RecordedRun
from rrfp.schedule.hold import Auto, counts_microbatches
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.step import SimulatedStep, simulate_step
from rrfp.simulate.world import TaskTimes, World

W_SHARE = 0.4
"""The weight gradient's share of a backward that was recorded whole, unless the user knows better:
on the CPU, input and weight gradient take 0.9 and 0.6 of a forward's time."""


def replay(
    run: RecordedRun,
    step: MeasuredStep,
    policy: Policy | None = None,
    shape: Shape | None = None,
    w_share: float = W_SHARE,
) -> SimulatedStep:
    """Play a step of a run again: under a policy over asynchronous links, or by default under the
    run's own policy over its own links.

    `shape` may split the backward where the run did not; `w_share` is then the weight gradient's
    share of a whole one. Raises UsageError for a hold with which a rank could get stuck, or that
    needs sizes which the run does not tell. The makespan includes the measured tail of the step.
    """
    shape, chosen = shape or run.shape, policy or run.policy
    if not counts_microbatches(chosen.hold) and any(each.sizes is None for each in step.replicas):
        raise UsageError(
            f"a hold of {chosen.hold} needs to know what microbatches keep, and the trace does not "
            "tell it; give the hold in microbatches"
        )
    if chosen.hold is Auto.AUTO and not all(each.budgets for each in step.replicas):
        raise UsageError(
            "the run found its hold by itself (auto), and the trace does not tell what it was; "
            "give a hold"
        )
    worlds = [
        World(
            task_times(replica.durations_ns, shape, w_share),
            replica.transfer,
            replica.stretch,
            blocking=run.is_blocking and policy is None,
            num_members=run.num_members,
            sizes=replica.sizes,
            budgets=replica.budgets if chosen.hold is Auto.AUTO else (),
        )
        for replica in step.replicas
    ]
    played = simulate_step(shape, chosen, worlds)
    return replace(played, makespan_ns=played.makespan_ns + step.tail_ns)


def task_times(durations_ns: Mapping[Task, int], shape: Shape, w_share: float) -> TaskTimes:
    """The times of a shape's tasks. A backward that was recorded whole is divided by `w_share`; one
    recorded in two parts keeps them."""

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

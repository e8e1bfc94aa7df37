"""The world of a simulated step: everything that dispatchers do not decide.

That is, how long tasks and messages take, and what delays them. All times are whole nanoseconds, so
that sums are exact and the same on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rrfp.schedule.bounds import Sizes
from rrfp.schedule.punctuality import RISK
from rrfp.schedule.tasks import Kind, Task, Value


@dataclass(frozen=True, slots=True)
class TaskTimes(Value):
    """Nanoseconds of every task of a step, `[stage][microbatch]`.

    `input_gradient` and `weight_gradient` are the two parts of a backward; a whole one takes their
    sum.
    """

    forward: Sequence[Sequence[int]]
    input_gradient: Sequence[Sequence[int]]
    weight_gradient: Sequence[Sequence[int]]

    def by_kind(self, *, split: bool) -> dict[Kind, Sequence[Sequence[int]]]:
        """The times of F, B and W tasks, or of F and whole B ones."""
        if split:
            return {
                Kind.F: self.forward,
                Kind.B: self.input_gradient,
                Kind.W: self.weight_gradient,
            }
        whole = [
            [b + w for b, w in zip(*rows, strict=True)]
            for rows in zip(self.input_gradient, self.weight_gradient, strict=True)
        ]
        return {Kind.F: self.forward, Kind.B: whole}


class Transfer(Protocol):
    """How long the message for a task takes from one pipeline rank to another, in ns."""

    def __call__(self, sender: int, receiver: int, task: Task, /) -> int: ...


class Stretch(Protocol):
    """How long a task really takes, which may depend on what its rank ran before and on when it
    starts. Called once per task, in the order in which a rank starts them."""

    def __call__(self, rank: int, start_ns: int, task: Task, time_ns: int, /) -> int: ...


class Lateness(Protocol):
    """How much later a message reaches this member than its group's first member, in ns."""

    def __call__(self, member: int, task: Task, /) -> int: ...


@dataclass(frozen=True, slots=True)
class World(Value):
    """Everything about one pipeline's step that dispatchers do not decide."""

    times: TaskTimes
    transfer: Transfer | None = None
    """None: messages take no time."""
    stretch: Stretch | None = None
    blocking: bool = False
    """A transfer starts when both ranks are there and blocks both, as in Megatron's own schedules.
    Otherwise messages travel while ranks compute, one at a time on a directed link, in order."""
    num_members: int = 1
    """Ranks that run each pipeline rank's tasks together and must agree (tensor parallelism)."""
    lateness: Lateness | None = None
    num_bytes: Sequence[int] = ()
    """Message sizes by microbatch, for the records; empty: 0."""
    sizes: Sizes | None = None
    """What microbatches keep in memory, by stage; None: not known."""
    budgets: Sequence[int] = ()
    """Bounds in bytes, by pipeline rank, in the place of the policy's; empty: the policy's."""
    expected: TaskTimes | None = None
    """What ranks know of their tasks' times beforehand, if they announce when they will be done;
    None: only what their earlier tasks took."""
    launch_ns: int = 0
    """How long a rank's host takes to launch a task on its device, which decides just in time
    (`rrfp.schedule.punctuality`). 0: ranks decide when a task has ended."""
    launch_risk: float = RISK
    """What a rank risks by waiting with its decision (`JustInTime`)."""
    agreement_ns: int = 0
    """The time of a round of agreement. It is hidden if it is over before the task that runs
    meanwhile; otherwise the group waits."""

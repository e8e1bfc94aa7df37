"""Paced runs: every task takes as long as in the simulator, while the training is real.

Step k of a run with seed S has the costs, jitter factors, delays and stops of `rrfp simulate` under
seed S + k, drawn by the simulator's own code. Without costs, jitter applies to the real times of
tasks, which it can only lengthen. Evaluations, the agreement of a group and the reduction of
gradients keep their real times.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from rrfp.errors import UsageError
from rrfp.inputs import resolve_admission, resolve_balancing
from rrfp.planning.modeled_costs import BalancedCosts, ModeledSteps
from rrfp.replay.cost_sources import resolve_costs
from rrfp.runtime.pace import Sleep, reduce_timer_slack, sleep_until
from rrfp.schedule.admission import Admission, AdmitAcross, ListedAssignments
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.policy import Auto
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from rrfp.simulate.conditions import Conditions, conditions
from rrfp.simulate.costs.layer_costs import check_divided
from rrfp.simulate.costs.model import Costs, Links
from rrfp.simulate.engine import Stretch, TaskTimes
from rrfp.simulate.jitter import Jitter, parse_jitter
from rrfp.trace.records import NS_PER_S

if TYPE_CHECKING:
    from rrfp.train.launch.process_groups import Layout
    from rrfp.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class PaceTally:
    """The number of tasks with modeled times, and the number of them that took longer."""

    num_tasks: int = 0
    num_over: int = 0
    worst_over_ns: int = 0
    """The most by which a task's work exceeded its modeled time."""

    def __add__(self, other: "PaceTally") -> "PaceTally":
        return PaceTally(
            self.num_tasks + other.num_tasks,
            self.num_over + other.num_over,
            max(self.worst_over_ns, other.worst_over_ns),
        )


class StepPacer:
    """A `rrfp.runtime.pace.Pace`: paces one rank's steps."""

    def __init__(
        self,
        costs: Costs | None,
        jitter: Jitter,
        admit: Admission,
        seed: int,
        shape: Shape,
        pp_rank: int,
        dp_rank: int,
        *,
        sleep: Sleep = sleep_until,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`seed` is that of step 0. `shape` has the kinds of the hint. `dp_rank` is the number of
        the simulated replica."""
        self.modeled: ModeledSteps | None = None
        """The modeled costs of the steps. None: tasks have real times, which jitter lengthens."""
        if costs is not None:
            self.modeled = ModeledSteps(costs, jitter, admit, seed, shape, dp_rank)
        self._jitter = jitter
        self._seed = seed
        self._pp_rank = pp_rank
        self._replica = dp_rank
        self._sleep = sleep
        self._clock = clock
        self._prepared: tuple[int, Conditions] | None = None
        self.tally = PaceTally()
        """The tally of the step that began last."""

    def prepare(self, step: int) -> None:
        """Draw the step's conditions before it begins, which takes some ms, and keep them for
        `start_step`. Do nothing without modeled costs."""
        if self.modeled is not None:
            self._prepared = step, self.modeled.conditions(step, self.modeled.shape)

    def sizes(self, step: int, shape: Shape) -> ActivationSizes | None:
        """Return the bytes that the step's microbatches keep on this rank's chunks; None without
        modeled costs or if the costs do not give them. Keeps the drawn conditions for
        `start_step`."""
        if self.modeled is None:
            return None
        drawn = self._conditions(self.modeled, step, shape)
        self._prepared = step, drawn
        sizes = drawn.costs.sizes
        return None if sizes is None else sizes.of(shape.stages_of(self._pp_rank))

    def _conditions(self, modeled: ModeledSteps, step: int, shape: Shape) -> Conditions:
        """Return the conditions of a step of this shape: those prepared for it, or else drawn
        now."""
        if self._prepared is not None and self._prepared[0] == step:
            drawn = self._prepared[1]
            if drawn.shape == shape:
                return drawn
        return modeled.conditions(step, shape)

    def start_step(self, step: int, shape: Shape) -> "PacedStep":
        """Return the pace of a step that begins now, and start a new tally. Tasks take their
        modeled times or, without modeled costs, their real times lengthened by jitter."""
        self.tally = PaceTally()
        seed, replica, count = self._seed + step, self._replica, None
        known: TaskTimes | None = None
        if self.modeled is None:
            model, links = _measured_model(self._jitter, shape, seed, replica), Links()
            stretch = self._jitter.stretch(shape, seed, replica)
        else:
            drawn, self._prepared = self._conditions(self.modeled, step, shape), None
            model, links, stretch = _modeled(drawn), drawn.links, drawn.stretch()
            count = self._count
            known = drawn.costs.times if drawn.costs.is_known else None
        return PacedStep(
            shape, self._pp_rank, model, known, links, stretch, count, self._sleep, self._clock
        )

    def _count(self, over_ns: int) -> None:
        """Add a task to the tally; its work exceeded its modeled time by `over_ns` (negative: took
        less)."""
        is_over = over_ns > 0
        self.tally += PaceTally(1, int(is_over), over_ns if is_over else 0)


_Model = Callable[[Task, int], int]
"""Gives a task's time before delays and stops, from the time of its work; both in ns."""


def _modeled(drawn: Conditions) -> _Model:
    """Make a model that gives each task its modeled time in ns, however long its work took."""
    times_ns = drawn.times.by_kind(split=drawn.shape.splits_backward)
    return lambda task, _: times_ns[task.kind][task.stage][task.microbatch]


def _measured_model(jitter: Jitter, shape: Shape, seed: int, replica: int) -> _Model:
    """Make a model that multiplies the time of a task's work by its stage's jitter factor. Raise
    UsageError if the jitter names a pipeline rank or link that does not exist."""
    seconds_ns = [[NS_PER_S] * shape.num_microbatches] * shape.num_stages
    times = jitter.times(TaskTimes(seconds_ns, seconds_ns, seconds_ns), shape, seed, replica)
    # Factors that only lengthen are constant per rank.
    a_second_ns = [row[0] for row in times.forward]
    return lambda task, worked_ns: worked_ns * a_second_ns[task.stage] // NS_PER_S


class PacedStep:
    """A `rrfp.runtime.pace.StepPace`: paces one step on one rank."""

    def __init__(
        self,
        shape: Shape,
        pp_rank: int,
        model: _Model,
        known: TaskTimes | None,
        links: Links,
        stretch: Stretch | None,
        count: Callable[[int], None] | None,
        sleep: Sleep,
        clock: Callable[[], int],
    ) -> None:
        """`known` are the modeled times before jitter. `count` is called for every task with the
        time in ns by which its work exceeded its modeled time, negative if it took less."""
        self._shape = shape
        self._known_ns = None if known is None else known.by_kind(split=shape.splits_backward)
        self._model = model
        self._links = links
        self._stretch = None if stretch is None else partial(stretch, pp_rank)
        self._count = count
        self._sleep = sleep
        self._clock = clock
        self._start_ns = clock()
        self._due_ns: dict[Task, int] = {}
        """The times of tasks that a device has not finished yet."""

    @contextmanager
    def task(self, task: Task) -> Iterator[None]:
        """Run a task's work in the block, then sleep until its modeled time, with delays and stops
        added, has passed since it began; work that took longer adds no sleep. Calls `count`, if
        given."""
        start_ns = self._clock()
        yield
        worked_ns = self._clock() - start_ns
        time_ns = self._model(task, worked_ns)
        if self._stretch is not None:
            time_ns = self._stretch(start_ns - self._start_ns, task, time_ns)
        if self._count is not None:
            self._count(worked_ns - time_ns)
        self._sleep(start_ns + time_ns)

    def left_ns(self, task: Task, work_ns: int) -> int:
        """Return the time in ns to add to a GPU task whose work takes `work_ns`, at least 0. Keeps
        the task's whole modeled time until `worked` is called."""
        time_ns = self._model(task, work_ns)
        if self._stretch is not None:
            time_ns = self._stretch(self._clock() - self._start_ns, task, time_ns)
        self._due_ns[task] = time_ns
        return max(0, time_ns - work_ns)

    def worked(self, task: Task, worked_ns: int) -> None:
        """Count by how many ns the work of a GPU task exceeded the time that `left_ns` gave it, and
        forget that time."""
        over_ns = worked_ns - self._due_ns.pop(task)
        if self._count is not None:
            self._count(over_ns)

    def expected_ns(self, task: Task) -> int | None:
        """Return the task's modeled time in ns before jitter; None if costs are not known in
        advance."""
        if self._known_ns is None:
            return None
        return self._known_ns[task.kind][task.stage][task.microbatch]

    def message_ns(self, task: Task) -> int:
        """Return the modeled time in ns of the message that a task waits for; the task must have
        one from another rank."""
        link = self._shape.link(task)
        assert link is not None
        return self._links(*link, task)


def make_pace(
    costs: Costs | None,
    jitter: Jitter,
    admit: Admission,
    seed: int,
    shape: Shape,
    pp_rank: int,
    dp_rank: int,
) -> StepPacer | None:
    """Make the pace of one rank of a run, with `StepPacer`'s arguments; return None if neither
    costs nor jitter pace anything. With a pace, the calling thread, and threads that it starts
    later, sleep precisely from now on."""
    if costs is None and not jitter.factors and not jitter.delays_tasks:
        return None
    reduce_timer_slack()
    return StepPacer(costs, jitter, admit, seed, shape, pp_rank, dp_rank)


def pace_of(settings: "TrainSettings", layout: "Layout") -> StepPacer | None:
    """Make this rank's pace by the run's --pace and --jitter; return None if they do not ask for
    one. Raise as `read_pace` does, and UsageError for an invalid --admit or --admit-across."""
    costs, jitter = read_pace(settings)
    costs = _balanced(costs, settings)
    admit = resolve_admission(settings.step.admit, settings.data.microbatches)
    shape = _shape_of(settings)
    return make_pace(costs, jitter, admit, settings.run.seed, shape, layout.pp_rank, layout.dp_rank)


def _balanced(costs: Costs | None, settings: "TrainSettings") -> Costs | None:
    """Wrap the costs so that the global batch is balanced over the replicas, if --admit-across asks
    for it; else return them unchanged."""
    across = resolve_balancing(settings.step.admit_across)
    if costs is None or across is AdmitAcross.NONE:
        return costs
    listed = across if isinstance(across, ListedAssignments) else None
    return BalancedCosts(costs, settings.layout.num_replicas, listed, settings.run.seed)


def _shape_of(settings: "TrainSettings") -> Shape:
    """Return the shape of a step, with the task kinds of the run's hint."""
    shape = settings.shape
    return replace(shape, kinds=kinds_of(settings.hint.for_shape(shape)))


def read_pace(settings: "TrainSettings") -> tuple[Costs | None, Jitter]:
    """Read the costs of --pace (None without it) and the jitter of --jitter. Raise UsageError for
    unknown ones, jitter that needs --pace, and costs for another --tp, and RrfpError for costs of a
    run without a complete trace."""
    jitter = parse_jitter(settings.run.jitter)
    if settings.run.pace is None:
        if jitter.needs_costs:
            raise UsageError(
                f"jitter {jitter.spec} needs modelled times, as real ones can only be lengthened; "
                "add --pace"
            )
        return None, jitter
    costs = resolve_costs(settings.run.pace)
    check_divided(costs, settings.run.pace, settings.layout.tp)
    return costs, jitter


def check_pace(settings: "TrainSettings") -> None:
    """Raise UsageError if the costs or the jitter are invalid or do not fit the run's pipeline (by
    the first step of replica 0), or if --hold auto would apply this machine's memory to the sizes
    of the costs. Raise RrfpError as `read_pace` does."""
    costs, jitter = read_pace(settings)
    costs = _balanced(costs, settings)
    admit = resolve_admission(settings.step.admit, settings.data.microbatches)
    if costs is None:
        _measured_model(jitter, settings.shape, settings.run.seed, 0)
    else:
        drawn = conditions(costs, jitter, admit, _shape_of(settings), settings.run.seed, 0, 0)
        if settings.policy.hold is Auto.AUTO and drawn.costs.sizes is not None:
            raise UsageError(
                f"--hold auto fills this machine's memory, and the sizes of --pace "
                f"{settings.run.pace} are those of another; give the hold as a size, such as 40GiB"
            )

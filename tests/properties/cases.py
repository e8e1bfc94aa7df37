"""Random steps, each drawn from one seed: the policies of the dispatchers, and the conditions under
which the step is played."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import exp, log
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st

from rrfp.replay.measured import decisions
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.dispatcher import Dispatcher, Group
from rrfp.schedule.hints import Hint, Order, WeightGradients, kinds_of
from rrfp.schedule.named_hints import ALTERNATIONS, HINTS, hint_named
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import (
    Cause,
    ComputeIdle,
    DecideAhead,
    InputArrived,
    Instruction,
    Kind,
    RunTask,
    StepDone,
    Task,
    Wait,
    parse_task,
)
from rrfp.trace.records import StimulusRecord
from tests.properties.naive_dispatcher import Checked, NaiveDispatcher
from tests.properties.virtual_time import (
    Announcer,
    Decider,
    History,
    Node,
    Sets,
    VirtualConditions,
    play,
)

MAX_RANKS, MAX_CHUNKS, MAX_MICROBATCHES, MAX_MEMBERS = 8, 4, 32, 4

SEEDS = st.integers(0, 2**32 - 1)

D = TypeVar("D", bound=Decider)

MOST_TASKS_VALIDATED = 48
"""Largest number of tasks of a rank whose dispatcher checks itself. A check takes time in
proportion to the tasks, and runs at more than two stimuli per task."""


@dataclass(frozen=True)
class Case:
    """A random step of `num_members` coupled pipelines."""

    seed: int
    shape: Shape
    hint: Hint
    dispatch: Dispatch
    limit: int | None
    hold: int | None
    w: WeightGradients
    rule: AgreementRule
    num_members: int
    collectives: tuple[Sets, ...]
    """By stage, the members that share a collective inside its tasks."""
    sizes: ActivationSizes | None = None
    """Activation bytes of microbatches, by stage."""
    budgets: tuple[int, ...] | None = None
    """The hold in bytes, by rank."""

    @property
    def binds(self) -> bool:
        return self.dispatch is Dispatch.READY and Kind.B in self.shape.kinds

    @property
    def bound_on_depth(self) -> int | None:
        """The limit on D, or None if it does not apply."""
        return self.limit if self.binds else None

    @property
    def bound_on_held(self) -> int | None:
        """The hold in slots, or None if it does not apply."""
        return self.hold if self.binds else None

    @property
    def groups(self) -> list[list[int]]:
        """The groups of members that agree: those connected by shared collectives on any stage.
        They are the same on every rank."""
        return connected(self.num_members, self.collectives)

    @property
    def order(self) -> Order:
        """The order that the hint gives with equal times of all tasks."""
        order = order_of(self.hint, self.shape)
        return order if order.shape == self.shape else order.forwards()

    def deciders(self, make: Callable[..., D], order: Order | None = None) -> list[list[D]]:
        """Make a decider for each rank and member. `make` takes the arguments of `Dispatcher`."""
        group_of = {
            member: Group(len(group), leads=member == group[0])
            for group in self.groups
            for member in group
            if len(group) > 1
        }
        policy = self.policy(order)
        return [
            [
                make(self.shape, rank, policy, group_of.get(member), **self.memory(rank))
                for member in range(self.num_members)
            ]
            for rank in range(self.shape.num_ranks)
        ]

    def memory(self, rank: int) -> dict[str, Any]:
        """Return the memory arguments of this rank's dispatcher."""
        if self.sizes is None:
            return {}
        sizes = self.sizes.of(self.shape.stages_of(rank))
        return {"sizes": sizes, "budget": None if self.budgets is None else self.budgets[rank]}

    def policy(self, order: Order | None = None) -> Policy:
        """Return the policy of the step, which counts positions in `order`. It leaves out `w` and
        the agreement rule where they have no effect."""
        policy = Policy(
            self.hint,
            order,
            self.dispatch,
            self.limit,
            self.hold and Fraction(self.hold, self.shape.num_chunks),
        )
        if self.dispatch is Dispatch.FIXED:
            return policy
        w = self.w if self.hint.ranks_weight_gradients else WeightGradients.IDLE
        return replace(policy, w=w, agreement=self.rule)

    def dispatchers(self) -> list[list[Dispatcher]]:
        """Make dispatchers that count positions only in a binding order."""
        return self.deciders(
            validating_dispatcher, self.order if self.dispatch is Dispatch.FIXED else None
        )

    def checked_dispatchers(self) -> list[list[Checked]]:
        """Make dispatchers that are compared with their specification at every stimulus."""
        order = self.order
        return [
            [Checked(*pair) for pair in zip(*of_rank, strict=True)]
            for of_rank in zip(
                self.deciders(validating_dispatcher, order),
                self.deciders(NaiveDispatcher, order),
                strict=True,
            )
        ]

    def play(self, deciders: Sequence[Sequence[Decider]]) -> History:
        return play(self.shape, deciders, self.conditions())

    def conditions(self) -> VirtualConditions:
        """Draw lognormal times, and latencies that differ by member, so that members see arrivals
        in different orders. In half of the cases, ranks decide ahead of the running task's end."""
        rng = random.Random(self.seed)
        sigma = rng.choice([0.0, 0.5, 2.0])
        jitter_ns = rng.choice([0, 10, 200])
        skews_ns = [rng.choice([0, jitter_ns]) for _ in range(self.num_members)]
        decides_ahead = rng.random() < 0.5

        def duration(_node: Node, _task: Task) -> int:
            return 1 + int(20 * rng.lognormvariate(0.0, sigma))

        def latency(_sender: Node, receiver: Node) -> int:
            return int((jitter_ns + skews_ns[receiver.member]) * rng.random())

        def ahead(_node: Node) -> int | None:
            return int(30 * rng.random()) if decides_ahead else None

        return VirtualConditions(
            duration,
            latency,
            ahead,
            self._announcer(),
            [self.groups] * self.shape.num_ranks,
            self.collectives,
        )

    def _announcer(self) -> Announcer:
        """Draw exact, imprecise or wrong announcements, or none."""
        # Its own generator, so that the draws of times and latencies do not depend on it.
        rng = random.Random(self.seed + 2)
        error = rng.choice([0.0, 0.3, 3.0])
        patience = rng.choice([None, 5, 20, 60])

        def announce(_node: Node, _task: Task, duration: int) -> tuple[int, int] | None:
            if patience is None or rng.random() < 0.1:
                return None
            return int(duration * rng.lognormvariate(0.0, error)), rng.randint(0, patience)

        return announce


def validating_dispatcher(
    shape: Shape, rank: int, policy: Policy, group: Group | None = None, **memory: Any
) -> Dispatcher:
    """Make a dispatcher that checks its own state, unless its rank has very many tasks."""
    is_small = shape.num_tasks_of_a_rank <= MOST_TASKS_VALIDATED
    return Dispatcher(shape, rank, policy, group, validate=is_small, **memory)


def connected(num_members: int, partitions: Sequence[Sets]) -> list[list[int]]:
    """Return the connected components of members that share a set in any partition."""
    component_of = {member: [member] for member in range(num_members)}
    for partition in partitions:
        for first, *others in partition:
            for other in others:
                if component_of[other] is not component_of[first]:
                    merged = sorted(component_of[first] + component_of[other])
                    component_of.update(dict.fromkeys(merged, merged))
    return [component for member, component in component_of.items() if component[0] == member]


def random_case(
    seed: int,
    *,
    max_members: int = MAX_MEMBERS,
    num_chunks: int | None = None,
    dispatch: Dispatch | None = None,
    is_largest: bool = False,
) -> Case:
    """Draw a step of any kind, more often a small one. Arguments replace drawn values."""
    rng = random.Random(seed)

    def size(largest: int) -> int:
        return largest if is_largest else _log_uniform(rng, largest)

    num_chunks = num_chunks or size(MAX_CHUNKS)
    placement = rng.choice(list(Placement)) if num_chunks == 2 else Placement.LOOP
    shape = Shape(size(MAX_RANKS), size(MAX_MICROBATCHES), num_chunks, placement)
    dispatch = dispatch or (Dispatch.FIXED if rng.random() < 0.2 else Dispatch.READY)
    hint, shape = _random_hint(rng, shape, dispatch)
    bound = rng.choice(["limit", "hold", "none"])
    largest_bound = 2 * num_chunks * shape.num_ranks
    limit = _log_uniform(rng, largest_bound) if bound == "limit" else None
    hold = num_chunks - 1 + _log_uniform(rng, largest_bound) if bound == "hold" else None
    num_members = size(max_members)
    return Case(
        seed,
        shape,
        hint,
        dispatch,
        limit,
        hold,
        rng.choice(list(WeightGradients)),
        rng.choice(list(AgreementRule)),
        num_members,
        _random_collectives(rng, num_members, shape.num_stages),
    )


def random_case_in_bytes(seed: int, *, max_members: int = MAX_MEMBERS) -> Case:
    """Draw a step with a hold in bytes.

    Sizes vary by a factor of 100. The budget of a rank is at least the smallest valid one, and
    often close to it. With a split backward, only a part of the bytes may be pending for W.
    """
    case = random_case(seed, max_members=max_members, dispatch=Dispatch.READY)
    rng = random.Random(seed + 1)
    shape = case.shape
    activations = [
        [int(10 ** rng.uniform(2, 4)) for _ in range(shape.num_microbatches)]
        for _ in range(shape.num_stages)
    ]
    pending_w = None
    if rng.random() < 0.5:
        pending_w = [[int(size * rng.random()) for size in row] for row in activations]
    sizes = ActivationSizes(activations, pending_w)
    least = [sizes.of(shape.stages_of(rank)).least_budget for rank in range(shape.num_ranks)]
    slack = rng.choice([1.0, 1.0, 1.2, 2.0, 5.0])
    budgets = tuple(int(each * rng.uniform(1, slack)) for each in least)
    return replace(case, limit=None, hold=None, sizes=sizes, budgets=budgets)


def cases(*, max_members: int = MAX_MEMBERS) -> st.SearchStrategy[Case]:
    return SEEDS.map(partial(random_case, max_members=max_members))


def _log_uniform(rng: random.Random, largest: int) -> int:
    return min(largest, int(exp(rng.uniform(0, log(largest + 1)))))


def _random_hint(rng: random.Random, shape: Shape, dispatch: Dispatch) -> tuple[Hint, Shape]:
    names = [*ALTERNATIONS, "gpipe", "random", "random", "random"]
    if shape.num_chunks == 1:
        names += ["1f1b", "zb-h1"]
    elif shape.placement is Placement.V:
        names += ["zb-v", "v-half", "v-min"]
    elif shape.num_microbatches % shape.num_ranks == 0:
        names += ["interleaved"]
    name = rng.choice(names)
    hint: Hint
    if name == "random":
        shape = replace(shape, kinds=rng.choice([WHOLE_BACKWARD, SPLIT_BACKWARD]))
        hint = random_order(shape, rng.randrange(2**32), valid=dispatch is Dispatch.FIXED)
    else:
        hint = hint_named(name).for_shape(shape)
        shape = replace(shape, kinds=kinds_of(hint))
    if rng.random() < 0.1:
        hint = hint.forwards() if isinstance(hint, Order) else hint
        shape = replace(shape, kinds=FORWARD_ONLY)
    return hint, shape


def _random_collectives(rng: random.Random, num_members: int, num_stages: int) -> tuple[Sets, ...]:
    """Draw replicas of equal size, whose members share the collectives of every stage. On some
    stages, pairs of replicas or all replicas may share collectives, too."""
    size = rng.choice([size for size in (1, 2, 4) if num_members % size == 0] + [num_members])
    coupled_size = rng.choice([min(2 * size, num_members), num_members])
    share_of_coupled_stages = rng.choice([0.0, 0.3, 1.0])
    return tuple(
        _blocks(num_members, coupled_size if rng.random() < share_of_coupled_stages else size)
        for _ in range(num_stages)
    )


def _blocks(num_members: int, size: int) -> Sets:
    return [range(first, min(first + size, num_members)) for first in range(0, num_members, size)]


def random_order(shape: Shape, seed: int, *, valid: bool) -> Order:
    """Draw a random permutation of each row. `valid` rows come from one sequence that can run."""
    rng = random.Random(seed)
    tasks = [task for rank in range(shape.num_ranks) for task in shape.tasks_of(rank)]
    rng.shuffle(tasks)
    if valid:
        tasks = list(_prerequisites_first(shape, tasks))
    rows: list[list[Task]] = [[] for _ in range(shape.num_ranks)]
    for task in tasks:
        rows[shape.rank_of(task.stage)].append(task)
    return Order("random", shape, tuple(map(tuple, rows)))


def _prerequisites_first(shape: Shape, tasks: list[Task]) -> Iterator[Task]:
    out: set[Task] = set()

    def with_prerequisites(task: Task) -> Iterator[Task]:
        if task not in out:
            for needed in shape.prerequisites(task):
                yield from with_prerequisites(needed)
            out.add(task)
            yield task

    for each in tasks:
        yield from with_prerequisites(each)


# Numbers of examples: few in `make test`, many in `make test-all`.


def examples(*, quick: int, thorough: int) -> settings:
    """Return settings with the number of examples of the current hypothesis profile."""
    is_thorough = settings.get_current_profile_name() == "thorough"
    return settings(max_examples=thorough if is_thorough else quick)


# Single decisions as text: arrivals, and the rank's answers.


def task(text: str) -> Task:
    return parse_task(text)[0]


def an_order(shape: Shape, *rows: str) -> Order:
    return Order("mine", shape, tuple(tuple(task(cell) for cell in row.split()) for row in rows))


def hint_dispatcher(
    name: str, shape: Shape, rank: int, *, limit: int | None = None, hold: int | None = None
) -> Dispatcher:
    """Make a dispatcher under a named hint; `hold` is in slots of one chunk and one microbatch."""
    hint = HINTS[name]
    order = order_of(hint, shape)
    order = order if order.shape == shape else order.forwards()
    slots = None if hold is None else Fraction(hold, shape.num_chunks)
    return Dispatcher(shape, rank, Policy(hint, order, limit=limit, hold=slots), validate=True)


def arrive(dispatcher: Dispatcher, texts: str, *, now_ns: int = 0, member: int = 0) -> None:
    for text in texts.split():
        assert dispatcher.handle(now_ns, InputArrived(task(text), member)) == ()


def ask(dispatcher: Dispatcher, now_ns: int = 0) -> str:
    """Ask an idle rank to decide; return its task, the cause of its wait, or `done`."""
    return _answer(dispatcher.handle(now_ns, ComputeIdle()))


def ask_ahead(dispatcher: Dispatcher) -> str:
    """Ask a busy rank to decide ahead; return its next task, or `nothing` if it is undecided."""
    instructions = dispatcher.handle(0, DecideAhead())
    return _answer(instructions) if instructions else "nothing"


def run_on(dispatcher: Dispatcher) -> str:
    """Return the tasks that the rank runs until it waits or is done."""
    ran = []
    while (answer := ask(dispatcher)) not in [*Cause, "done"]:
        ran.append(answer)
    return " ".join(ran)


def _answer(instructions: Sequence[Instruction]) -> str:
    match instructions[-1]:
        case RunTask() as run:
            return str(run.task)
        case Wait(cause):
            return cause
        case StepDone():
            return "done"
        case other:
            raise AssertionError(other)


def replayed(stimuli: Iterable[StimulusRecord], dispatcher: Dispatcher) -> list[Task]:
    """Replay one step's stimuli on a fresh dispatcher; return the tasks that it runs."""
    return [task for _, task in decisions(stimuli, dispatcher) if task is not None]

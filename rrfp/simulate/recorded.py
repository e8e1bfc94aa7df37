"""What a recording tells of its run: the pipeline's shape, what steered it, and who ran together.

The shape is that of the records themselves. What steered the run stands in its settings (`run.json`
keeps them under `settings`), but for an order that came from a file, of which the settings have the
path only: there it is read from the places that the tasks were recorded to have in it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.dispatcher import (
    DEFAULT_LIMIT,
    AgreementRule,
    Dispatch,
    Dispatcher,
    Group,
    RunTask,
    WeightGradients,
)
from rrfp.schedule.hints import HINT_NAMES, Hint, hint_named, kinds_of
from rrfp.schedule.order import Order
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task, format_task
from rrfp.simulate.world import Policy
from rrfp.trace.records import (
    Phase,
    RankInfo,
    RankRecords,
    ReceiveRecord,
    Recording,
    StimulusRecord,
    TaskRecord,
    WaitRecord,
)
from rrfp.trace.rundir import expected_ranks
from rrfp.trace.steps import Window, is_evaluation, step_name, step_windows
from rrfp.trace.stimuli import stimulus_of, task_of

_MEGATRON = "megatron"
"""The dispatch of Megatron-Core's own schedules, which bind and whose transfers block."""

_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank recorded of one step, each list in the order in which it was recorded."""

    info: RankInfo
    entry_ns: int
    """When it entered the schedule."""
    tasks: list[TaskRecord]
    waits: list[WaitRecord]
    receives: list[ReceiveRecord]
    stimuli: list[StimulusRecord]
    is_in_group: bool
    """Whether it agreed with other ranks on what to run."""


Members = tuple[RankStep, ...]
"""The ranks that run a pipeline rank's tasks together; the first one leads."""


@dataclass(frozen=True, slots=True)
class StepRecords:
    """One step that every rank finished."""

    step: int
    window: Window
    replicas: tuple[tuple[Members, ...], ...]
    """By data-parallel replica and pipeline rank. Replicas that share experts count as one."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds that a run was given."""

    limit: int | None
    hold: int | None
    """In slots of one chunk and one microbatch."""
    usual_limit: int | None
    """That of `ready` dispatch where neither was given; None: it was asked for none."""

    def of(self, dispatch: Dispatch) -> tuple[int | None, int | None]:
        """The limit and the hold under a dispatch. An order that binds is held to what was given;
        the usual limit is none of its own."""
        if dispatch is Dispatch.FIXED or self.limit is not None or self.hold is not None:
            return self.limit, self.hold
        return self.usual_limit, None


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run whose steps can be played again."""

    shape: Shape
    policy: Policy
    hint_name: str
    bounds: Bounds
    is_blocking: bool
    """Its transfers lay on the compute path, as Megatron's own do."""
    may_share_cores: bool
    """Ranks of one host computed on its CPU; how many cores it has is not recorded."""
    num_members: int
    steps: tuple[StepRecords, ...]
    """The steps that every rank finished and that have all tasks of the shape."""
    left_out: tuple[int, ...]
    """The other steps that were asked for."""

    @property
    def told(self) -> str:
        """Its policy in a few words: `bf ready, limit 32`."""
        policy = self.policy
        words = [f"{self.hint_name} {policy.dispatch}"]
        if self.is_blocking:
            words.append("blocking transfers")
        if policy.limit is not None:
            words.append(f"limit {policy.limit}")
        if policy.hold is not None:
            words.append(f"hold {policy.hold // self.shape.num_chunks}")
        return ", ".join(words)

    def with_hint(self, hint: Hint) -> Shape:
        """The run's shape, its backward split as the hint says."""
        return replace(self.shape, kinds=kinds_of(hint))


def read_run(recording: Recording, steps: range | None = None) -> RecordedRun:
    """Find out what a recording's run was; of its steps that train those asked for, None being all.
    Evaluations are no steps to replay: they have no backward.

    Raises RrfpError when the trace does not tell, or no step is whole or has a backward, and
    UsageError when the run has none of the steps asked for.
    """
    layout = _Layout(recording)
    windows = step_windows(recording)
    begun = {task.step for records in recording.ranks for task in records.tasks}
    found = begun | windows.keys()
    if found and all(map(is_evaluation, found)):
        raise RrfpError("the trace has evaluations only, and only steps that train are replayed")
    begun = {step for step in begun if not is_evaluation(step)}
    asked = sorted(
        step for step in found if not is_evaluation(step) and (steps is None or step in steps)
    )
    if not asked:
        if steps is None or not begun:
            raise RrfpError("the trace has no steps; the run ended before its first one did")
        raise UsageError(
            "the trace has none of the steps asked for; it has those from "
            f"{min(begun)} to {max(begun)}"
        )
    finished = [step for step in asked if step in windows]
    if not finished:
        raise RrfpError(f"none of the steps {asked[0]}:{asked[-1] + 1} was finished by every rank")
    by_step = layout.steps({step: windows[step] for step in finished})
    shape = layout.shape(by_step)
    whole = [step for step in by_step if _is_whole(step, shape)]
    if not whole:
        raise RrfpError("no step of the trace has all of its tasks; see 'rrfp trace check'")
    settings = _Settings(recording)
    bounds = settings.bounds(shape)
    kept = {each.step for each in whole}
    return RecordedRun(
        shape,
        _policy(settings, bounds, shape, whole[0]),
        settings.text("hint"),
        bounds,
        settings.is_blocking,
        settings.computes_on_cpu and layout.shares_hosts,
        layout.num_members,
        tuple(whole),
        tuple(step for step in asked if step not in kept),
    )


def decisions(
    stimuli: Iterable[StimulusRecord], dispatcher: Dispatcher
) -> Iterator[tuple[StimulusRecord, Task | None]]:
    """Hand one step's stimuli to a fresh dispatcher, in their recorded order: each with the task
    that the dispatcher runs then, if any."""
    for record in stimuli:
        task = None
        for instruction in dispatcher.handle(record.time_ns, stimulus_of(record)):
            if isinstance(instruction, RunTask):
                task = instruction.task
        yield record, task


def redispatch(
    run: RecordedRun, members: Members, member: int = 0
) -> Iterator[tuple[StimulusRecord, Task | None]]:
    """Decide a step of one rank again: what it took in, each with the task that it then ran.

    Raises RrfpError at the first task that is not the one that was recorded, and for a run of
    Megatron's own schedules, which no dispatcher steered.
    """
    rank = members[member]
    split = run.shape.splits_backward
    num_decided = 0
    for stimulus, decided in decisions(rank.stimuli, dispatcher_of(run, members, member)):
        if decided is not None:
            record = rank.tasks[num_decided]
            if decided != task_of(record):
                raise RrfpError(
                    f"what rank {rank.info.rank} took in leads to "
                    f"{format_task(decided, split=split)} where it ran "
                    f"{format_task(task_of(record), split=split)} in {step_name(record.step)}: its "
                    "settings are not those of the trace, or it is of another version of rrfp; "
                    "see 'rrfp trace check' and record it again"
                )
            num_decided += 1
        yield stimulus, decided
    if num_decided < len(rank.tasks):
        raise RrfpError(
            f"what the dispatcher of rank {rank.info.rank} took in leads to {num_decided} "
            f"of the {len(rank.tasks)} tasks that it ran; see 'rrfp trace check'"
        )


def dispatcher_of(run: RecordedRun, members: Members, member: int = 0) -> Dispatcher:
    """A dispatcher as that rank had it at the start of a step."""
    rank = members[member]
    if not rank.stimuli:
        raise RrfpError(
            f"rank {rank.info.rank} recorded nothing that a dispatcher took in, as Megatron's own "
            "schedules have none; replay a run of --dispatch ready or fixed"
        )
    if not all(0 <= stimulus.member < len(members) for stimulus in rank.stimuli):
        raise RrfpError(
            f"rank {rank.info.rank} took in what arrived at a rank that is not of its group; see "
            "'rrfp trace check'"
        )
    group = Group(len(members), member == 0, run.policy.rule) if rank.is_in_group else None
    return run.policy.dispatcher(run.shape, rank.info.pp_rank, group)


class _Layout:
    """Who ran what, together with whom."""

    def __init__(self, recording: Recording) -> None:
        if not recording.ranks:
            raise RrfpError("the trace has no ranks; see 'rrfp trace check'")
        self._settings = _Settings(recording)
        infos = [records.info for records in recording.ranks]
        missing = sorted(expected_ranks(recording.settings) - {info.rank for info in infos})
        if missing:
            raise RrfpError(
                f"the trace lacks ranks of its run, rank {missing[0]} for one, and only whole runs "
                "are replayed; see 'rrfp trace check'"
            )
        self._num_ranks = 1 + max(info.pp_rank for info in infos)
        self._stages = {info.pp_rank: info.stages for info in infos}
        hosts = [info.host for info in infos]
        self.shares_hosts = len(set(hosts)) < len(hosts)
        # Replicas that share experts run in step: so many neighbouring ones as experts span.
        num_coupled = self._settings.number("ep") or 1
        replicas: defaultdict[int, defaultdict[int, list[RankRecords]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for records in recording.ranks:
            info = records.info
            replicas[info.dp_rank // num_coupled][info.pp_rank].append(records)
        self._replicas = [
            [
                sorted(replica[pp_rank], key=lambda records: records.info.rank)
                for pp_rank in range(self._num_ranks)
            ]
            for _, replica in sorted(replicas.items())
        ]
        sizes = {len(members) for replica in self._replicas for members in replica}
        self.num_members = max(sizes)
        if len(sizes) > 1:
            raise RrfpError(
                f"the trace lacks ranks: some stages have {min(sizes)} and some "
                f"{max(sizes)} of them; see 'rrfp trace check'"
            )

    def steps(self, windows: dict[int, Window]) -> list[StepRecords]:
        """The records of these steps."""
        by_step = [
            [[_split(records) for records in members] for members in replica]
            for replica in self._replicas
        ]
        return [
            StepRecords(
                step,
                window,
                tuple(
                    tuple(tuple(rank[step] for rank in members) for members in replica)
                    for replica in by_step
                ),
            )
            for step, window in windows.items()
        ]

    def shape(self, steps: list[StepRecords]) -> Shape:
        """The shape of the step that has most tasks, of those that train: a trace of an earlier
        version may number evaluations among them."""
        tasks = max(
            ([task for members in each.replicas[0] for task in members[0].tasks] for each in steps),
            key=lambda tasks: (any(task.kind == Kind.B for task in tasks), len(tasks)),
        )
        if not tasks:
            raise RrfpError("no step of the trace has any task; see 'rrfp trace check'")
        found = {task.kind for task in tasks}
        kinds = next(
            (k for k in (FORWARD_ONLY, WHOLE_BACKWARD, SPLIT_BACKWARD) if found == set(k)), None
        )
        if kinds is None:
            raise RrfpError(
                f"the steps of the trace have tasks of kind {', '.join(sorted(found))}, which are "
                "not F, F B or F B W; see 'rrfp trace check'"
            )
        if kinds == FORWARD_ONLY:
            raise RrfpError("the steps of the trace have no backward; choose a run that trains")
        num_chunks = len(self._stages[0])
        num_microbatches = 1 + max(task.microbatch for task in tasks)
        for placement in Placement:
            if placement is Placement.V and num_chunks != 2:
                continue
            shape = Shape(self._num_ranks, num_microbatches, num_chunks, placement, kinds)
            if all(shape.stages_of(rank) == stages for rank, stages in self._stages.items()):
                return shape
        raise RrfpError(
            f"the stages of pipeline rank 0 are {', '.join(map(str, self._stages[0]))}: the chunks "
            "of the trace lie neither in a loop nor in a V"
        )


def _split(records: RankRecords) -> defaultdict[int, RankStep]:
    """A rank's records by step; a step that it did not record is empty."""
    is_in_group = bool(records.agreements)
    steps: defaultdict[int, RankStep] = defaultdict(
        lambda: RankStep(records.info, 0, [], [], [], [], is_in_group)
    )
    for phase in records.phases:
        if phase.phase == Phase.SCHEDULE:
            steps[phase.step] = RankStep(records.info, phase.start_ns, [], [], [], [], is_in_group)
    for task in records.tasks:
        steps[task.step].tasks.append(task)
    for wait in records.waits:
        steps[wait.step].waits.append(wait)
    for receive in records.receives:
        steps[receive.step].receives.append(receive)
    for stimulus in records.stimuli:
        steps[stimulus.step].stimuli.append(stimulus)
    return steps


def _is_whole(records: StepRecords, shape: Shape) -> bool:
    """Whether every rank ran each task of the shape once."""
    return all(
        len(rank.tasks) == shape.num_tasks_of_a_rank
        and {(task.stage, task.kind, task.microbatch) for task in rank.tasks}
        == set(shape.tasks_of(pp_rank))
        for replica in records.replicas
        for pp_rank, members in enumerate(replica)
        for rank in members
    )


class _Settings:
    """The settings of a run, as its trace has them."""

    def __init__(self, recording: Recording) -> None:
        found = recording.settings.get("settings")
        if not isinstance(found, dict):
            raise RrfpError(
                "the trace does not tell the settings of its run; record one with 'rrfp train'"
            )
        self._values: dict[str, Any] = found
        self._is_simulated = recording.settings.get("simulated") is True

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self._strange(name, value)
        return value

    def number(self, name: str) -> int | None:
        """A whole number from 1 on, None where it was not given."""
        value = self._values.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise self._strange(name, value)
        return value

    def choice(self, name: str, choices: type[_Choice], default: _Choice) -> _Choice:
        """One of the choices; the default in traces from before there was one."""
        value = self._values.get(name, default)
        if value not in list(choices):
            raise self._strange(name, value)
        return choices(value)

    @property
    def is_blocking(self) -> bool:
        return self._values.get("dispatch") == _MEGATRON or self._values.get("links") == "blocking"

    @property
    def dispatch(self) -> Dispatch:
        if self._values.get("dispatch") == _MEGATRON:
            return Dispatch.FIXED
        return self.choice("dispatch", Dispatch, Dispatch.READY)

    @property
    def computes_on_cpu(self) -> bool:
        return not self._is_simulated and self._values.get("device", "cpu") == "cpu"

    def bounds(self, shape: Shape) -> Bounds:
        """In a simulated `ready` run no limit is none; in one of 'rrfp train' it is the usual."""
        hold = self.number("hold")
        is_unbound = self._is_simulated and self.dispatch is Dispatch.READY
        return Bounds(
            self.number("limit"),
            None if hold is None else hold * shape.num_chunks,
            None if is_unbound else DEFAULT_LIMIT,
        )

    @staticmethod
    def _strange(name: str, value: object) -> RrfpError:
        return RrfpError(
            f"the settings of the trace say {name} = {value!r}, which no run has; record it with "
            "'rrfp train'"
        )


def _policy(settings: _Settings, bounds: Bounds, shape: Shape, step: StepRecords) -> Policy:
    """What steered every rank of the run."""
    name = settings.text("hint")
    hint = hint_named(name, shape) if name in HINT_NAMES else _order_as_run(name, shape, step)
    order = order_of(hint, shape)
    if order.shape.kinds != shape.kinds:
        raise RrfpError(
            f"the tasks of the trace are {' '.join(shape.kinds)} and its hint, {name}, has "
            f"{' '.join(order.shape.kinds)}; see 'rrfp trace check'"
        )
    return Policy(
        order if isinstance(hint, Order) else hint,
        order,
        settings.dispatch,
        *bounds.of(settings.dispatch),
        settings.choice("w", WeightGradients, WeightGradients.IDLE),
        settings.choice("agreement", AgreementRule, AgreementRule.INTERSECTION),
    )


def _order_as_run(name: str, shape: Shape, step: StepRecords) -> Order:
    """The order of a file, by the places that a step's tasks had in it."""
    rows = []
    for pp_rank, members in enumerate(step.replicas[0]):
        by_place = sorted(members[0].tasks, key=lambda task: task.hint_position)
        if [task.hint_position for task in by_place] != list(range(shape.num_tasks_of_a_rank)):
            raise RrfpError(
                f"the trace does not tell where the tasks of pipeline rank {pp_rank} stand in its "
                f"order {name}; see 'rrfp trace check'"
            )
        rows.append(tuple(map(task_of, by_place)))
    return Order(name, shape, tuple(rows))

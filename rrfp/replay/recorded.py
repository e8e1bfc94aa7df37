"""A recorded run: its shape, its policy, its groups, and the records of its steps.

The shape comes from the records themselves, and the policy from the run's description.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, TypeVar

from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.bounds import ActivationSizes, Rows
from rrfp.schedule.hints import Order
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import (
    KNOBS,
    PAPER_LIMIT,
    Bytes,
    Dispatch,
    Hold,
    Policy,
    check_hold_is_absolute,
    counts_microbatches,
    format_bytes,
    usual_limit,
)
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Shape, shape_of_stages
from rrfp.schedule.tasks import Kind
from rrfp.simulate.memory_budgets import by_rank, peak_bytes_of_1f1b
from rrfp.trace.perfetto.format import MOST_OF_A_KIND
from rrfp.trace.records import (
    Phase,
    RankInfo,
    RankRecords,
    ReceiveRecord,
    Recording,
    StimulusRecord,
    TaskRecord,
    WaitRecord,
    Window,
    activation_changes,
    are_sizes_known,
    is_evaluation,
    step_name,
    step_windows,
    task_of,
    tasks_with_wrong_bytes,
)
from rrfp.trace.run_dir import expected_ranks
from rrfp.trace.run_json import description_of_steps, last_policy_begins, stated_policy

# The records of one step, arranged by replica, pipeline rank and group.


@dataclass(frozen=True, slots=True)
class RankStep:
    """The records of one rank in one step, in the order in which they were made."""

    info: RankInfo
    entry_ns: int
    """The time at which it entered the schedule."""
    tasks: list[TaskRecord]
    waits: list[WaitRecord]
    receives: list[ReceiveRecord]
    stimuli: list[StimulusRecord]
    is_in_group: bool
    """Whether it agreed with other ranks on what to run."""
    budget_bytes: int = 0
    """The rank's bound in bytes; 0 without one."""
    unknown_sizes: int = 0
    """The number of activation sizes that were not known when the step ran under a bound in
    bytes."""


Members = tuple[RankStep, ...]
"""The ranks that run a pipeline rank's tasks together; the first one leads."""


@dataclass(frozen=True, slots=True)
class StepRecords:
    """One step that every rank finished."""

    step: int
    window: Window
    replicas: tuple[tuple[Members, ...], ...]
    """By data-parallel replica and pipeline rank. Replicas that share experts count as one."""

    def is_whole(self, shape: Shape) -> bool:
        """True if every rank ran each task of the shape exactly once."""
        return all(
            len(rank.tasks) == shape.num_tasks_of_a_rank
            and {(task.stage, task.kind, task.microbatch) for task in rank.tasks}
            == set(shape.tasks_of(pp_rank))
            for replica in self.replicas
            for pp_rank, members in enumerate(replica)
            for rank in members
        )


def split_by_step(records: RankRecords) -> defaultdict[int, RankStep]:
    """Divide a rank's records by step, into a dictionary that has an empty entry for any other
    step. Records without a step's schedule phase have an entry time of 0."""
    is_in_group = bool(records.agreements)
    steps: defaultdict[int, RankStep] = defaultdict(
        lambda: RankStep(records.info, 0, [], [], [], [], is_in_group)
    )
    for phase in records.phases:
        if phase.phase == Phase.SCHEDULE:
            steps[phase.step] = RankStep(
                *(records.info, phase.start_ns, [], [], [], [], is_in_group),
                *(phase.budget_bytes, phase.unknown_sizes),
            )
    for task in records.tasks:
        steps[task.step].tasks.append(task)
    for wait in records.waits:
        steps[wait.step].waits.append(wait)
    for receive in records.receives:
        steps[receive.step].receives.append(receive)
    for stimulus in records.stimuli:
        steps[stimulus.step].stimuli.append(stimulus)
    return steps


# The activation sizes of a recorded step, and the bounds in force.


def sizes_of_rank(shape: Shape, rank: RankStep) -> ActivationSizes:
    """Compute the activation sizes of one rank's chunks in a step from the bytes recorded with its
    tasks; zeros where they are not known. What F keeps is at least what B leaves for W.

    Raises RrfpError for bytes that do not add up.
    """
    if wrong := tasks_with_wrong_bytes(rank.tasks):
        raise RrfpError(
            f"the bytes that rank {rank.info.rank} held in {step_name(wrong[0].step)} do not add "
            "up; see 'rrfp trace check'"
        )
    kept = [[0] * shape.num_microbatches for _ in range(shape.num_chunks)]
    owed = [[0] * shape.num_microbatches for _ in range(shape.num_chunks)]
    for task, change, left in activation_changes(rank.tasks):
        chunk = shape.chunk_of(task.stage)
        if task.kind == Kind.F:
            kept[chunk][task.microbatch] = change
        elif task.kind == Kind.B:
            owed[chunk][task.microbatch] = left
            # Where W needs more than F kept, that is what a bound must leave room for.
            kept[chunk][task.microbatch] = max(kept[chunk][task.microbatch], left)
    return ActivationSizes(kept, owed if shape.splits_backward else None)


def sizes_of_replica(shape: Shape, replica: Sequence[Members]) -> ActivationSizes | None:
    """Compute the activation sizes of a replica's stages in a step, the largest where several ranks
    run a stage; None where they are not known. Raises RrfpError for bytes that do not add up."""
    if not are_any_known(rank for members in replica for rank in members):
        return None
    of_ranks = [_largest([sizes_of_rank(shape, rank) for rank in members]) for members in replica]
    places = [(shape.rank_of(stage), shape.chunk_of(stage)) for stage in range(shape.num_stages)]
    kept = [of_ranks[rank].activations[chunk] for rank, chunk in places]
    owed = [
        (of_ranks[rank].pending_w or of_ranks[rank].activations)[chunk] for rank, chunk in places
    ]
    return ActivationSizes(kept, owed if shape.splits_backward else None)


def budgets_of(replica: Sequence[Members]) -> tuple[int, ...]:
    """Return the bounds in bytes of a step by pipeline rank, the least where several ranks run its
    tasks; empty if any rank had none."""
    found = tuple(min(rank.budget_bytes for rank in members) for members in replica)
    return found if all(found) else ()


def knows_sizes(replica: Sequence[Members]) -> bool:
    """True if a replica's sizes in a step are recorded and are those of its microbatches. Under a
    bound in bytes, one of a kind that was never measured is given all of the bound, and the step
    does not count."""
    ranks = [rank for members in replica for rank in members]
    return are_any_known(ranks) and not any(rank.unknown_sizes for rank in ranks)


def are_any_known(ranks: Iterable[RankStep]) -> bool:
    """True if any of these ranks recorded the bytes that its tasks kept."""
    return any(are_sizes_known(rank.tasks) for rank in ranks)


def _largest(found: Sequence[ActivationSizes]) -> ActivationSizes:
    """Return the largest sizes of several ranks that run the same tasks, by chunk and
    microbatch."""
    if len(found) == 1:
        return found[0]
    owed = [sizes.pending_w for sizes in found if sizes.pending_w is not None]
    return ActivationSizes(
        _largest_rows([sizes.activations for sizes in found]), _largest_rows(owed) or None
    )


def _largest_rows(found: Sequence[Rows]) -> list[list[int]]:
    """Return the largest entries of tables of the same form."""
    return [[max(each) for each in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]


# The policy of a recorded run.
#
# The run's description (`run.json`, and the trace) has it as `policy`, in earlier versions among
# the `settings`. For an order from a file it has only the path; the order follows from the
# positions that were recorded for the tasks.


_Choice = TypeVar("_Choice", bound=StrEnum)


class RecordedSettings:
    """The settings and the policy of a run, as its trace has them."""

    def __init__(self, recording: Recording) -> None:
        found = recording.settings.get("settings")
        if not isinstance(found, dict):
            raise RrfpError(
                "the trace does not tell the settings of its run; record one with 'rrfp train'"
            )
        self._values: dict[str, Any] = found
        self._is_simulated = recording.settings.get("simulated") is True
        self._policy = stated_policy(recording.settings)

    def text(self, name: str) -> str:
        """Return a text of the recorded policy. Raises RrfpError if it is missing or not a text."""
        value = self._policy.get(name)
        if not isinstance(value, str):
            raise self._strange(name, value)
        return value

    def number(self, name: str) -> int | None:
        """Return a setting that is a whole number from 1 on; None where it was not given. Raises
        RrfpError for any other value."""
        return self._whole(name, self._values.get(name))

    def even_layers(self, shape: Shape) -> int | None:
        """Return the number of the model's layers if the stages share them evenly; None otherwise,
        or if the settings do not have it."""
        layers = self._values.get("layers")
        is_even = type(layers) is int and layers > 0 and layers % shape.num_stages == 0
        is_uneven = self._values.get("uneven_stages") or isinstance(self._values.get("layout"), str)
        return layers if is_even and not is_uneven else None

    def _whole(self, name: str, value: object) -> int | None:
        """Return the value unchanged if it is a whole number from 1 on, or None. Raises RrfpError
        for any other value."""
        if value is not None and (type(value) is not int or value < 1):
            raise self._strange(name, value)
        return value

    @property
    def is_blocking(self) -> bool:
        """True if transfers blocked: under Megatron's own schedule, or over blocking links."""
        return self._is_native or self._values.get("links") == "blocking"

    @property
    def _is_native(self) -> bool:
        """True if Megatron's own schedule ran the steps."""
        return self._policy.get("dispatch") == Dispatch.MEGATRON

    @property
    def computes_on_cpu(self) -> bool:
        """True for a run, not a simulation, that computed on the CPU, which is the default."""
        return not self._is_simulated and self._values.get("device", "cpu") == "cpu"

    def knob(self, name: str, shape: Shape) -> Any:
        """Return the value of a policy's knob; the default in traces from before there was one. For
        Megatron's own schedules `dispatch` is `fixed`, as they bind like an order. A fractional
        hold must be whole slots of one chunk. Raises RrfpError for an invalid value, and for a hold
        that is a share of 1F1B's peak."""
        if name == "dispatch" and self._is_native:
            return Dispatch.FIXED
        knob = KNOBS[name]
        value = self._policy.get(name, knob.describe(knob.default))
        with suppress(UsageError):
            if type(value) is str and str in knob.kinds:
                found = knob.read(value, name, in_run=True)
                check_hold_is_absolute(found)
                return found
        if knob.default is None and (value is None or (type(value) is int and value >= 1)):
            return value
        if name == "hold" and type(value) is float and 0 < value <= MOST_OF_A_KIND:
            # A number of slots of one chunk each.
            slots = Fraction(round(value * shape.num_chunks), shape.num_chunks)
            if float(slots) == value:
                return slots
        raise self._strange(name, value)

    @staticmethod
    def _strange(name: str, value: object) -> RrfpError:
        """Make the error for a recorded setting with a value that no run has."""
        return RrfpError(
            f"the settings of the trace say {name} = {value!r}, which no run has; record it with "
            "'rrfp train'"
        )


def policy_of(settings: RecordedSettings, shape: Shape, step: StepRecords) -> Policy:
    """Build the policy of a recorded run, with its order; that of a file follows from the recorded
    positions of the step's tasks. Raises RrfpError if it does not match the records."""
    name = settings.text("hint")
    hint = hint_named(name).for_shape(shape) if name in HINTS else _order_as_run(name, shape, step)
    order = order_of(hint, shape)
    if order.shape.kinds != shape.kinds:
        raise RrfpError(
            f"the tasks of the trace are {' '.join(shape.kinds)} and its hint, {name}, has "
            f"{' '.join(order.shape.kinds)}; see 'rrfp trace check'"
        )
    knobs = {each: settings.knob(each, shape) for each in KNOBS if each != "hint"}
    return Policy(hint=order if isinstance(hint, Order) else hint, order=order, **knobs)


def _order_as_run(name: str, shape: Shape, step: StepRecords) -> Order:
    """Rebuild the order of a file from the positions in it that a step's tasks of the first replica
    have. Raises RrfpError if they are not 0, 1, 2, ... on each rank."""
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


# Who ran what in a recorded run, together with whom, and the shape of its pipeline.


class RecordedLayout:
    """The ranks of a run, arranged by replica, pipeline rank and group."""

    def __init__(self, recording: Recording) -> None:
        if not recording.ranks:
            raise RrfpError("the trace has no ranks; see 'rrfp trace check'")
        self._settings = RecordedSettings(recording)
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
        # Replicas that share experts run in step: as many neighbouring ones as experts span.
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
        """Return the records of the steps with these windows, by replica, pipeline rank and group;
        replicas that share experts count as one."""
        by_step = [
            [[split_by_step(records) for records in members] for members in replica]
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
        """Find the shape of the step with the most tasks, among those with a backward: traces of
        earlier versions number evaluations among the steps that train.

        Raises RrfpError without tasks or backwards, and when the tasks or the stages are of no
        shape.
        """
        tasks = max(
            ([task for members in each.replicas[0] for task in members[0].tasks] for each in steps),
            key=lambda tasks: (any(task.kind == Kind.B for task in tasks), len(tasks)),
        )
        if not tasks:
            raise RrfpError("no step of the trace has any task; see 'rrfp trace check'")
        if all(task.kind == Kind.F for task in tasks):
            raise RrfpError("the steps of the trace have no backward; choose a run that trains")
        return self._shape(tasks)

    def shape_of(self, step: StepRecords) -> Shape:
        """Find the shape of a step, which may be an evaluation. Raises RrfpError when the tasks or
        the stages are of no shape."""
        return self._shape([task for members in step.replicas[0] for task in members[0].tasks])

    def _shape(self, tasks: list[TaskRecord]) -> Shape:
        """Find the shape of a step with these tasks. Raises RrfpError if their kinds are not F, F B
        or F B W, or if the ranks' stages form neither a loop nor a V."""
        found = {task.kind for task in tasks}
        kinds = next(
            (k for k in (FORWARD_ONLY, WHOLE_BACKWARD, SPLIT_BACKWARD) if found == set(k)), None
        )
        if kinds is None:
            raise RrfpError(
                f"the steps of the trace have tasks of kind {', '.join(sorted(found))}, which are "
                "not F, F B or F B W; see 'rrfp trace check'"
            )
        num_microbatches = 1 + max(task.microbatch for task in tasks)
        shape = shape_of_stages(self._stages, num_microbatches, kinds)
        if shape is None:
            raise RrfpError(
                f"the stages of pipeline rank 0 are {', '.join(map(str, self._stages[0]))}: the "
                "chunks of the trace lie neither in a loop nor in a V"
            )
        return shape


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run whose steps can be replayed."""

    shape: Shape
    policy: Policy
    hint_name: str
    is_blocking: bool
    """Whether transfers blocked the compute path, like Megatron's own."""
    is_imported: bool
    """Whether the run was imported. Then messages are not recorded but derived from tasks and
    waits."""
    may_share_cores: bool
    """Several ranks computed on one host's CPU; traces do not tell how many cores it has."""
    num_members: int
    steps: tuple[StepRecords, ...]
    """The steps that every rank finished and that have all tasks of the shape."""
    left_out: tuple[int, ...]
    """The other steps asked for; not those of `without_sizes`."""
    without_sizes: tuple[int, ...] = ()
    """Whole steps that are left out because the bytes of their microbatches were not known yet."""
    layers: int | None = None
    """The number of layers of the model, if the stages share them evenly; None if not known."""

    @property
    def knows_arrivals(self) -> bool:
        """True if the arrival times of messages are known. For an imported run whose transfers do
        not block, only the times of sending and of use are known."""
        return self.is_blocking or not self.is_imported

    @property
    def policy_description(self) -> str:
        """A short description of the policy: `bf ready, limit 32`; other knobs are left out."""
        policy = self.policy
        words = [f"{self.hint_name} {policy.dispatch}"]
        if self.is_blocking:
            words.append("blocking transfers")
        if policy.limit is not None:
            words.append(f"limit {policy.limit}")
        if policy.hold is not None:
            words.append(f"hold {format_hold(policy.hold)}")
        return ", ".join(words)

    def peak_of_1f1b(self) -> int | None:
        """Return the most bytes, over ranks and steps, that 1F1B would have kept at once on a rank,
        with the chunks of each rank as one; None where the run does not record its sizes."""
        sizes = [
            sizes_of_replica(self.shape, replica)
            for step in self.steps
            for replica in step.replicas
        ]
        known = [by_rank(each, self.shape) for each in sizes if each is not None]
        return max(map(peak_bytes_of_1f1b, known), default=None)

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the replica and the pipeline rank of a rank. Raises UsageError if the run has no
        such rank."""
        for number, replica in enumerate(self.steps[0].replicas):
            for pp_rank, members in enumerate(replica):
                if rank in (member.info.rank for member in members):
                    return number, pp_rank
        raise UsageError(f"the run has no rank {rank}; see 'rrfp trace check' for those it has")

    def bounds_under(self, dispatch: Dispatch) -> tuple[int | None, Hold | None]:
        """Return the limit and the hold that the run keeps under another dispatch: its own. But
        from `ready` to `fixed`, the usual limit and the paper's are dropped, as they belong to
        `ready`."""
        own = self.policy
        if own.hold is not None:
            return None, own.hold
        if dispatch is own.dispatch:
            return own.limit, None
        if dispatch is Dispatch.FIXED:
            is_usual = own.limit in (PAPER_LIMIT, usual_limit(own.hint, self.shape))
            return None if is_usual else own.limit, None
        return own.limit, None


def format_hold(hold: Hold) -> str:
    """Format a hold for people: bytes are rounded, with a unit."""
    return format_bytes(hold.num) if isinstance(hold, Bytes) else str(hold)


def read_run(recording: Recording, steps: range | None = None) -> RecordedRun:
    """Interpret a recording as a run that can be replayed. `steps` selects among its training
    steps; None selects all, or those under the last chosen policy. Evaluations, unfinished steps,
    and steps that lack tasks are left out; so are those without known sizes under a hold in bytes,
    if others have them.

    Raises RrfpError when the trace lacks what is needed, when no step is whole or has a backward,
    and when the steps ran under several policies; UsageError when the run has none of the steps
    asked for.
    """
    layout = RecordedLayout(recording)
    windows = step_windows(recording)
    chosen_in = last_policy_begins(recording.settings)
    begun = {task.step for records in recording.ranks for task in records.tasks}
    found = begun | windows.keys()
    if found and all(map(is_evaluation, found)):
        raise RrfpError("the trace has evaluations only, and only steps that train are replayed")
    begun = {step for step in begun if not is_evaluation(step)}
    if steps is None and any(step >= chosen_in for step in windows):
        # Under the hint `auto` the first steps have another policy.
        found = {step for step in found if is_evaluation(step) or step >= chosen_in}
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
    # Of a run that was resumed, only steps under one policy can be replayed together.
    recording = Recording(description_of_steps(recording.settings, finished), recording.ranks)
    by_step = layout.steps({step: windows[step] for step in finished})
    shape = layout.shape(by_step)
    whole = [step for step in by_step if step.is_whole(shape)]
    if not whole:
        raise RrfpError("no step of the trace has all of its tasks; see 'rrfp trace check'")
    settings = RecordedSettings(recording)
    policy = policy_of(settings, shape, whole[0])
    without_sizes: tuple[int, ...] = ()
    if not counts_microbatches(policy.hold):
        told = [step for step in whole if all(knows_sizes(each) for each in step.replicas)]
        # Their microbatches ran one by one, as later ones do not.
        if told:
            without_sizes = tuple(step.step for step in whole if step not in told)
            whole = told
    kept = {each.step for each in whole}.union(without_sizes)
    return RecordedRun(
        shape,
        policy,
        settings.text("hint"),
        settings.is_blocking,
        "imported" in recording.settings,
        settings.computes_on_cpu and layout.shares_hosts,
        layout.num_members,
        tuple(whole),
        tuple(step for step in asked if step not in kept),
        without_sizes,
        settings.even_layers(shape),
    )

"""A change to the replay of a run: of its policy, or of what slowed it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from rrfp.errors import UsageError
from rrfp.replay.measured import MeasuredStep
from rrfp.replay.recorded import RecordedRun, format_hold
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import Hint, WeightGradients
from rrfp.schedule.policy import (
    KNOBS,
    Auto,
    Bytes,
    Dispatch,
    Hold,
    Policy,
    ShareOf1F1B,
    counts_microbatches,
    split_knobs,
)
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.simulate.step import SimulatedStep, simulate_step


@dataclass(frozen=True, slots=True, init=False)
class Change:
    """A change to a replay. A changed policy is `ready` unless it says `fixed`, keeps the
    bound that the run was given unless it has its own, and runs over asynchronous links."""

    knobs: Mapping[str, Any]
    """The changed knobs of the policy. A hold may be a share of what 1F1B would have kept."""
    unbound: bool = False
    """Without the bound that the run was given."""
    without_jitter: bool = False
    median_stage: int | None = None
    """Make this stage as fast as the median stage."""
    free_links: bool = False
    usual_link: tuple[int, int] | None = None
    """Make the messages from the first pipeline rank to the second as fast as the median link's."""
    usual_rank: int | None = None
    """Make the tasks of this rank, and of those that run them with it, as fast as in the median of
    the other replicas; in a run of one replica, as fast as the median one of those that run them
    with it."""
    usual_replica: int | None = None
    """Make all ranks of this replica as fast as those of the median one of the others."""
    even_microbatches: bool = False
    """Let all microbatches weigh the same."""
    usual_microbatches: bool = False
    """Make heavy microbatches as light as the median one."""
    admit: Admit = Admit.GIVEN
    """Admit the microbatches in this order, by what each took."""
    even_stages: bool = False
    """Even out the stages' work: in whole layers where the run tells how many it has."""

    def __init__(
        self,
        hint: Hint | None = None,
        dispatch: Dispatch | None = None,
        *,
        knobs: Mapping[str, Any] = MappingProxyType({}),
        **changes: Any,
    ) -> None:
        """A change by the names of knobs and of the fields above. A knob of None stays as it is."""
        named, others = split_knobs({"hint": hint, "dispatch": dispatch, **changes})
        given = {name: value for name, value in named.items() if value is not None}
        object.__setattr__(self, "knobs", {**knobs, **given})
        defaults = {each.name: each.default for each in fields(self) if each.name != "knobs"}
        if unknown := others.keys() - defaults.keys():
            raise TypeError(f"Change has no field {sorted(unknown)}")
        for name, value in {**defaults, **others}.items():
            object.__setattr__(self, name, value)

    @property
    def hint(self) -> Hint | None:
        """The changed hint; None if the hint stays."""
        return self.knobs.get("hint")

    @property
    def has_policy(self) -> bool:
        """True if the change has a knob, or drops the run's bound."""
        return self.unbound or bool(self.knobs)

    def check(self, run: RecordedRun) -> None:
        """Raise UsageError for a stage, link, rank or replica that the run does not have, for a
        rank or replica without peers to be compared with, and for `--admit plan`."""
        shape, num_replicas = run.shape, len(run.steps[0].replicas)
        if self.admit is Admit.PLAN:
            raise UsageError(
                "--admit plan searches on what is known before a step, and a recorded one tells "
                "what it took; choose --admit pyramid, or rrfp simulate --costs RUN --admit plan"
            )
        if self.median_stage is not None and not 0 <= self.median_stage < shape.num_stages:
            raise UsageError(
                f"the run has no stage {self.median_stage}; choose one from 0 to "
                f"{shape.num_stages - 1}"
            )
        if self.usual_link is not None and (
            not 0 <= self.usual_link[0] < shape.num_ranks
            or self.usual_link[1] not in shape.neighbors(self.usual_link[0])
        ):
            sender, receiver = self.usual_link
            raise UsageError(
                f"the run has no link from pipeline rank {sender} to {receiver}; see 'rrfp analyze "
                "misalignment' for those that it has"
            )
        if self.usual_replica is not None and not 0 <= self.usual_replica < num_replicas:
            raise UsageError(
                f"the run has no replica {self.usual_replica}; choose one from 0 to "
                f"{num_replicas - 1}"
            )
        if self.usual_rank is not None:
            run.place_of(self.usual_rank)
        if self.usual_replica is not None and num_replicas == 1:
            raise UsageError("the run has one replica, which has no peers; choose another change")
        if self.usual_rank is not None and num_replicas == run.num_members == 1:
            raise UsageError(
                "the run has one replica, and one rank for each task, so that its ranks have no "
                "peers; choose another change"
            )

    def policy(self, run: RecordedRun) -> tuple[Policy, Shape]:
        """Return the changed policy, and the shape whose backward is split as it says. Without a
        dispatch the policy is `ready`, and without a bound it keeps that of the run, unless
        `unbound`. Other knobs of the run stay only under `ready`.

        Raises UsageError for a hint that does not fit the shape, for bounds that exclude each
        other, and for a binding order that deadlocks or exceeds a bound.
        """
        own = run.policy
        hint = self.hint or own.hint
        dispatch = self.knobs.get("dispatch", Dispatch.READY)
        limit, hold = self.knobs.get("limit"), self.knobs.get("hold")
        hold = None if hold is None else absolute(hold, run)
        if limit is None and hold is None and not self.unbound:
            limit, hold = run.bounds_under(dispatch)
        is_fixed = dispatch is Dispatch.FIXED
        # A run that an order steered had no bound of `ready` dispatch to keep.
        by_shape = (
            limit is None and hold is None and not self.unbound and dispatch is not own.dispatch
        )
        kept: dict[str, Any] = {}
        if not is_fixed:
            kept = own.values()
            if not hint.ranks_weight_gradients:
                kept["w"] = WeightGradients.IDLE
        bounds = {"hint": hint, "dispatch": dispatch, "limit": limit, "hold": hold}
        policy = Policy(
            **{**kept, **self.knobs, **bounds}, limits_by_shape=by_shape and not is_fixed
        )
        return fitted(policy, run.shape, counts_places=is_fixed)

    def apply(self, step: MeasuredStep, run: RecordedRun) -> MeasuredStep:
        """Return the step with every change but that of the policy: those of ranks, replicas and
        links first, free links last. A rank is compared with the other replicas or, in a run of
        one, with its group. The change is not checked."""
        if self.usual_rank is not None:
            replica, pp_rank = run.place_of(self.usual_rank)
            if len(step.replicas) > 1:
                step = step.with_usual_ranks(replica, [pp_rank], run.shape)
            else:
                step = step.with_usual_member(self.usual_rank)
        if self.usual_replica is not None:
            pp_ranks = range(run.shape.num_ranks)
            step = step.with_usual_ranks(self.usual_replica, pp_ranks, run.shape)
        if self.usual_link is not None:
            step = step.with_usual_link(self.usual_link, run.shape)
        if self.even_microbatches:
            step = step.with_even_microbatches()
        if self.usual_microbatches:
            step = step.with_usual_microbatches()
        if self.admit is Admit.PYRAMID:
            step = step.with_pyramid()
        if self.even_stages:
            step = step.with_even_stages(run.layers, run.shape)
        if self.median_stage is not None:
            step = step.with_median_stage(self.median_stage)
        if self.without_jitter:
            step = step.without_jitter()
        return step.with_free_links() if self.free_links else step

    @property
    def flags(self) -> str:
        """The flags of `rrfp analyze whatif` that make this change, in one line; empty for no
        change. Without the run's bound they have `--limit none`."""
        words = []
        stated = {name: KNOBS[name].describe(value) for name, value in self.knobs.items()}
        if self.unbound:
            stated["limit"] = "none"
        words += [f"--{name} {stated[name]}" for name in KNOBS if name in stated]
        values: tuple[tuple[str, object], ...] = (
            ("usual-rank", self.usual_rank),
            ("usual-replica", self.usual_replica),
            ("usual-link", self.usual_link and f"{self.usual_link[0]}-{self.usual_link[1]}"),
            ("median-stage", self.median_stage),
            ("admit", None if self.admit is Admit.GIVEN else self.admit),
        )
        words += [f"--{name} {value}" for name, value in values if value is not None]
        switches = (
            ("even-microbatches", self.even_microbatches),
            ("usual-microbatches", self.usual_microbatches),
            ("even-stages", self.even_stages),
            ("without-jitter", self.without_jitter),
            ("free-links", self.free_links),
        )
        return " ".join([*words, *(f"--{name}" for name, is_on in switches if is_on)])

    def describe(self, run: RecordedRun) -> str:
        """Describe the change in a few words: `bfw, hold 8, free links`; `as it was` if it is none.
        The dispatch is named where it was given or changes. Raises UsageError as `policy` does."""
        words = []
        if self.has_policy:
            name = self.hint.name if self.hint is not None else run.hint_name
            dispatch = self.policy(run)[0].dispatch
            names_dispatch = "dispatch" in self.knobs or dispatch is not run.policy.dispatch
            words.append(f"{name} {dispatch}" if names_dispatch else name)
        if self.unbound and "hold" not in self.knobs:
            words.append("no bound")
        for name, value in self.knobs.items():
            if name == "hold":
                resolved = absolute(value, run)
                known = "" if resolved == value else f" ({format_hold(resolved)})"
                words.append(f"hold {format_hold(value)}{known}")
            elif name not in ("hint", "dispatch"):
                words.append(f"{name} {KNOBS[name].describe(value)}")
        if self.without_jitter:
            words.append("without jitter")
        if self.median_stage is not None:
            words.append(f"stage {self.median_stage} as fast as the median")
        if self.usual_rank is not None:
            words.append(f"rank {self.usual_rank} as fast as its peers")
        if self.usual_replica is not None:
            words.append(f"replica {self.usual_replica} as fast as the others")
        if self.even_microbatches:
            words.append("even microbatches")
        if self.usual_microbatches:
            words.append("no heavy microbatches")
        if self.admit is not Admit.GIVEN:
            words.append(f"admitted as a {self.admit}")
        if self.even_stages:
            words.append("even stages")
        if self.usual_link is not None:
            sender, receiver = self.usual_link
            words.append(f"link {sender} to {receiver} as fast as the median")
        if self.free_links:
            words.append("free links")
        return ", ".join(words) or "as it was"


def absolute(hold: Hold, run: RecordedRun) -> Hold:
    """Resolve a share of what 1F1B would have kept in the run to a number of bytes or, where the
    run does not record its sizes, of microbatches (at least one). Any other hold stays."""
    if not isinstance(hold, ShareOf1F1B):
        return hold
    peak = run.peak_of_1f1b()
    if peak is not None:
        return Bytes(max(1, int(hold.factor * peak)))
    num_chunks = run.shape.num_chunks
    num_slots = int(hold.factor * min(run.shape.num_ranks, run.shape.num_microbatches) * num_chunks)
    return Fraction(max(num_chunks, num_slots), num_chunks)


# A recorded run in virtual time: its own tasks, messages and delays, under any policy.
#
# Under the run's own policy a replay takes the measured time again, because what lay between the
# tasks comes from the run too; that shows the replay to be sound. Under another policy the times
# stay as recorded. That may be far off if ranks shared cores: other tasks would have run side by
# side, and taken more or less time.


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
    """Simulate a step of a run with its own task times, delays and messages: under a policy over
    asynchronous links, or by default under the run's own policy over its own links.

    `shape` may split the backward where the run did not; `w_share` is then the weight gradient's
    share of a whole one. Raises UsageError for a hold with which a rank could get stuck, or that
    needs sizes or budgets which the run does not record. The makespan includes the measured tail of
    the step.
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
        StepConditions(
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
    """Arrange recorded times by kind, stage and microbatch; a task that did not run takes 0. A
    backward that was recorded whole is divided, with `w_share` of it for the weight gradient; one
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

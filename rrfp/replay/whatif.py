"""Predicts the step time of a recorded run under another policy, or without a bottleneck.

The run is replayed under its own policy first. What passed between its tasks comes from the run
itself, so this replay should be off by next to nothing. Its error, which the report states, tells
whether the replay is sound, not how well it predicts another policy. Savings compare each step's
replay with the same step's replay as it was, because some steps are long whatever the policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median, median_low

from rrfp.errors import RrfpError, UsageError
from rrfp.replay.bottlenecks import LEAST_EXCESS_OF_STAGE, Structural, structural
from rrfp.replay.change import W_SHARE, Change, replay
from rrfp.replay.measured import MeasuredStep, measure
from rrfp.replay.recorded import RecordedRun, read_run
from rrfp.schedule.named_hints import HINTS, ORDERS
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.simulate.step import SimulatedStep
from rrfp.trace.records import Recording

_LEAST_SAVING = 0.005
"""The smallest saving that the conclusion mentions."""


@dataclass(frozen=True, slots=True)
class Row:
    """The predicted run with one change."""

    what: str
    hint: str
    policy: Policy
    makespan_ns: int
    """The run's replayed time less the saving."""
    saving: float
    """The share of a step's replayed time that this would save, the median over the steps; negative
    for a loss."""
    peak_held: tuple[float, ...]
    """The most activations held in any step, by pipeline rank, in whole-rank microbatches."""
    peak_held_bytes: tuple[int, ...] | None
    """Likewise in bytes; None where the run does not tell its sizes."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A run replayed as it was and with changes; medians over the steps."""

    run: RecordedRun
    measured_ns: int
    replay_error: float
    """How far the replay is off the measured step, either way, as a share of it."""
    as_it_was: Row
    rows: tuple[Row, ...]
    bubble: Structural
    conclusion: str
    """The result in a sentence."""
    caution: str
    """Why the rows may not predict the run, in a sentence; empty if nothing speaks against them."""


def what_if(
    recording: Recording,
    changes: Callable[[RecordedRun], Sequence[Change]] | None = None,
    steps: range | None = None,
    w_share: float | None = None,
) -> WhatIf:
    """Replay a recorded run as it was, and with each of the changes; None takes a sensible set.

    `w_share` is the weight gradient's share of a backward that was recorded whole, under a hint
    that splits it; None means `W_SHARE`. Raises RrfpError when the trace cannot be replayed, and
    UsageError for steps that it lacks, a change that the run cannot have, or a share outside 0 to
    1.
    """
    run = read_run(recording, steps)
    w_share = W_SHARE if w_share is None else w_share
    if not 0 <= w_share <= 1:
        raise UsageError(f"the weight gradient's share is {w_share:g}; it must be from 0 to 1")
    return _WhatIf(run, measure(run), w_share).report(changes)


class _WhatIf:
    """Replays the steps of one run under changes, and compares them with the run as it was."""

    def __init__(self, run: RecordedRun, steps: list[MeasuredStep], w_share: float) -> None:
        if any(step.window_ns <= 0 for step in steps):
            raise RrfpError("the steps take no time in this trace; see 'rrfp trace check'")
        self._run = run
        self._steps = steps
        self._w_share = w_share
        self._own_ns = [step.makespan_ns for step in self._play(Change())]

    def report(self, changes: Callable[[RecordedRun], Sequence[Change]] | None) -> WhatIf:
        """Replay all changes, and compare them with the run as it was. `changes` makes them from
        the run; None takes a sensible set."""
        run, steps = self._run, self._steps
        chosen = changes(run) if changes is not None else self._sensible()
        rows = [self._row(change) for change in chosen]
        return WhatIf(
            run,
            int(median(step.window_ns for step in steps)),
            median(
                abs(own_ns - step.window_ns) / step.window_ns
                for own_ns, step in zip(self._own_ns, steps, strict=True)
            ),
            self._row(Change()),
            tuple(rows),
            structural(run, steps),
            self._conclusion(chosen, rows),
            self._caution(chosen),
        )

    def _play(self, change: Change) -> list[SimulatedStep]:
        """Simulate all steps with a change. Raises UsageError for a change that the run cannot
        have."""
        run = self._run
        change.check(run)
        policy, shape = change.policy(run) if change.has_policy else (None, None)
        return [
            replay(run, change.apply(step, run), policy, shape, self._w_share)
            for step in self._steps
        ]

    def _row(self, change: Change) -> Row:
        """Replay a change, and summarize its median saving and its largest peaks of memory (in
        bytes only if all sizes are known)."""
        run = self._run
        played = self._play(change)
        saving = _saving(self._own_ns, [step.makespan_ns for step in played])
        peaks = zip(*(step.peak_held for step in played), strict=True)
        in_bytes = zip(*(step.peak_held_bytes for step in played), strict=True)
        return Row(
            change.describe(run),
            change.hint.name if change.hint is not None else run.hint_name,
            change.policy(run)[0] if change.has_policy else run.policy,
            round(median(self._own_ns) * (1 - saving)),
            saving,
            tuple(max(held) / run.shape.num_chunks for held in peaks),
            tuple(map(max, in_bytes)) if self._knows_sizes else None,
        )

    def _sensible(self) -> list[Change]:
        """Choose the changes to replay by default: the paper's hints and a usual order, where they
        differ from the run's policy, then the removal of jitter, of a slow stage and of the time of
        messages."""
        run = self._run
        changes = [Change(HINTS["bf"])]
        changes.append(Change(HINTS["bfw" if run.shape.num_chunks == 1 else "bfw-deep"]))
        for name in ("zb-v", "interleaved", "1f1b"):
            if ORDERS[name].fits(run.shape):
                changes.append(Change(ORDERS[name].for_shape(run.shape), Dispatch.FIXED))
                break
        changes = [change for change in changes if self._is_other(change)]
        changes.append(Change(without_jitter=True))
        if self._slow_stage is not None:
            changes.append(Change(median_stage=self._slow_stage))
        if run.shape.num_ranks > 1:
            changes.append(Change(free_links=True))
        return changes

    def _is_other(self, change: Change) -> bool:
        """True if a changed policy can keep the run's bound, and differs in hint or dispatch from
        the run's own, or the run's transfers blocked."""
        run = self._run
        try:
            policy, _ = change.policy(run)
        except UsageError:
            return False
        own = run.policy
        return run.is_blocking or (policy.hint, policy.dispatch) != (own.hint, own.dispatch)

    def _conclusion(self, changes: Sequence[Change], rows: Sequence[Row]) -> str:
        """State the saving of the best changed policy, or that it saves nothing or below 0.5%, and
        the share of a slow stage in what remains. Empty if no change is of the policy. For that
        share it replays the best one again, with and without the slow stage."""
        policies = [
            (row, change) for row, change in zip(rows, changes, strict=True) if change.has_policy
        ]
        if not policies:
            return ""
        best, change = max(policies, key=lambda each: each[0].saving)
        if best.saving <= 0:
            return f"{best.what} would save nothing: no policy here is faster than the run's own."
        if best.saving < _LEAST_SAVING:
            return (
                f"{best.what} would save less than {_LEAST_SAVING:.1%}, and no policy here would "
                "save more."
            )
        saved = f"You would save {best.saving:.0%} with {best.what}"
        if change.median_stage is not None:
            return f"{saved}."
        stage = self._slow_stage
        if stage is None:
            return f"{saved}; no stage has much more work than the median."
        times_ns, helped_ns = (
            [step.makespan_ns for step in self._play(each)]
            for each in (change, replace(change, median_stage=stage))
        )
        helped = _saving(times_ns, helped_ns)
        if helped < _LEAST_SAVING:
            return (
                f"{saved}; the busiest stage, {stage}, as fast as the median would then save less "
                f"than {_LEAST_SAVING:.1%}."
            )
        return f"{saved}; {helped:.0%} of what remains is stage {stage}, slower than the median."

    def _caution(self, changes: Sequence[Change]) -> str:
        """Warn that the ranks may have shared cores, if so and a policy changes; otherwise return
        an empty text."""
        if not (self._run.may_share_cores and any(change.has_policy for change in changes)):
            return ""
        return (
            "Task times are as recorded. If the ranks shared cores, another policy would have "
            "changed them, and its row can be far off."
        )

    @cached_property
    def _knows_sizes(self) -> bool:
        """True if the activation sizes of all steps and replicas are known."""
        return all(replica.sizes is not None for step in self._steps for replica in step.replicas)

    @cached_property
    def _slow_stage(self) -> int | None:
        """The stage whose tasks take the most time, if that is over 2% above the median stage; else
        None."""
        totals_ns = [0] * self._run.shape.num_stages
        for step in self._steps:
            for replica in step.replicas:
                for task, time_ns in replica.durations_ns.items():
                    totals_ns[task.stage] += time_ns
        most_ns = max(totals_ns)
        is_slow = most_ns > (1 + LEAST_EXCESS_OF_STAGE) * median_low(totals_ns)
        return totals_ns.index(most_ns) if is_slow else None


def _saving(before_ns: Sequence[int], after_ns: Sequence[int]) -> float:
    """Return the share of a step's time that is saved, the median over the steps; negative for a
    loss."""
    return median(1 - after / before for before, after in zip(before_ns, after_ns, strict=True))

"""The results of a race: turns and modeled times, combined into rows.

Ratios are paired: a round's step time of one system over that of another in the same round, with
the same costs and jitter, or over that step's lower bound; then the median over rounds. Intervals
are 95% bootstrap intervals of the median (`rrfp.analyze.compare`)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from rrfp.analyze.compare import Estimate, estimate, resampled_medians
from rrfp.race.entries import Failure, Turn
from rrfp.race.lineup import Lineup, LineupRow
from rrfp.race.runner import ModeledTimes
from rrfp.schedule.admission import Admit
from rrfp.schedule.policy import hold_as_json

MOST_DIFFERENCE = 1e-5
"""Largest accepted gradient difference relative to the norm; the order of sums changes last
bits."""


@dataclass(frozen=True, slots=True)
class ResultRow:
    """The results of a system in a case. None stands for unknown: no turn has ended, the gradients
    are not known to agree, or the simulator does not know the order."""

    lineup_row: LineupRow
    steps: int
    """Number of completed turns."""
    step_time_s: Estimate | None
    ratio_to_megatron: Estimate | None
    """Speedup over Megatron's 1F1B: Megatron's time over this system's."""
    ratio_to_floor: Estimate | None
    ratio_to_load: Estimate | None
    ratio_to_simulated: Estimate | None
    slowdown: Estimate | None
    """Additional step time over the row's baseline (`LineupRow.against`), as a fraction."""
    compute_s: float | None
    blocking_s: float | None
    coordination_s: float | None
    peak_held: float | None
    peak_held_bytes: int | None
    """Peak bytes by the costs' sizes; None if the costs have no sizes."""
    over_pace: float | None
    """Fraction of tasks whose work exceeded their modeled time."""
    gradients_agree: bool | None
    gradients_same: bool | None
    """True if gradients are bit-identical. Known only for the given admission order, because
    another one sums in another order."""
    gradient_difference: float | None
    error: str | None

    @property
    def label(self) -> str:
        """Name of the row: the system, its memory bound and its admission order."""
        lineup_row = self.lineup_row
        admit = "" if lineup_row.admit is Admit.GIVEN else lineup_row.admit
        return " ".join(filter(None, (lineup_row.system.name, lineup_row.bound, admit)))

    @property
    def is_void(self) -> bool:
        """True if the gradients differ too much from the reference's, so that the times are
        meaningless; False if that is unknown."""
        return self.gradients_agree is False

    @property
    def ratios(self) -> dict[str, Estimate | None]:
        """All ratios by name, the slowdown among them; None for unknown ones."""
        return {
            "ratio_to_megatron": self.ratio_to_megatron,
            "ratio_to_floor": self.ratio_to_floor,
            "ratio_to_load": self.ratio_to_load,
            "ratio_to_simulated": self.ratio_to_simulated,
            "slowdown": self.slowdown,
        }

    def as_json(self) -> dict[str, object]:
        """Return the row as `rrfp bench --format json` prints it. Ratios are medians, with their
        intervals in `intervals`; an infinite gradient difference is null."""
        lineup_row, system, case = self.lineup_row, self.lineup_row.system, self.lineup_row.case
        ratios = self.ratios
        return {
            "preset": lineup_row.preset,
            "system": system.name,
            "hint": None if system.peer else system.policy.hint.name,
            "dispatch": system.dispatch_label,
            "profile": case.profile,
            "pp": case.pp,
            "tp": case.tp,
            "microbatches": case.microbatches,
            "seed": case.seed,
            "task_ms": case.task_ms,
            "chunks": system.chunks,
            "placement": system.placement,
            "limit": lineup_row.limit,
            "hold": hold_as_json(lineup_row.hold),
            "admit": lineup_row.admit,
            "steps": self.steps,
            "step_time_s": None if self.step_time_s is None else self.step_time_s.as_json(),
            **{name: None if each is None else each.median for name, each in ratios.items()},
            "intervals": {
                name: [each.low, each.high] for name, each in ratios.items() if each is not None
            },
            "compute_s": self.compute_s,
            "blocking_s": self.blocking_s,
            "coordination_s": self.coordination_s,
            "peak_held": self.peak_held,
            "peak_held_bytes": self.peak_held_bytes,
            "over_pace": self.over_pace,
            "gradients_agree": self.gradients_agree,
            "gradients_same": self.gradients_same,
            # Infinite if the reference is zero, and JSON has no infinity.
            "gradient_difference": self.gradient_difference
            if self.gradient_difference is not None and math.isfinite(self.gradient_difference)
            else None,
            "error": self.error,
        }


def results(
    lineup: Lineup, ended: Iterable[Turn | Failure], models: Mapping[str, ModeledTimes]
) -> list[ResultRow]:
    """Combine turns and modeled times into one row for each row of the lineup. A completed turn
    cancels earlier failures of its entry; turns of entries outside the lineup are ignored."""
    turns: dict[str, dict[int, Turn]] = {name: {} for name in lineup.entries}
    failures: dict[str, Failure] = {}
    for each in ended:
        if each.entry not in turns:
            continue
        if isinstance(each, Failure):
            failures[each.entry] = each
        else:
            # A later completed turn cancels a failure.
            failures.pop(each.entry, None)
            turns[each.entry][each.round] = each
    valid = {name for name, of_entry in turns.items() if _gradients_agree(of_entry)}
    return [
        _row(lineup_row, turns, valid, models[lineup_row.entry], failures.get(lineup_row.entry))
        for lineup_row in lineup.rows
    ]


def _gradients_agree(of_entry: Mapping[int, Turn]) -> bool | None:
    """Return whether an entry's gradients differ from the reference's by at most 1e-5; None before
    round 0."""
    difference = of_entry[0].gradient_difference if 0 in of_entry else None
    return None if difference is None else difference <= MOST_DIFFERENCE


def _row(
    lineup_row: LineupRow,
    turns: Mapping[str, Mapping[int, Turn]],
    valid: set[str],
    model: ModeledTimes,
    failure: Failure | None,
) -> ResultRow:
    """Combine the turns of a row's entry, of Megatron's 1F1B and of its baseline into a result:
    times are medians over rounds, peaks the largest. Ratios compare the rounds that both have run;
    they need gradients that agree, in both entries."""
    own = turns[lineup_row.entry]
    rounds = sorted(own)
    times = {number: own[number].step_time_s for number in rounds}
    is_valid = lineup_row.entry in valid

    def ratio_to(others: Mapping[int, float] | Sequence[float] | None) -> Estimate | None:
        if others is None or not is_valid:
            return None
        known = others if isinstance(others, Mapping) else dict(enumerate(others))
        return _estimate([times[number] / known[number] for number in rounds if number in known])

    def times_of(name: str) -> dict[int, float]:
        """Step times of an entry by round; empty if its gradients are not known to agree, or if
        --system excludes it."""
        if name not in valid:
            return {}
        return {number: turn.step_time_s for number, turn in turns.get(name, {}).items()}

    megatron = times_of(lineup_row.megatron)
    first = own.get(0)
    num_tasks = sum(turn.num_tasks for turn in own.values())
    slower = None if lineup_row.against is None else ratio_to(times_of(lineup_row.against))
    return ResultRow(
        lineup_row,
        len(rounds),
        step_time_s=_estimate(list(times.values())),
        ratio_to_megatron=None
        if not is_valid
        else _estimate([megatron[each] / times[each] for each in rounds if each in megatron]),
        ratio_to_floor=ratio_to(model.floor_s),
        ratio_to_load=ratio_to(model.load_s),
        ratio_to_simulated=ratio_to(model.simulated_s),
        slowdown=None
        if slower is None
        else Estimate(slower.median - 1, slower.low - 1, slower.high - 1),
        compute_s=_median([turn.compute_s for turn in own.values()]),
        blocking_s=_median([turn.blocking_s for turn in own.values()]),
        coordination_s=_median([turn.coordination_s for turn in own.values()]),
        peak_held=max((turn.peak_held for turn in own.values()), default=None),
        peak_held_bytes=max(
            (turn.peak_held_bytes for turn in own.values() if turn.peak_held_bytes is not None),
            default=None,
        ),
        over_pace=sum(turn.num_over for turn in own.values()) / num_tasks if num_tasks else None,
        gradients_agree=_gradients_agree(own),
        gradients_same=first.gradients_same
        if first is not None and lineup_row.admit is Admit.GIVEN
        else None,
        gradient_difference=None if first is None else first.gradient_difference,
        error=None if failure is None else failure.error,
    )


def _median(values: Sequence[float]) -> float | None:
    """Return the median; None without values."""
    return median(values) if values else None


def _estimate(values: Sequence[float]) -> Estimate | None:
    """Return the median with its bootstrap interval; None without values."""
    if not values:
        return None
    return estimate(resampled_medians({"length": np.array(values)}, 0)["length"])

"""The rows of a race for people: a sheet a case, within 80 columns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rrfp.analyze.units import Times
from rrfp.cli.tables.sheet import Column, Sheet
from rrfp.race.presets import Measure, Preset
from rrfp.trace.records import NS_PER_S

if TYPE_CHECKING:
    from rrfp.analyze.compare import Estimate
    from rrfp.race.lineup import Case
    from rrfp.race.results import ResultRow


def race_sheets(preset: Preset, rows: "Sequence[ResultRow]") -> list[Sheet]:
    """A sheet a case, the first one under the preset's question; the last one tells what must be
    known of some rows."""
    cases: dict[Case, list[ResultRow]] = {}
    for row in rows:
        cases.setdefault(row.lineup_row.case, []).append(row)
    sheets = [_sheet(case, of_case, preset.measure) for case, of_case in cases.items()]
    sheets[0] = replace(sheets[0], title=f"{preset.name}: {preset.question}\n{sheets[0].title}")
    notes = [*sheets[-1].notes, *_notes(rows), _MEANING[preset.measure]]
    sheets[-1] = replace(sheets[-1], notes=notes)
    return sheets


_INTERVAL = (
    "95 of 100: where so many bootstrap medians of the rounds lie. x megatron: how many times as "
    "fast as megatron-1f1b."
)
_MEANING = {
    Measure.SPEED: f"{_INTERVAL} over floor, over load: time over the least that any schedule "
    "takes, and over the most loaded rank's work. held: the most microbatches on a "
    "rank, or peak GB: the most that they take there, by the profile's sizes.",
    Measure.TIME: f"Of a step, on average over the ranks. {_INTERVAL}",
    Measure.SLOWDOWN: "slowdown: of a step, against the same system without jitter, or against bf "
    f"under the same bound. {_INTERVAL} held: the most microbatches on a rank.",
}


def _sheet(case: "Case", rows: "Sequence[ResultRow]", measure: Measure) -> Sheet:
    times = Times(row.step_time_s.high * NS_PER_S for row in rows if row.step_time_s is not None)

    def time(row: "ResultRow") -> str:
        found = row.step_time_s
        return "failed" if found is None else times.tell(found.median * NS_PER_S)

    def interval(row: "ResultRow") -> str:
        found = row.step_time_s
        if found is None or row.steps == 1:
            return ""
        return "-".join(times.number(each * NS_PER_S) for each in (found.low, found.high))

    columns = {"time": time, "95 of\n100": interval, "x mega-\ntron": _speed, **_OF[measure]}
    # Nothing is known of memory where costs say no sizes, and of intervals after one round.
    told = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    if any(told.get("peak\nGB", ())):
        # In 80 columns there is room for one of the two.
        del told["held"]
    timed = [(row.step_time_s.median, row.label) for row in rows if row.step_time_s is not None]
    return Sheet(
        case.name,
        [
            Column("system", [row.label for row in rows], is_text=True),
            *(Column(name, cells) for name, cells in told.items() if any(cells)),
        ],
        [f"Fastest: {min(timed)[1]}."] if len(timed) > 1 else [],
    )


def _speed(row: "ResultRow") -> str:
    return "void" if row.is_void else _ratio(row.ratio_to_megatron)


def _ratio(found: "Estimate | None") -> str:
    return "" if found is None else f"{found.median:.3f}"


def _held(row: "ResultRow") -> str:
    return "" if row.peak_held is None else f"{row.peak_held:g}"


def _peak(row: "ResultRow") -> str:
    return "" if row.peak_held_bytes is None else f"{row.peak_held_bytes / 1e9:.3g}"


def _share(seconds: "Callable[[ResultRow], float | None]") -> "Callable[[ResultRow], str]":
    def cell(row: "ResultRow") -> str:
        found = seconds(row)
        return "" if found is None else f"{found:.3f}"

    return cell


def _slowdown(row: "ResultRow") -> str:
    return "" if row.slowdown is None else f"{100 * row.slowdown.median:+.1f}"


def _slowdown_interval(row: "ResultRow") -> str:
    found = row.slowdown
    return "" if found is None else f"{100 * found.low:+.1f} {100 * found.high:+.1f}"


_OF: "dict[Measure, dict[str, Callable[[ResultRow], str]]]" = {
    Measure.SPEED: {
        "over\nfloor": lambda row: _ratio(row.ratio_to_floor),
        "over\nload": lambda row: _ratio(row.ratio_to_load),
        "held": _held,
        "peak\nGB": _peak,
    },
    Measure.TIME: {
        "compute\ns": _share(lambda row: row.compute_s),
        "blocking\ns": _share(lambda row: row.blocking_s),
        "coordi-\nnation s": _share(lambda row: row.coordination_s),
    },
    Measure.SLOWDOWN: {
        "slow-\ndown %": _slowdown,
        "95 of 100": _slowdown_interval,
        "held": _held,
    },
}
"""The columns of each measure, beside those that all have."""


def _notes(rows: "Sequence[ResultRow]") -> Iterator[str]:
    for row in rows:
        where = f"{row.lineup_row.case.name}: {row.label}"
        if row.is_void:
            yield f"void: gradients are {row.gradient_difference:.1e} off the reference's, {where}"
        if row.error is not None:
            yield f"failed: {where}: {row.error}"
    checked = [row for row in rows if row.gradients_agree is not None]
    same = sum(row.gradients_same is True for row in checked)
    agree = sum(row.gradients_agree is True for row in checked)
    yield (
        f"Gradients agree with megatron-1f1b's in {agree} of {len(checked)} rows, to the last bit "
        f"in {same}."
    )

"""Tables of a race's results: one per case for people, and one of all rows for programs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rrfp.analyze.compare import Estimate
from rrfp.analyze.table import TEXT, Column, Table, Times
from rrfp.race.lineup import Case
from rrfp.race.presets import Measure, Preset
from rrfp.race.results import ResultRow
from rrfp.trace.records import NS_PER_S


def result_table(rows: Sequence[ResultRow]) -> Table:
    """Make one table of all rows, for programs. In CSV, the bounds of intervals have columns of
    their own. It has no columns if there are no rows."""
    return Table("", [*_result_columns(rows)] if rows else [], rows_key="rows")


def _result_columns(rows: Sequence[ResultRow]) -> Iterator[Column]:
    """Yield a column for each field of the rows' JSON. Estimates get further columns for CSV
    alone."""
    found = [row.as_json() for row in rows]
    for name in found[0]:
        values = [each[name] for each in found]
        if name == "intervals":
            yield Column(None, values, path=name)
        elif name == "step_time_s":
            yield Column(None, values, path=name)
            yield from _estimate_columns(name, [row.step_time_s for row in rows], "median")
        else:
            yield Column(None, values, key=name)
            if name in rows[0].ratios:
                yield from _estimate_columns(name, [row.ratios[name] for row in rows])


def _estimate_columns(
    name: str, estimates: Sequence[Estimate | None], *more: str
) -> Iterator[Column]:
    """Yield columns for CSV alone with the lower and upper bounds of estimates, and `more` of their
    fields, such as the median; empty for None."""
    for part in (*more, "low", "high"):
        values = [None if each is None else getattr(each, part) for each in estimates]
        yield Column(None, values, key=f"{name}_{part}", path="")


def case_tables(preset: Preset, every_row: Sequence[ResultRow]) -> list[Table]:
    """The rows of a preset for people, one table per case.

    The first table's title has the preset's question; the last table has the notes.
    """
    rows = [row for row in every_row if row.lineup_row.preset == preset.name]
    cases: dict[Case, list[ResultRow]] = {}
    for row in rows:
        cases.setdefault(row.lineup_row.case, []).append(row)
    tables = [_case_table(case, of_case, preset.measure) for case, of_case in cases.items()]
    tables[0] = replace(tables[0], title=f"{preset.name}: {preset.question}\n{tables[0].title}")
    notes = [*tables[-1].conclusions, *_notes(rows), _MEANING[preset.measure]]
    tables[-1] = replace(tables[-1], conclusions=notes)
    return tables


_INTERVAL = (
    "95 of 100: bootstrap interval of the median over the rounds. x megatron: speedup over "
    "megatron-1f1b."
)
_MEANING = {
    Measure.SPEED: f"{_INTERVAL} over floor, over load: time relative to the lower bound of "
    "all schedules, and to the most loaded rank's work. held: peak microbatches on a rank, or peak "
    "GB: their bytes by the profile's sizes.",
    Measure.TIME: f"Seconds per step, averaged over the ranks. {_INTERVAL}",
    Measure.SLOWDOWN: "slowdown: additional step time over the same system without jitter, or over "
    f"bf under the same bound. {_INTERVAL} held: peak microbatches on a rank.",
}


def _case_table(case: Case, rows: Sequence[ResultRow], measure: Measure) -> Table:
    """Make the table of a case: step times, speed relative to Megatron, and the columns of the
    measure. Empty columns are left out, and `held` if peak bytes are known. The conclusion names
    the fastest row, if several have times."""
    times = Times(row.step_time_s.high * NS_PER_S for row in rows if row.step_time_s is not None)

    def time(row: ResultRow) -> str:
        found = row.step_time_s
        return "failed" if found is None else times.format(found.median * NS_PER_S)

    def interval(row: ResultRow) -> str:
        found = row.step_time_s
        if found is None or row.steps == 1:
            return ""
        return "-".join(times.number(each * NS_PER_S) for each in (found.low, found.high))

    columns = {
        "time": time,
        "95 of\n100": interval,
        "x mega-\ntron": _speed,
        **_MEASURE_COLUMNS[measure],
    }
    # Columns may be empty: memory without sizes in the costs, intervals after a single round.
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    if any(cells.get("peak\nGB", ())):
        # A line of 80 columns has room for only one of the two.
        del cells["held"]
    timed = [(row.step_time_s.median, row.label) for row in rows if row.step_time_s is not None]
    return Table(
        case.name,
        [
            Column("system", [row.label for row in rows], TEXT),
            *(Column(name, texts) for name, texts in cells.items() if any(texts)),
        ],
        [f"Fastest: {min(timed)[1]}."] if len(timed) > 1 else [],
    )


def _speed(row: ResultRow) -> str:
    """Format a row's speedup over Megatron's 1F1B; `void` if its gradients differ from the
    reference's."""
    return "void" if row.is_void else _ratio(row.ratio_to_megatron)


def _ratio(found: Estimate | None) -> str:
    """Format an estimate's median; an empty text for None."""
    return "" if found is None else f"{found.median:.3f}"


def _held(row: ResultRow) -> str:
    """Format the peak number of microbatches on a rank; an empty text if unknown."""
    return "" if row.peak_held is None else f"{row.peak_held:g}"


def _peak(row: ResultRow) -> str:
    """Format the peak bytes of a rank in GB; an empty text if unknown."""
    return "" if row.peak_held_bytes is None else f"{row.peak_held_bytes / 1e9:.3g}"


def _seconds(seconds: Callable[[ResultRow], float | None]) -> Callable[[ResultRow], str]:
    """Make a function that formats one of a row's times in seconds; an empty text for None."""

    def cell(row: ResultRow) -> str:
        found = seconds(row)
        return "" if found is None else f"{found:.3f}"

    return cell


def _slowdown(row: ResultRow) -> str:
    """Format the median of a row's slowdown in percent, with its sign; an empty text if unknown."""
    return "" if row.slowdown is None else f"{100 * row.slowdown.median:+.1f}"


def _slowdown_interval(row: ResultRow) -> str:
    """Format the interval of a row's slowdown in percent; an empty text if unknown."""
    found = row.slowdown
    return "" if found is None else f"{100 * found.low:+.1f} {100 * found.high:+.1f}"


_MEASURE_COLUMNS: dict[Measure, dict[str, Callable[[ResultRow], str]]] = {
    Measure.SPEED: {
        "over\nfloor": lambda row: _ratio(row.ratio_to_floor),
        "over\nload": lambda row: _ratio(row.ratio_to_load),
        "held": _held,
        "peak\nGB": _peak,
    },
    Measure.TIME: {
        "compute\ns": _seconds(lambda row: row.compute_s),
        "blocking\ns": _seconds(lambda row: row.blocking_s),
        "coordi-\nnation s": _seconds(lambda row: row.coordination_s),
    },
    Measure.SLOWDOWN: {
        "slow-\ndown %": _slowdown,
        "95 of 100": _slowdown_interval,
        "held": _held,
    },
}
"""The additional columns for each measure."""


def _notes(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Yield sentences for each row that is void or has failed, then one that counts the rows whose
    gradients agree with the reference's, among those where that is known."""
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

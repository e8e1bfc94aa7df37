"""The rows of a race for people: a table a case, within 80 columns."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rrfp.race.presets import Measure, Preset

if TYPE_CHECKING:
    from rrfp.analyze.compare import Estimate
    from rrfp.race.lineup import Case
    from rrfp.race.results import ResultRow


def race_tables(preset: Preset, rows: "Sequence[ResultRow]") -> Group:
    """The preset's question, a table a case, and what must be known of some rows."""
    cases: dict[Case, list[ResultRow]] = {}
    for row in rows:
        cases.setdefault(row.lineup_row.case, []).append(row)
    tables = [_table(case, of_case, preset.measure) for case, of_case in cases.items()]
    return Group(
        Text(f"{preset.name}: {preset.question}", style="bold"),
        *tables,
        *(Text(note) for note in _notes(rows)),
        Text(f"{_MEANING[preset.measure]}\n"),
    )


_MEANING = {
    Measure.SPEED: "x megatron: how many times as fast as megatron-1f1b. over floor, over load: "
    "time over the least that any schedule takes, and over the most loaded rank's work.",
    Measure.TIME: "Of a step, on average over the ranks. x megatron: how many times as fast as "
    "megatron-1f1b.",
    Measure.SLOWDOWN: "slowdown: of a step, against the same system without jitter, or against bf "
    "under the same bound. x megatron: how many times as fast as megatron-1f1b.",
}


def _table(case: "Case", rows: "Sequence[ResultRow]", measure: Measure) -> Table:
    table = Table(
        title=Text(case.name), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("system", overflow="fold", vertical="bottom")
    columns = {"time\ns": _time, "95 of\n100": _interval, "x mega-\ntron": _speed, **_OF[measure]}
    for heading in columns:
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(Text(row.label), *(cell(row) for cell in columns.values()))
    return table


def _time(row: "ResultRow") -> str:
    return "failed" if row.step_time_s is None else f"{row.step_time_s.median:#.4g}"


def _interval(row: "ResultRow") -> str:
    found = row.step_time_s
    return "" if found is None or row.steps == 1 else f"{found.low:#.3g}-{found.high:#.3g}"


def _speed(row: "ResultRow") -> str:
    return "void" if row.is_void else _ratio(row.ratio_to_megatron)


def _ratio(found: "Estimate | None") -> str:
    return "" if found is None else f"{found.median:.3f}"


def _held(row: "ResultRow") -> str:
    return "" if row.peak_held is None else f"{row.peak_held:g}"


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

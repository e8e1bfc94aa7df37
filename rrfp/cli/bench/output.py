"""The rows of a race: printed, warned about, and drawn."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rrfp.cli.options import RowFormat
from rrfp.cli.output import print_sheets
from rrfp.cli.progress import working
from rrfp.cli.report_extra import missing_for_charts
from rrfp.cli.tables.csv_cells import print_csv
from rrfp.runtime.pace import MOST_OVER_PACE

if TYPE_CHECKING:
    from rrfp.race.lineup import Lineup
    from rrfp.race.results import ResultRow


def print_rows(lineup: "Lineup", rows: "Sequence[ResultRow]", output_format: RowFormat) -> None:
    """Print the rows on stdout."""
    match output_format:
        case RowFormat.JSON:
            print(json.dumps({"rows": [row.as_json() for row in rows]}, allow_nan=False))
        case RowFormat.CSV:
            _print_csv(rows)
        case RowFormat.TABLE | RowFormat.MD:
            from rrfp.cli.bench.tables import race_sheets

            sheets = []
            for preset in lineup.presets:
                of_preset = [row for row in rows if row.lineup_row.preset == preset.name]
                sheets += race_sheets(preset, of_preset)
            print_sheets(sheets, markdown=output_format is RowFormat.MD)


def _print_csv(rows: "Sequence[ResultRow]") -> None:
    """A line a row: the keys of the JSON, estimates in three columns each."""
    table: list[dict[str, object]] = []
    for row in rows:
        flat: dict[str, object] = {}
        found = row.as_json()
        intervals = found.pop("intervals")
        assert isinstance(intervals, dict)
        for name, value in found.items():
            if name == "step_time_s":
                step_time = row.step_time_s
                for part in ("median", "low", "high"):
                    flat[f"{name}_{part}"] = None if step_time is None else getattr(step_time, part)
                continue
            flat[name] = value
            if name in row.ratios:
                flat[f"{name}_low"], flat[f"{name}_high"] = intervals.get(name, (None, None))
        table.append(flat)
    print_csv(table[0] if table else (), (flat.values() for flat in table))


def tell_over_pace(rows: "Sequence[ResultRow]") -> None:
    """Warn on stderr of work that did not fit into its modelled time."""
    over = [row for row in rows if (row.over_pace or 0.0) > MOST_OVER_PACE]
    if over:
        worst = max(over, key=lambda row: row.over_pace or 0.0)
        typer.echo(
            f"Warning: in {len(over)} of {len(rows)} rows the work of more than "
            f"{MOST_OVER_PACE:.0%} of the tasks took longer than its model, {worst.over_pace:.1%} "
            f"in {worst.lineup_row.case.name}: {worst.label}; give them longer ones (--task-ms, or "
            "other costs), or the machine less to do",
            err=True,
        )


def draw_charts(lineup: "Lineup", rows: "Sequence[ResultRow]", directory: Path) -> None:
    """Draw a chart a preset, if the extra that draws charts is installed."""
    if missing_for_charts():
        typer.echo(
            "No chart is drawn without the extra 'report' (pip install 'rrfp[report]')", err=True
        )
        return
    from rrfp.analyze.charts.files import save
    from rrfp.race.chart import race_chart

    for preset in lineup.presets:
        chart = race_chart(preset, [row for row in rows if row.lineup_row.preset == preset.name])
        if chart is None:
            continue
        with working("Drawing the charts"):
            for ending in ("svg", "png"):
                save(chart, directory / f"{preset.name}.{ending}")
        typer.echo(
            f"The chart of {preset.name} is {directory / preset.name}.svg and .png", err=True
        )

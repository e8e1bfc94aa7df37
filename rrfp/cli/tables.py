"""Tables for people: data in, a rich table out, within 80 columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rrfp.trace.records import NS_PER_S
from rrfp.trace.steps import count_of, step_name

if TYPE_CHECKING:
    import polars as pl

    from rrfp.analyze.bubbles import Bubbles
    from rrfp.replay.whatif import WhatIf
    from rrfp.simulate.trial import Row

_HEADINGS = {
    "warmup": "warm-\nup",
    "forward_input": "fwd\ninput",
    "backward_input": "bwd\ninput",
    "coordination": "coordi-\nnation",
    "transfer": "trans-\nfer",
    "gradient_sync": "grad\nsync",
    "overhead": "over-\nhead",
}
_MOST_CAUSES = 7
"""So many columns of causes have room beside each other in 80 columns."""


def bubble_table(bubbles: "Bubbles") -> Group:
    """A row a rank and a total: how much of the window was work, how much bubble, and why.

    Causes that no rank had are left out. Of many causes the last ones stand in a table below.
    """
    ranks = bubbles.ranks
    wholes_ns = [rank.window_ns for rank in ranks]

    def percents(parts_ns: list[int]) -> list[str]:
        """Of each rank, and of all."""
        pairs = zip([*parts_ns, sum(parts_ns)], [*wholes_ns, sum(wholes_ns)], strict=True)
        return [f"{100 * part_ns / whole_ns:.1f}" for part_ns, whole_ns in pairs]

    names = {"rank": [*(str(rank.rank) for rank in ranks), "all"]}
    main = {
        "stage": [*(" ".join(map(str, rank.stages)) for rank in ranks), ""],
        "work": percents([rank.busy_ns for rank in ranks]),
        "bubble": percents([rank.bubble_ns for rank in ranks]),
    }
    causes = [
        (_HEADINGS.get(cause, cause), percents([rank.causes_ns[cause] for rank in ranks]))
        for cause, total_ns in bubbles.causes_ns.items()
        if total_ns
    ]
    first, *others = (
        _rank_table(names | (main if start == 0 else {}) | dict(causes[start:][:_MOST_CAUSES]))
        for start in range(0, max(1, len(causes)), _MOST_CAUSES)
    )
    steps = bubbles.steps
    told = count_of(steps) if len(steps) > 1 else step_name(steps[0])
    first.title = f"Where the time of {told} went, in % of it"
    return Group(first, *others)


def _rank_table(columns: dict[str, list[str]]) -> Table:
    """A row a rank and a total."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for heading in columns:
        # The stages of a rank with many chunks may take several lines.
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=heading != "stage")
    *of_ranks, of_all = zip(*columns.values(), strict=True)
    for row in of_ranks:
        table.add_row(*row)
    table.add_section()
    table.add_row(*of_all, style="bold")
    return table


def trial_table(labels: Sequence[str], rows: "Sequence[Row]") -> Table:
    """A row a simulated setting: how long it took, how near to the floor, and what it held."""
    columns = {
        "time\ns": [_digits(row.mean_s) for row in rows],
        "spread\n%": [f"{100 * row.spread:.1f}" for row in rows],
        "over\nfirst": [f"{row.ratio_to(rows[0]):.3f}" for row in rows],
        "over\nfloor": [f"{row.ratio_to_floor:.3f}" for row in rows],
        "held": [f"{max(row.peak_held):g}" for row in rows],
        "bubble\n%": [f"{100 * row.bubble_fraction:.1f}" for row in rows],
    }
    if len(rows[0].trials) == 1:
        del columns["spread\n%"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    if len(rows) > 1:
        table.add_column("row", overflow="fold", vertical="bottom")
    else:
        del columns["over\nfirst"]
    for heading in columns:
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for label, figures in zip(labels, zip(*columns.values(), strict=True), strict=True):
        table.add_row(*([Text(label)] if len(rows) > 1 else []), *figures)
    return table


def whatif_table(report: "WhatIf") -> Table:
    """A row a replay: the run as it was, then what each change would have made of it."""

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("replayed", overflow="fold", vertical="bottom")
    for heading in ("time\ns", "saved\n%", "held"):
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    own = report.as_it_was
    table.add_row(
        Text(f"{own.what}: {report.run.told}"),
        _digits(own.makespan_ns / NS_PER_S),
        "",
        f"{max(own.peak_held):g}",
        end_section=True,
    )
    for row in report.rows:
        table.add_row(
            Text(row.what),
            _digits(row.makespan_ns / NS_PER_S),
            f"{100 * row.saving:.1f}",
            f"{max(row.peak_held):g}",
        )
    return table


def frame_table(frame: "pl.DataFrame") -> Table:
    """The rows of a report as they are, with four digits of what is not whole."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in frame.columns:
        table.add_column(name.replace("_", "\n"), justify="right", vertical="bottom")
    for row in frame.iter_rows():
        # A trace may hold what rich would take for markup.
        table.add_row(
            *(Text(f"{each:.4g}" if isinstance(each, float) else str(each)) for each in row)
        )
    return table


def _digits(seconds: float) -> str:
    """At least four digits that count."""
    return f"{seconds:.0f}" if seconds >= 1000 else f"{seconds:#.4g}"

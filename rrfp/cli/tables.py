"""Tables for people: data in, a rich table out, within 80 columns."""

from rich import box
from rich.table import Table

from rrfp.analyze.bubbles import CAUSES, Bubbles

_HEADINGS = {
    "warmup": "warm-\nup",
    "forward_input": "fwd\ninput",
    "backward_input": "bwd\ninput",
    "coordination": "coordi-\nnation",
    "transfer": "trans-\nfer",
    "gradient_sync": "grad\nsync",
    "overhead": "over-\nhead",
}


def bubble_table(bubbles: Bubbles) -> Table:
    """A row a rank and a total: how much of the window was work, how much bubble, and why.

    Causes that no rank had are left out.
    """
    totals_ns = bubbles.causes_ns
    causes = [cause for cause in CAUSES if totals_ns[cause]]
    table = Table(
        title=f"Where the time of {_steps(bubbles)} went, in % of it",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    for heading in ("rank", "stage", "work", "bubble", *(_HEADINGS.get(c, c) for c in causes)):
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for rank in bubbles.ranks:
        table.add_row(
            str(rank.info.rank),
            " ".join(map(str, rank.info.stages)),
            _percent(rank.busy_ns, rank.window_ns),
            _percent(rank.window_ns - rank.busy_ns, rank.window_ns),
            *(_percent(rank.causes_ns[cause], rank.window_ns) for cause in causes),
        )
    all_ns = bubbles.window_ns * len(bubbles.ranks)
    bubble_ns = sum(totals_ns.values())
    table.add_section()
    table.add_row(
        "all",
        "",
        _percent(all_ns - bubble_ns, all_ns),
        _percent(bubble_ns, all_ns),
        *(_percent(totals_ns[cause], all_ns) for cause in causes),
        style="bold",
    )
    return table


def _steps(bubbles: Bubbles) -> str:
    count = len(bubbles.steps)
    return f"{count} steps" if count > 1 else f"step {bubbles.steps[0]}"


def _percent(part_ns: int, whole_ns: int) -> str:
    return f"{100 * part_ns / whole_ns:.1f}"

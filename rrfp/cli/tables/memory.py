"""The sheet of what a run's ranks kept in memory."""

from typing import TYPE_CHECKING

from rrfp.analyze.units import Times, outliers
from rrfp.cli.tables.sheet import Column, Sheet
from rrfp.schedule.hold import told_bytes
from rrfp.trace.records import NS_PER_S
from rrfp.trace.steps import step_name

if TYPE_CHECKING:
    from rrfp.analyze.memory.peaks import Memory


def memory_sheet(memory: "Memory") -> Sheet:
    """A row a rank: the most it held, when, what its bound was, and what microbatches kept."""
    ranks = memory.ranks
    times = Times(each.peak_after_s * NS_PER_S for each in ranks)
    peaks = [each.peak_held_bytes for each in ranks]
    columns = [
        Column("rank", [str(each.rank) for each in ranks]),
        Column("stage", [" ".join(map(str, sorted(each.stages))) for each in ranks], is_text=True),
        Column("held\nat most", [*map(told_bytes, peaks)], marked=outliers(peaks)),
        Column("micro-\nbatches", [f"{each.peak_held:g}" for each in ranks]),
        Column("in", [step_name(each.peak_step) for each in ranks], is_text=True),
        Column("after", [times.tell(each.peak_after_s * NS_PER_S) for each in ranks]),
        Column(
            "bound",
            ["" if each.budget_bytes is None else told_bytes(each.budget_bytes) for each in ranks],
        ),
        Column("room", [told_bytes(each.room_bytes) for each in ranks]),
        Column("largest\nmicrob.", [told_bytes(each.largest_microbatch_bytes) for each in ranks]),
        Column("outbox", [told_bytes(each.outbox_bytes) for each in ranks]),
        Column("mean\nmicrob.", [told_bytes(each.mean_microbatch_bytes) for each in ranks]),
    ]
    if all(each.budget_bytes is None for each in ranks):
        columns = [each for each in columns if each.heading != "bound"]
    if not any(each.outbox_bytes for each in ranks):
        columns = [each for each in columns if each.heading != "outbox"]
    return Sheet(
        "How many bytes of activations each rank held",
        columns,
        [memory.told],
        num_names=2,
        dispensable=("after", "mean\nmicrob."),
    )

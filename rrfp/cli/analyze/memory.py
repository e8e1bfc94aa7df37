"""The sheet of what a run's ranks kept in memory."""

from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.analyze.number_format import Times, outliers
from rrfp.cli.analyze.frames import print_report, read_frames
from rrfp.cli.options import By, ByRank, Format, FrameFormat, Stage, Steps, TracePath
from rrfp.cli.output import check_threshold, tell_left_out
from rrfp.cli.tables import Column, Sheet
from rrfp.schedule.knobs import told_bytes
from rrfp.trace.records import NS_PER_S, step_name

if TYPE_CHECKING:
    from rrfp.analyze.memory import Memory


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


# `rrfp analyze memory`: how many bytes each rank kept, and how many more it could have kept.


def memory(
    path: TracePath = None,
    steps: Steps = None,
    stage: Stage = None,
    by: ByRank = By.STAGE,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, help="Exit with 3 when a rank held more GiB than this."),
    ] = None,
) -> None:
    """Show how many bytes of activations each stage's rank held, and when.

    Of several ranks at one place of the pipeline it shows the one that held
    most. Its room is what its bound would have let it hold beyond that, or
    without a bound in bytes what the rank that held most has held beyond that.
    """
    from rrfp.analyze import memory as peaks

    frames = read_frames(path, steps, evaluations=False)
    report = peaks.memory(frames)
    if by is By.STAGE:
        report = report.by_stage()
    if stage is not None:
        report = report.of_rank(frames.rank_of(stage))
    unfinished = set(frames.steps) - set(frames.windows["step"])
    tell_left_out(tuple(unfinished), "not every rank finished them")

    def sheets() -> "list[Sheet]":

        return [memory_sheet(report)]

    print_report(frames, report.frame, report.as_json(), output_format, sheets)
    check_threshold(fail_above, report.worst.peak_held_bytes / 2**30, "what a rank held, in GiB,")

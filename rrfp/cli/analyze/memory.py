"""`rrfp analyze memory`: the activations that each rank held, and its headroom."""

from typing import Annotated

import typer

from rrfp.cli.options import By, ByRank, Format, FrameFormat, Stage, Steps, TracePath
from rrfp.cli.output import check_threshold, note_left_out, print_analysis, read_frames

EXAMPLE = "Example: rrfp analyze memory runs/latest --steps 3:10 --by rank"


def memory(
    path: TracePath = None,
    steps: Steps = None,
    stage: Stage = None,
    by: ByRank = By.STAGE,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None, typer.Option(min=0, help="Exit with 3 when a rank held more GiB than this.")
    ] = None,
) -> None:
    """Show how many bytes of activations each stage's rank held, and when.

    Of several ranks of a stage it shows the one that held most. Headroom is the
    distance to the rank's bound, or without a bound in bytes to the peak of the
    rank that held most.
    """
    from rrfp.analyze.memory import memory as measure
    from rrfp.analyze.memory import memory_table

    frames = read_frames(path, steps, evaluations=False)
    report = measure(frames)
    if by is By.STAGE:
        report = report.by_stage()
    if stage is not None:
        report = report.of_rank(frames.rank_of(stage))
    unfinished = set(frames.steps) - set(frames.windows["step"])
    note_left_out(tuple(unfinished), "not every rank finished them")

    print_analysis(frames, memory_table(report), output_format)
    check_threshold(fail_above, report.worst.peak_held_bytes / 2**30, "what a rank held, in GiB,")

"""`rrfp analyze whatif`: a run replayed with changes."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.console import print_report
from rrfp.cli.declared_options import hint_names
from rrfp.cli.options import PEOPLE, Format, FrameFormat, Steps, TracePath
from rrfp.cli.output import (
    NOT_WHOLE,
    WITHOUT_SIZES,
    check_threshold,
    left_out_of,
    note_evaluations,
    note_left_out,
    note_warm_up,
    read_frames,
)
from rrfp.cli.progress import working
from rrfp.errors import UsageError
from rrfp.inputs import resolve_hint
from rrfp.schedule.admission import Admit
from rrfp.schedule.knobs import parse_hold, parse_patience

if TYPE_CHECKING:
    from rrfp.replay.change import Change
    from rrfp.replay.recorded import RecordedRun

EXAMPLE = (
    "Examples: rrfp analyze whatif runs/latest; "
    "rrfp analyze whatif runs/latest --hint bfw --hint zb-h1 --hold 8"
)


def whatif(
    path: TracePath = None,
    hint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HINT",
            help="A hint's name or an order file; may be given several times.",
            autocompletion=hint_names,
        ),
    ] = None,
    dispatch: Annotated[
        str | None,
        typer.Option(
            metavar="ready|fixed",
            help="What the hint is to the dispatcher; --hint, --limit or --hold without it make it "
            "ready.",
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="N", help="Forwards a rank may run ahead of its backwards, or none."),
    ] = None,
    hold: Annotated[
        str | None,
        typer.Option(
            metavar="N|SIZE",
            help="Activations kept on a rank: 8 (microbatches of the whole rank), 40GiB, or 1.0x "
            "of what 1F1B would have kept at most.",
        ),
    ] = None,
    patience: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long a free rank waits for a better task that was announced to it: 0 (never),"
            " auto or a time such as 5ms.",
        ),
    ] = None,
    without_jitter: Annotated[
        bool, typer.Option("--without-jitter", help="Let every task take the mean of its kind.")
    ] = False,
    median_stage: Annotated[
        int | None,
        typer.Option(min=0, metavar="STAGE", help="Make a stage as fast as the one in the middle."),
    ] = None,
    free_links: Annotated[
        bool, typer.Option("--free-links", help="Let messages take no time.")
    ] = False,
    usual_link: Annotated[
        str | None,
        typer.Option(
            metavar="FROM-TO",
            help="Make the messages between two pipeline ranks as fast as on the link in the "
            "middle.",
        ),
    ] = None,
    usual_rank: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="RANK", help="Make a rank as fast as those that run the same tasks."
        ),
    ] = None,
    usual_replica: Annotated[
        int | None,
        typer.Option(min=0, metavar="REPLICA", help="Make a replica as fast as the others."),
    ] = None,
    even_microbatches: Annotated[
        bool, typer.Option("--even-microbatches", help="Let all microbatches weigh the same.")
    ] = False,
    usual_microbatches: Annotated[
        bool,
        typer.Option(
            "--usual-microbatches", help="Make heavy microbatches as light as the median one."
        ),
    ] = False,
    admit: Annotated[
        Admit, typer.Option(help="In which order the microbatches enter, by what each took.")
    ] = Admit.GIVEN,
    even_stages: Annotated[
        bool,
        typer.Option(
            "--even-stages",
            help="Even out the stages' work: in whole layers, if the run tells how many it has.",
        ),
    ] = False,
    w_share: Annotated[
        float | None,
        typer.Option(
            help="The weight gradient's share of a backward that was recorded whole, for hints "
            "that split it; without it, that of F, B and W as 1 to 0.9 to 0.6."
        ),
    ] = None,
    steps: Steps = None,
    output_format: FrameFormat = Format.TABLE,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit with 3 when a row would save more than this."),
    ] = None,
) -> None:
    """Replay a run under other hints and bounds, or without what slowed it.

    The run's own policy is replayed first; how far that is from what was
    measured tells whether the replay is sound. What is asked for holds together
    in every row, and each --hint makes one; without any, a sensible set is shown.
    Savings are shares of the run's own replayed time.
    """
    from rrfp.analyze.chosen_steps import step_time_ns
    from rrfp.analyze.frames import recording_of
    from rrfp.analyze.whatif import whatif_table
    from rrfp.cli.simulate.rows import count_or_none, read_dispatch
    from rrfp.replay.change import Change
    from rrfp.replay.whatif import what_if

    chosen = None if dispatch is None else read_dispatch("dispatch", dispatch)
    bound = None if limit is None else count_or_none("limit", limit)
    kept = None if hold is None else parse_hold(hold, "--hold", auto=False)
    waits = None if patience is None else parse_patience(patience, "--patience")
    link = None if usual_link is None else _parse_link(usual_link)

    def changes(run: "RecordedRun") -> "list[Change]":
        hints = [resolve_hint(text).on(run.shape) for text in hint] if hint else [None]
        return [
            Change(
                each,
                chosen,
                bound,
                kept,
                waits,
                limit is not None and bound is None,
                without_jitter=without_jitter,
                median_stage=median_stage,
                free_links=free_links,
                usual_link=link,
                usual_rank=usual_rank,
                usual_replica=usual_replica,
                even_microbatches=even_microbatches,
                usual_microbatches=usual_microbatches,
                admit=admit,
                even_stages=even_stages,
            )
            for each in hints
        ]

    is_admitted = admit is not Admit.GIVEN
    evened = (even_microbatches, usual_microbatches, even_stages)
    switches = (without_jitter, free_links, *evened, is_admitted)
    places = (median_stage, link, usual_rank, usual_replica)
    choices = (hint, dispatch, limit, hold, patience, *places)
    is_asked = any(switches) or any(choice is not None for choice in choices)
    frames = read_frames(path, steps, evaluations=False)
    with working("Replaying the run"):
        report = what_if(recording_of(frames), changes if is_asked else None, w_share=w_share)
    note_warm_up(frames)
    note_left_out(report.run.left_out, NOT_WHOLE)
    note_left_out(report.run.without_sizes, WITHOUT_SIZES)
    if output_format in PEOPLE:
        note_evaluations(frames, "only steps that train are replayed")

    step_ns = step_time_ns(frames, [each.step for each in report.run.steps])
    print_report([whatif_table(report, step_ns)], output_format, left_out_of(frames))
    check_threshold(fail_above, max(row.saving for row in report.rows), "the best row's saving")


def _parse_link(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text, re.ASCII)
    if found is None:
        raise UsageError(
            f"--usual-link takes two pipeline ranks such as 0-1, its sender first, not '{text}'"
        )
    return int(found[1]), int(found[2])

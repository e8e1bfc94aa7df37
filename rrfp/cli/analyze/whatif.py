"""`rrfp analyze whatif`: replay a run with changes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rrfp.cli.console import print_report
from rrfp.cli.declared_options import hint_names, run_names, with_options
from rrfp.cli.options import PATH_HELP, PEOPLE, STEPS_HELP, Format
from rrfp.cli.output import (
    NOT_WHOLE,
    WITHOUT_SIZES,
    check_threshold,
    left_out_json,
    note_evaluations,
    note_left_out,
    note_warm_up,
    read_frames,
)
from rrfp.cli.progress import working
from rrfp.errors import UsageError
from rrfp.inputs import Declared, declared_knobs, read_knob, resolve_hint, setting
from rrfp.schedule.admission import Admit
from rrfp.schedule.policy import KNOBS

if TYPE_CHECKING:
    from rrfp.replay.change import Change
    from rrfp.replay.recorded import RecordedRun

EXAMPLE = (
    "Examples: rrfp analyze whatif runs/latest; "
    "rrfp analyze whatif runs/latest --hint bfw --hint zb-h1 --hold 8"
)

_POLICY, _CAUSES = "Policy", "What slowed it"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatifOptions:
    """The options besides the knobs of the policy."""

    path: Path | None = setting(
        None, PATH_HELP, is_argument=True, metavar="RUN", completes=run_names
    )
    without_jitter: bool = setting(
        False, "Give every task the mean time of its kind.", panel=_CAUSES
    )
    median_stage: int | None = setting(
        None, "Make a stage as fast as the median stage.", least=0, metavar="STAGE", panel=_CAUSES
    )
    free_links: bool = setting(False, "Transfer messages in no time.", panel=_CAUSES)
    usual_link: str | None = setting(
        None,
        "Make messages between two pipeline ranks as fast as on the median link.",
        metavar="FROM-TO",
        panel=_CAUSES,
    )
    usual_rank: int | None = setting(
        None, "Make a rank as fast as its peers.", least=0, metavar="RANK", panel=_CAUSES
    )
    usual_replica: int | None = setting(
        None, "Make a replica as fast as the others.", least=0, metavar="REPLICA", panel=_CAUSES
    )
    even_microbatches: bool = setting(False, "Give all microbatches the same cost.", panel=_CAUSES)
    usual_microbatches: bool = setting(
        False, "Make heavy microbatches as light as the median one.", panel=_CAUSES
    )
    admit: Admit = setting(
        Admit.GIVEN,
        "The order in which microbatches enter, by their measured cost",
        metavar="ORDER",
        panel=_POLICY,
    )
    even_stages: bool = setting(
        False,
        "Even out the work of the stages, in whole layers if their number is known.",
        panel=_CAUSES,
    )
    w_share: float | None = setting(
        None,
        "Share of W in a backward recorded as one task, for hints that split it. Default: F, B "
        "and W take 1 : 0.9 : 0.6.",
    )
    steps: str | None = setting(None, STEPS_HELP, metavar="A:B")
    output_format: Format = setting(
        Format.TABLE,
        "table, md (GitHub's Markdown), json, csv or parquet.",
        flag="format",
        metavar="FORMAT",
    )
    fail_above: float | None = setting(
        None, "Exit with 3 if a row would save more than this.", least=0, most=1
    )


def _knobs() -> Iterator[Declared]:
    """Yield the policy's knobs as options whose help names no default, because a missing knob keeps
    the run's value. --hint is repeatable."""
    for each in declared_knobs("", in_run=False):
        about = each.help.partition(" [")[0].rstrip(".")
        if each.flag == "hint":
            yield replace(
                each,
                kind=list[str],
                help="A hint's name or an order file; repeatable.",
                completes=hint_names,
                panel=_POLICY,
            )
        else:
            yield replace(each, help=f"{about}.", panel=_POLICY)


@with_options(WhatifOptions, _knobs())
def whatif(options: WhatifOptions, texts: dict[str, Any]) -> None:
    """Replay a run under other hints and bounds, or without a cause of delay.

    The run's own policy is replayed first; its error shows how accurate replays
    are. All given options apply to every row, and each --hint makes a row.
    Without options a useful set is shown. Savings are shares of the run's
    replayed time.
    """
    from rrfp.analyze.frames import recording_of, step_time_ns
    from rrfp.analyze.whatif import whatif_table
    from rrfp.replay.change import Change
    from rrfp.replay.whatif import what_if

    hints = texts.pop("hint", None)
    knobs = {
        name: read_knob(KNOBS[name], text, f"--{name}", in_run=False)
        for name, text in texts.items()
    }
    unbound = "limit" in knobs and knobs["limit"] is None
    link = None if options.usual_link is None else _parse_link(options.usual_link)
    causes: dict[str, Any] = {
        "without_jitter": options.without_jitter,
        "median_stage": options.median_stage,
        "free_links": options.free_links,
        "usual_link": link,
        "usual_rank": options.usual_rank,
        "usual_replica": options.usual_replica,
        "even_microbatches": options.even_microbatches,
        "usual_microbatches": options.usual_microbatches,
        "admit": options.admit,
        "even_stages": options.even_stages,
    }

    def changes(run: "RecordedRun") -> "list[Change]":
        chosen = [resolve_hint(text).for_shape(run.shape) for text in hints] if hints else [None]
        return [Change(hint, unbound=unbound, **knobs, **causes) for hint in chosen]

    is_asked = bool(hints) or Change(unbound=unbound, **knobs, **causes) != Change()
    frames = read_frames(options.path, options.steps, evaluations=False)
    with working("Replaying the run"):
        report = what_if(
            recording_of(frames), changes if is_asked else None, w_share=options.w_share
        )
    note_warm_up(frames)
    note_left_out(report.run.left_out, NOT_WHOLE)
    note_left_out(report.run.without_sizes, WITHOUT_SIZES)
    if options.output_format in PEOPLE:
        note_evaluations(frames, "only steps that train are replayed")

    step_ns = step_time_ns(frames, [each.step for each in report.run.steps])
    print_report([whatif_table(report, step_ns)], options.output_format, left_out_json(frames))
    check_threshold(
        options.fail_above, max(row.saving for row in report.rows), "the best row's saving"
    )


def _parse_link(text: str) -> tuple[int, int]:
    """Parse `FROM-TO` into two pipeline ranks. Raises UsageError for any other text."""
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text, re.ASCII)
    if found is None:
        raise UsageError(
            f"--usual-link takes two pipeline ranks such as 0-1, its sender first, not '{text}'"
        )
    return int(found[1]), int(found[2])

"""The table of a what-if report: the run as recorded, and with each change."""

from collections.abc import Sequence

import polars as pl

from rrfp.analyze.table import BYTES, CHANGE, COMPACT, TEXT, Column, Table, format_time, times
from rrfp.replay.whatif import WhatIf
from rrfp.schedule.policy import hold_as_json
from rrfp.trace.records import NS_PER_S, STEP, counted


def whatif_table(report: WhatIf, step_ns: float) -> Table:
    """Make the table: the recorded run as the lead row, and the step time under each change.

    `step_ns` is the measured mean step time. Programs do not get the lead row, and get replayed
    times (the run's less the saving) instead of measured ones.
    """
    own, rows = report.as_it_was, report.rows
    policies = [row.policy for row in rows]
    holds = [hold_as_json(policy.hold) for policy in policies]
    lengths_ns = [step_ns * (1 - row.saving) for row in rows]
    return Table(
        "What a step would have taken, by replays of the run",
        [
            Column(
                "replayed",
                [row.what for row in rows],
                TEXT,
                "what",
                lead=f"{own.what}: {report.run.policy_description}",
            ),
            Column(None, [row.hint for row in rows], key="hint"),
            Column(None, [str(policy.dispatch) for policy in policies], key="dispatch"),
            Column(
                None, pl.Series([policy.limit for policy in policies], dtype=pl.Int64), key="limit"
            ),
            Column(None, _texts(holds), key="hold", path=""),
            Column(None, holds, path="hold"),
            Column("time", lengths_ns, times([step_ns, *lengths_ns]), lead=step_ns),
            Column(None, [row.makespan_ns / NS_PER_S for row in rows], key="makespan_s"),
            Column("saved\n%", [row.saving for row in rows], CHANGE, "saving"),
            Column("held", [max(row.peak_held) for row in rows], COMPACT, lead=max(own.peak_held)),
            Column(None, [row.peak_held for row in rows], key="peak_held"),
            *_peak_columns([own.peak_held_bytes, *(row.peak_held_bytes for row in rows)]),
        ],
        [
            f"{counted(len(report.run.steps), STEP)}, measured {format_time(step_ns)} each (mean); "
            f"replayed as it was, the run is {report.replay_error:.1%} off.",
            report.bubble.whole.description,
            report.conclusion,
            report.caution,
        ],
        has_lead=True,
        facts={
            "replay_error": report.replay_error,
            "measured_s": report.measured_ns / NS_PER_S,
            "replayed_s": own.makespan_ns / NS_PER_S,
            "bubble": {
                **report.bubble.whole.as_json(),
                "ranks": [rank.as_json() for rank in report.bubble.ranks],
            },
        },
        rows_key="rows",
    )


def _texts(values: Sequence[object]) -> pl.Series:
    """Make a series of texts; None stays None."""
    return pl.Series([None if each is None else str(each) for each in values], dtype=pl.String)


def _peak_columns(peaks: Sequence[tuple[int, ...] | None]) -> list[Column]:
    """Make the columns of peak memory in each replay; hidden from people unless all are known.

    The first of `peaks` is that of the run as recorded.
    """
    own, *others = (None if each is None else max(each) for each in peaks)
    is_known = all(each is not None for each in peaks)
    joined = [None if each is None else " ".join(map(str, each)) for each in peaks[1:]]
    return [
        Column("peak\nmemory" if is_known else None, others, BYTES, lead=own),
        Column(None, _texts(joined), key="peak_held_bytes", path=""),
        Column(None, peaks[1:], path="peak_held_bytes"),
    ]

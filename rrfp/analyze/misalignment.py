"""How long messages wait for their stages, and stages for their messages.

A message is *queued* from its arrival until its task starts. A stage is *starved* by a message
while it idles until that message arrives and ends its wait. A message that arrives while the stage
works, or that does not end its wait, starves no stage.

With blocking transfers, as in Megatron's own schedules, a message arrives only when its stage
receives it. It is then queued at its sender, which waits for the stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import polars as pl

from rrfp.analyze.frames import MESSAGES, Frames, Schema, numbers_of, recording_of
from rrfp.analyze.table import TEXT, Column, Table, Unit, outliers, seconds
from rrfp.errors import RrfpError
from rrfp.replay.blocking import BlockingRank, find_transfers
from rrfp.replay.recorded import RecordedLayout, RecordedSettings
from rrfp.trace.records import NS_PER_S, Phase, Recording, Window


class BlockingReplica(NamedTuple):
    """A step of one replica with blocking transfers."""

    ranks: list[BlockingRank]
    """One for each pipeline rank, with its transfers."""
    members: list[list[int]]
    """The ranks that run each pipeline rank's tasks together, the leader first."""


def transfers_block(frames: Frames) -> bool:
    """Return whether the run states that its transfers blocked both ranks; False if it states
    nothing."""
    try:
        return RecordedSettings(Recording(frames.settings, [])).is_blocking
    except RrfpError:
        return False


def is_simulated(frames: Frames) -> bool:
    """Return whether the run was simulated, in virtual time."""
    return bool(frames.settings.get("simulated"))


def is_imported(frames: Frames) -> bool:
    """Return whether the run was imported, so that its messages are derived from tasks and
    waits."""
    return "imported" in frames.settings


def blocking_replicas(
    frames: Frames, windows: Mapping[int, Window]
) -> Iterator[tuple[int, list[BlockingReplica]]]:
    """Yield each step with its replicas and their blocking transfers.

    Raises RrfpError if the trace lacks settings, ranks or tasks of the run.
    """
    layout = RecordedLayout(recording_of(frames.of_steps(list(windows))))
    for records in layout.steps(dict(windows)):
        shape = layout.shape_of(records)
        found = []
        for replica in records.replicas:
            # An imported run does not record when a rank entered the step.
            entries_ns = [
                records.window[0]
                if is_imported(frames)
                else max(member.entry_ns for member in members)
                for members in replica
            ]
            members = [[member.info.rank for member in members] for members in replica]
            met = find_transfers(shape, replica, entries_ns, are_recorded=not is_imported(frames))
            found.append(BlockingReplica(met, members))
        yield records.step, found


LINK = ("from", "to", "direction")
_RANKS = ("from_rank", "to_rank")
_OF_A_STEP = ("to_rank", "step")
_TIMES: Schema = {"queued_ns": pl.Int64, "starved_ns": pl.Int64}


def misalignment(
    frames: Frames, stage: int | None = None, *, by_rank: bool = False
) -> pl.DataFrame:
    """Return a row for each directed link between pipeline ranks.

    Columns: the number of messages, and median and 95th percentile of the seconds that messages
    were queued and that they starved their stage. `stage` keeps only links to the rank that holds
    it (UsageError if none does). With `by_rank` each pair of ranks has a row. Raises RrfpError for
    a run without recorded messages.
    """
    messages = timed_messages(frames)
    if stage is not None:
        messages = messages.filter(pl.col("to") == frames.rank_of(stage))
    if messages.is_empty():
        if frames.run["pp_rank"].n_unique() < 2:
            raise RrfpError(
                "the run has one pipeline rank, and so no messages between stages; open a run with "
                "two or more"
            )
        raise RrfpError(
            "the trace has no messages between stages; record one with 'rrfp train' or 'rrfp run' "
            "under their own transport"
        )
    link = (*LINK, *(_RANKS if by_rank else ()))
    return (
        messages.group_by(*link)
        .agg(
            pl.len().alias("messages"),
            *(
                (pl.col(f"{what}_ns").quantile(share, "linear") / NS_PER_S).alias(
                    f"{what}_s_{name}"
                )
                for what in ("queued", "starved")
                for name, share in (("median", 0.5), ("p95", 0.95))
            ),
        )
        .sort(*link)
    )


def link_table(
    report: pl.DataFrame, stages: Mapping[int, Sequence[int]], *, by_rank: bool = False
) -> Table:
    """Make the table of queued messages and starved stages, for a report of `misalignment`."""
    ends = [
        f"{numbers_of(stages[sender])} → {numbers_of(stages[receiver])}"
        for sender, receiver in report.select("from", "to").iter_rows()
    ]
    directions = report["direction"]
    names = [Column("stages", [f"{e} {d}" for e, d in zip(ends, directions, strict=True)], TEXT)]
    programs = [Column(None, report[name], key=name) for name in LINK]
    if by_rank:
        ranks = [f"{sender} → {receiver}" for sender, receiver in report.select(_RANKS).iter_rows()]
        names.insert(0, Column("ranks", ranks, TEXT))
        programs += [Column(None, report[name], key=name) for name in _RANKS]
    unit = seconds(time_s for name in _FIGURES for time_s in report[name])
    return Table(
        "How messages and their stages missed each other, link by link",
        [
            *names,
            *programs,
            Column("messages", report["messages"], key="messages"),
            *(
                Column(
                    heading,
                    report[name],
                    unit,
                    key=name,
                    path=f"{name.rpartition('_')[0]}.{name.rpartition('_')[2]}",
                    marked=outliers(report[name].to_list()) if name.endswith("p95") else (),
                )
                for name, heading in _FIGURES.items()
            ),
        ],
        [*_conclusions(report, ends, unit)],
        num_names=len(names),
        rows_key="links",
    )


_FIGURES = {
    "queued_s_median": "queued,\nmedian",
    "queued_s_p95": "queued,\np95",
    "starved_s_median": "starved,\nmedian",
    "starved_s_p95": "starved,\np95",
}
"""The figures of a link, in seconds, and their headings."""


def _conclusions(report: pl.DataFrame, ends: Sequence[str], unit: Unit) -> Iterator[str]:
    """Yield sentences on the links where stages are starved and messages queued longest (p95).

    If both are 0, one sentence says so.
    """
    is_aligned = True
    for name, sentence in (
        ("starved_s_p95", "A stage idles longest for messages on {}, {} (p95)."),
        ("queued_s_p95", "Messages lie longest before a busy stage on {}, {} (p95)."),
    ):
        worst = report[name].arg_max()
        if worst is not None and report[name][worst] > 0:
            is_aligned = False
            yield sentence.format(ends[worst], unit.format(report[name][worst]))
    if is_aligned:
        yield "No message lay queued, and no stage was starved."


def median_flight_ns(frames: Frames, link: tuple[int, int] | None = None) -> float:
    """Return the median time in flight of messages; 0 without messages.

    `link` selects those from one pipeline rank to another.
    """
    messages = timed_messages(frames)
    if link is not None:
        sender, receiver = link
        messages = messages.filter(
            (pl.col("from_pp_rank") == sender) & (pl.col("to_pp_rank") == receiver)
        )
    middle_ns: Any = (messages["came_ns"] - messages["left_ns"]).median()
    return float(middle_ns or 0)


def timed_messages(frames: Frames) -> pl.DataFrame:
    """Return each message of the finished steps with its link, `queued_ns` and `starved_ns`.

    The link is `from`, `to` (pipeline ranks) and `direction`.
    """
    messages = None
    if transfers_block(frames):
        # If ranks are missing, the blocking transfers cannot be matched.
        with suppress(RrfpError):
            messages = _blocking_messages(frames)
    if messages is None:
        messages = _sent(frames)
    direction = pl.when(pl.col("kind") == "F").then(pl.lit("forward")).otherwise(pl.lit("backward"))
    return messages.with_columns(
        pl.col("from_pp_rank").alias("from"),
        pl.col("to_pp_rank").alias("to"),
        direction.alias("direction"),
    )


def _blocking_messages(frames: Frames) -> pl.DataFrame:
    """Return the messages of finished steps of a run with blocking transfers.

    A message is queued while its sender waits for the receiver, and starves the receiver from the
    time that the receiver reaches the transfer until the transfer ends. Raises RrfpError if the
    transfers cannot be matched.
    """
    windows = {step: (start, end) for step, start, end in frames.windows.iter_rows()}
    met = blocking_replicas(frames, windows) if windows else ()
    rows = [
        (
            step,
            *(str(meeting.task.kind), meeting.task.stage, meeting.task.microbatch),
            *(replica.members[end.pp_rank][0] for end in (meeting.sender, meeting.receiver)),
            *(end.pp_rank for end in (meeting.sender, meeting.receiver)),
            0,
            meeting.began_ns,
            meeting.passed_ns,
            rank.spans[meeting.task][0],
            max(0, meeting.began_ns - meeting.sender.there_ns),
            max(0, meeting.passed_ns - meeting.receiver.there_ns),
        )
        for step, replicas in met
        for replica in replicas
        for rank in replica.ranks
        for meeting in chain.from_iterable(rank.transfers)
        if meeting.receiver.pp_rank == rank.pp_rank
    ]
    return pl.DataFrame(rows, schema={**MESSAGES, **_TIMES}, orient="row")


def _sent(frames: Frames) -> pl.DataFrame:
    """Return the recorded messages of finished steps with `queued_ns` and `starved_ns`.

    Of the messages that arrive between two starts of tasks, only the last starves its rank.
    """
    # A rank is idle since the end of its last task, or since its entry into the step. A message
    # that arrives before the entry matches neither and starves no stage.
    entries = frames.phases.filter(pl.col("phase") == Phase.SCHEDULE).select(
        pl.col("rank").alias("to_rank"),
        "step",
        pl.col("start_ns").alias("since_ns"),
        pl.col("start_ns").alias("idle_ns"),
    )
    tasks = frames.tasks.select(
        pl.col("rank").alias("to_rank"),
        "step",
        pl.col("start_ns").alias("since_ns"),
        pl.col("end_ns").alias("idle_ns"),
    )
    free = pl.concat([entries, tasks]).sort("since_ns")
    return (
        frames.messages.join(frames.windows, on="step", how="semi")
        .sort("came_ns")
        .join_asof(
            free,
            left_on="came_ns",
            right_on="since_ns",
            by=_OF_A_STEP,
            # The task that this message started says nothing about the time before it.
            allow_exact_matches=False,
            check_sortedness=False,
        )
        .with_columns(
            (pl.col("used_ns") - pl.col("came_ns")).clip(0).alias("queued_ns"),
            pl.when(pl.col("came_ns") == pl.col("came_ns").max().over(*_OF_A_STEP, "since_ns"))
            .then((pl.col("came_ns") - pl.col("idle_ns")).fill_null(0).clip(0))
            .otherwise(0)
            .alias("starved_ns"),
        )
    )

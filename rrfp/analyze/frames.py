"""A run as a few tidy tables: a row a task, a wait, a message, an agreement, a phase.

Times are integer nanoseconds on the run's one clock. `rank` is a process; `pp_rank`, `tp_rank` and
`dp_rank` are its place in the layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from rrfp.errors import UsageError
from rrfp.trace.records import RankInfo, Recording

_PLACE = {"rank": pl.Int32, "pp_rank": pl.Int32, "tp_rank": pl.Int32, "dp_rank": pl.Int32}
_SPAN = {"start_ns": pl.Int64, "end_ns": pl.Int64, "step": pl.Int32}
_TASK = {"kind": pl.String, "stage": pl.Int32, "microbatch": pl.Int32}
_TRANSFER = {**_PLACE, **_SPAN, **_TASK, "peer": pl.Int32, "sequence": pl.Int64}

Schema = Mapping[str, type[pl.DataType]]

TASKS: Schema = {
    **_PLACE,
    **_SPAN,
    "kind": pl.String,
    "stage": pl.Int32,
    "chunk": pl.Int32,
    "microbatch": pl.Int32,
    "hint_position": pl.Int32,
    "ready": pl.Int32,
    "skipped": pl.Int32,
    "depth": pl.Int32,
    "held": pl.Int32,
    "ready_forwards": pl.Int32,
    "ready_backwards": pl.Int32,
}
WAITS: Schema = {**_PLACE, **_SPAN, "cause": pl.String}
TRANSFERS: Schema = {
    **_PLACE,
    **_SPAN,
    **_TASK,
    "peer": pl.Int32,
    "sequence": pl.Int64,
    "num_bytes": pl.Int64,
}
AGREEMENTS: Schema = {**_PLACE, **_SPAN, **_TASK, "position": pl.Int32}
PHASES: Schema = {**_PLACE, **_SPAN, "phase": pl.String}
MESSAGES: Schema = {
    "step": pl.Int32,
    **_TASK,
    "from_rank": pl.Int32,
    "to_rank": pl.Int32,
    "from_pp_rank": pl.Int32,
    "to_pp_rank": pl.Int32,
    "num_bytes": pl.Int64,
    "left_ns": pl.Int64,
    "came_ns": pl.Int64,
    "used_ns": pl.Int64,
}
"""`left_ns`: its first byte written; `came_ns`: its last one there; `used_ns`: the task that takes
it began. Named by that task; only messages whose two ends and task were recorded."""


@dataclass(frozen=True, slots=True)
class Frames:
    """The tables of a run, each with the columns of its schema."""

    tasks: pl.DataFrame
    waits: pl.DataFrame
    messages: pl.DataFrame
    agreements: pl.DataFrame
    phases: pl.DataFrame

    def of_steps(self, steps: range) -> "Frames":
        """The rows of these steps alone. Raises UsageError when there are none."""
        chosen = pl.col("step").is_between(steps.start, steps.stop - 1)
        if self.phases.filter(chosen).is_empty():
            found = self.phases["step"].unique().sort().to_list()
            raise UsageError(
                f"the trace has none of the steps asked for; it has those from {found[0]} to "
                f"{found[-1]}"
                if found
                else "the trace has no steps; the run ended before its first one did"
            )
        return Frames(
            self.tasks.filter(chosen),
            self.waits.filter(chosen),
            self.messages.filter(chosen),
            self.agreements.filter(chosen),
            self.phases.filter(chosen),
        )

    def of_stage(self, stage: int) -> "Frames":
        """The rows of the pipeline rank that holds a stage; of messages, those that come there.

        Raises UsageError for a stage that ran no task.
        """
        holder = self.tasks.filter(pl.col("stage") == stage)["pp_rank"].unique()
        if holder.is_empty():
            raise UsageError(
                f"the trace has no tasks of stage {stage}; its stages are "
                f"{', '.join(map(str, self.tasks['stage'].unique().sort()))}"
            )
        own = pl.col("pp_rank") == holder.item()
        return Frames(
            self.tasks.filter(own),
            self.waits.filter(own),
            self.messages.filter(pl.col("to_pp_rank") == holder.item()),
            self.agreements.filter(own),
            self.phases.filter(own),
        )


def frames_of(recording: Recording) -> Frames:
    """The tables of a recording."""
    tasks, waits, sends, receives, agreements, phases = (
        pl.concat(
            [_of_rank(each.info, each.by_name()[name], schema) for each in recording.ranks]
            or [pl.DataFrame(schema=schema)]
        )
        for name, schema in (
            ("task", TASKS),
            ("wait", WAITS),
            ("send", TRANSFERS),
            ("receive", TRANSFERS),
            ("agreement", AGREEMENTS),
            ("phase", PHASES),
        )
    )
    return Frames(tasks, waits, _messages(tasks, sends, receives), agreements, phases)


def _of_rank(info: RankInfo, records: Sequence[tuple[object, ...]], schema: Schema) -> pl.DataFrame:
    """One rank's records: their fields are the schema's columns behind the rank's place."""
    names = [name for name in schema if name not in _PLACE]
    columns = zip(*records, strict=True) if records else [()] * len(names)
    frame = pl.DataFrame(
        dict(zip(names, columns, strict=True)), schema={name: schema[name] for name in names}
    )
    place = [pl.lit(getattr(info, name), dtype).alias(name) for name, dtype in _PLACE.items()]
    return frame.select(*place, *names)


def _messages(tasks: pl.DataFrame, sends: pl.DataFrame, receives: pl.DataFrame) -> pl.DataFrame:
    """Each message from its two ends, which its link and its number there tell, and its task."""
    sent = sends.select(
        pl.col("rank").alias("from_rank"),
        pl.col("peer").alias("to_rank"),
        "sequence",
        pl.col("pp_rank").alias("from_pp_rank"),
        pl.col("start_ns").alias("left_ns"),
    )
    came = receives.select(
        pl.col("peer").alias("from_rank"),
        pl.col("rank").alias("to_rank"),
        "sequence",
        pl.col("pp_rank").alias("to_pp_rank"),
        pl.col("end_ns").alias("came_ns"),
        "num_bytes",
        "step",
        *_TASK,
    )
    used = tasks.select(
        pl.col("rank").alias("to_rank"), "step", *_TASK, pl.col("start_ns").alias("used_ns")
    )
    return (
        came.join(sent, on=["from_rank", "to_rank", "sequence"])
        .join(used, on=["to_rank", "step", *_TASK])
        .select(*MESSAGES)
        .sort("came_ns", "from_rank", "to_rank")
    )

"""A run as tidy tables of tasks, waits, messages, agreements and counters, and its choice of steps.

Times are integer nanoseconds on the run's common clock. `rank` is a process; `pp_rank`, `tp_rank`
and `dp_rank` are its coordinates in the layout. A trace may be larger than memory, so a table is
read on first use, and only the chosen steps of it.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import takewhile
from statistics import median
from typing import Any

import polars as pl

from rrfp.errors import RrfpError, UsageError, numbered
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import (
    EVALUATION,
    RECORD_TYPES,
    Phase,
    RankInfo,
    RankRecords,
    Recording,
    counted,
    is_evaluation,
    split_step,
    steps_in_order,
    windows_of,
)
from rrfp.trace.run_dir import expected_ranks
from rrfp.trace.run_json import stated_policy

Schema = Mapping[str, type[pl.DataType]]

PLACE: Schema = dict.fromkeys(("rank", "pp_rank", "tp_rank", "dp_rank"), pl.Int64)
_TYPES: dict[object, type[pl.DataType]] = {int: pl.Int64, str: pl.String}

SCHEMAS: dict[str, Schema] = {
    name: {**PLACE, **{field: _TYPES[each] for field, each in record_type.__annotations__.items()}}
    for name, record_type in RECORD_TYPES.items()
}
"""The columns of each type of record: the recording rank, and the fields."""
MESSAGES: Schema = {
    "step": pl.Int64,
    "kind": pl.String,
    "stage": pl.Int64,
    "microbatch": pl.Int64,
    "from_rank": pl.Int64,
    "to_rank": pl.Int64,
    "from_pp_rank": pl.Int64,
    "to_pp_rank": pl.Int64,
    "num_bytes": pl.Int64,
    "left_ns": pl.Int64,
    "came_ns": pl.Int64,
    "used_ns": pl.Int64,
}
"""A row for each message, named by the task that receives it: `left_ns` (first byte written),
`came_ns` (last byte arrived) and `used_ns` (the task began). Messages without a record of both ends
and of the task are missing."""
COUNTERS: Schema = {
    **PLACE,
    "time_ns": pl.Int64,
    "step": pl.Int64,
    "name": pl.String,
    "value": pl.Int64,
}
"""The counters of the dispatcher at each choice of a task. `name` is `depth` (D), `held`,
`held_bytes`, `ready_forwards` or `ready_backwards`."""
WINDOWS: Schema = dict.fromkeys(("step", "start_ns", "end_ns"), pl.Int64)
RUN: Mapping[str, pl.DataType | type[pl.DataType]] = {
    **PLACE,
    "stages": pl.List(pl.Int64),
    "host": pl.String,
    "pid": pl.Int64,
    "clock_offset_ns": pl.Int64,
    "clock_error_ns": pl.Int64,
    "settings": pl.String,
}
"""A row for each rank. `settings` is the content of run.json, the same in every row."""

_NONE_FINISHED = "the trace has no step that every rank finished; see 'rrfp trace check'"
_TASK_KEY = ("step", "kind", "stage", "microbatch")
_MOST_TASKS_AT_ONCE = 2_000_000


class Frames:
    """The tables of a run, or of some of its steps or ranks.

    `tables` has a table for each record type in `SCHEMAS`, with the columns of its schema.
    """

    def __init__(self, run: pl.DataFrame, tables: Mapping[str, pl.LazyFrame]) -> None:
        self.run = run
        self.num_left_out = 0
        """The number of evaluations that were left out of tables of training steps."""
        self.warm_up: tuple[int, ...] = ()
        """The first steps that were left out because they took much longer than later ones."""
        self._tables = tables

    @cached_property
    def tasks(self) -> pl.DataFrame:
        """Records of all tasks, read on first use."""
        return self.table("task")

    @cached_property
    def waits(self) -> pl.DataFrame:
        """Records of all waits, read on first use."""
        return self.table("wait")

    @cached_property
    def agreements(self) -> pl.DataFrame:
        """Records of all agreements, read on first use."""
        return self.table("agreement")

    @cached_property
    def phases(self) -> pl.DataFrame:
        """Records of all phases, read on first use."""
        return self.table("phase")

    @cached_property
    def messages(self) -> pl.DataFrame:
        """Messages whose send, receipt and receiving task are all recorded (`MESSAGES`)."""
        return _messages(self.tasks, self.table("send"), self.table("receive"))

    @cached_property
    def counters(self) -> pl.DataFrame:
        """A row for each task and counter of the dispatcher at its start (`COUNTERS`)."""
        names = ["depth", "held", "held_bytes", "ready_forwards", "ready_backwards"]
        return (
            self.tasks.rename({"start_ns": "time_ns"})
            .unpivot(
                names, index=[*PLACE, "time_ns", "step"], variable_name="name", value_name="value"
            )
            .sort("rank", "time_ns", maintain_order=True)
        )

    @cached_property
    def windows(self) -> pl.DataFrame:
        """The window of each step that all ranks finished: `step`, `start_ns`, `end_ns`."""
        schedules = self.phases.filter(pl.col("phase") == Phase.SCHEDULE)
        found = windows_of(
            schedules.select("rank", "step", "start_ns", "end_ns").iter_rows(), self.run.height
        )
        rows = [(step, *window) for step, window in found.items()]
        return pl.DataFrame(rows, schema=WINDOWS, orient="row")

    def finished_windows(self) -> pl.DataFrame:
        """Return `windows`. Raises RrfpError if no step was finished by all ranks."""
        if self.windows.is_empty():
            raise RrfpError(_NONE_FINISHED)
        return self.windows

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The content of run.json; empty for a run without ranks."""
        found: dict[str, Any] = json.loads(self.run["settings"][0]) if self.run.height else {}
        return found

    @cached_property
    def stages(self) -> dict[int, Sequence[int]]:
        """The stages of each pipeline rank, in order of `pp_rank`."""
        held = self.run.select("pp_rank", "stages").unique("pp_rank").sort("pp_rank")
        return dict(held.iter_rows())

    @cached_property
    def steps(self) -> list[int]:
        """The steps that began: training steps in order, then evaluations."""
        return steps_in_order(
            pl.concat([self.scan(name).select("step") for name in ("task", "phase")])
            .unique()
            .collect()["step"]
            .to_list()
        )

    def table(self, name: str) -> pl.DataFrame:
        """Read the records of one type, rank by rank in the order of recording."""
        return self.scan(name).collect()

    def scan(self, name: str) -> pl.LazyFrame:
        """Return the records of one type as a lazy frame."""
        return self._tables[name]

    def of_steps(self, steps: range | Collection[int]) -> "Frames":
        """Return the tables of these steps only. Raises UsageError if the run has none of them."""
        chosen = (
            pl.col("step").is_between(steps.start, steps.stop - 1)
            if isinstance(steps, range) and steps.step == 1
            else pl.col("step").is_in(list(steps))
        )
        found = self._filtered(lambda _: chosen)
        if not found.steps:
            raise UsageError(self._describe_missing_steps())
        return found

    def of_stage(self, stage: int) -> "Frames":
        """Return the tables of the pipeline rank that holds a stage, with the messages it received.

        All ranks' sends are kept for them. Steps that these ranks finished count as finished.
        Raises UsageError for a stage that no rank holds.
        """
        own = pl.col("pp_rank") == self.rank_of(stage)
        # Other ranks sent the received messages.
        found = self._filtered(lambda name: pl.lit(True) if name == "send" else own)
        found.run = self.run.filter(own)
        return found

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage. Raises UsageError if no rank does."""
        holders = self.run.filter(pl.col("stages").list.contains(stage))["pp_rank"]
        if holders.is_empty():
            raise UsageError(
                f"the trace has no tasks of stage {stage}; its stages are "
                f"{', '.join(map(str, self.run['stages'].explode().unique().sort()))}"
            )
        return int(holders[0])

    def piecewise(self) -> Iterator["Frames"]:
        """Yield the run in pieces of whole steps with about two million tasks; most runs are one
        piece."""
        counts = self.scan("task").group_by("step").len().collect(engine="streaming")
        pieces = (
            pl.DataFrame({"step": self.steps}, schema={"step": pl.Int64})
            .join(counts, on="step", how="left", maintain_order="left")
            .group_by(
                pl.col("len").fill_null(0).cum_sum() // _MOST_TASKS_AT_ONCE, maintain_order=True
            )
            .agg(pl.col("step"))
        )
        if pieces.height < 2:
            yield self
            return
        for steps in pieces["step"]:
            yield self.of_steps(steps.to_list())

    def _filtered(self, chosen: Callable[[str], pl.Expr]) -> "Frames":
        """Return new tables, each filtered by the expression that `chosen` returns for its name."""
        found = Frames(
            self.run, {name: table.filter(chosen(name)) for name, table in self._tables.items()}
        )
        found.num_left_out = self.num_left_out
        found.warm_up = self.warm_up
        return found

    def _describe_missing_steps(self) -> str:
        """Explain in a sentence that the run has none of the chosen steps, and which ones it
        has."""
        if not self.steps:
            return "the trace has no steps; the run ended before its first one did"
        (sort, first), (_, last) = split_step(self.steps[0]), split_step(self.steps[-1])
        return f"the trace has none of the {sort}s asked for; it has those from {first} to {last}"


def numbers_of(stages: Iterable[int]) -> str:
    """Format the sorted numbers of stages, such as `0 7`."""
    return " ".join(map(str, sorted(stages)))


def label_of(stages: Sequence[int]) -> str:
    """Format the name of a pipeline rank in reports: `stage 3`, or `stages 0 7`."""
    return f"stage{'s' if len(stages) > 1 else ''} {numbers_of(stages)}"


def frames_of(recording: Recording) -> Frames:
    """Convert a recording into tables."""
    return Frames(
        run_frame((records.info for records in recording.ranks), recording.settings),
        {
            name: pl.concat(
                [_of_rank(each.info, each.by_name()[name], schema) for each in recording.ranks]
                or [pl.DataFrame(schema=schema)]
            ).lazy()
            for name, schema in SCHEMAS.items()
        },
    )


def recording_of(frames: Frames) -> Recording:
    """Convert tables into a recording, the inverse of `frames_of`."""
    names = list(RUN)[:-1]
    ranks = {}
    for row in frames.run.select(names).iter_rows(named=True):
        info = RankInfo(**{**row, "stages": tuple(row["stages"])})
        ranks[info.rank] = RankRecords(info)
    for name, record_type in RECORD_TYPES.items():
        table = frames.table(name).select("rank", *record_type._fields)
        for (rank,), rows in table.partition_by(
            "rank", as_dict=True, include_key=False, maintain_order=True
        ).items():
            ranks[rank].by_name()[name].extend(map(record_type._make, rows.iter_rows()))
    return Recording(frames.settings, list(ranks.values()))


def run_frame(infos: Iterator[RankInfo], settings: Mapping[str, object]) -> pl.DataFrame:
    """Make the table of a run's ranks, with the settings as JSON in each row."""
    content = json.dumps(settings)
    return pl.DataFrame(
        [{**asdict(info), "stages": list(info.stages), "settings": content} for info in infos],
        schema=RUN,
    )


def _of_rank(info: RankInfo, records: Sequence[tuple[object, ...]], schema: Schema) -> pl.DataFrame:
    """Make the table of one rank's records: the rank's coordinates, then the fields."""
    names = [name for name in schema if name not in PLACE]
    columns = zip(*records, strict=True) if records else [()] * len(names)
    frame = pl.DataFrame(
        dict(zip(names, columns, strict=True)), schema={name: schema[name] for name in names}
    )
    place = [pl.lit(getattr(info, name), dtype).alias(name) for name, dtype in PLACE.items()]
    return frame.select(*place, *names)


def _messages(tasks: pl.DataFrame, sends: pl.DataFrame, receives: pl.DataFrame) -> pl.DataFrame:
    """Join the two ends of each message by link and sequence number, and its task.

    Messages without one of these are left out. The result has the columns of `MESSAGES`, in order
    of arrival.
    """
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
        *_TASK_KEY,
    )
    used = tasks.select(
        pl.col("rank").alias("to_rank"), *_TASK_KEY, pl.col("start_ns").alias("used_ns")
    )
    return (
        came.join(sent, on=["from_rank", "to_rank", "sequence"])
        .join(used, on=["to_rank", *_TASK_KEY])
        .select(*MESSAGES)
        .sort("came_ns", "from_rank", "to_rank")
    )


def missing_records(frames: Frames) -> Iterator[str]:
    """Yield sentences on missing ranks, each rank's lost records, and half-recorded messages.

    Messages count as half recorded if the numbers of sends and receives differ. `rrfp trace check`
    checks more.
    """
    missing = sorted(expected_ranks(frames.settings) - set(frames.run["rank"]))
    if missing:
        ranks = numbered("rank", missing)
        yield f"{ranks} left no records; figures are of the other {frames.run.height}"
    for rank, num_lost in (
        frames.table("loss").group_by("rank").agg(pl.col("num_lost").sum()).sort("rank").iter_rows()
    ):
        yield f"rank {rank} lost {num_lost} records, and its steps that lack them are left out"
    num_sent, num_received = (
        frames.scan(name).select(pl.len()).collect().item() for name in ("send", "receive")
    )
    if num_sent != num_received:
        yield (
            f"{num_sent} messages were sent and {num_received} received; those that lack an end "
            "are left out"
        )


def run_settings(frames: Frames) -> dict[str, Any]:
    """Return the settings by flag; empty if the trace, perhaps of another program, has none."""
    settings = frames.settings.get("settings")
    return settings if isinstance(settings, dict) else {}


def run_limit(frames: Frames) -> int | None:
    """Return the run's limit on D; None if there was none or it is unknown."""
    limit = stated_policy(frames.settings).get("limit")
    return limit if type(limit) is int else None


# The choice of steps for a report: training steps or evaluations, and without slow first steps.

NOT_REPLAYED = "evaluations have no backward, and only steps that train are replayed"
"""The reason why evaluations have no structural part."""
_MOST_WARM_UP = 3
_MOST_OF_A_RUN = 4
"""At most a quarter of the steps is warm-up."""
_FAR = 5.0
"""The number of deviations by which warm-up steps exceed the median of later steps."""
_DEVIATION = 1.4826
"""The ratio of standard deviation to median absolute deviation of normal noise."""
_LEAST_EXCESS = 0.2
"""The least excess of warm-up steps over that median, as a share of it."""
_SIMULATED = "simulated"
"""The host of simulated ranks, which have no warm-up."""


def choose_steps(
    frames: Frames,
    steps: range | None = None,
    *,
    evaluations: bool = False,
    with_warm_up: bool = False,
) -> Frames:
    """Return the tables of the training steps, or with `evaluations` of the evaluations.

    `steps` selects some of them by number. None selects all except `warm_up_steps`, or with
    `with_warm_up` all. The result notes what is left out. Raises UsageError if the run has steps
    but none of that kind, or none of `steps`.
    """
    tested = evaluation_steps(frames)
    trained = sorted(set(frames.steps).difference(tested))
    if evaluations and not tested:
        raise UsageError("the trace has no evaluations; leave out --evaluations")
    if tested and not trained and not evaluations:
        raise UsageError(
            f"the trace has {counted(len(tested), EVALUATION)} and no step that trains; 'rrfp "
            "analyze bubbles --evaluations' looks at evaluations"
        )
    found = frames
    if tested:
        found = frames.of_steps(tested if evaluations else trained)
        found.num_left_out = 0 if evaluations else len(tested)
    if steps is None:
        return found if with_warm_up else _without_warm_up(found)
    asked = [step for step in found.steps if split_step(step)[1] in steps]
    # Parquet files are filtered faster by a range than by a list.
    return found.of_steps(asked if evaluations and asked else steps)


def warm_up_steps(frames: Frames) -> tuple[int, ...]:
    """Return the first finished steps if they were slow, as compilation makes them.

    These are the longest sequence of steps from the first one on in which each step took longer
    than the median of the later steps by five deviations and by 20%. They are at most three, and at
    most a quarter of the run. The deviation is the median absolute deviation scaled to normal
    noise, so that a single slow step later does not hide the warm-up. Runs of fewer than four steps
    and simulated runs have no warm-up.
    """
    if _SIMULATED in frames.run["host"]:
        return ()
    in_time = frames.windows.sort("start_ns").select(
        "step", (pl.col("end_ns") - pl.col("start_ns")).alias("ns")
    )
    most = min(_MOST_WARM_UP, in_time.height // _MOST_OF_A_RUN)
    if not most:
        return ()
    later_ns = in_time["ns"][most:].to_list()
    usual_ns = median(later_ns)
    deviation_ns = _DEVIATION * median(abs(ns - usual_ns) for ns in later_ns)
    bound_ns = usual_ns + max(_FAR * deviation_ns, _LEAST_EXCESS * usual_ns)
    first = takewhile(lambda row: row[1] > bound_ns, in_time.head(most).iter_rows())
    return tuple(step for step, _ in first)


def step_time_ns(frames: Frames, steps: Collection[int] | None = None) -> float:
    """Return the mean step time that all reports show, over the steps that all ranks finished.

    `steps` selects some of them. Raises RrfpError if none of them is left.
    """
    whole = frames.windows
    if steps is not None:
        whole = whole.filter(pl.col("step").is_in(list(steps)))
    if whole.is_empty():
        raise RrfpError(_NONE_FINISHED)
    return float((whole["end_ns"] - whole["start_ns"]).mean())  # type: ignore[arg-type]


def _without_warm_up(frames: Frames) -> Frames:
    """Return the tables without the warm-up steps, which the result notes in `warm_up`."""
    slow = warm_up_steps(frames)
    if not slow:
        return frames
    rest = [step for step in frames.steps if step not in slow]
    is_behind = max(slow) < min(rest)
    found = frames.of_steps(range(min(rest), max(rest) + 1) if is_behind else rest)
    found.warm_up = slow
    return found


def evaluation_steps(frames: Frames) -> list[int]:
    """Return the steps of a run that are evaluations, in order.

    Traces of earlier versions number them like training steps; they are the finished steps without
    any backward in a run that has backwards.
    """
    if numbered_apart := [step for step in frames.steps if is_evaluation(step)]:
        return numbered_apart
    ran = (
        frames.scan("task")
        .group_by("step")
        .agg(
            (pl.col("kind") == Kind.F).any().alias("forwards"),
            (pl.col("kind") != Kind.F).any().alias("others"),
        )
        .collect(engine="streaming")
    )
    if not ran["others"].any():
        return []
    # An unfinished step may merely have lost its backwards.
    tested = ran.filter(pl.col("forwards") & ~pl.col("others"))["step"]
    return sorted(set(tested) & set(frames.windows["step"]))

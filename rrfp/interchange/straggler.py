"""Reads the traces of StragglerAnalysis (Lin et al., "Understanding Stragglers in Large Model
Training Using What-if Analysis", 2025): a CSV or Parquet table with one operation per row.

Its columns are those in the project's readme. Times are seconds. In the published traces they have
single precision, so neighboring tasks may overlap by microseconds; the later one is moved to the
end of the earlier one. They also count from the start of each step, so all steps start at 0; the
steps are placed end to end, because the time between them is unknown.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from rrfp.errors import RrfpError
from rrfp.interchange.json_stream import open_bytes
from rrfp.interchange.spans import RankSpans, Source, TaskSpan, TransferSpan
from rrfp.schedule.tasks import Cause, Kind
from rrfp.trace.perfetto.format import MOST_OF_A_KIND, bounds_of
from rrfp.trace.records import NS_PER_S, Phase, PhaseRecord, RankInfo, WaitRecord

NUMBERS = ("dp_rank", "stage", "rank", "step", "mc", "mb_id")
TIMES = ("start_ts", "duration")
"""The columns that are read; `seq_id` and `gmc` follow from the others."""

_TASKS = {"forward-compute": Kind.F, "backward-compute": Kind.B}
_TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
_GRADIENT_SYNC = (
    "grads-reduce-scatter",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "separate-grads-all-reduce",
)
_OPTIMIZER = ("optimizer-clip-main-grad", "optimizer")
_PASSED_OVER = ("params-all-gather", "gc")
"""Operations that are skipped: they precede a step's first task, or the pipeline does not wait for
them."""

OPTYPES = (*_TASKS, *_TRANSFERS, *_GRADIENT_SYNC, *_OPTIMIZER, *_PASSED_OVER)
_ROUNDING_NS = 100_000
_MOST = {
    **dict.fromkeys(NUMBERS, MOST_OF_A_KIND - 1),
    **dict.fromkeys(TIMES, 4_000_000_000),  # a date of 2096, in seconds since 1970
    "step": 1 << 30,
    "mc": 1_000,
}


def read_table(path: Path) -> tuple[list[RankSpans], Source]:
    """The spans of a run from its table. Raises RrfpError for any other table, for one without
    tasks, and for one with impossible values or a rank with several stages or replicas."""
    table = _checked(path, _read(path))
    if not table["optype"].is_in(list(_TASKS)).any():
        raise RrfpError(
            f"{path} has no forward-compute or backward-compute; the operations known are "
            f"{', '.join(OPTYPES)}"
        )
    num_ranks = 1 + _largest(table["stage"])
    chunks = table.filter(pl.col("optype").is_in(list(_TASKS)))["mc"]
    num_chunks = 1 + _largest(chunks)
    ranks: dict[int, RankSpans] = {}
    num_placed: defaultdict[tuple[int, int], int] = defaultdict(int)
    places = table.select("rank", "stage", "dp_rank").unique().sort("rank")
    for number, pp_rank, dp_rank in places.iter_rows():
        if number in ranks:
            raise RrfpError(f"{path} gives rank {number} several stages or replicas")
        stages = tuple(chunk * num_ranks + pp_rank for chunk in range(num_chunks))
        tp_rank = num_placed[pp_rank, dp_rank]
        num_placed[pp_rank, dp_rank] += 1
        info = RankInfo(number, pp_rank, tp_rank, dp_rank, stages, "unknown", 0)
        ranks[number] = RankSpans(info)
    for number, step, optype, start_ns, end_ns, chunk, microbatch in table.select(
        "rank", "step", "optype", "start_ns", "end_ns", "mc", "mb_id"
    ).iter_rows():
        rank = ranks[number]
        if optype in _TASKS:
            stage = chunk * num_ranks + rank.info.pp_rank
            rank.tasks.append(TaskSpan(start_ns, end_ns, step, _TASKS[optype], stage, microbatch))
        elif optype in _TRANSFERS:
            rank.transfers.append(TransferSpan(start_ns, end_ns, step))
        elif optype in _GRADIENT_SYNC:
            rank.waits.append(WaitRecord(start_ns, end_ns, step, Cause.GRADIENT_SYNC))
        elif optype in _OPTIMIZER:
            rank.phases.append(PhaseRecord(start_ns, end_ns, step, Phase.OPTIMIZER))
    for rank in ranks.values():
        rank.tasks = _without_overlaps(rank.tasks)
        rank.phases += rank.schedules()
    # The published traces have one rank of each tensor-parallel group, without the group's size.
    return list(ranks.values()), Source("trace of StragglerAnalysis", 1, "cuda", True, None)


def _read(path: Path) -> pl.DataFrame:
    """Read a CSV or Parquet file. Raises RrfpError if it is damaged or cannot be read."""
    try:
        if path.suffix == ".parquet":
            with _without_stderr():
                return _read_parquet(path)
        return pl.read_csv(b"".join(open_bytes(path)), infer_schema_length=None)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        reason = " ".join(str(error).split())[:80]
        raise RrfpError(
            f"{path} is no table ({reason}); import the CSV or the Parquet file as it was written"
        ) from None


def _read_parquet(path: Path) -> pl.DataFrame:
    """Read a Parquet file. Raises RrfpError if it claims more rows than it has bytes, as a
    malicious one may."""
    num_rows = pl.scan_parquet(path, glob=False).select(pl.len()).collect().item()
    # A file of a few bytes can claim billions of equal rows. Real times are not equal.
    if num_rows > path.stat().st_size:
        raise RrfpError(
            f"{path} claims {num_rows} rows, more than it has bytes, so it is damaged; write it "
            "again"
        )
    return pl.read_parquet(path, glob=False)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard stderr in the block: Rust prints a panic there, which polars also raises."""
    # Open this file first: if stderr is closed, it gets descriptor 2.
    with Path(os.devnull).open("wb") as nowhere:
        stderr = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _checked(path: Path, table: pl.DataFrame) -> pl.DataFrame:
    """The table with whole numbers, and with its times as `start_ns` and `end_ns`, in ns of the
    run; steps that overlap are placed end to end. Raises RrfpError for missing columns and for
    impossible values."""
    missing = [name for name in (*NUMBERS, *TIMES, "optype") if name not in table.columns]
    if missing:
        raise RrfpError(
            f"{path} lacks the columns {', '.join(missing)}; a table of StragglerAnalysis has "
            f"{', '.join((*NUMBERS, *TIMES, 'optype'))}"
        )
    for name in (*NUMBERS, *TIMES, "optype"):
        found = table[name].dtype
        # Text may contain numbers. A column without values is refused below, by its first row.
        allowed = (pl.String, pl.Null, *((pl.Categorical, pl.Enum) if name == "optype" else ()))
        if found not in allowed and (name == "optype" or not found.is_numeric()):
            kind = "text" if name == "optype" else "number"
            raise RrfpError(f"{path} has {name} as {str(found)[:40]}; it must be a {kind}")
    table = table.with_columns(
        *(pl.col(name).cast(pl.Float64, strict=False) for name in (*NUMBERS, *TIMES)),
        pl.col("optype").cast(pl.String),
    )
    is_task = pl.col("optype").is_in(list(_TASKS))
    for name in (*NUMBERS, *TIMES):
        column = pl.col(name)
        most, is_whole = _MOST[name], name in NUMBERS
        bad = ~column.is_between(0, most).fill_null(value=False)
        bad = bad | (column != column.floor()) if is_whole else bad
        # Only tasks have chunks and microbatches.
        bad = bad & is_task if name in ("mc", "mb_id") else bad
        rows = table.with_row_index("row", offset=1).filter(bad)
        if len(rows):
            raise RrfpError(
                f"{path}, row {rows['row'][0]}: {name} is {rows[name][0]}; it must be a "
                f"{'whole ' if is_whole else ''}number from 0 to {most:,}"
            )
    unknown = set(table["optype"].drop_nulls().unique()) - set(OPTYPES)
    if unknown or table["optype"].has_nulls():
        first = sorted(unknown)[0][:40] if unknown else "missing"
        raise RrfpError(f"{path} has the optype '{first}'; those known are {', '.join(OPTYPES)}")
    table = table.with_columns(pl.col(name).cast(pl.Int64, strict=False) for name in NUMBERS)
    start_ns, end_ns = (
        (seconds * NS_PER_S).round().cast(pl.Int64)
        for seconds in (pl.col("start_ts"), pl.col("start_ts") + pl.col("duration"))
    )
    return _put_end_to_end(path, table.with_columns(start_ns=start_ns, end_ns=end_ns))


def _put_end_to_end(path: Path, table: pl.DataFrame) -> pl.DataFrame:
    """Shift the steps so that they follow each other without gaps, if any overlap; otherwise change
    nothing. Raises RrfpError if they take impossibly long."""
    steps = (
        table.group_by("step")
        .agg(pl.col("start_ns").min().alias("first_ns"), pl.col("end_ns").max().alias("last_ns"))
        .sort("step")
    )
    if (steps["first_ns"] >= steps["last_ns"].shift(1)).all():
        return table
    shifts_ns = []
    end_ns = 0
    for _, first_ns, last_ns in steps.iter_rows():
        shifts_ns.append(end_ns - first_ns)
        end_ns += last_ns - first_ns
    if end_ns > bounds_of("end_ns")[1]:
        raise RrfpError(
            f"{path} has steps that take {end_ns / NS_PER_S:.4g} s together; start_ts and duration "
            "must be seconds"
        )
    steps = steps.select("step", pl.Series("shift_ns", shifts_ns, pl.Int64))
    return (
        table.join(steps, on="step")
        .with_columns(pl.col("start_ns", "end_ns") + pl.col("shift_ns"))
        .drop("shift_ns")
    )


def _without_overlaps(tasks: list[TaskSpan]) -> list[TaskSpan]:
    """The tasks in order of time. One that overlaps the one before by at most 100 us and its own
    length, due to rounding, begins at its end; greater overlaps stay."""
    apart: list[TaskSpan] = []
    for task in sorted(tasks):
        ended_ns = apart[-1].end_ns if apart else task.start_ns
        is_rounding = 0 < ended_ns - task.start_ns <= min(_ROUNDING_NS, task.end_ns - task.start_ns)
        apart.append(task._replace(start_ns=ended_ns) if is_rounding else task)
    return apart


def _largest(column: pl.Series) -> int:
    """The greatest value of a column of integers."""
    most = column.max()
    assert isinstance(most, int)
    return most

"""The tables of StragglerAnalysis made into runs."""

import csv
import io
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import polars as pl
import pytest

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.frames import frames_of
from rrfp.errors import RrfpError
from rrfp.interchange.formats import import_run
from rrfp.replay.whatif import what_if
from rrfp.trace.records import Phase

COLUMNS = (
    *("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration"),
    *("seq_id", "mc", "gmc", "mb_id"),
)


def row(rank: int, step: int, optype: str, start: float, end: float, mb: int = -1) -> list[Any]:
    is_task = optype.endswith("-compute")
    chunk, of_model = (0, rank) if is_task else (-1, -1)
    return [0, rank, rank, step, optype, start, round(end - start, 9), 0, chunk, of_model, mb]


def steps_of_two_stages(step: int) -> list[list[Any]]:
    """One microbatch over two stages: forwards of 1 s, backwards of 2 s, messages of 0.1 s."""
    return [
        row(0, step, "params-all-gather", 0, 0.5),
        row(0, step, "forward-compute", 1, 2, 0),
        row(0, step, "forward-send", 2, 2.1),
        row(0, step, "backward-recv", 2.1, 5.2),
        row(0, step, "backward-compute", 5.2, 7.2, 0),
        row(0, step, "grads-reduce-scatter", 7.2, 8),
        row(0, step, "optimizer", 8, 8.5),
        row(1, step, "forward-recv", 1, 2.1),
        row(1, step, "forward-compute", 2.1, 3.1, 0),
        row(1, step, "backward-compute", 3.1, 5.1, 0),
        row(1, step, "backward-send", 5.1, 5.2),
        row(1, step, "gc", 5.2, 5.2, 0),
    ]


def written(path: Path, rows: list[list[Any]], columns: tuple[str, ...] = COLUMNS) -> Path:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    path.write_text(text.getvalue())
    return path


def test_causes_are_those_of_the_construction(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", steps_of_two_stages(7))
    imported = import_run([path])
    assert imported.notes == ()
    report = bubbles(frames_of(imported.recording))
    assert report.window_ns == 7 * 10**9
    first, second = (
        {cause: ns / 1e9 for cause, ns in rank.causes_ns.items() if ns} for rank in report.ranks
    )
    # It waits while stage 1 runs its two tasks; the rest of the two messages is their way.
    assert first == {"backward_input": 3.1, "transfer": 0.1, "gradient_sync": 0.8}
    assert second == {"warmup": 1.1, "drain": 2.9}
    assert what_if(imported.recording, lambda _: []).replay_error < 0.01
    phases = {phase.phase for phase in imported.recording.ranks[0].phases}
    assert phases == {Phase.SCHEDULE, Phase.OPTIMIZER}


def test_parquet_says_the_same_as_csv(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", steps_of_two_stages(7))
    table = pl.read_csv(path).with_columns(
        pl.col("optype").cast(pl.Categorical), pl.col("rank").cast(pl.Int16)
    )
    table.write_parquet(tmp_path / "t.parquet")
    assert import_run([tmp_path / "t.parquet"]) == import_run([path])


def test_steps_that_all_begin_at_zero_are_laid_end_to_end(tmp_path: Path) -> None:
    rows = steps_of_two_stages(7) + steps_of_two_stages(9)
    recording = import_run([written(tmp_path / "t.csv", rows)]).recording
    entries = [p.start_ns for p in recording.ranks[0].phases if p.phase == Phase.SCHEDULE]
    assert [entry - entries[0] for entry in entries] == [0, 8_500_000_000]
    assert bubbles(frames_of(recording)).window_ns == 14 * 10**9


def test_chunks_are_stages_in_a_loop(tmp_path: Path) -> None:
    rows = []
    for chunk in range(2):
        for rank in range(2):
            for kind, start in (("forward", 2 * chunk + rank), ("backward", 10 - 2 * chunk - rank)):
                each = row(rank, 0, f"{kind}-compute", start, start + 1, 0)
                each[COLUMNS.index("mc")] = chunk
                rows.append(each)
    recording = import_run([written(tmp_path / "t.csv", rows)]).recording
    assert [rank.info.stages for rank in recording.ranks] == [(0, 2), (1, 3)]
    assert sorted(task.stage for task in recording.ranks[1].tasks) == [1, 1, 3, 3]


def test_neighbours_that_rounding_made_overlap_are_put_apart(tmp_path: Path) -> None:
    rows = [
        row(0, 0, "forward-compute", 0, 1.000004, 0),
        row(0, 0, "backward-compute", 1, 2, 0),
        row(0, 0, "forward-compute", 1.9, 3, 1),
    ]
    tasks = import_run([written(tmp_path / "t.csv", rows)]).recording.ranks[0].tasks
    # Microseconds are of rounding; a tenth of a second is not, and stays.
    assert [task.start_ns for task in tasks] == [0, 1_000_004_000, 1_900_000_000]


GOOD = row(0, 0, "forward-compute", 0, 1, 0)


def spoiled(column: str, value: object) -> list[Any]:
    bad = list(GOOD)
    bad[COLUMNS.index(column)] = value
    return bad


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "no forward-compute or backward-compute"),
        ([row(0, 0, "forward-send", 0, 1)], "no forward-compute or backward-compute"),
        ([GOOD, spoiled("duration", -1)], "row 2: duration is -1.0"),
        ([GOOD, spoiled("duration", "nan")], "row 2: duration is nan"),
        ([GOOD, spoiled("start_ts", "inf")], "row 2: start_ts is inf"),
        ([GOOD, spoiled("start_ts", "soon")], "row 2: start_ts is None"),
        ([GOOD, spoiled("rank", "")], "row 2: rank is None"),
        ([GOOD, spoiled("mc", -1)], "row 2: mc is -1.0"),
        ([GOOD, spoiled("mc", 10**8)], "row 2: mc is 100000000.0"),
        ([GOOD, spoiled("stage", 10**12)], "row 2: stage is 1000000000000.0"),
        ([GOOD, spoiled("mb_id", 1 << 20)], "row 2: mb_id is 1048576.0"),
        ([GOOD, spoiled("step", 0.5)], "step is 0.5; it must be a whole number"),
        (
            [GOOD, spoiled("duration", 3e9), spoiled("step", 1)],
            "has steps that take 3e+09 s together",
        ),
        ([GOOD, spoiled("optype", "nap")], "has the optype 'nap'"),
        ([GOOD, spoiled("optype", "")], "has the optype 'missing'"),
        ([GOOD, spoiled("stage", 1)], "gives rank 0 several stages or replicas"),
        ([GOOD, [1, 2]], "row 2: rank is None"),
    ],
)
def test_rows_that_cannot_be_are_refused(
    rows: list[list[Any]], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(RrfpError) as raised:
        import_run([written(tmp_path / "t.csv", rows)])
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_huge_numbers_cost_nothing(tmp_path: Path) -> None:
    rows = [GOOD, spoiled("mb_id", 10**6), spoiled("step", 10**9)]
    imported = import_run([written(tmp_path / "t.csv", rows)])
    assert imported.recording.settings["settings"]["hint"] == "as recorded"  # type: ignore[index]


def test_steps_may_be_dated(tmp_path: Path) -> None:
    dated = [spoiled("start_ts", 1.7e9 + second) for second in range(20)]
    for step, each in enumerate(dated):
        each[COLUMNS.index("step")] = step
    tasks = import_run([written(tmp_path / "t.csv", dated)]).recording.ranks[0].tasks
    assert [task.start_ns for task in tasks] == [step * 10**9 for step in range(20)]
    # By so little they overlap that they are laid end to end.
    for each in dated[1:]:
        each[COLUMNS.index("start_ts")] -= 1e-6
    tasks = import_run([written(tmp_path / "t.csv", dated)]).recording.ranks[0].tasks
    assert [task.start_ns for task in tasks] == [step * 10**9 for step in range(20)]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("rank", [[0]]),
        ("rank", [{"a": 1}]),
        ("rank", [b"0"]),
        ("start_ts", [datetime(2024, 1, 1)]),
        ("duration", [timedelta(seconds=1)]),
        ("optype", [["forward-compute"]]),
    ],
)
def test_columns_of_other_types_are_refused(column: str, values: list[Any], tmp_path: Path) -> None:
    table = pl.DataFrame(dict(zip(COLUMNS, ([value] for value in GOOD), strict=True)))
    table.with_columns(pl.Series(column, values)).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(RrfpError, match=f"has {column} as "):
        import_run([tmp_path / "t.parquet"])


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    for name, data, sentence in (
        ("a.csv", b"", "is no table"),
        ("b.csv", b"\xff\xfe\x00", "lacks the columns"),
        ("c.parquet", b"PAR1", "is no table"),
        ("d.csv", b"rank,step\n0,0\n", "lacks the columns dp_rank, stage"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RrfpError, match=sentence):
            import_run([tmp_path / name])


def test_a_panic_of_the_reader_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What Rust itself says of it, from a thread of its own, is not heard."""

    def panic(*_: object, **__: object) -> NoReturn:
        os.write(2, b"thread 'async-executor-0' panicked")
        raise pl.exceptions.PanicException("Thrift out of range")

    table = pl.DataFrame([row(0, 0, "optimizer", 0, 1)], COLUMNS, orient="row")
    table.write_parquet(tmp_path / "t.parquet")
    monkeypatch.setattr(pl, "read_parquet", panic)
    with pytest.raises(RrfpError, match="is no table \\(Thrift out of range\\)"):
        import_run([tmp_path / "t.parquet"])
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def test_more_rows_than_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pl.DataFrame([row(0, 0, "optimizer", 0, 1)], COLUMNS, orient="row")
    table.select(pl.all().repeat_by(1_000_000).explode()).write_parquet(path)
    assert path.stat().st_size < 100_000
    with pytest.raises(RrfpError, match="claims 1000000 rows, more than it has bytes"):
        import_run([path])

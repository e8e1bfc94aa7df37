"""What Nsight Systems, OpenTelemetry and Chakra recorded, made into runs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrfp.errors import RrfpError
from rrfp.interchange.formats import import_run
from rrfp.interchange.range_names import ScheduleRange, schedule_range, task_range
from rrfp.interchange.rank_names import ranks_by_name
from rrfp.trace.records import evaluation_step
from tests.foreign_traces import (
    SHAPE,
    execution_trace,
    exports,
    nsight_export,
    protobuf,
    ran,
    spans_file,
)
from tests.timed_orders import Timed, Told, expected_tasks, operators, told_tasks

__all__ = ["ran"]


def check_imported(paths: list[Path], ran: list[list[Timed]]) -> tuple[str, ...]:
    imported = import_run(paths)
    for rank, rows in enumerate(ran):
        assert told_tasks(imported.recording, rank) == expected_tasks(rows)
    assert imported.recording.settings["settings"]["hint"] == "interleaved"  # type: ignore[index]
    return imported.notes


def test_nsight_systems_tells_the_ranges_of_operators(
    ran: list[list[Timed]], tmp_path: Path
) -> None:
    notes = check_imported(exports(ran, tmp_path), ran)
    assert any("2 chunks a rank, interleaved by Megatron" in note for note in notes)


def test_nsight_systems_tells_when_the_gpu_ran(ran: list[list[Timed]], tmp_path: Path) -> None:
    paths = exports(ran, tmp_path, late_ns=7_000)
    check_imported(paths, ran)
    assert import_run(paths).recording.settings["settings"]["device"] == "cuda"  # type: ignore[index]


@pytest.mark.parametrize(
    ("names", "found", "is_noted"),
    [
        (("report1", "report2"), [0, 1], True),
        (("report10", "report9"), [1, 0], True),
        (("job_48213", "job_48214"), [0, 1], True),
        (("report_1", "report_0"), [1, 0], False),
        (("a_rank3_of_8", "a_Rank-12_of_8"), [3, 12], False),
        (("pprank3", "b"), [1, 0], True),
    ],
)
def test_only_some_numbers_in_names_are_ranks(
    names: tuple[str, ...], found: list[int], is_noted: bool
) -> None:
    ranks, notes = ranks_by_name([Path(f"run7/{name}.json.gz") for name in names])
    assert (ranks, bool(notes)) == (found, is_noted)


def test_files_are_numbered_by_name_and_that_is_told(
    ran: list[list[Timed]], tmp_path: Path
) -> None:
    paths = [
        path.rename(tmp_path / f"job_4821{place}.sqlite")
        for place, path in enumerate(exports(ran, tmp_path), 3)
    ]
    notes = check_imported(paths, ran)
    assert any("the files' names do not tell ranks" in note for note in notes)
    assert not any("missing" in note for note in notes)


def test_nsight_systems_tells_our_ranges(ran: list[list[Timed]], tmp_path: Path) -> None:
    """Those of trace_native, which tell everything, whatever the files are called."""

    def ranges(rank: int, rows: list[Timed]) -> Iterator[Told]:
        for start_ns, end_ns, step, task in rows:
            chunk = SHAPE.chunk_of(task.stage)
            name = task_range(task.kind, task.stage, chunk, task.microbatch, step)
            yield Told(start_ns, end_ns, name, None)
        for step in {row.step for row in rows}:
            own = [row for row in rows if row.step == step]
            call = ScheduleRange(step, rank, rank, 0, 0, SHAPE.stages_of(rank))
            yield Told(own[0].start_ns, own[-1].end_ns, schedule_range(call), None)

    paths = [
        nsight_export(tmp_path / f"{name}.sqlite", ranges(rank, rows))
        for name, rank, rows in zip("ab", (0, 1), ran, strict=True)
    ]
    assert check_imported(paths, ran) == ()


def test_spans_of_megatron_are_numbered(ran: list[list[Timed]], tmp_path: Path) -> None:
    notes = check_imported([spans_file(tmp_path / "spans.jsonl", ran)], ran)
    assert any("the spans are the host's" in note for note in notes)


def test_steps_of_a_resumed_job_count_as_they_ran_last(
    ran: list[list[Timed]], tmp_path: Path
) -> None:
    """It ran steps 0 and 1, and was resumed from 1 after a second."""
    resumed = [
        rows
        + [
            row._replace(start_ns=row.start_ns + 1_000_000_000, end_ns=row.end_ns + 1_000_000_000)
            for row in rows
            if row.step == 1
        ]
        for rows in ran
    ]
    parts = ran, [rows[len(ran[0]) :] for rows in resumed]
    lines = [spans_file(tmp_path / "part.jsonl", part).read_text() for part in parts]
    path = tmp_path / "spans.jsonl"
    path.write_text("\n".join(lines))
    ran_last = [
        [row for row in rows[: len(ran[0])] if row.step == 0] + rows[len(ran[0]) :]
        for rows in resumed
    ]
    notes = check_imported([path], ran_last)
    assert any(
        "1 step ran more than once, as in a job that was resumed (1)" in each for each in notes
    )


def test_spans_of_an_evaluation_are_one(ran: list[list[Timed]], tmp_path: Path) -> None:
    path = spans_file(tmp_path / "spans.jsonl", ran, evaluates=True)
    steps = {task.step for task in import_run([path]).recording.ranks[1].tasks}
    assert steps == {0, evaluation_step(0)}


def test_an_execution_trace_with_times_is_read(ran: list[list[Timed]], tmp_path: Path) -> None:
    paths = []
    for rank, rows in enumerate(ran):
        paths.append(tmp_path / f"linked.{rank}.json")
        paths[-1].write_text(json.dumps(execution_trace(rows)))
    check_imported(paths, ran)


def test_an_execution_trace_in_protobuf_is_read(ran: list[list[Timed]], tmp_path: Path) -> None:
    paths = []
    for rank, rows in enumerate(ran):
        paths.append(tmp_path / f"job.{rank}.et")
        paths[-1].write_bytes(protobuf(operators(rows), has_times=True))
    recording = import_run(paths).recording
    for rank, rows in enumerate(ran):
        found = [(step, task) for _, step, task in told_tasks(recording, rank)]
        assert found == [(row.step, row.task) for row in rows]
    (tmp_path / "untimed.0.et").write_bytes(protobuf(operators(ran[0]), has_times=False))
    with pytest.raises(RrfpError, match="is an execution trace without times"):
        import_run([tmp_path / "untimed.0.et"])

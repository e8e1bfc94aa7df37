"""Profiles without ranges of ours made into runs, against the times that a hook took."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.frames import frames_of
from rrfp.errors import RrfpError
from rrfp.interchange.formats import import_run
from rrfp.interchange.kineto import read_profiles
from rrfp.replay.whatif import what_if
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.trace.check import check_contents
from rrfp.trace.perfetto.reader import read_contents
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording, step_windows
from tests.naive_path import naive_work, work_on_path
from tests.plain_profiles import NUM_RANKS, PlainRun, profile_megatron, profile_pipelining
from tests.ranks import run_ranks
from tests.timed_orders import TASK_NS, Timed, expected_tasks, plain_profile, played, told_tasks

US = 1_000
MOST_OFF_NS = 1_000_000
"""The median by which a task may be off: what runs outside of its operators, on a busy machine."""


def written(runs: Iterable[PlainRun], directory: Path) -> list[Path]:
    paths = []
    for rank, run in enumerate(runs):
        paths.append(directory / f"rank-{rank}.json")
        paths[-1].write_text(json.dumps(run.profile))
    return paths


def check_against_truth(runs: list[PlainRun], paths: list[Path], tmp_path: Path) -> Recording:
    """Every task is there, in its place and at its time; and what is imported is a whole run."""
    ranks, _ = read_profiles(paths)
    for spans in ranks:
        truth = sorted(runs[spans.info.rank].truth)
        found = sorted(spans.tasks)
        assert len(found) == len(truth)
        for span, (_, _, step, kind, stage, microbatch) in zip(found, truth, strict=True):
            assert (span.step, span.kind) == (step, kind)
            if stage is not None:
                assert (span.stage, span.microbatch) == (stage, microbatch)
        pairs = list(zip(found, truth, strict=True))
        assert median(abs(span.start_ns - of[0]) for span, of in pairs) < MOST_OFF_NS
        assert median(abs(span.end_ns - of[1]) for span, of in pairs) < MOST_OFF_NS
    recording = import_run(paths).recording
    write_trace(tmp_path / "trace.pftrace", recording)
    assert check_contents(read_contents(tmp_path / "trace.pftrace")) == []
    for rank in bubbles(frames_of(recording)).ranks:
        assert rank.busy_ns + sum(rank.causes_ns.values()) == rank.window_ns
    assert what_if(recording, lambda _: []).replay_error < 0.5
    return recording


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "num_chunks", "with_stack", "order"),
    [
        ("Schedule1F1B", 1, False, "1f1b"),
        pytest.param("Schedule1F1B", 1, True, "1f1b", marks=SLOW),
        pytest.param("ScheduleGPipe", 1, False, "gpipe", marks=SLOW),
        pytest.param("ScheduleInterleaved1F1B", 2, False, "interleaved", marks=SLOW),
        pytest.param("ScheduleInterleavedZeroBubble", 2, False, "as recorded", marks=SLOW),
        pytest.param("ScheduleZBVZeroBubble", 2, False, "zb-v", marks=SLOW),
    ],
)
def test_torchs_pipelines_are_imported_as_they_ran(
    name: str, num_chunks: int, with_stack: bool, order: str, tmp_path: Path
) -> None:
    runs = run_ranks(NUM_RANKS, profile_pipelining, name, num_chunks, with_stack, timeout_s=120)
    recording = check_against_truth(runs, written(runs, tmp_path), tmp_path)
    assert recording.settings["settings"]["hint"] == order  # type: ignore[index]
    check_path(recording)


@pytest.mark.slow
@pytest.mark.parametrize("with_stack", [False, True])
@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ({"pp": 4, "microbatches": 8}, "1f1b"),
        ({"pp": 4, "microbatches": 8, "chunks": 2, "layers": 8}, "interleaved"),
        ({"pp": 2, "tp": 2}, "1f1b"),
        ({"pp": 2, "dp": 2}, "1f1b"),
    ],
)
def test_megatrons_own_schedule_is_imported_as_it_ran(
    settings: dict[str, Any], order: str, with_stack: bool, tmp_path: Path
) -> None:
    runs = run_ranks(NUM_RANKS, profile_megatron, settings, with_stack, timeout_s=280)
    recording = check_against_truth(runs, written(runs, tmp_path), tmp_path)
    assert recording.settings["settings"]["hint"] == order  # type: ignore[index]
    assert 1 + max(rank.info.tp_rank for rank in recording.ranks) == settings.get("tp", 1)
    assert 1 + max(rank.info.dp_rank for rank in recording.ranks) == settings.get("dp", 1)
    check_path(recording)


def check_path(recording: Recording) -> None:
    for step in step_windows(recording):
        assert work_on_path(recording, step) == naive_work(recording, step)


def put(directory: Path, profiles: Iterable[dict[str, Any]]) -> list[Path]:
    paths = []
    for rank, profile in enumerate(profiles):
        paths.append(directory / f"{rank}.json")
        paths[-1].write_text(json.dumps(profile))
    return paths


@pytest.mark.parametrize(
    ("order", "shape"),
    [
        ("1f1b", Shape(3, 5)),
        ("gpipe", Shape(2, 4)),
        ("interleaved", Shape(2, 4, 2)),
        ("interleaved", Shape(4, 8, 3)),
    ],
)
def test_orders_are_told_by_autograd_alone(order: str, shape: Shape, tmp_path: Path) -> None:
    ran = played(order, shape, 3)
    imported = import_run(
        put(tmp_path, [plain_profile(rows, rank, len(ran)) for rank, rows in enumerate(ran)])
    )
    for rank, rows in enumerate(ran):
        assert told_tasks(imported.recording, rank) == expected_tasks(rows)
    assert imported.recording.settings["settings"]["hint"] == order  # type: ignore[index]


def test_what_a_backward_computes_anew_is_no_forward(tmp_path: Path) -> None:
    ran = played("1f1b", Shape(2, 3), 1)
    profiles = [plain_profile(rows, rank, 2) for rank, rows in enumerate(ran)]
    for profile, rows in zip(profiles, ran, strict=True):
        for timed in rows:
            if timed.task.kind is Kind.B:
                profile["traceEvents"].append(
                    {
                        "ph": "X",
                        "cat": "cpu_op",
                        "name": "aten::addmm",
                        "ts": timed.start_ns / US + 1,
                        "dur": 5,
                        "args": {"Sequence number": 0, "Fwd thread id": 0},
                    }
                )
    recording = import_run(put(tmp_path, profiles)).recording
    for rank, rows in enumerate(ran):
        assert told_tasks(recording, rank) == expected_tasks(rows)


def test_the_gpu_ran_what_the_host_launched(tmp_path: Path) -> None:
    """Each operator launches a kernel that runs 50 ms later, for half a task; each send and receive
    one of NCCL's."""
    ran = played("1f1b", Shape(2, 3), 2)
    late_us, kernel_us = 50_000, TASK_NS / US / 6
    profiles = [plain_profile(rows, rank, 2) for rank, rows in enumerate(ran)]
    for profile in profiles:
        for number, event in enumerate(list(profile["traceEvents"])):
            moves = event["name"].startswith("c10d")
            name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)" if moves else "gemm"
            launched_us = event["ts"] + 1
            linked = {"args": {"correlation": number}}
            for each in (
                {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched_us, "dur": 1},
                {"cat": "kernel", "name": name, "ts": event["ts"] + late_us, "dur": kernel_us},
            ):
                profile["traceEvents"].append({"ph": "X", **each, **linked})
    imported = import_run(put(tmp_path, profiles))
    assert imported.recording.settings["settings"]["device"] == "cuda"  # type: ignore[index]
    for rank, rows in enumerate(ran):
        lengths = [round(2 * (row.end_ns - row.start_ns) / 3 + kernel_us * US) for row in rows]
        found = [length for length, _, _ in told_tasks(imported.recording, rank)]
        assert found == pytest.approx(lengths, abs=4)


def test_groups_tell_places(tmp_path: Path) -> None:
    """Two replicas of two ranks, as Megatron lays them out: 0 and 2 are a pipeline."""
    ran = played("1f1b", Shape(2, 4), 1)
    profiles = []
    for rank in range(4):
        groups = [
            {"pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "ranks": [rank % 2, rank % 2 + 2]},
            {"pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [rank]},
        ]
        profiles.append(plain_profile(ran[rank // 2], rank, 4, pg_config=groups))
    ranks = import_run(put(tmp_path, profiles)).recording.ranks
    assert [(rank.info.pp_rank, rank.info.dp_rank) for rank in ranks] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_what_is_cut_off_is_left_out_and_told(tmp_path: Path) -> None:
    ran = played("1f1b", Shape(2, 4), 2)
    ran[1] = ran[1][:-1]
    imported = import_run(
        put(tmp_path, [plain_profile(rows, rank, 2) for rank, rows in enumerate(ran)])
    )
    assert {task.step for rank in imported.recording.ranks for task in rank.tasks} == {0}
    assert any("after the last whole step is left out" in note for note in imported.notes)


def torn(ran: list[list[Timed]]) -> list[list[Timed]]:
    return [rows[1:] for rows in ran]


def cut_off(ran: list[list[Timed]]) -> list[list[Timed]]:
    return [ran[0], ran[1][:3]]


def last_in_first_out(ran: list[list[Timed]]) -> list[list[Timed]]:
    """The backwards of a rank in the reverse order, as no known schedule has it."""
    before, last = ran[0][-2:]
    swapped = [before._replace(task=last.task), last._replace(task=before.task)]
    return [[*ran[0][:-2], *swapped], ran[1]]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (torn, "does not hold one whole step"),
        (cut_off, "rank 1 has no step like it"),
        (last_in_first_out, "nothing tells them"),
    ],
)
def test_an_order_that_tells_no_microbatches_is_refused(
    spoil: Callable[[list[list[Timed]]], list[list[Timed]]], sentence: str, tmp_path: Path
) -> None:
    ran = spoil(played("gpipe", Shape(2, 2), 1))
    paths = put(tmp_path, [plain_profile(rows, rank, 2) for rank, rows in enumerate(ran)])
    with pytest.raises(RrfpError, match=sentence):
        import_run(paths)


def test_a_job_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    ran = played("1f1b", Shape(1, 4), 1)
    profile = plain_profile(ran[0], 0, 1)
    profile["traceEvents"] = [
        event for event in profile["traceEvents"] if not event["name"].startswith("c10d")
    ]
    with pytest.raises(RrfpError, match="it is of no pipeline"):
        import_run(put(tmp_path, [profile]))


def test_one_rank_of_many_says_what_is_missing(tmp_path: Path) -> None:
    ran = played("interleaved", Shape(2, 4, 2), 1)
    (path,) = put(tmp_path, [plain_profile(ran[1], 1, 2)])
    imported = import_run([path])
    assert told_tasks(imported.recording, 0) == expected_tasks(ran[1])
    assert any("1 of 2 ranks is missing (0)" in note for note in imported.notes)


def test_the_last_pipeline_rank_alone_tells_no_steps(tmp_path: Path) -> None:
    """In 1F1B each of its forwards has its backward next, as in a step of one microbatch."""
    ran = played("1f1b", Shape(2, 4, 1), 2)
    first, last = put(tmp_path, [plain_profile(rows, rank, 2) for rank, rows in enumerate(ran)])
    with pytest.raises(RrfpError, match="of a last pipeline rank alone, whose 8 forwards each"):
        import_run([last])
    assert len({task.step for task in import_run([first, last]).recording.ranks[1].tasks}) == 2


def test_what_a_profile_says_in_odd_text_is_read(tmp_path: Path) -> None:
    """A byte order mark before it, and half a character in the host's name."""
    profile = plain_profile(played("1f1b", Shape(2, 4, 1), 1)[0], 0, 2)
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({**profile, "host_name": "h\ud800"}), encoding="utf-8-sig")
    (rank,) = import_run([path]).recording.ranks
    assert rank.info.host == "h?"

"""Profiles of torch.profiler made into runs: which tasks they tell of, when and in which steps."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.frames import frames_of
from rrfp.analyze.misalignment import timed_messages
from rrfp.errors import RrfpError
from rrfp.interchange.formats import import_run
from rrfp.replay.recorded import read_run
from rrfp.replay.whatif import what_if
from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.check import check_contents
from rrfp.trace.perfetto.reader import read_contents
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording, step_windows
from tests.made_profiles import FIXTURES, US, Event, event, profile, put

__all__ = ["put"]


def order_of(recording: Recording, rank: int, step: int) -> tuple[Task, ...]:
    return tuple(
        Task(task.stage, Kind(task.kind), task.microbatch)
        for task in recording.ranks[rank].tasks
        if task.step == step
    )


@pytest.mark.parametrize(
    ("name", "order", "num_stages"),
    [
        ("megatron", "1f1b", 4),
        ("pipelining-1f1b", "1f1b", 4),
        ("pipelining-gpipe", "gpipe", 4),
        ("pipelining-interleaved", "interleaved", 8),
    ],
)
def test_a_profile_gives_a_whole_run(
    name: str, order: str, num_stages: int, tmp_path: Path
) -> None:
    imported = import_run([FIXTURES / name])
    recording = imported.recording
    shape = Shape(4, 8, num_stages // 4)
    steps = sorted({task.step for task in recording.ranks[0].tasks})
    assert len(steps) == 3
    for rank in range(4):
        for step in steps:
            assert order_of(recording, rank, step) == ORDERS[order].on(shape).rows[rank]
    assert recording.settings["settings"]["hint"] == order  # type: ignore[index]

    write_trace(tmp_path / "trace.pftrace", recording)
    contents = read_contents(tmp_path / "trace.pftrace")
    assert contents.recording == recording
    assert check_contents(contents) == []

    report = bubbles(frames_of(recording))
    for rank_report in report.ranks:
        assert rank_report.busy_ns > 0
        total_ns = rank_report.busy_ns + sum(rank_report.causes_ns.values())
        assert total_ns == rank_report.window_ns
    assert len(timed_messages(frames_of(recording))) == 3 * 2 * 8 * (num_stages - 1)
    assert what_if(recording, lambda _: []).replay_error < 0.03


def test_steps_in_different_orders_are_replayed_all_the_same(
    put: Callable[[str, Any], Path],
) -> None:
    orders = ("F0", "F1", "B0", "B1"), ("F0", "B0", "F1", "B1")
    names = [f"PP:0{name}" for order in orders for name in order]
    events = [event(name, 20 * place, 10) for place, name in enumerate(names)]
    recording = import_run([put("p.json", profile(events))]).recording
    assert recording.settings["settings"]["dispatch"] == "megatron"  # type: ignore[index]
    assert recording.settings["settings"]["hint"] == "as recorded"  # type: ignore[index]
    assert what_if(recording, lambda _: []).replay_error < 0.2


def test_the_gpus_times_count_where_it_did_the_work(put: Callable[[str, Any], Path]) -> None:
    names = ["PP:0F0", "PP:0B0"] * 2
    events = []
    for index, name in enumerate(names):
        number = {"args": {"External id": index}}
        events.append(event(name, 10 * index, 5, **number))
        for stream, start_us in ((7, 1000 + 100 * index), (8, 1010 + 100 * index)):
            gpu = {"cat": "gpu_user_annotation", "pid": 0, "tid": stream}
            events.append(event(name, start_us, 50, **gpu, **number))
    # Nothing was done on the GPU for this one, and its launch is no time of the GPU.
    events.append(event("PP:0RECV_F1", 38, 1, args={"External id": 99}))
    recording = import_run([put("p.json", profile(events))]).recording
    tasks = recording.ranks[0].tasks
    assert [(task.start_ns, task.end_ns) for task in tasks] == [
        (100 * US * index, 100 * US * index + 60 * US) for index in range(4)
    ]
    assert [task.step for task in tasks] == [0, 0, 1, 1]
    assert recording.ranks[0].waits == []
    assert recording.settings["settings"]["device"] == "cuda"  # type: ignore[index]


def test_steps_are_the_profilers_where_it_had_any(put: Callable[[str, Any], Path]) -> None:
    events = [
        event("ProfilerStep#4", 0, 100),
        event("ProfilerStep#5", 100, 100),
        *(event("PP:0F0", start, 10) for start in (10, 110)),
        *(event("PP:0B0", start, 10) for start in (30, 130)),
    ]
    recording = import_run([put("p.json", profile(events))]).recording
    assert [task.step for task in recording.ranks[0].tasks] == [4, 4, 5, 5]
    # Two calls of the schedule in one step of the profiler: their tasks come again.
    twice = [*events, event("PP:0F0", 150, 10)]
    recording = import_run([put("p.json", profile(twice))]).recording
    assert [task.step for task in recording.ranks[0].tasks] == [0, 0, 1, 1, 2]


def test_huge_numbers_cost_nothing(put: Callable[[str, Any], Path]) -> None:
    events = [event("PP:999999F999999", 0, 1), event("PP:0B999999", 2, 1)]
    imported = import_run([put("p.json", profile(events, 0, 10**6))])
    assert imported.notes[0].startswith("999999 of 1000000 ranks are missing (1, 2, 3, ")
    assert len(imported.recording.ranks[0].tasks) == 2


Spoil = Callable[[int, list[Event]], object]


@pytest.fixture
def spoilt(tmp_path: Path) -> Callable[[str, Spoil], Path]:
    """A directory of a fixture's profiles, in each of which the events of its rank were changed."""

    def write(name: str, spoil: Spoil) -> Path:
        for rank in range(4):
            packed = (FIXTURES / name / f"rank-{rank}.json.gz").read_bytes()
            told = json.loads(gzip.decompress(packed))
            told["traceEvents"].sort(key=lambda each: each["ts"])
            spoil(rank, told["traceEvents"])
            (tmp_path / f"{rank}.json").write_text(json.dumps(told))
        return tmp_path

    return write


def test_steps_without_the_profilers_are_the_same(spoilt: Callable[[str, Spoil], Path]) -> None:
    gap_us = 1_000_000

    def spread(rank: int, events: list[Event], profiler: bool = False) -> None:
        begins: list[float] = []
        first = "PP:0F0" if rank == 0 else f"PP:{rank}RECV_F0"
        for each in events:
            if each["name"] == first:
                begins.append(each["ts"] + gap_us * len(begins))
            each["ts"] += gap_us * (len(begins) - 1)
        assert len(begins) == 3
        for step in range(3 * profiler):
            end_us = [*begins, begins[-1] + 100 * gap_us][step + 1]
            events.append(event(f"ProfilerStep#{step}", begins[step], end_us - begins[step]))

    def windows_ns(directory: Path) -> list[tuple[int, ...]]:
        recording = import_run([directory]).recording
        return [phase[:3] for rank in recording.ranks for phase in rank.phases]

    counted = windows_ns(spoilt("pipelining-interleaved", spread))
    told = windows_ns(
        spoilt("pipelining-interleaved", lambda rank, events: spread(rank, events, profiler=True))
    )
    assert counted == told
    for (_, end_ns, step), (start_ns, _, later) in pairwise(counted):
        assert later <= step or end_ns < start_ns


@pytest.mark.parametrize("torn", [(0, 1, 2, 3), (0, 1), (3,)])
def test_a_torn_step_is_left_out(
    torn: tuple[int, ...], spoilt: Callable[[str, Spoil], Path]
) -> None:
    def tear(rank: int, events: list[Event]) -> None:
        if rank in torn:
            del events[: len(events) // 8]

    imported = import_run([spoilt("pipelining-1f1b", tear)])
    (note,) = imported.notes
    assert note.startswith(f"{len(torn)} of 4 profiles begin in the middle of a step")
    rows = ORDERS["1f1b"].on(Shape(4, 8)).rows
    for rank in range(4):
        steps = [phase.step for phase in imported.recording.ranks[rank].phases]
        missing = 0 if len(torn) == 4 else int(rank in torn)
        assert steps == list(range(missing, 2 if len(torn) == 4 else 3))
        assert all(order_of(imported.recording, rank, step) == rows[rank] for step in steps)


def test_evaluation_does_not_hide_the_order(spoilt: Callable[[str, Spoil], Path]) -> None:
    def evaluate(rank: int, events: list[Event]) -> None:
        events[:] = [e for e in events if not re.fullmatch(r"rrfp B.* step=2", e["name"])]

    recording = import_run([spoilt("megatron", evaluate)]).recording
    assert recording.settings["settings"]["hint"] == "1f1b"  # type: ignore[index]


def test_steps_without_a_backward_are_evaluations(spoilt: Callable[[str, Spoil], Path]) -> None:
    """As trace_native numbered them once: among the others."""

    def evaluate(rank: int, events: list[Event]) -> None:
        events[:] = [e for e in events if not re.fullmatch(r"rrfp B.* step=2", e["name"])]

    recording = import_run([spoilt("megatron", evaluate)]).recording
    steps = [1, -1, 3] if 3 in step_windows(recording) else [1, -1]
    for rank in recording.ranks:
        assert list(dict.fromkeys(task.step for task in rank.tasks)) == steps
        assert list(dict.fromkeys(phase.step for phase in rank.phases)) == steps
    assert read_run(recording).left_out == ()


@pytest.mark.parametrize("name", ["pipelining-1f1b", "pipelining-gpipe"])
def test_steps_without_a_backward_are_evaluations_where_they_are_counted(
    name: str, spoilt: Callable[[str, Spoil], Path]
) -> None:
    def evaluate(rank: int, events: list[Event], step: int = 1) -> None:
        """Leave out that step's backwards."""
        counts: Counter[str] = Counter()
        left_out = []
        for each in events:
            counts[each["name"]] += 1
            is_backward = re.fullmatch(r"PP:\dB\d+|Backward \d+", each["name"]) is not None
            if is_backward and counts[each["name"]] == step + 1:
                left_out.append(each)
        events[:] = [each for each in events if each not in left_out]

    recording = import_run([spoilt(name, evaluate)]).recording
    assert {task.step for rank in recording.ranks for task in rank.tasks} == {0, -1, 2}
    assert read_run(recording).left_out == ()
    # The last step may have been cut short.
    recording = import_run([spoilt(name, partial(evaluate, step=2))]).recording
    assert {task.step for rank in recording.ranks for task in rank.tasks} == {0, 1, 2}


def test_what_is_no_harm_is_passed_over(put: Callable[[str, Any], Path]) -> None:
    since_1970_us = 1.7e15
    event_0, event_1 = event("PP:0F0", since_1970_us, 10), event("PP:0B0", since_1970_us + 20, 10)
    told = {**profile([{**event_0, "pid": 1 << 40}, {**event_1, "pid": 10**30}])}
    profiles = put("p.json", {**told, "baseTimeNanoseconds": 0}).parent
    put("run.json", {"settings": {}})
    recording = import_run([profiles]).recording
    assert [task.start_ns for task in recording.ranks[0].tasks] == [0, 20 * US]
    assert recording.ranks[0].info.pid == 0
    # Two at one time, of which one has an id.
    numbered = {**event("PP:0F0", 0, 10), "args": {"External id": 3}}
    put("p.json", profile([event("PP:0F0", 0, 10), numbered, event("PP:0B0", 20, 10)]))
    assert len(import_run([profiles]).recording.ranks[0].tasks) == 3
    # What is not compressed may grow while it is read, or has no size.
    put("p.json", json.dumps(profile([event_0, event_1])).encode() + b" " * 3_000_000)
    assert len(import_run([profiles]).recording.ranks[0].tasks) == 2


def on_gpu(number: Callable[[int], Event], num_worked: int = 6) -> list[Event]:
    events = []
    for index, name in enumerate(["PP:0F0", "PP:0B0"] * 3):
        events.append(event(name, 10 * index, 5, args=number(index)))
        if index < num_worked:
            worked = {"cat": "gpu_user_annotation", "args": number(index)}
            events.append(event(name, 1000 + 100 * index, 50, **worked))
    return events


def test_the_gpus_work_is_found_by_its_number_only(put: Callable[[str, Any], Path]) -> None:
    by_text = on_gpu(lambda index: {"External id": str(index)})
    tasks = import_run([put("p.json", profile(by_text))]).recording.ranks[0].tasks
    assert [task.start_ns for task in tasks] == [100 * US * index for index in range(6)]
    half = [
        {**each, "args": {}} if each["cat"] == "gpu_user_annotation" else each for each in by_text
    ]
    for events in (on_gpu(lambda _: {}), half):
        with pytest.raises(RrfpError, match="the GPU worked for; profile with a torch"):
            import_run([put("p.json", profile(events))])
    cut = on_gpu(lambda index: {"External id": index}, num_worked=5)
    imported = import_run([put("p.json", profile(cut))])
    assert "has 1 tasks for which the GPU did nothing" in imported.notes[0]
    assert len(imported.recording.ranks[0].tasks) == 5


def test_gpipes_stages_are_the_ranks_numbers(put: Callable[[str, Any], Path]) -> None:
    ranks = 0, 1, 3
    paths = [
        put(
            f"{rank}.json",
            profile([event("Forward 0", 20 * rank, 10), event("Backward 0", 200, 10)], rank, 4),
        )
        for rank in ranks
    ]
    imported = import_run(paths)
    assert [rank.info.stages for rank in imported.recording.ranks] == [(0,), (1,), (3,)]
    assert "all ranks are taken for one pipeline" in imported.notes[0]

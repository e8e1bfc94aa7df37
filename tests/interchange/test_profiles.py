"""Runs from profiles of torch.profiler: their tasks, times and steps."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.frames import frames_of
from rrfp.analyze.misalignment import timed_messages
from rrfp.errors import RrfpError
from rrfp.interchange.assemble import assemble
from rrfp.interchange.formats import import_run
from rrfp.interchange.kineto import read_profiles
from rrfp.interchange.range_names import (
    Maker,
    ScheduleRange,
    TaskRange,
    WaitRange,
    parse_range,
    schedule_range,
    task_range,
    wait_range,
)
from rrfp.interchange.spans import RankSpans, Source, TaskSpan, TransferSpan, least_shifts
from rrfp.replay.recorded import read_run
from rrfp.replay.whatif import what_if
from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.trace.check import check_contents
from rrfp.trace.perfetto.reader import read_contents
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import (
    Phase,
    PhaseRecord,
    RankInfo,
    Recording,
    WaitRecord,
    evaluation_step,
    step_windows,
)
from tests.e2e.ranks import run_ranks
from tests.interchange.made_profiles import (
    FIXTURES,
    NUM_RANKS,
    TASK_NS,
    US,
    Event,
    PlainRun,
    Timed,
    event_of,
    expected_tasks,
    imported_tasks,
    plain_profile,
    played,
    profile_megatron,
    profile_of,
    profile_pipelining,
    put,
)
from tests.properties.cases import examples
from tests.properties.naive_analyses import naive_work, work_on_path

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
            assert order_of(recording, rank, step) == ORDERS[order].for_shape(shape).rows[rank]
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
    events = [event_of(name, 20 * place, 10) for place, name in enumerate(names)]
    recording = import_run([put("p.json", profile_of(events))]).recording
    assert recording.settings["settings"]["dispatch"] == "megatron"  # type: ignore[index]
    assert recording.settings["settings"]["hint"] == "as recorded"  # type: ignore[index]
    assert what_if(recording, lambda _: []).replay_error < 0.2


def test_the_gpus_times_count_where_it_did_the_work(put: Callable[[str, Any], Path]) -> None:
    names = ["PP:0F0", "PP:0B0"] * 2
    events = []
    for index, name in enumerate(names):
        number = {"args": {"External id": index}}
        events.append(event_of(name, 10 * index, 5, **number))
        for stream, start_us in ((7, 1000 + 100 * index), (8, 1010 + 100 * index)):
            gpu = {"cat": "gpu_user_annotation", "pid": 0, "tid": stream}
            events.append(event_of(name, start_us, 50, **gpu, **number))
    # Nothing was done on the GPU for this one, and its launch is no time of the GPU.
    events.append(event_of("PP:0RECV_F1", 38, 1, args={"External id": 99}))
    recording = import_run([put("p.json", profile_of(events))]).recording
    tasks = recording.ranks[0].tasks
    assert [(task.start_ns, task.end_ns) for task in tasks] == [
        (100 * US * index, 100 * US * index + 60 * US) for index in range(4)
    ]
    assert [task.step for task in tasks] == [0, 0, 1, 1]
    assert recording.ranks[0].waits == []
    assert recording.settings["settings"]["device"] == "cuda"  # type: ignore[index]


def test_steps_are_the_profilers_where_it_had_any(put: Callable[[str, Any], Path]) -> None:
    events = [
        event_of("ProfilerStep#4", 0, 100),
        event_of("ProfilerStep#5", 100, 100),
        *(event_of("PP:0F0", start, 10) for start in (10, 110)),
        *(event_of("PP:0B0", start, 10) for start in (30, 130)),
    ]
    recording = import_run([put("p.json", profile_of(events))]).recording
    assert [task.step for task in recording.ranks[0].tasks] == [4, 4, 5, 5]
    # Two calls of the schedule in one step of the profiler: their tasks come again.
    twice = [*events, event_of("PP:0F0", 150, 10)]
    recording = import_run([put("p.json", profile_of(twice))]).recording
    assert [task.step for task in recording.ranks[0].tasks] == [0, 0, 1, 1, 2]


def test_huge_numbers_cost_nothing(put: Callable[[str, Any], Path]) -> None:
    events = [event_of("PP:999999F999999", 0, 1), event_of("PP:0B999999", 2, 1)]
    imported = import_run([put("p.json", profile_of(events, 0, 10**6))])
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
            events.append(event_of(f"ProfilerStep#{step}", begins[step], end_us - begins[step]))

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
    rows = ORDERS["1f1b"].for_shape(Shape(4, 8)).rows
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


def test_harmless_oddities_are_skipped(put: Callable[[str, Any], Path]) -> None:
    since_1970_us = 1.7e15
    event_0, event_1 = (
        event_of("PP:0F0", since_1970_us, 10),
        event_of("PP:0B0", since_1970_us + 20, 10),
    )
    told = {**profile_of([{**event_0, "pid": 1 << 40}, {**event_1, "pid": 10**30}])}
    profiles = put("p.json", {**told, "baseTimeNanoseconds": 0}).parent
    put("run.json", {"settings": {}})
    recording = import_run([profiles]).recording
    assert [task.start_ns for task in recording.ranks[0].tasks] == [0, 20 * US]
    assert recording.ranks[0].info.pid == 0
    # Two at one time, of which one has an id.
    numbered = {**event_of("PP:0F0", 0, 10), "args": {"External id": 3}}
    put("p.json", profile_of([event_of("PP:0F0", 0, 10), numbered, event_of("PP:0B0", 20, 10)]))
    assert len(import_run([profiles]).recording.ranks[0].tasks) == 3
    # What is not compressed may grow while it is read, or has no size.
    put("p.json", json.dumps(profile_of([event_0, event_1])).encode() + b" " * 3_000_000)
    assert len(import_run([profiles]).recording.ranks[0].tasks) == 2


def on_gpu(number: Callable[[int], Event], num_worked: int = 6) -> list[Event]:
    events = []
    for index, name in enumerate(["PP:0F0", "PP:0B0"] * 3):
        events.append(event_of(name, 10 * index, 5, args=number(index)))
        if index < num_worked:
            worked = {"cat": "gpu_user_annotation", "args": number(index)}
            events.append(event_of(name, 1000 + 100 * index, 50, **worked))
    return events


def test_the_gpus_work_is_found_by_its_number_only(put: Callable[[str, Any], Path]) -> None:
    by_text = on_gpu(lambda index: {"External id": str(index)})
    tasks = import_run([put("p.json", profile_of(by_text))]).recording.ranks[0].tasks
    assert [task.start_ns for task in tasks] == [100 * US * index for index in range(6)]
    half = [
        {**each, "args": {}} if each["cat"] == "gpu_user_annotation" else each for each in by_text
    ]
    for events in (on_gpu(lambda _: {}), half):
        with pytest.raises(RrfpError, match="the GPU worked for; profile with a torch"):
            import_run([put("p.json", profile_of(events))])
    cut = on_gpu(lambda index: {"External id": index}, num_worked=5)
    imported = import_run([put("p.json", profile_of(cut))])
    assert "has 1 tasks for which the GPU did nothing" in imported.notes[0]
    assert len(imported.recording.ranks[0].tasks) == 5


def test_gpipes_stages_are_the_ranks_numbers(put: Callable[[str, Any], Path]) -> None:
    ranks = 0, 1, 3
    paths = [
        put(
            f"{rank}.json",
            profile_of(
                [event_of("Forward 0", 20 * rank, 10), event_of("Backward 0", 200, 10)], rank, 4
            ),
        )
        for rank in ranks
    ]
    imported = import_run(paths)
    assert [rank.info.stages for rank in imported.recording.ranks] == [(0,), (1,), (3,)]
    assert "all ranks are taken for one pipeline" in imported.notes[0]


# Derived for every import: clocks, waits and messages.


SOURCE = Source("test", 1, "cpu", True, None)


def test_a_wrong_clock_is_found_by_causality_and_reported(tmp_path: Path) -> None:
    early_us = 50_000_000
    for rank in range(4):
        told = json.loads(
            gzip.decompress((FIXTURES / f"megatron/rank-{rank}.json.gz").read_bytes())
        )
        for each in told["traceEvents"]:
            each["ts"] -= early_us * (rank >= 2)
        (tmp_path / f"{rank}.json").write_text(json.dumps(told))
    straight = import_run([FIXTURES / "megatron"])
    imported = import_run([tmp_path])
    (note,) = imported.notes
    assert "rank 2 by" in note
    assert "rank 3 by" in note
    assert "rank 0" not in note
    assert straight.notes == ()
    expected, found = (bubbles(frames_of(each.recording)) for each in (straight, imported))
    assert found.window_ns == pytest.approx(expected.window_ns, rel=0.01)
    for left, right in zip(found.ranks, expected.ranks, strict=True):
        assert left.busy_ns == right.busy_ns


def test_shifts_that_contradict_each_other_are_none() -> None:
    assert least_shifts({(0, 1): -5, (1, 0): 100}, [0, 1]) == {0: 0, 1: 5}
    assert least_shifts({(0, 1): -5, (1, 2): -5, (2, 0): 20}, [0, 1, 2]) == {0: 0, 1: 5, 2: 10}
    assert least_shifts({(0, 1): -5, (1, 0): 4}, [0, 1]) is None


def test_an_order_that_no_clock_explains_is_reported() -> None:
    def rank(number: int, *tasks: tuple[int, int, Kind]) -> RankSpans:
        return RankSpans(
            RankInfo(number, number, 0, 0, (number,), "h", 1),
            [TaskSpan(start, end, 0, kind, number, 0) for start, end, kind in tasks],
            phases=[PhaseRecord(0, 100, 0, Phase.SCHEDULE)],
        )

    imported = assemble(
        [rank(0, (0, 50, Kind.F), (60, 80, Kind.B)), rank(1, (40, 50, Kind.F), (51, 70, Kind.B))],
        SOURCE,
    )
    assert "which no shift of clocks explains" in imported.notes[0]
    assert bubbles(frames_of(imported.recording)).ranks[0].busy_ns == 70


def test_waits_are_derived_from_producers_and_consumers() -> None:
    """Two stages, one microbatch, known by construction: rank 0 waits for its gradient until 60,
    moves messages until 65, and does nothing known until 70."""

    def rank(number: int, *tasks: tuple[int, int, Kind]) -> RankSpans:
        return RankSpans(
            RankInfo(number, number, 0, 0, (number,), "h", 1),
            [TaskSpan(start, end, 3, kind, number, 0) for start, end, kind in tasks],
            phases=[PhaseRecord(0, 100, 3, Phase.SCHEDULE)],
        )

    first = rank(0, (0, 10, Kind.F), (70, 90, Kind.B))
    first.transfers = [TransferSpan(10, 12, 3), TransferSpan(30, 65, 3)]
    first.waits = [WaitRecord(92, 97, 3, Cause.GRADIENT_SYNC)]
    second = rank(1, (15, 35, Kind.F), (36, 60, Kind.B))
    recording = assemble([first, second], SOURCE).recording
    causes = bubbles(frames_of(recording)).ranks[0].causes_ns
    expected = {"backward_input": 50, "transfer": 5, "overhead": 5, "gradient_sync": 5, "drain": 5}
    assert {cause: ns for cause, ns in causes.items() if ns} == expected
    messages = frames_of(recording).messages.sort("left_ns")
    # The forward came at once, as no wait tells otherwise; the gradient as the transfer ended.
    assert messages.select("left_ns", "came_ns", "used_ns").rows() == [(10, 10, 15), (60, 65, 70)]


def test_a_task_begins_when_its_input_was_sent() -> None:
    """A span of torch.distributed.pipelining on the CPU holds the wait for its input."""
    tasks = [TaskSpan(0, 50, 0, Kind.F, 1, 0)]
    late = RankSpans(RankInfo(1, 1, 0, 0, (1,), "h", 1), tasks, receives_inside=True)
    late.phases = [PhaseRecord(0, 50, 0, Phase.SCHEDULE)]
    giver = RankSpans(RankInfo(0, 0, 0, 0, (0,), "h", 1), [TaskSpan(5, 30, 0, Kind.F, 0, 0)])
    giver.phases = [PhaseRecord(5, 30, 0, Phase.SCHEDULE)]
    recording = assemble([giver, late], SOURCE).recording
    assert recording.ranks[1].tasks[0][:2] == (30, 50)


@pytest.mark.parametrize(("late_ns", "told"), [(900, None), (5_000, "rank 1 by 5 us, ")])
def test_only_large_shifts_are_reported(late_ns: int, told: str | None) -> None:
    ranks = [
        RankSpans(
            RankInfo(number, number, 0, 0, (number,), "h", 1),
            [TaskSpan(0, late_ns, 0, Kind.F, number, 0)],
            phases=[PhaseRecord(0, late_ns, 0, Phase.SCHEDULE)],
        )
        for number in range(2 if told is None else 20)
    ]
    notes = assemble(ranks, SOURCE).notes
    assert (notes == ()) == (told is None)
    if told is not None:
        assert told in notes[0]
        assert notes[0].endswith("rank 8 by 40 us, ...")


@st.composite
def runs(draw: st.DrawFn) -> list[RankSpans]:
    """Ranks whose tasks come in any order and at any time, and whose clocks are anywhere."""
    num_ranks, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    inside = draw(st.booleans())
    ranks = []
    for number in range(num_ranks):
        tasks = []
        now_ns = draw(st.integers(-1000, 1000))
        start_ns = now_ns
        keys = [(kind, m) for kind in (Kind.F, Kind.B) for m in range(num_microbatches)]
        for kind, microbatch in draw(st.permutations(keys)):
            now_ns += draw(st.integers(0, 50))
            end_ns = now_ns + draw(st.integers(0, 100))
            tasks.append(TaskSpan(now_ns, end_ns, 0, kind, number, microbatch))
            now_ns = end_ns
        transfers = [
            TransferSpan(at, at + draw(st.integers(0, 60)), 0)
            for at in draw(st.lists(st.integers(start_ns, now_ns), max_size=5))
        ]
        spans = RankSpans(
            RankInfo(number, number, 0, 0, (number,), "h", 1),
            tasks,
            transfers=transfers,
            receives_inside=inside,
        )
        spans.phases = [PhaseRecord(start_ns, now_ns + 1, 0, Phase.SCHEDULE)]
        ranks.append(spans)
    return ranks


@examples(quick=40, thorough=1000)
@given(runs())
def test_causes_sum_to_the_window_and_no_message_comes_early(ranks: list[RankSpans]) -> None:
    recording = assemble(ranks, SOURCE).recording
    frames = frames_of(recording)
    for rank in bubbles(frames).ranks:
        assert rank.busy_ns + sum(rank.causes_ns.values()) == rank.window_ns
    for message in frames.messages.to_dicts():
        assert message["left_ns"] <= message["came_ns"] <= message["used_ns"]
    starts_ns = [task.start_ns for rank in recording.ranks for task in rank.tasks]
    assert min(starts_ns) >= 0


# Runs from profiles without rrfp's ranges, compared with the times that a hook measured.


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


def put_profiles(directory: Path, profiles: Iterable[dict[str, Any]]) -> list[Path]:
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
def test_orders_are_found_by_autograd_alone(order: str, shape: Shape, tmp_path: Path) -> None:
    ran = played(order, shape, 3)
    imported = import_run(
        put_profiles(
            tmp_path, [plain_profile(rows, rank, len(ran)) for rank, rows in enumerate(ran)]
        )
    )
    for rank, rows in enumerate(ran):
        assert imported_tasks(imported.recording, rank) == expected_tasks(rows)
    assert imported.recording.settings["settings"]["hint"] == order  # type: ignore[index]


def test_recomputed_operators_are_not_a_forward(tmp_path: Path) -> None:
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
    recording = import_run(put_profiles(tmp_path, profiles)).recording
    for rank, rows in enumerate(ran):
        assert imported_tasks(recording, rank) == expected_tasks(rows)


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
    imported = import_run(put_profiles(tmp_path, profiles))
    assert imported.recording.settings["settings"]["device"] == "cuda"  # type: ignore[index]
    for rank, rows in enumerate(ran):
        lengths = [round(2 * (row.end_ns - row.start_ns) / 3 + kernel_us * US) for row in rows]
        found = [length for length, _, _ in imported_tasks(imported.recording, rank)]
        assert found == pytest.approx(lengths, abs=4)


def test_groups_determine_places(tmp_path: Path) -> None:
    """Two replicas of two ranks, as Megatron lays them out: 0 and 2 are a pipeline."""
    ran = played("1f1b", Shape(2, 4), 1)
    profiles = []
    for rank in range(4):
        groups = [
            {"pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "ranks": [rank % 2, rank % 2 + 2]},
            {"pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [rank]},
        ]
        profiles.append(plain_profile(ran[rank // 2], rank, 4, pg_config=groups))
    ranks = import_run(put_profiles(tmp_path, profiles)).recording.ranks
    assert [(rank.info.pp_rank, rank.info.dp_rank) for rank in ranks] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_incomplete_steps_are_left_out_and_reported(tmp_path: Path) -> None:
    ran = played("1f1b", Shape(2, 4), 2)
    ran[1] = ran[1][:-1]
    imported = import_run(
        put_profiles(tmp_path, [plain_profile(rows, rank, 2) for rank, rows in enumerate(ran)])
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
def test_an_order_without_known_microbatches_is_refused(
    spoil: Callable[[list[list[Timed]]], list[list[Timed]]], sentence: str, tmp_path: Path
) -> None:
    ran = spoil(played("gpipe", Shape(2, 2), 1))
    paths = put_profiles(tmp_path, [plain_profile(rows, rank, 2) for rank, rows in enumerate(ran)])
    with pytest.raises(RrfpError, match=sentence):
        import_run(paths)


def test_a_job_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    ran = played("1f1b", Shape(1, 4), 1)
    profile = plain_profile(ran[0], 0, 1)
    profile["traceEvents"] = [
        event for event in profile["traceEvents"] if not event["name"].startswith("c10d")
    ]
    with pytest.raises(RrfpError, match="it is of no pipeline"):
        import_run(put_profiles(tmp_path, [profile]))


def test_one_rank_of_many_says_what_is_missing(tmp_path: Path) -> None:
    ran = played("interleaved", Shape(2, 4, 2), 1)
    (path,) = put_profiles(tmp_path, [plain_profile(ran[1], 1, 2)])
    imported = import_run([path])
    assert imported_tasks(imported.recording, 0) == expected_tasks(ran[1])
    assert any("1 of 2 ranks is missing (0)" in note for note in imported.notes)


def test_the_last_pipeline_rank_alone_does_not_show_steps(tmp_path: Path) -> None:
    """In 1F1B each of its forwards has its backward next, as in a step of one microbatch."""
    ran = played("1f1b", Shape(2, 4, 1), 2)
    first, last = put_profiles(
        tmp_path, [plain_profile(rows, rank, 2) for rank, rows in enumerate(ran)]
    )
    with pytest.raises(RrfpError, match="of a last pipeline rank alone, whose 8 forwards each"):
        import_run([last])
    assert len({task.step for task in import_run([first, last]).recording.ranks[1].tasks}) == 2


def test_odd_text_in_a_profile_is_read(tmp_path: Path) -> None:
    """A byte order mark before it, and half a character in the host's name."""
    profile = plain_profile(played("1f1b", Shape(2, 4, 1), 1)[0], 0, 2)
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({**profile, "host_name": "h\ud800"}), encoding="utf-8-sig")
    (rank,) = import_run([path]).recording.ranks
    assert rank.info.host == "h?"


# The names of ranges in a profile: ours are read as they were written, and others tell nothing.


number = st.integers(0, 10**6)


steps = st.one_of(number, number.map(evaluation_step))


@given(number, number, number, steps, st.sampled_from(Kind), st.sampled_from(Cause))
def test_names_are_read_as_they_were_written(
    stage: int, chunk: int, microbatch: int, step: int, kind: Kind, cause: Cause
) -> None:
    name = task_range(kind, stage, chunk, microbatch, step)
    assert parse_range(name) == TaskRange(Maker.RRFP, kind, microbatch, stage, step)
    assert parse_range(wait_range(cause, chunk, step)) == WaitRange(Maker.RRFP, cause, step)
    call = ScheduleRange(step, stage, chunk, microbatch, stage, (chunk, microbatch))
    assert parse_range(schedule_range(call)) == call


def test_a_profile_names_evaluations() -> None:
    step = evaluation_step(4)
    assert task_range(Kind.F, 1, 0, 3, step) == "rrfp F3 stage=1 chunk=0 evaluation=4"
    assert wait_range(Cause.TRANSFER, 12, step) == "rrfp wait transfer 12 evaluation=4"
    call = schedule_range(ScheduleRange(step, 1, 1, 0, 0, (1,)))
    assert call == "rrfp schedule evaluation=4 rank=1 pp=1 tp=0 dp=0 stages=1"


@pytest.mark.parametrize(
    "name",
    [
        *("rrfp", "rrfp ", "rrfp F3", "rrfp X3 stage=0 chunk=0 step=0", "rrfp wait x 1 step=0"),
        *("PP:", "PP:F3", "PP:1Q3", "1F3", "PP:1F3 ", "Forward", "Forward x", "PP:1UNSHARD", ""),
        *("rrfp F3 stage=0 chunk=0 step=-1", "rrfp F3 stage=0 chunk=0 test=1"),
        *("rrfp F٣ stage=0 chunk=0 step=0", f"PP:{'9' * 40}F0"),
    ],
)
def test_other_names_are_not_ranges_of_a_pipeline(name: str) -> None:
    assert parse_range(name) is None

"""Work and the causes of idle time sum to the window, to the nanosecond, by the design's rules."""

import random
import re
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze import bubbles as module
from rrfp.analyze.bubbles import CAUSES, Bubbles, bubble_table, bubbles, divide
from rrfp.analyze.critical_path import critical_path
from rrfp.analyze.frames import frames_of
from rrfp.analyze.html import table_element
from rrfp.errors import RrfpError, UsageError
from rrfp.interchange.formats import import_run
from rrfp.schedule.tasks import Cause
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.records import (
    Phase,
    PhaseRecord,
    RankInfo,
    RankRecords,
    Recording,
    TaskRecord,
    WaitRecord,
    Window,
    step_windows,
)
from tests.analyze.recordings import make_recording
from tests.analyze.simulated_runs import MEGATRONS, OURS, random_times, simulated_case
from tests.properties.cases import SEEDS, Case, cases, examples
from tests.properties.naive_analyses import divide_step


def _task(start_ns: int, end_ns: int) -> TaskRecord:
    return TaskRecord(start_ns, end_ns, 0, "F", 0, 0, 0, 0, 1, 0, 1, 1, 1, 0)


def _wait(start_ns: int, end_ns: int, cause: str) -> WaitRecord:
    return WaitRecord(start_ns, end_ns, 0, cause)


def _divide(
    window: tuple[int, int], tasks: list[TaskRecord], waits: list[WaitRecord]
) -> dict[str, int]:
    """Return the parts that are not zero."""
    return {cause: ns for cause, ns in _parts(window, tasks, waits).items() if ns}


def _parts(
    window: tuple[int, int], tasks: list[TaskRecord], waits: list[WaitRecord]
) -> dict[str, int]:
    """The causes of a step of one rank."""
    info = RankInfo(0, 0, 0, 0, (0,), "node", 0)
    phases = [PhaseRecord(*window, 0, "schedule")]
    ranks = [RankRecords(info, tasks=tasks, waits=waits, phases=phases)]
    (row,) = divide(frames_of(Recording({}, ranks))).to_dicts()
    assert row["busy_ns"] + sum(row[cause] for cause in CAUSES) == row["window_ns"]
    return {cause: row[cause] for cause in CAUSES}


def bubbles_of(recording: Recording, steps: range | None = None) -> Bubbles:
    return module.bubbles(frames_of(recording), steps)


def test_the_parts_of_a_step() -> None:
    tasks = [_task(120, 150), _task(170, 200), _task(230, 260)]
    waits = [
        _wait(105, 115, "forward_input"),
        _wait(152, 160, "backward_input"),
        _wait(160, 168, "limit"),
        _wait(200, 230, "gradient_sync"),
        _wait(262, 270, "gradient_sync"),
        _wait(270, 280, "drain"),
        _wait(280, 284, "backward_input"),
    ]
    assert _divide((100, 300), tasks, waits) == {
        "warmup": 20,
        "backward_input": 8,
        "limit": 8,
        "overhead": 2 + 2,
        "gradient_sync": 30 + 8,
        "drain": 2 + 30,
    }


def test_a_rank_without_tasks_warms_up_all_the_time() -> None:
    assert _divide((0, 9), [], [_wait(1, 5, "drain")]) == {"warmup": 9}


def test_tasks_that_touch_leave_no_gap() -> None:
    assert _divide((0, 9), [_task(0, 5), _task(5, 9)], [_wait(4, 6, "order")]) == {}


def test_what_lies_outside_the_window_is_cut_off() -> None:
    tasks = [_task(0, 12), _task(18, 30), _task(40, 50)]
    assert _divide((10, 20), tasks, [_wait(5, 35, "hold")]) == {"hold": 6}


_spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25)), max_size=6)


@given(_spans, st.lists(st.tuples(_spans.map(tuple), st.sampled_from(list(Cause))), max_size=4))
def test_the_parts_sum_to_the_window_whatever_was_recorded(
    work: list[tuple[int, int]], idle: list[tuple[Any, Cause]]
) -> None:
    window = (10, 70)
    tasks = [_task(start, start + length) for start, length in work]
    waits = [
        _wait(start, start + length, cause) for spans, cause in idle for start, length in spans
    ]
    parts = _parts(window, tasks, waits)
    assert parts == divide_step(window, tasks, waits)
    busy = {t for task in tasks for t in range(task.start_ns, task.end_ns)} & set(range(*window))
    assert all(part >= 0 for part in parts.values())
    assert sum(parts.values()) + len(busy) == 60
    if busy:
        assert parts["warmup"] >= min(busy) - 10
        assert parts["drain"] + parts["gradient_sync"] >= 69 - max(busy)


def _launch(start_ns: int, end_ns: int) -> PhaseRecord:
    return PhaseRecord(start_ns, end_ns, 0, Phase.LAUNCH)


def _on_a_device() -> Recording:
    """A rank whose host launches tasks early, in time, late, and outside its gaps."""
    tasks = [_task(100, 120), _task(150, 180), _task(180, 200), _task(230, 260)]
    waits = [_wait(120, 130, "backward_input"), _wait(205, 208, "hold")]
    launches = [(90, 102), (135, 145), (175, 185), (195, 210), (220, 235), (262, 270)]
    phases = [PhaseRecord(90, 300, 0, "schedule"), *(_launch(*each) for each in launches)]
    info = RankInfo(0, 0, 0, 0, (0,), "node", 0)
    return Recording({}, [RankRecords(info, tasks=tasks, waits=waits, phases=phases)])


def test_overhead_is_launch_and_decision() -> None:
    (rank,) = bubbles_of(_on_a_device()).ranks
    causes_ns = {cause: ns for cause, ns in rank.causes_ns.items() if ns}
    assert causes_ns == {
        "warmup": 10,
        "backward_input": 10,
        "hold": 3,
        "drain": 40,
        "overhead": 20 + 27,
    }
    assert rank.overhead_parts_ns == {"launch": 10 + 5 + 2 + 10, "decision": 5 + 5 + 10}


def test_the_parts_of_overhead_are_shown() -> None:
    report = bubbles_of(_on_a_device())
    parts_s = {"launch": 27e-9, "decision": 20e-9}
    table = bubble_table(report, by_rank=True)
    (row,) = table.frame().to_dicts()
    assert parts_s.items() <= row.items()
    as_json: Any = table.document()
    assert parts_s.items() <= as_json["ranks"][0].items()
    sentence = "The overhead of 22.4% is 12.9% launch and 9.5% decision."
    assert bubble_table(report).conclusions[-1] == sentence
    page = str(table_element(table))
    *headings, _, _ = re.findall(r">([^<>]+)</th>", page)
    assert headings[-3:] == [
        "overhead",
        "overhead: launch",
        "overhead: decision",
    ]
    assert re.findall(r">([^<>]+)</td>", page)[-3:] == ["22.4", "12.9", "9.5"]


def test_without_launches_overhead_is_not_divided() -> None:
    recording = _on_a_device()
    del recording.ranks[0].phases[1:]
    report = bubbles_of(recording)
    assert report.ranks[0].causes_ns["overhead"] == 47
    assert report.overhead_parts_ns == report.ranks[0].overhead_parts_ns == {}
    table = bubble_table(report, by_rank=True)
    assert table.frame().columns[-1] == "overhead"
    assert bubble_table(report).conclusions[-1] == ""
    assert "launch" not in f"{table.document()} {table_element(table)}"


_steps = st.lists(st.tuples(_spans, _spans, _spans), min_size=2, max_size=2)
"""The work, waits and launches of a rank in each step, as starts and lengths."""


@given(st.lists(_steps, min_size=1, max_size=3))
def test_the_parts_of_overhead_are_those_of_each_nanosecond(
    drawn: list[list[tuple[Any, Any, Any]]],
) -> None:
    recording = Recording({}, [])
    expected = {}
    for rank, steps in enumerate(drawn):
        records = RankRecords(RankInfo(rank, rank, 0, 0, (rank,), "node", rank))
        recording.ranks.append(records)
        # All at the same time, though the records of a step count in that step alone.
        for step, (work, idle, launched) in enumerate(steps):
            records.phases.append(PhaseRecord(10, 70, step, "schedule"))
            for start, length in work:
                records.tasks.append(_task(start, start + length)._replace(step=step))
            for start, length in idle:
                wait = _wait(start, start + length, "limit")
                records.waits.append(wait._replace(step=step))
            for start, length in launched:
                launch = _launch(start, start + length)
                records.phases.append(launch._replace(step=step))
            busy = _nanoseconds(work) & {*range(10, 70)}
            between = set(range(min(busy), max(busy)) if busy else ()) - busy
            overhead = between - _nanoseconds(idle)
            launching = overhead & _nanoseconds(launched)
            expected[step, rank] = (len(launching), len(overhead - launching), len(overhead))
    divided = divide(frames_of(recording)).select("step", "rank", "launch", "decision", "overhead")
    assert {(step, rank): tuple(parts) for step, rank, *parts in divided.rows()} == expected


def _nanoseconds(spans: list[tuple[int, int]]) -> set[int]:
    return {ns for start, length in spans for ns in range(start, start + length)}


def _run(*schedules: tuple[int, int]) -> Recording:
    """A rank for each entry and return, with one task in the middle."""
    ranks = []
    for rank, (entry, leave) in enumerate(schedules):
        info = RankInfo(rank, rank, 0, 0, (rank,), "node", rank)
        tasks, phases = [_task(40, 60)], [PhaseRecord(entry, leave, 0, "schedule")]
        ranks.append(RankRecords(info, tasks=tasks, phases=phases))
    return Recording({}, ranks)


def test_the_window_is_from_the_first_entry_to_the_last_return() -> None:
    report = bubbles_of(_run((30, 90), (0, 70)))
    assert report.window_ns == 90
    early, late = report.ranks[1], report.ranks[0]
    assert (early.causes_ns["warmup"], early.causes_ns["drain"]) == (40, 30)
    assert (late.causes_ns["warmup"], late.causes_ns["drain"]) == (40, 30)
    assert report.bubble_fraction == pytest.approx(1 - 20 / 90)


def test_a_whole_run_adds_up() -> None:
    recording = make_recording(4, 8, 5)
    report = bubbles_of(recording)
    assert report.steps == (0, 1, 2, 3, 4)
    assert report.dropped_steps == ()
    for rank, records in zip(report.ranks, recording.ranks, strict=True):
        assert rank.busy_ns + sum(rank.causes_ns.values()) == rank.window_ns == report.window_ns
        assert rank.busy_ns == sum(task.end_ns - task.start_ns for task in records.tasks)
        assert tuple(rank.causes_ns) == CAUSES
    # 1F1B without jitter: (M + N - 1)(F + B), of which M (F + B) is work.
    assert report.bubble_fraction == pytest.approx(1 - 8 / 11, abs=0.04)


def test_steps_are_summed_and_half_open() -> None:
    recording = make_recording(2, 3, 4)
    parts = [bubbles_of(recording, range(step, step + 1)) for step in range(1, 3)]
    both = bubbles_of(recording, range(1, 3))
    assert both.steps == (1, 2)
    assert both.window_ns == sum(part.window_ns for part in parts)
    for index in range(2):
        assert both.ranks[index].busy_ns == sum(part.ranks[index].busy_ns for part in parts)


def test_a_step_that_a_rank_misses_is_dropped_for_all() -> None:
    recording = make_recording(3, 3, 3)
    phases = recording.ranks[1].phases
    phases[:] = [phase for phase in phases if phase.step != 2]
    report = bubbles_of(recording)
    assert (report.steps, report.dropped_steps) == ((0, 1), (2,))
    expected = bubbles_of(recording, range(2))
    assert report.ranks == expected.ranks
    with pytest.raises(RrfpError, match="none of the steps 2:3 was finished by every rank"):
        bubbles_of(recording, range(2, 3))


def test_what_cannot_be_divided_gets_a_sentence() -> None:
    recording = make_recording(2, 3, 4)
    with pytest.raises(UsageError, match="none of the steps asked for; it has those from 0 to 3"):
        bubbles_of(recording, range(7, 9))
    with pytest.raises(RrfpError, match="the trace has no steps"):
        bubbles_of(Recording({}, []))
    recording.ranks[0].waits.append(WaitRecord(0, 1, 0, "lunch"))
    with pytest.raises(RrfpError, match="waited in step 0 for 'lunch'"):
        bubbles_of(recording)


# Work and the causes of idle time sum to the window, for every rank and step of any run.
#
# The runs are random simulated ones, imported ones, and real ones as they are and with records that
# were shifted, stretched, dropped and doubled. Work is counted here a second time.


PROFILES = sorted(
    path.parent for path in Path(__file__).parents[1].glob("fixtures/*/rank-0.json.gz")
)


def check_sums(recording: Recording) -> None:
    """Every finished step of every rank is divided once, into parts that sum to its window."""
    frames = frames_of(recording)
    windows = step_windows(recording)
    divided = divide(frames)
    ranks = {records.info.rank: records for records in recording.ranks}
    rows = {(row["step"], row["rank"]): row for row in divided.iter_rows(named=True)}
    assert len(rows) == divided.height
    assert rows.keys() == set(product(windows, ranks))
    for (step, rank), row in rows.items():
        start_ns, end_ns = windows[step]
        assert min(row[part] for part in ("busy_ns", *CAUSES)) >= 0
        assert row["window_ns"] == end_ns - start_ns
        assert row["busy_ns"] + sum(row[cause] for cause in CAUSES) == row["window_ns"]
        tasks = (task for task in ranks[rank].tasks if task.step == step)
        assert row["busy_ns"] == busy_ns(tasks, windows[step])
    if windows:
        report = bubbles(frames)
        totals = divided.group_by("rank").agg(pl.all().exclude("step").sum())
        found = [(each.rank, each.busy_ns, *each.causes_ns.values()) for each in report.ranks]
        assert sorted(found) == sorted(totals.select("rank", "busy_ns", *CAUSES).rows())


def busy_ns(tasks: Iterable[TaskRecord], window: Window) -> int:
    """How much of the window any of the tasks takes."""
    total_ns, reached_ns = 0, window[0]
    for start_ns, end_ns in sorted(task[:2] for task in tasks):
        begin_ns, stop_ns = max(start_ns, reached_ns), min(end_ns, window[1])
        if begin_ns < stop_ns:
            total_ns += stop_ns - begin_ns
            reached_ns = stop_ns
    return total_ns


@examples(quick=40, thorough=2000)
@given(cases())
def test_the_parts_of_simulated_steps_sum_to_the_window(case: Case) -> None:
    recording = simulated_case(
        case,
        random_times(random.Random(case.seed), case.shape),
        transfer=lambda *_: case.seed % 150,
        lateness=lambda member, _: case.seed % 40 * member,
        agreement_ns=case.seed % 13,
    )
    check_sums(recording)


@cache
def real_runs() -> list[Recording]:
    return [read_trace(OURS), read_trace(MEGATRONS)]


def test_the_parts_of_real_steps_sum_to_the_window() -> None:
    for recording in real_runs():
        check_sums(recording)


@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_the_parts_of_imported_steps_sum_to_the_window(folder: Path) -> None:
    check_sums(import_run([folder]).recording)


def disturbed(recording: Recording, rng: random.Random) -> Recording:
    """The recording with some tasks, waits and phases shifted, stretched, dropped or doubled."""
    disturbed = deepcopy(recording)
    windows = step_windows(recording)
    reach_ns = max(end_ns - start_ns for start_ns, end_ns in windows.values()) // 2
    share = rng.choice([0.02, 0.3, 1.0])
    for records in disturbed.ranks:
        lists: list[list[Any]] = [records.tasks, records.waits, records.phases]
        for found in lists:
            found[:] = [
                changed
                for record in found
                for changed in (
                    _disturb(record, rng, reach_ns) if rng.random() < share else [record]
                )
            ]
    return disturbed


def _disturb(record: Any, rng: random.Random, reach_ns: int) -> list[Any]:
    start_ns, end_ns = record[:2]
    match rng.choice(["shift", "stretch", "drop", "double", "relabel"]):
        case "shift":
            by_ns = rng.randint(-reach_ns, reach_ns)
            return [record._replace(start_ns=start_ns + by_ns, end_ns=end_ns + by_ns)]
        case "stretch":
            return [record._replace(end_ns=start_ns + rng.randint(0, reach_ns))]
        case "drop":
            return []
        case "double":
            by_ns = rng.randint(0, 1 + end_ns - start_ns)
            return [record, record._replace(start_ns=start_ns + by_ns, end_ns=end_ns + by_ns)]
        case _:
            is_wait = isinstance(record, WaitRecord)
            return [record._replace(cause=rng.choice(list(Cause))) if is_wait else record]


@examples(quick=15, thorough=400)
@given(SEEDS)
def test_the_parts_of_disturbed_steps_sum_to_the_window(seed: int) -> None:
    rng = random.Random(seed)
    for recording in real_runs():
        changed = disturbed(recording, rng)
        if step_windows(changed):
            check_sums(changed)


@examples(quick=15, thorough=400)
@given(SEEDS)
def test_so_do_the_owners_on_the_critical_path(seed: int) -> None:
    rng = random.Random(seed)
    for recording in real_runs():
        changed = disturbed(recording, rng)
        frames = frames_of(changed)
        for step, (start_ns, end_ns) in step_windows(changed).items():
            # Of tasks that wait for each other in a ring there is no path, and a sentence says so.
            with suppress(RrfpError):
                path = critical_path(frames, step)
                spans = [(each.start_ns, each.end_ns) for each in path.segments]
                assert all(before[1] == after[0] for before, after in pairwise(spans))
                assert (spans[0][0], spans[-1][1]) == (start_ns, end_ns)
                assert sum(owner.time_ns for owner in path.owners) == end_ns - start_ns

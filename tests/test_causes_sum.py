"""Work and the causes of idle time sum to the window, for every rank and step of any run.

The runs are random simulated ones, imported ones, and real ones as they are and with records that
were shifted, stretched, dropped and doubled. Work is counted here a second time.
"""

import random
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

from rrfp.analyze.bubbles import CAUSES, bubbles, divide
from rrfp.analyze.critical_path import critical_path
from rrfp.analyze.frames import frames_of
from rrfp.errors import RrfpError
from rrfp.interchange.formats import import_run
from rrfp.schedule.tasks import Cause
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.records import Recording, TaskRecord, WaitRecord, Window, step_windows
from tests.cases import SEEDS, Case, cases
from tests.effort import examples
from tests.simulated import simulated_case
from tests.step_times import MEGATRONS, OURS, random_times

PROFILES = sorted(path.parent for path in Path(__file__).parent.glob("fixtures/*/rank-0.json.gz"))


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

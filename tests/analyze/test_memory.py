"""What `rrfp analyze memory`, the charts, the findings and the comparison say of bytes held."""

import csv
import io
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest
import vl_convert
from hypothesis import given

from rrfp.analyze.charts import ChartKind
from rrfp.analyze.charts.export import VEGA_LITE, draw, spec_of
from rrfp.analyze.compare import compare
from rrfp.analyze.findings import blame, findings, replays
from rrfp.analyze.frames import frames_of, recording_of
from rrfp.analyze.memory import activation_changes, memory, memory_table, peak_bytes
from rrfp.analyze.report import report
from rrfp.analyze.whatif import whatif_table
from rrfp.cli import main as cli
from rrfp.errors import RrfpError, UsageError
from rrfp.replay.bottlenecks import BottleneckKind
from rrfp.replay.change import Change, replay
from rrfp.replay.cost_sources import costs_of
from rrfp.replay.measured import MeasuredStep, divided, evened, measure, redispatch, without_heavy
from rrfp.replay.recorded import RecordedRun, read_run
from rrfp.replay.whatif import what_if
from rrfp.schedule.admission import Admit
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Auto, Bytes, Hold, Policy, ShareOf1F1B
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.toml_files import preset
from rrfp.simulate.engine import StepConditions
from rrfp.simulate.memory_budgets import by_rank, peak_bytes_of_1f1b
from rrfp.simulate.step import play, simulate_step
from rrfp.trace.check import check_contents
from rrfp.trace.perfetto.reader import TraceContents, read_contents, read_trace
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import RankRecords, Recording, TaskRecord, task_of
from rrfp.trace.spill import SpillWriter, row_of
from tests.analyze.simulated_runs import OURS, equal_times, policy_of, random_times, simulated_run
from tests.properties.cases import SEEDS, examples
from tests.trace.test_spill import read_spill

# What a run kept in memory, from its trace: sizes come back to the byte, replays keep to a hold in
# bytes, and damaged sums are reported.


SHAPE = Shape(4, 8)


def random_sizes(rng: Random, shape: Shape, *, splits: bool) -> ActivationSizes:
    """Sizes over a factor of 100."""
    kept = [
        [rng.randint(1, 10 ** rng.choice([1, 2, 3])) for _ in range(shape.num_microbatches)]
        for _ in range(shape.num_stages)
    ]
    owed = [[rng.randint(0, size) for size in row] for row in kept]
    return ActivationSizes(kept, owed if splits else None)


def least_budget(sizes: ActivationSizes, shape: Shape) -> int:
    return max(sizes.of(shape.stages_of(rank)).least_budget for rank in range(shape.num_ranks))


def random_run(seed: int) -> tuple[Recording, list[StepConditions], Policy, Shape]:
    """A run of one or two replicas whose microbatches have sizes, under any kind of bound."""
    rng = Random(seed)
    num_chunks = rng.choice([1, 1, 2])
    placement = rng.choice(list(Placement)) if num_chunks == 2 else Placement.LOOP
    shape = Shape(rng.randint(1, 4), rng.randint(1, 8), num_chunks, placement)
    hint = rng.choice(["bf", "bfw", "f-first"] if num_chunks == 1 else ["bf-deep", "bfw-deep"])
    policy, shape = policy_of(hint, shape)
    worlds = [
        StepConditions(
            random_times(rng, shape),
            lambda sender, receiver, task: 20,
            sizes=random_sizes(rng, shape, splits=shape.splits_backward),
        )
        for _ in range(rng.randint(1, 2))
    ]
    least = max(least_budget(sizes, shape) for world in worlds if (sizes := world.sizes))
    bounds: list[tuple[int | None, Hold | None]] = [
        *((3, None), (None, None), (None, Fraction(num_chunks + 1, num_chunks))),
        *[(None, Bytes(rng.randint(least, 3 * least)))] * 3,
    ]
    limit, hold = rng.choice(bounds)
    if rng.random() < 0.2:
        limit, hold = None, Auto.AUTO
        budgets = [rng.randint(least, 3 * least) for _ in range(shape.num_ranks)]
        worlds = [replace(world, budgets=budgets) for world in worlds]
    policy = replace(policy, limit=limit, hold=hold)
    return simulated_run(policy, shape, worlds, num_steps=2), worlds, policy, shape


def peaks_by_sizes(recording: Recording, worlds: list[StepConditions], shape: Shape) -> list[int]:
    """By pipeline rank, the most bytes kept at once, counted task by task from the sizes that the
    test gave, and not from what was recorded of them."""
    peaks = [0] * shape.num_ranks
    for records in recording.ranks:
        sizes = worlds[records.info.dp_rank].sizes
        assert sizes is not None
        kept: dict[tuple[int, int, int], int] = {}
        for task in records.tasks:
            key = task.step, task.stage, task.microbatch
            if task.kind == "F":
                kept[key] = sizes.activations[task.stage][task.microbatch]
            elif task.kind == "B" and shape.splits_backward:
                assert sizes.pending_w is not None
                kept[key] = sizes.pending_w[task.stage][task.microbatch]
            else:
                del kept[key]
            peak = sum(size for (step, *_), size in kept.items() if step == task.step)
            peaks[records.info.pp_rank] = max(peaks[records.info.pp_rank], peak)
        assert not kept
    return peaks


# Sizes and bounds come back.


@given(SEEDS)
@examples(quick=40, thorough=1000)
def test_sizes_bounds_and_decisions_come_back_from_a_trace(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    recording, worlds, policy, shape = random_run(seed)
    path = tmp_path_factory.mktemp("trace") / "run.pftrace"
    write_trace(path, recording)
    contents = read_contents(path)
    assert contents.recording == recording
    assert check_contents(contents) == []
    assert recording_of(frames_of(recording)) == recording
    run = read_run(recording)
    assert run.policy.hold == policy.hold
    peaks = peaks_by_sizes(recording, worlds, shape)
    for step in measure(run):
        for replica, world in zip(step.replicas, worlds, strict=True):
            assert replica.sizes == world.sizes
            if policy.hold is not None and not isinstance(policy.hold, int | Fraction):
                bounds = world.budgets or [policy.hold_bytes or 0] * shape.num_ranks
                assert list(replica.budgets) == list(bounds)
                assert all(peak <= most for peak, most in zip(peaks, bounds, strict=True))
        again = replay(run, step)
        assert again.makespan_ns == step.window_ns
        assert list(again.peak_held_bytes) == peaks
    for records in run.steps:
        for pipeline in records.replicas:
            for members in pipeline:
                decided = [task for _, task in redispatch(run, members) if task is not None]
                assert decided == [task_of(task) for task in members[0].tasks]


def test_a_spill_file_holds_the_bytes_and_an_earlier_one_reads_as_none(tmp_path: Path) -> None:
    recording, *_ = random_run(7)
    records = recording.ranks[0]
    path = tmp_path / "rank-0.jsonl"
    writer = SpillWriter(path, records.info)
    for found in records.by_name().values():
        writer.append(map(row_of, found))
    writer.append([row_of(records.tasks[0])[:-2], row_of(records.phases[0])[:-2]])
    writer.flush()
    writer.close()
    read = read_spill(path)
    assert read is not None
    assert read.tasks[:-1] == records.tasks
    assert read.tasks[-1] == records.tasks[0]._replace(held_bytes=0)
    assert read.phases[-1] == records.phases[0]._replace(budget_bytes=0)


def test_a_trace_of_before_has_no_bytes() -> None:
    recording = read_trace(OURS)
    assert all(task.held_bytes == 0 for rank in recording.ranks for task in rank.tasks)
    assert all(phase.budget_bytes == 0 for rank in recording.ranks for phase in rank.phases)
    run = read_run(recording)
    assert run.peak_of_1f1b() is None
    assert measure(run)[0].replicas[0].sizes is None


# Inconsistent bytes are reported.


def held_run(hold: Hold | None = None, hint: str = "bfw") -> Recording:
    policy, shape = policy_of(hint, SHAPE)
    sizes = random_sizes(Random(1), shape, splits=shape.splits_backward)
    world = StepConditions(random_times(Random(1), shape), sizes=sizes)
    return simulated_run(replace(policy, hold=hold), shape, [world], num_steps=2)


def with_tasks(recording: Recording, tasks: list[TaskRecord]) -> Recording:
    first, *others = recording.ranks
    return Recording(recording.settings, [replace(first, tasks=tasks), *others])


@pytest.mark.parametrize("kind", "FBW")
@pytest.mark.parametrize("error", [-1, 1, 10**9])
def test_a_sum_that_is_off_is_reported_once_by_check_and_refused_by_replays(
    kind: str, error: int
) -> None:
    recording = held_run()
    tasks = list(recording.ranks[0].tasks)
    place = next(place for place, task in enumerate(tasks) if task.kind == kind)
    # From there on, so that it is that task's change which is off.
    for later in range(place, len(tasks)):
        if tasks[later].step == tasks[place].step:
            held = tasks[later].held_bytes + error
            tasks[later] = tasks[later]._replace(held_bytes=held)
    damaged = with_tasks(recording, tasks)
    problems = check_contents(TraceContents(damaged))
    assert any("1 task with bytes held that do not add up" in problem for problem in problems)
    with pytest.raises(RrfpError, match="the bytes that rank 0 held in step 0 do not add up; see"):
        measure(read_run(damaged))


def test_bytes_above_the_bound_are_reported() -> None:
    recording = held_run(Bytes(10_000))
    first, *others = recording.ranks
    phases = [phase._replace(budget_bytes=1) for phase in first.phases]
    damaged = Recording(recording.settings, [replace(first, phases=phases), *others])
    problems = check_contents(TraceContents(damaged))
    assert any("passed the bound" in each and "of 1 bytes" in each for each in problems)


def test_a_hold_in_bytes_without_bytes_is_refused() -> None:
    recording = held_run(Bytes(10_000))
    bare = Recording(
        recording.settings,
        [
            replace(rank, tasks=[task._replace(held_bytes=0) for task in rank.tasks])
            for rank in recording.ranks
        ],
    )
    with pytest.raises(RrfpError, match="the trace does not tell its bytes; record it again"):
        measure(read_run(bare))


def test_a_hold_found_by_the_run_itself_is_needed_to_replay_it() -> None:
    recording = held_run(Bytes(10_000))
    recording.settings["settings"] |= {"hold": "auto"}  # type: ignore[operator]
    run = read_run(recording)
    (step, *_) = measure(run)
    assert step.replicas[0].budgets == (10_000,) * 4
    replay(run, step)
    unknown = replace(step, replicas=tuple(replace(each, budgets=()) for each in step.replicas))
    with pytest.raises(UsageError, match="the trace does not tell what it was; give a hold"):
        replay(run, unknown)


@pytest.mark.parametrize("hold", ["1.0x", "12 Gi", "much", 0.3, -1, [8]])
def test_a_hold_that_no_run_has_is_refused(hold: object) -> None:
    recording = held_run()
    recording.settings["settings"] |= {"hold": hold}  # type: ignore[operator]
    with pytest.raises(RrfpError, match="settings of the trace say hold = "):
        read_run(recording)


def test_measured_bytes_may_grow_in_a_backward() -> None:
    # W may need more than F kept: output gradients, too.
    recording = held_run()
    step = 0
    records = recording.ranks[0]
    held = {"F": 10, "B": 15, "W": 0}
    tasks: list[TaskRecord] = []
    left: dict[int, int] = {}
    for task in records.tasks:
        if task.step != step:
            step, left = task.step, {}
        left[task.microbatch] = held[task.kind]
        tasks.append(task._replace(held_bytes=sum(left.values())))
    damaged = with_tasks(recording, tasks)
    assert not [each for each in check_contents(TraceContents(damaged)) if "bytes" in each]
    sizes = measure(read_run(damaged))[0].replicas[0].sizes
    assert sizes is not None
    assert sizes.activations[0] == [15] * 8
    assert sizes.pending_w is not None
    assert sizes.pending_w[0] == [15] * 8


def test_steps_whose_sizes_were_not_known_yet_have_no_peak() -> None:
    policy, shape = policy_of("bfw", SHAPE)
    real = random_sizes(Random(2), shape, splits=True)
    budget = 2 * least_budget(real, shape)
    worlds = [
        StepConditions(random_times(Random(2), shape), sizes=ActivationSizes([[budget] * 8] * 4)),
        StepConditions(random_times(Random(2), shape), sizes=real),
    ]
    policy = replace(policy, hold=Bytes(budget))
    recording = _with_unknown_sizes(simulated_run(policy, shape, worlds[:1]))
    simulate_step(shape, policy, worlds[1:], recording=recording, step=1)
    run = read_run(recording)
    assert run.peak_of_1f1b() == peak_bytes_of_1f1b(real)
    assert ([step.step for step in run.steps], run.left_out, run.without_sizes) == ([1], (), (0,))
    # A hold below what those steps reckoned with is replayed all the same.
    assert what_if(recording, lambda run: [Change(hold=Bytes(budget // 2))]).rows
    found = memory(frames_of(recording))
    assert {each.peak_step for each in found.ranks} == {1}
    assert found.worst.peak_held_bytes < budget
    # Where no step knows them, all count.
    alone = _with_unknown_sizes(simulated_run(policy, shape, worlds[:1]))
    assert memory(frames_of(alone)).worst.peak_held_bytes == budget
    assert read_run(alone).peak_of_1f1b() == 4 * budget


def _with_unknown_sizes(recording: Recording) -> Recording:
    """As a run records its first step under a bound in bytes."""
    for rank in recording.ranks:
        rank.phases[:] = [phase._replace(unknown_sizes=8) for phase in rank.phases]
    return recording


# What if.


def only(change: Change) -> Callable[[RecordedRun], list[Change]]:
    return lambda run: [change]


def test_a_change_to_a_hold_in_bytes_is_a_fresh_simulation_of_it() -> None:
    policy, shape = policy_of("bfw", SHAPE, limit=32)
    sizes = random_sizes(Random(3), shape, splits=True)
    world = StepConditions(
        random_times(Random(3), shape), lambda sender, receiver, task: 20, sizes=sizes
    )
    recording = simulated_run(policy, shape, [world], num_steps=2)
    one = peak_bytes_of_1f1b(by_rank(sizes, shape))
    assert read_run(recording).peak_of_1f1b() == one
    least = least_budget(sizes, shape)
    for hold, budget in (
        (Bytes(least), least),
        (Bytes(2 * least), 2 * least),
        (ShareOf1F1B(Fraction(1)), one),
        (ShareOf1F1B(Fraction(5, 4)), one * 5 // 4),
    ):
        report = what_if(recording, only(Change(hold=hold)))
        fresh = play(shape, replace(policy, limit=None, hold=Bytes(budget)), world)
        (row,) = report.rows
        assert (row.makespan_ns, row.peak_held_bytes) == (fresh.makespan_ns, fresh.peak_held_bytes)
        assert max(fresh.peak_held_bytes) <= budget
        assert whatif_table(report, 1.0).records()[0]["hold"] == str(Bytes(budget))


def test_a_share_of_a_run_without_sizes_counts_microbatches() -> None:
    policy, shape = policy_of("bf", SHAPE, limit=32)
    world = StepConditions(random_times(Random(3), shape))
    recording = simulated_run(policy, shape, [world])
    report = what_if(recording, lambda run: [Change(hold=ShareOf1F1B(Fraction(1, 2)))])
    assert report.rows[0].policy.hold == 2
    assert report.rows[0].peak_held_bytes is None
    with pytest.raises(UsageError, match="a hold of 1GiB needs to know what microbatches keep"):
        what_if(recording, lambda run: [Change(hold=Bytes(2**30))])


def test_a_hold_that_could_get_stuck_is_refused_with_the_figure() -> None:
    with pytest.raises(UsageError, match=r"the hold of 5 B \(5 bytes\) is below"):
        what_if(held_run(), lambda run: [Change(hold=Bytes(5))])


def test_a_run_held_in_bytes_keeps_its_hold_under_another_hint() -> None:
    recording = held_run(Bytes(3000))
    report = what_if(recording, lambda run: [Change(HINTS["bf"]), Change(HINTS["bfw"], limit=3)])
    assert [row.policy.hold for row in report.rows] == [Bytes(3000), None]
    assert max(report.rows[0].peak_held_bytes or ()) <= 3000


# Sizes move with what moves the microbatches.


def changed(change: Change, recording: Recording) -> tuple[RecordedRun, MeasuredStep, MeasuredStep]:
    run = read_run(recording)
    (step, *_) = measure(run)
    return run, step, change.apply(step, run)


def sums(sizes: ActivationSizes | None) -> list[int]:
    """By microbatch."""
    assert sizes is not None
    return [sum(column) for column in zip(*sizes.activations, strict=True)]


def test_a_pyramid_takes_the_sizes_along() -> None:
    run, step, after = changed(Change(admit=Admit.PYRAMID), held_run())
    before_ns, after_ns = step.replicas[0].durations_ns, after.replicas[0].durations_ns
    pairs: dict[bool, set[tuple[tuple[int, ...], int]]] = defaultdict(set)
    for is_after, times_ns, sizes in (
        (False, before_ns, step.replicas[0].sizes),
        (True, after_ns, after.replicas[0].sizes),
    ):
        for microbatch, size in enumerate(sums(sizes)):
            times = tuple(ns for task, ns in times_ns.items() if task.microbatch == microbatch)
            pairs[is_after].add((tuple(sorted(times)), size))
    assert pairs[False] == pairs[True]
    assert sums(step.replicas[0].sizes) != sums(after.replicas[0].sizes)
    assert replay(run, after).peak_held_bytes


@pytest.mark.parametrize("change", [Change(even_microbatches=True), Change(even_stages=True)])
def test_evening_keeps_the_bytes_there_are(change: Change) -> None:
    _, step, after = changed(change, held_run())
    assert sum(sums(after.replicas[0].sizes)) == sum(sums(step.replicas[0].sizes))
    rows = after.replicas[0].sizes
    assert rows is not None
    if change.even_microbatches:
        assert all(max(row) - min(row) <= 1 for row in rows.activations)
    else:
        assert sums(rows) == sums(step.replicas[0].sizes)
        assert all(max(each) - min(each) <= 1 for each in zip(*rows.activations, strict=True))


@given(SEEDS)
@examples(quick=100, thorough=2000)
def test_changed_sizes_are_sizes_and_add_up(seed: int) -> None:
    rng = Random(seed)
    shape = Shape(rng.randint(1, 4), rng.randint(1, 8))
    found = [random_sizes(rng, shape, splits=True) for _ in range(rng.randint(1, 3))]
    even = evened(found)
    shares = [rng.random() for _ in range(shape.num_stages)]
    for sizes in found:
        anew = divided(sizes, lambda column: shares)
        assert sums(anew) == sums(sizes)
        lighter = without_heavy(sizes)
        assert all(
            size <= before
            for rows in zip(lighter.activations, sizes.activations, strict=True)
            for size, before in zip(*rows, strict=True)
        )
    assert sum(sum(sums(sizes)) for sizes in even) == sum(sum(sums(sizes)) for sizes in found)


def test_a_replica_whose_sizes_are_not_known_leaves_all_as_they_are() -> None:
    known = ActivationSizes([[1, 3]])
    assert evened([known, None]) == [known, None]
    assert evened([known]) == [ActivationSizes([[2, 2]])]


# A lone rank's records, for the counters.


def test_a_rank_without_tasks_has_no_counters(tmp_path: Path) -> None:
    recording = held_run()
    empty = [RankRecords(rank.info) for rank in recording.ranks]
    path = tmp_path / "run.pftrace"
    write_trace(path, Recording(recording.settings, empty))
    assert read_trace(path).ranks == empty


# A recorded run as costs.


def test_a_recorded_run_as_costs_holds_the_same_bytes() -> None:
    recording, worlds, _, shape = random_run(11)

    costs = costs_of(recording)
    for replica, world in enumerate(worlds):
        assert costs.step(shape, 0, replica).sizes == world.sizes
    drawn = costs_of(recording, drawn=True)
    more = replace(shape, num_microbatches=40)
    sizes = drawn.step(more, 3, 0).sizes
    assert sizes == drawn.step(more, 3, 0).sizes
    assert sizes != drawn.step(more, 4, 0).sizes
    assert sizes is not None
    recorded = {
        tuple(column)
        for world in worlds
        if world.sizes is not None
        for column in zip(*world.sizes.activations, strict=True)
    }
    assert {tuple(column) for column in zip(*sizes.activations, strict=True)} <= recorded
    bare = costs_of(read_trace(OURS), drawn=True)
    assert bare.step(bare.shape, 0, 0).sizes is None


GIB = 2**30


def a_run(
    *, hint: str = "bfw", num_steps: int = 2, budgets: tuple[int, ...] = (), **bounds: Any
) -> Recording:
    """Four ranks whose microbatches differ tenfold; the last stage keeps a third of the others."""
    policy, shape = policy_of(hint, Shape(4, 12), **bounds)
    rng = Random(5)
    of_microbatch = [rng.choice([GIB, 2 * GIB, 10 * GIB]) for _ in range(12)]
    kept = [[size // (3 if stage == 3 else 1) for size in of_microbatch] for stage in range(4)]
    sizes = ActivationSizes(kept, [[size // 4 for size in row] for row in kept])
    times = equal_times(shape, 100, 100, 50)
    times = replace(
        times,
        **{
            name: [
                [ns * size // (2 * GIB) for ns, size in zip(row, of_microbatch, strict=True)]
                for row in getattr(times, name)
            ]
            for name in ("forward", "input_gradient", "weight_gradient")
        },
    )
    world = StepConditions(times, lambda *_: 9, sizes=sizes, budgets=budgets)
    return simulated_run(policy, shape, [world], num_steps=num_steps)


def naive_peaks(recording: Recording) -> dict[int, int]:
    """By rank, from the records alone."""
    peaks: defaultdict[int, int] = defaultdict(int)
    for rank in recording.ranks:
        for task in rank.tasks:
            peaks[rank.info.rank] = max(peaks[rank.info.rank], task.held_bytes)
    return peaks


# The figures.


@given(SEEDS)
@examples(quick=25, thorough=500)
def test_peaks_sizes_and_room_are_those_of_the_tasks(seed: int) -> None:
    recording, worlds, policy, shape = random_run(seed)
    found = memory(frames_of(recording))
    peaks = naive_peaks(recording)
    assert {each.rank: each.peak_held_bytes for each in found.ranks} == peaks
    assert peak_bytes(frames_of(recording)) == max(peaks.values())
    for each, records in zip(found.ranks, recording.ranks, strict=True):
        sizes = worlds[records.info.dp_rank].sizes
        assert sizes is not None
        rows = sizes.of(each.stages).activations
        whole = [sum(column) for column in zip(*rows, strict=True)]
        assert each.largest_microbatch_bytes == max(whole)
        assert each.mean_microbatch_bytes == pytest.approx(sum(whole) / len(whole))
        assert each.peak_held == max(task.held for task in records.tasks) / shape.num_chunks
        at_peak = [task for task in records.tasks if task.held_bytes == each.peak_held_bytes]
        first = at_peak[0]
        (start_ns,) = {p.start_ns for p in records.phases if p.step == first.step}
        assert each.peak_step == first.step
        assert each.peak_after_s == pytest.approx((first.start_ns - start_ns) / 1e9)
        if isinstance(policy.hold, Bytes):
            assert each.budget_bytes == policy.hold.num
        elif policy.hold is Auto.AUTO:
            assert each.budget_bytes == worlds[0].budgets[records.info.pp_rank]
        else:
            assert each.budget_bytes is None
        ceiling = each.budget_bytes or max(peaks.values())
        assert each.headroom_bytes == ceiling - each.peak_held_bytes


def naive_for_w(tasks: list[TaskRecord], sizes: ActivationSizes) -> list[int]:
    waiting: dict[tuple[int, int, int], int] = {}
    found = []
    for task in tasks:
        key = task.step, task.stage, task.microbatch
        if task.kind == "B":
            assert sizes.pending_w is not None
            waiting[key] = sizes.pending_w[task.stage][task.microbatch]
        elif task.kind == "W":
            del waiting[key]
        found.append(sum(waiting.values()))
    return found


def test_what_waits_for_w_is_what_the_sizes_owe() -> None:
    seeds = (seed for seed in range(100) if random_run(seed)[3].splits_backward)
    for _, seed in zip(range(8), seeds, strict=False):
        recording, worlds, *_ = random_run(seed)
        tasks = activation_changes(frames_of(recording))
        for records in recording.ranks:
            sizes = worlds[records.info.dp_rank].sizes
            assert sizes is not None
            own = tasks.filter(pl.col("rank") == records.info.rank)
            assert own["for_w"].to_list() == naive_for_w(records.tasks, sizes)


def test_an_unfinished_step_does_not_count() -> None:
    recording = a_run(hold=4)
    first = recording.ranks[0]
    recording.ranks[0] = replace(first, phases=first.phases[:1])
    assert {each.peak_step for each in memory(frames_of(recording)).ranks} == {0}
    recording.ranks[0] = replace(first, phases=[])
    with pytest.raises(RrfpError, match="no step that every rank finished"):
        memory(frames_of(recording))


def test_the_sentence_names_the_worst_and_the_freest_rank() -> None:
    said = memory_table(memory(frames_of(a_run(hold=4)))).conclusions[0]
    assert said == (
        "Rank 0 held most, 40 GiB in step 0; rank 3 could have held 35 GiB more before it held "
        "as much."
    )
    said = memory_table(memory(frames_of(a_run(hold=Bytes(30 * GIB))))).conclusions[0]
    assert said.startswith("Rank 0 held most, 30 GiB in step 0, of 30 GiB; rank 3 could have ")


# Findings.


def found_in(recording: Recording) -> dict[str, Any]:
    frames = frames_of(recording)
    replayed = replays(frames)
    return {
        each.kind: each for each in findings(frames, blame(frames), replayed.run, replayed.culprits)
    }


def multimodal(hold: Hold) -> Recording:
    """Steps of the preset whose microbatches differ most."""
    policy, shape = policy_of("bfw", Shape(4, 24))
    costs = preset("multimodal").step(shape, 1235, 0)
    world = StepConditions(costs.times, costs.links, sizes=costs.sizes)
    return simulated_run(replace(policy, hold=hold), shape, [world])


def test_a_bound_that_counts_microbatches_is_held_against_the_same_memory_in_bytes() -> None:
    found = found_in(multimodal(4))[BottleneckKind.MEMORY]
    frames = frames_of(multimodal(4))
    most = memory(frames).worst.peak_held_bytes
    assert found.saving > 0.02
    assert "could have held" in found.figures
    assert f"at that bound a step takes {found.saving:.0%} less" in found.advice
    assert found.flags.startswith("--hold ")
    assert found.flags.endswith("MiB")
    assert 0.999 * most <= int(found.flags[7:-3]) * 2**20 <= most


def test_a_bound_in_bytes_is_doubled_in_bytes() -> None:
    most = memory(frames_of(multimodal(4))).worst.peak_held_bytes
    found = found_in(multimodal(Bytes(most)))
    assert BottleneckKind.MEMORY not in found
    bound = found[BottleneckKind.BOUND]
    assert "GiB)" in bound.title
    assert bound.advice == f"Try {bound.flags}, if memory allows."
    assert 2 * most * 0.999 <= int(bound.flags[7:-3]) * 2**20 <= 2 * most


def test_where_the_device_sets_the_bound_more_is_no_advice() -> None:
    recording = multimodal(4)
    most = memory(frames_of(recording)).worst.peak_held_bytes
    policy, shape = policy_of("bfw", Shape(4, 24))
    costs = preset("multimodal").step(shape, 1235, 0)
    world = StepConditions(costs.times, costs.links, sizes=costs.sizes, budgets=[most] * 4)
    automatic = simulated_run(replace(policy, hold=Auto.AUTO), shape, [world])
    bound = found_in(automatic)[BottleneckKind.BOUND]
    assert "hold auto" in bound.title
    assert "recompute activations, or use smaller microbatches" in bound.advice


# Charts and pages.


def rows(spec: dict[str, Any], column: str) -> list[dict[str, Any]]:
    (data,) = spec["datasets"].values()
    return [row for row in data if row.get(column) is not None]


@pytest.mark.parametrize("hint", ["bf", "bfw"])
@pytest.mark.parametrize("hold", [4, Bytes(30 * GIB)])
def test_the_chart_has_the_peaks_and_the_bound(hint: str, hold: Hold) -> None:
    recording = a_run(hint=hint, hold=hold)
    spec = spec_of(draw(ChartKind.MEMORY, frames_of(recording)))
    assert vl_convert.vegalite_to_vega(spec, VEGA_LITE)["marks"]
    held: defaultdict[str, float] = defaultdict(float)
    for row in rows(spec, "held"):
        held[row["row"]] = max(held[row["row"]], row["held"])
        assert 0 <= row["for_w"] <= row["held"]
    expected = {f"stage {rank}": peak / GIB for rank, peak in naive_peaks(recording).items()}
    assert held == {name: pytest.approx(peak, abs=1e-6) for name, peak in expected.items()}
    bounds = [row["bound"] for row in rows(spec, "bound")]
    assert bounds == ([30] * 4 if isinstance(hold, Bytes) else [])
    assert ("weight gradients" in str(spec["title"]["subtitle"])) is (hint == "bfw")


def test_a_long_curve_keeps_its_peak() -> None:
    policy, shape = policy_of("bfw", Shape(2, 400), limit=300)
    rng = Random(1)
    sizes = ActivationSizes([[rng.randint(1, 10**6) for _ in range(400)] for _ in range(2)])
    world = StepConditions(equal_times(shape, 7, 9, 5), sizes=sizes)
    recording = simulated_run(policy, shape, [world])
    spec = spec_of(draw(ChartKind.MEMORY, frames_of(recording)))
    points = rows(spec, "held")
    assert len(points) < 600
    most = max(naive_peaks(recording).values())
    unit = 2**20 if most >= 2**20 else 2**10
    assert max(row["held"] for row in points) == pytest.approx(most / unit, abs=1e-5)


def test_a_step_is_chosen_and_one_that_was_not_finished_is_refused() -> None:
    frames = frames_of(a_run(hold=4))
    assert "step 1" in spec_of(draw(ChartKind.MEMORY, frames, 1))["title"]["text"]
    with pytest.raises(UsageError, match="step 7 was not finished"):
        draw(ChartKind.MEMORY, frames, 7)


def test_a_report_shows_memory_and_what_another_bound_would_save() -> None:
    recording = multimodal(4)
    num = sum(len(found) for rank in recording.ranks for found in rank.by_name().values())
    page = report("a run", TraceContents(recording, num_records_written=num))
    assert "Bytes of activations that each rank held at most" in page
    assert "could have held" in page
    assert "a step takes" in page
    assert 'data-chart="memory"' in page


def test_a_comparison_has_the_memory_of_both() -> None:
    recordings = a_run(hold=4), a_run(hold=Bytes(20 * GIB))
    a, b = map(frames_of, recordings)
    found = compare(a, b)
    peaks = [max(naive_peaks(each).values()) for each in recordings]
    assert found.as_json()["peak_held_bytes"] == peaks
    assert found.memory_sentence == "The most that a rank held is 40 GiB in A and 20 GiB in B."
    of_last = compare(a, b, 3)
    assert of_last.as_json()["peak_held_bytes"] == [naive_peaks(each)[3] for each in recordings]
    without = [
        replace(rank, tasks=[task._replace(held_bytes=0) for task in rank.tasks])
        for rank in recordings[0].ranks
    ]
    bare = frames_of(Recording(recordings[0].settings, without))
    assert compare(bare, bare).memory_sentence == ""
    assert compare(bare, a).as_json()["peak_held_bytes"] == [None, peaks[0]]


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ({"outbox_bytes": {"0": 2**28, "2": 5}}, [2**28, 0, 5, 0]),
        ({"outbox_bytes": {"0": "much", "x": 1, "3": 7}}, [0, 0, 0, 7]),
        ({"outbox_bytes": [1]}, [0] * 4),
        ("shm", [0] * 4),
    ],
)
def test_outboxes_are_those_that_the_run_states(transport: object, expected: list[int]) -> None:
    recording = a_run(hold=4)
    told = frames_of(replace(recording, settings={**recording.settings, "transport": transport}))
    assert [each.outbox_bytes for each in memory(told).ranks] == expected
    headings = [column.heading for column in memory_table(memory(told)).columns]
    assert ("outbox" in headings) == any(expected)


# The command.


@pytest.fixture
def rrfp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs `rrfp analyze` in a directory with one trace, and gives its exit code and output."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    write_trace(Path("run.pftrace"), a_run(hold=4))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_command_states_each_rank_and_one_sentence(
    rrfp: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, _ = rrfp("memory", "run.pftrace")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "rank 3 could have held 35 GiB more before it" in out
    code, out, _ = rrfp("memory", "run.pftrace", "--format", "json", "--steps", "1:")
    found = json.loads(out)
    assert [each["rank"] for each in found["ranks"]] == [0, 1, 2, 3]
    assert found["peak_held_bytes"] == found["ranks"][0]["peak_held_bytes"] == 40 * GIB
    assert found["ranks"][0]["peak_step"] == 1
    assert found["ranks"][0]["budget_bytes"] is None
    _, out, _ = rrfp("memory", "run.pftrace", "--format", "csv", "--stage", "2", "--by", "rank")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (row["rank"], row["stages"], row["budget_bytes"]) == ("2", "2", "")
    assert rrfp("memory", "run.pftrace", "--format", "md")[1].count("| 3 | 3 |") == 1
    code, _, told = rrfp("memory", "run.pftrace", "--fail-above", "20")
    assert code == 3
    assert "what a rank held, in GiB, is 40" in told


def test_a_trace_without_sizes_says_so_and_what_to_do(
    rrfp: Callable[..., tuple[int, str, str]],
) -> None:
    for command in (("memory",), ("chart", "memory", "-o", "memory.svg")):
        code, out, told = rrfp(*command[:2], *command[2:], str(OURS))
        assert (code, out) == (1, "")
        assert told.count("\n") == 1
        assert "has no activation bytes; record the run again" in told


@pytest.mark.parametrize(
    ("hold", "code", "said"),
    [
        ("24GiB", 0, "hold 24 GiB"),
        ("1.0x", 0, "hold 1.0x"),
        ("8", 0, "hold 8"),
        ("1KiB", 2, "the hold of 1 KiB (1024 bytes) is below"),
        ("auto", 2, "--hold is 'auto'; write 12 (microbatches)"),
        ("1.5", 2, "--hold is '1.5'; write 12 (microbatches)"),
    ],
)
def test_whatif_takes_any_hold(
    rrfp: Callable[..., tuple[int, str, str]], hold: str, code: int, said: str
) -> None:
    found = rrfp("whatif", "run.pftrace", "--hold", hold)
    assert found[0] == code
    assert said in found[1] + found[2]
    if not code:
        assert "memory" in found[1]
        rows = json.loads(rrfp("whatif", "run.pftrace", "--hold", hold, "--format", "json")[1])
        assert len(rows["rows"][0]["peak_held_bytes"]) == 4
        assert rrfp("whatif", "run.pftrace", "--hold", hold, "--format", "csv")[0] == 0

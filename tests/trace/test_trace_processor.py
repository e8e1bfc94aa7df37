"""Perfetto's own trace processor finds every recorded slice, arrow, counter value and
annotation."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Bytes, Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.simulate.engine import StepConditions
from rrfp.simulate.step import new_recording, simulate_step
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import LossRecord, RankInfo, RankRecords, Recording, TaskRecord
from tests.analyze.recordings import make_recording
from tests.analyze.simulated_runs import MEGATRONS, OURS, random_times, simulated
from tests.e2e.trace_processor import MISSING, TraceProcessor, trace_processor

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

INSTANTS = ("stimulus", "cost", "loss")
"""The categories of what has one time."""

Path_ = tuple[str, ...]
"""The names of the tracks from the top."""
Slice = tuple[str, str, Path_, int, int, frozenset[tuple[str, Any]]]
"""Category, name, path, start, length and annotations."""


@pytest.fixture(scope="module")
def processor() -> Iterator[TraceProcessor]:
    with trace_processor() as found:
        yield found


# What is to be found, from the records.


def _stage(info: RankInfo, recording: Recording) -> Path_:
    places = {(other.dp_rank, other.tp_rank) for other in map(_info, recording.ranks)}
    pipeline = "pipeline" if len(places) == 1 else f"pipeline dp{info.dp_rank} tp{info.tp_rank}"
    return pipeline, _stage_name(info)


def _info(records: RankRecords) -> RankInfo:
    return records.info


def _stage_name(info: RankInfo) -> str:
    stages = " ".join(map(str, info.stages))
    return f"stages {stages}" if len(info.stages) > 1 else f"stage {stages}"


def _has_chunks(recording: Recording) -> bool:
    return any(len(info.stages) > 1 for info in map(_info, recording.ranks))


def _title(task: TaskRecord, has_chunks: bool) -> str:
    return f"{task.kind}{task.microbatch}" + (f".{task.chunk}" if has_chunks else "")


def _fields(record: Any, *left_out: str, **more: Any) -> frozenset[tuple[str, Any]]:
    fields = record._asdict() | more
    for name in ("start_ns", "end_ns", "time_ns", *left_out):
        fields.pop(name, None)
    for name, default in record._field_defaults.items():
        if fields[name] == default:
            del fields[name]
    return frozenset(fields.items())


def _slices_of(recording: Recording) -> Counter[Slice]:
    """The slices of what was recorded with a begin and an end, hints apart."""
    found: Counter[Slice] = Counter()
    names = {each.info.rank: _stage_name(each.info) for each in recording.ranks}
    has_chunks = _has_chunks(recording)
    for each in recording.ranks:
        stage = _stage(each.info, recording)

        def add(
            category: str, name: str, path: Path_, record: Any, stage: Path_ = stage, **more: Any
        ) -> None:
            span = record.start_ns, record.end_ns - record.start_ns
            found[category, name, (*stage, *path), *span, _fields(record, **more)] += 1

        for task in each.tasks:
            add("task", _title(task, has_chunks), ("compute",), task, rank=each.info.rank)
        for wait in each.waits:
            add("wait", wait.cause, ("wait",), wait)
        for send in each.sends:
            path = ("send", f"send to {names[send.peer]}")
            add("send", f"send {send.kind}{send.microbatch}", path, send)
        for receive in each.receives:
            path = ("receive", f"receive from {names[receive.peer]}")
            add("receive", f"recv {receive.kind}{receive.microbatch}", path, receive)
        for agreement in each.agreements:
            name = f"agree {agreement.kind}{agreement.microbatch}"
            add("agreement", name, ("agreement",), agreement)
        for phase in each.phases:
            add("phase", phase.phase, ("phases",), phase)
    return found


def _hints_of(recording: Recording) -> Counter[tuple[str, Path_, int, int]]:
    """In the place of each task the one that the hint has there."""
    found: Counter[tuple[str, Path_, int, int]] = Counter()
    has_chunks = _has_chunks(recording)
    for each in recording.ranks:
        steps: defaultdict[int, list[TaskRecord]] = defaultdict(list)
        for task in each.tasks:
            steps[task.step].append(task)
        for tasks in steps.values():
            hinted = sorted(tasks, key=lambda task: task.hint_position)
            for ran, wanted in zip(tasks, hinted, strict=True):
                name = f"hint {_title(wanted, has_chunks)}"
                path = (*_stage(each.info, recording), "hint")
                found[name, path, ran.start_ns, ran.end_ns - ran.start_ns] += 1
    return found


def _counters_of(recording: Recording) -> Counter[tuple[Path_, int, float]]:
    """The changes of each counter."""
    found: Counter[tuple[Path_, int, float]] = Counter()
    for each in recording.ranks:
        counters: dict[str, list[int]] = {
            "D": [task.depth for task in each.tasks],
            "held": [task.held for task in each.tasks],
            "ready forwards": [task.ready_forwards for task in each.tasks],
            "ready backwards": [task.ready_backwards for task in each.tasks],
        }
        if any(task.held_bytes for task in each.tasks):
            counters["bytes held"] = [task.held_bytes for task in each.tasks]
            for_w = _waits_for_w(each.tasks)
            budgets = {p.step: p.budget_bytes for p in each.phases if p.phase == "schedule"}
            if any(for_w):
                counters["bytes held for W"] = for_w
            if any(task.waiting_bytes for task in each.tasks):
                waiting = [task.waiting_bytes for task in each.tasks]
                counters["bytes of waiting gradients"] = waiting
            if any(budgets.values()):
                counters["budget of bytes"] = [budgets[task.step] for task in each.tasks]
        starts_ns = [task.start_ns for task in each.tasks]
        points = {
            name: list(zip(starts_ns, values, strict=True)) for name, values in counters.items()
        }
        if "bytes held" in counters and each.sends:
            points["bytes in outbox"] = _outbox(each)
        for name, of_counter in points.items():
            last = None
            for time_ns, value in of_counter:
                if value != last:
                    last = value
                    path = (*_stage(each.info, recording), "counters", name)
                    found[path, time_ns, float(value)] += 1
    return found


def _outbox(records: RankRecords) -> list[tuple[int, int]]:
    """By time of a change, the bytes of the messages that were made by then and not sent yet."""
    spans = []
    for send in records.sends:
        stage = send.stage - 1 if send.kind == "F" else send.stage + 1
        made = [
            task.end_ns
            for task in records.tasks
            if (task.step, task.kind, task.stage, task.microbatch)
            == (send.step, send.kind, stage, send.microbatch)
        ]
        spans.append((min([*made, send.end_ns]) if made else send.start_ns, send))
    times_ns = sorted({each for made_ns, send in spans for each in (made_ns, send.end_ns)})
    return [
        (now, sum(send.num_bytes for made_ns, send in spans if made_ns <= now < send.end_ns))
        for now in times_ns
    ]


def _waits_for_w(tasks: list[TaskRecord]) -> list[int]:
    """By task, what the weight gradients to come will give back, of those whose B has run."""
    found = []
    for place, task in enumerate(tasks):
        total = 0
        for later in range(place + 1, len(tasks)):
            each = tasks[later]
            if each.kind != "W" or each.step != task.step:
                continue
            done = [t for t in tasks[: place + 1] if t.step == task.step and t.kind == "B"]
            if (each.stage, each.microbatch) in {(t.stage, t.microbatch) for t in done}:
                total += tasks[later - 1].held_bytes - each.held_bytes
        found.append(total)
    return found


def _arrows_of(recording: Recording) -> Counter[tuple[Any, ...]]:
    """From each send to its receive, and from there to the task: names, steps and stages."""
    found: Counter[tuple[Any, ...]] = Counter()
    has_chunks = _has_chunks(recording)
    sends = {
        (each.info.rank, send.peer, send.sequence): (each, send)
        for each in recording.ranks
        for send in each.sends
    }
    for each in recording.ranks:
        tasks = {(task.step, task.kind, task.stage, task.microbatch): task for task in each.tasks}
        for receive in each.receives:
            sender, send = sends[receive.peer, each.info.rank, receive.sequence]
            task = tasks[receive.step, receive.kind, receive.stage, receive.microbatch]
            name = f"{receive.kind}{receive.microbatch}"
            here, there = _stage(each.info, recording), _stage(sender.info, recording)
            taken = (f"recv {name}", receive.start_ns, here)
            found[(f"send {name}", send.start_ns, there), taken] += 1
            found[taken, (_title(task, has_chunks), task.start_ns, here)] += 1
    return found


# What is found, in SQL.


def _paths(processor: TraceProcessor) -> dict[int, Path_]:
    tracks = {
        track: (name, parent)
        for track, name, parent in processor.query("select id, name, parent_id from track")
    }

    def path_of(track: int | None) -> Path_:
        if track is None:
            return ()
        name, parent = tracks[track]
        return (*path_of(parent), name)

    return {track: path_of(track) for track in tracks}


def _annotations(processor: TraceProcessor) -> dict[int | None, dict[str, Any]]:
    found: defaultdict[int | None, dict[str, Any]] = defaultdict(dict)
    for owner, key, number, text in processor.query(
        "select arg_set_id, key, int_value, string_value from args where key glob 'debug.*'"
    ):
        found[owner][key.removeprefix("debug.")] = text if number is None else number
    return found


def _check(processor: TraceProcessor, path: Path, recording: Recording) -> None:
    processor.load(path.read_bytes())
    assert processor.query("select name, value from stats where severity <> 'info' and value") == []

    paths, notes = _paths(processor), _annotations(processor)
    slices: Counter[Slice] = Counter()
    hints: Counter[tuple[str, Path_, int, int]] = Counter()
    instants: Counter[tuple[str, int, frozenset[tuple[str, Any]]]] = Counter()
    begun: dict[int, tuple[str, int, Path_]] = {}
    for number, category, name, track, start_ns, length_ns, depth, owner in processor.query(
        "select id, category, name, track_id, ts, dur, depth, arg_set_id from slice"
    ):
        annotations = notes[owner]
        begun[number] = (name, start_ns, paths[track][:2])
        if category == "hint":
            hints[name, paths[track], start_ns, length_ns] += 1
            assert name.startswith(f"hint {annotations['kind']}{annotations['microbatch']}")
        elif category in INSTANTS:
            assert length_ns == 0
            instants[category, start_ns, frozenset(annotations.items())] += 1
        elif category not in ("run", "rank"):
            # Names only, of what is counted in the record.
            skipped = annotations.pop("skipped_tasks", "").split()
            assert len(skipped) == min(annotations.get("skipped", 0), 9)
            fields = frozenset(annotations.items())
            slices[category, name, paths[track], start_ns, length_ns, fields] += 1
        if length_ns > 0:
            assert depth == 0, "slices of a row stand side by side"

    assert slices == _slices_of(recording)
    assert hints == _hints_of(recording)
    assert instants == Counter(
        (category, record.time_ns, _fields(record))
        for each in recording.ranks
        for category in INSTANTS
        for record in each.by_name()[category]
    )
    counters = processor.query("select track_id, ts, value from counter")
    assert Counter((paths[track], *rest) for track, *rest in counters) == _counters_of(recording)
    arrows = processor.query("select slice_out, slice_in from flow")
    assert Counter((begun[out], begun[into]) for out, into in arrows) == _arrows_of(recording)


# The runs.


@pytest.mark.parametrize("trace", [OURS, MEGATRONS], ids=lambda path: path.stem)
def test_a_sample_is_found_whole(processor: TraceProcessor, trace: Path) -> None:
    _check(processor, trace, read_trace(trace))


def _chunks() -> Recording:
    """Two chunks a rank in a V, where W is split off; tasks and messages of all lengths."""
    shape = Shape(3, 5, 2, Placement.V)
    times = random_times(random.Random(1), shape)
    return simulated("zb-v", shape, times, num_steps=2, limit=4)


def _members() -> Recording:
    """Two ranks that agree on every task."""
    shape = Shape(3, 6)
    times = random_times(random.Random(2), shape)
    return simulated("bf", shape, times, num_members=2, agreement_ns=3, num_steps=2)


def _replicas() -> Recording:
    """Two pipelines side by side, which wait for each other's gradients."""
    shape = Shape(2, 4)
    hint = hint_named("bf").for_shape(shape)
    policy = Policy(hint, order_of(hint, shape), Dispatch.READY, limit=2)
    recording = new_recording(shape, 1, 2, {})
    rng = random.Random(3)
    for step in range(2):
        worlds = [StepConditions(random_times(rng, shape)) for _ in range(2)]
        simulate_step(shape, policy, worlds, gradient_sync_ns=7, recording=recording, step=step)
    return recording


def _memory() -> Recording:
    """Sizes of microbatches, a part of them owed to W, under a bound in bytes."""
    shape = Shape(3, 5, kinds=SPLIT_BACKWARD)
    rng = random.Random(4)
    kept = [[rng.randint(1, 100) for _ in range(5)] for _ in range(3)]
    sizes = ActivationSizes(kept, [[size // 3 for size in row] for row in kept])
    hint = hint_named("bfw").for_shape(shape)
    policy = Policy(hint, order_of(hint, shape), hold=Bytes(180))
    recording = new_recording(shape, 1, 1, {})
    for step in range(2):
        times = random_times(rng, shape)
        world = StepConditions(
            times, lambda *_: 5_000, num_bytes=[1, 20, 300, 4_000, 50_000], sizes=sizes
        )
        simulate_step(shape, policy, [world], recording=recording, step=step)
    for rank in recording.ranks:
        rank.tasks[:] = [task._replace(waiting_bytes=rng.choice([0, 7, 8])) for task in rank.tasks]
        rank.phases[:] = [phase._replace(unknown_sizes=phase.step) for phase in rank.phases]
    return recording


def _losses() -> Recording:
    """A rank that had no room for all its records."""
    recording = make_recording(2, 2, 2)
    recording.ranks[1].losses.append(LossRecord(1_000, 1, 7))
    return recording


@pytest.mark.parametrize(
    "make",
    [make_recording, _losses, _chunks, _members, _replicas, _memory],
    ids=lambda make: make.__name__,
)
def test_a_run_is_found_whole(processor: TraceProcessor, make: Any, tmp_path: Path) -> None:
    recording = make()
    path = tmp_path / "trace.pftrace"
    write_trace(path, recording)
    _check(processor, path, recording)

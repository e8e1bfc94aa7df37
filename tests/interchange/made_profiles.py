"""Makes profiles of torch.profiler event by event, and reads those of real runs in
tests/fixtures."""

import gzip
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task

FIXTURES = Path(__file__).parents[1] / "fixtures"
US = 1_000

Event = dict[str, Any]


def event_of(name: str, start_us: float, duration_us: float, **more: Any) -> Event:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "pid": 7,
        "tid": 7,
        "ts": start_us,
        "dur": duration_us,
        **more,
    }


def profile_of(events: list[Event], rank: int | None = 0, world_size: int = 1) -> dict[str, Any]:
    told = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": world_size}}
    return {"schemaVersion": 1, **told, "baseTimeNanoseconds": 5_000, "traceEvents": events}


@pytest.fixture
def put(tmp_path: Path) -> Callable[[str, Any], Path]:
    def write(name: str, content: Any) -> Path:
        path = tmp_path / name
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


# Dumps of torch's flight recorder, as it writes them for NCCL.


WORLD, PIPELINE = "0", "18"
DESCRIPTIONS = {WORLD: "default_pg", PIPELINE: "PIPELINE_MODEL_PARALLEL_GROUP"}
DONE, STARTED = "completed", "started"

Entry = tuple[str, str, int, str]
"""An operation's name, its group, its number there and its state; `p2p:coalesced` ends a batch."""


def dump(entries: list[Entry], num_ranks: int = 4, sizes: Any = ((8,),)) -> dict[str, Any]:
    """A dump as torch writes it for NCCL."""
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": str(list(range(num_ranks)))}
            for name, desc in DESCRIPTIONS.items()
        },
        "entries": [
            {
                "record_id": number,
                "process_group": (group, DESCRIPTIONS[group]),
                "collective_seq_id": sequence,
                "p2p_seq_id": sequence,
                "is_p2p": "-" in name or name.startswith("p2p:"),
                "profiling_name": f"nccl:{name.removeprefix('p2p:')}",
                "time_created_ns": 1_795_398_104_000_000_000 + number,
                "input_sizes": sizes,
                "output_sizes": sizes,
                "state": state,
                "retired": state == DONE,
                "frames": [
                    {"name": "send", "filename": "/lib/torch/distributed/x.py", "line": 3},
                    {"name": "train", "filename": "/job/train.py", "line": 10 + number},
                ],
            }
            for number, (name, group, sequence, state) in enumerate(entries)
        ],
    }


# Hints' orders with times, as recorded by programs that do not know microbatches.


TASK_NS = 1_000_000
TRANSFER_NS = 10_000
NUM_OPERATORS = 3


class Timed(NamedTuple):
    start_ns: int
    end_ns: int
    step: int
    task: Task


class NamedSpan(NamedTuple):
    """An event as a profiler names it."""

    start_ns: int
    end_ns: int
    name: str
    sequence: int | None


def played(name: str, shape: Shape, num_steps: int) -> list[list[Timed]]:
    """The tasks of each rank with times: a task begins when its rank is free and its input
    arrived."""
    rows = ORDERS[name].for_shape(shape).rows
    ran: list[list[Timed]] = [[] for _ in rows]
    ended: dict[tuple[int, Task], int] = {}
    free = [0] * len(rows)
    for step in range(num_steps):
        left = [list(row) for row in rows]
        while any(left):
            for rank, row in enumerate(left):
                while row and (ready := _ready_ns(shape, row[0], step, ended)) is not None:
                    start_ns = max(free[rank], ready) + TRANSFER_NS
                    end_ns = start_ns + TASK_NS * (2 if row[0].kind is Kind.B else 1)
                    ran[rank].append(Timed(start_ns, end_ns, step, row[0]))
                    ended[step, row[0]] = free[rank] = end_ns
                    row.pop(0)
        free = [max(free)] * len(rows)
    return ran


def _ready_ns(
    shape: Shape, task: Task, step: int, ended: dict[tuple[int, Task], int]
) -> int | None:
    needs = []
    if task.kind is Kind.F and task.stage > 0:
        needs.append(Task(task.stage - 1, Kind.F, task.microbatch))
    if task.kind is Kind.B:
        needs.append(Task(task.stage, Kind.F, task.microbatch))
        if task.stage + 1 < shape.num_stages:
            needs.append(Task(task.stage + 1, Kind.B, task.microbatch))
    if any((step, need) not in ended for need in needs):
        return None
    return max((ended[step, need] for need in needs), default=0)


def operators(ran: list[Timed]) -> Iterator[NamedSpan]:
    """The operators of a rank, numbered by autograd, with a receive before each task and a send
    after it."""
    number = 0
    numbers: dict[tuple[int, int, int], range] = {}
    unknown = range(1 << 40, (1 << 40) + NUM_OPERATORS)
    for start_ns, end_ns, step, task in ran:
        key = step, task.stage, task.microbatch
        yield NamedSpan(start_ns - TRANSFER_NS, start_ns, "c10d::recv_", number)
        part_ns = (end_ns - start_ns) // NUM_OPERATORS
        if task.kind is Kind.F:
            numbers[key] = range(number, number + NUM_OPERATORS)
            names = [("aten::addmm", sequence) for sequence in numbers[key]]
            number += NUM_OPERATORS
        else:
            node = "autograd::engine::evaluate_function: AddmmBackward0"
            names = [(node, sequence) for sequence in reversed(numbers.get(key, unknown))]
        for index, (name, sequence) in enumerate(names):
            begin_ns = start_ns + index * part_ns
            is_last = index == NUM_OPERATORS - 1
            yield NamedSpan(begin_ns, end_ns if is_last else begin_ns + part_ns, name, sequence)
        yield NamedSpan(end_ns, end_ns + TRANSFER_NS // 2, "c10d::send", number)


def plain_profile(ran: list[Timed], rank: int, num_ranks: int, **more: Any) -> dict[str, Any]:
    """A profile with the operators of a rank, and nothing that names tasks."""
    events = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": name,
            "pid": 7,
            "tid": 7,
            "ts": start_ns / US,
            "dur": (end_ns - start_ns) / US,
            "args": {"Sequence number": sequence, "Fwd thread id": 0},
        }
        for start_ns, end_ns, name, sequence in operators(ran)
    ]
    told = {"rank": rank, "world_size": num_ranks, **more}
    return {"schemaVersion": 1, "distributedInfo": told, "traceEvents": events}


def imported_tasks(recording: Any, rank: int) -> list[tuple[int, int, Task]]:
    """The tasks of an imported run: their lengths, steps and names, in their order."""
    return [
        (task.end_ns - task.start_ns, task.step, Task(task.stage, Kind(task.kind), task.microbatch))
        for task in recording.ranks[rank].tasks
    ]


def expected_tasks(ran: list[Timed]) -> list[tuple[int, int, Task]]:
    return [(end_ns - start_ns, step, task) for start_ns, end_ns, step, task in ran]


# Named orders as Nsight Systems, OpenTelemetry and Chakra record them, in files of their forms.


SHAPE = Shape(2, 4, 2)
ORIGIN_NS = 1_700_000_000_000_000_000


@pytest.fixture
def ran() -> list[list[Timed]]:
    return played("interleaved", SHAPE, 2)


def nsight_export(path: Path, told: Iterator[NamedSpan], *, late_ns: int | None = None) -> Path:
    """An export in the schema that Nsight Systems documents, with the ranges of emit_nvtx. With
    `late_ns` every range launches a kernel, which runs so much later and for as long."""
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);"
            "CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT "
            "NULL, rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, "
            "endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);"
        )
        if late_ns is not None:
            database.executescript(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT "
                "NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, "
                "nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT "
                "NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT "
                "NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, "
                "shortName INTEGER NOT NULL);"
            )
        process = 1 << 56 | 4242 << 24
        for number, (start_ns, end_ns, name, sequence) in enumerate(told):
            text = name if sequence is None else f"{name}, seq = {sequence}, op_id = {number}"
            database.execute("INSERT INTO StringIds VALUES (?, ?)", (number, text))
            database.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, 0, 0, 0, NULL, ?, NULL, ?, 0)",
                (start_ns, end_ns, process | 4242, number),
            )
            if late_ns is not None:
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 0, 0)",
                    (start_ns + 1, start_ns + 2, process | 4242, number),
                )
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, ?, 0, 0)",
                    (start_ns + late_ns, end_ns + late_ns, number, process),
                )
    return path


def exports(ran: list[list[Timed]], directory: Path, late_ns: int | None = None) -> list[Path]:
    return [
        nsight_export(directory / f"report_{rank}.sqlite", operators(rows), late_ns=late_ns)
        for rank, rows in enumerate(ran)
    ]


def spans_file(
    path: Path, ran: list[list[Timed]], *, evaluates: bool = False, num_tensor_ranks: int = 1
) -> Path:
    """Write Megatron-LM's spans like the collector's file exporter: one line per export."""
    lines = []
    for rank, rows in enumerate(ran):
        spans = []
        for step in sorted({row.step for row in rows}):
            own = [row for row in rows if row.step == step]
            is_test = evaluates and step == 1
            own = [row for row in own if row.task.kind is Kind.F] if is_test else own
            around = "megatron.evaluate.step" if is_test else "megatron.train.iteration"
            told = [{"key": "megatron.iteration", "value": {"intValue": str(step)}}]
            spans.append((own[0].start_ns - 5_000, own[-1].end_ns + 5_000, around, told))
            for start_ns, end_ns, _, task in own:
                kind = "forward" if task.kind is Kind.F else "backward"
                spans.append((start_ns, end_ns, f"megatron.microbatch.{kind}", []))
                spans.append((start_ns - 4_000, start_ns, f"megatron.p2p.recv_{kind}", []))
        resource = [
            {"key": "service.instance.id", "value": {"stringValue": f"job7-rank{rank}"}},
            {"key": "dl.pipeline_parallel.size", "value": {"intValue": "2"}},
            {"key": "dl.tensor_parallel.size", "value": {"intValue": str(num_tensor_ranks)}},
        ]
        exported = [
            {
                "name": name,
                "startTimeUnixNano": str(ORIGIN_NS + start_ns),
                "endTimeUnixNano": str(ORIGIN_NS + end_ns),
                "attributes": attributes,
            }
            for start_ns, end_ns, name, attributes in spans
        ]
        lines.append(
            {
                "resourceSpans": [
                    {"resource": {"attributes": resource}, "scopeSpans": [{"spans": exported}]}
                ]
            }
        )
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def execution_trace(rows: list[Timed]) -> dict[str, Any]:
    """An execution trace as chakra_trace_link writes it."""
    nodes = [
        {
            "id": number,
            "name": name,
            "ctrl_deps": 1,
            "ts": start_ns / 1_000,
            "inclusive_dur": (end_ns - start_ns) / 1_000,
            "attrs": [{"name": "seq_id", "type": "int64", "value": sequence}],
        }
        for number, (start_ns, end_ns, name, sequence) in enumerate(operators(rows))
    ]
    return {"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def protobuf(told: Iterator[NamedSpan], *, has_times: bool) -> bytes:
    """Nodes as et_def.proto has them, with their times rounded to microseconds."""
    messages = [field(1, b"0.0.4")]
    for number, (start_ns, end_ns, name, sequence) in enumerate(told):
        seq_id = field(1, b"seq_id") + field(9, sequence or 0)
        start_us = start_ns // 1_000
        times = field(6, start_us) + field(7, end_ns // 1_000 - start_us) if has_times else b""
        messages.append(
            field(1, number) + field(2, name.encode()) + field(3, 4) + times + field(10, seq_id)
        )
    return b"".join(varint(len(message)) + message for message in messages)


# Pipelines under torch.profiler without rrfp, with the times that a hook measured.


NUM_RANKS = 4
MICROBATCHES = 8
STEPS = 2
WIDTH = 256


@dataclass(slots=True)
class PlainRun:
    """The profile of one rank, and the tasks that a hook measured."""

    profile: dict[str, Any]
    truth: list[tuple[int, int, int, str, int | None, int | None]]
    """For each task: start and end in ns since 1970, step, kind, and stage and microbatch if the
    hook knows them."""


def profile_pipelining(name: str, num_chunks: int, with_stack: bool) -> PlainRun:
    """A small MLP under one of torch.distributed.pipelining's schedules, on gloo."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_stages = dist.get_rank(), NUM_RANKS * num_chunks
    is_v = name == "ScheduleZBVZeroBubble"
    held = [chunk * NUM_RANKS + rank for chunk in range(num_chunks)]
    held = [rank, num_stages - 1 - rank] if is_v else held
    stages = [
        PipelineStage(
            torch.nn.Sequential(*(_layer() for _ in range(4))),
            index,
            num_stages,
            torch.device("cpu"),
        )
        for index in held
    ]
    run = PlainRun({}, [])
    step = 0

    def noted(function: Any, letter: str, stage: int) -> Any:
        def call(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            start_ns = time.time_ns()
            result = function(microbatch, *args, **kwargs)
            run.truth.append((start_ns, time.time_ns(), step, letter, stage, microbatch))
            return result

        return call

    for stage in stages:
        of: Any = stage
        of.forward_one_chunk = noted(of.forward_one_chunk, "F", of.stage_index)
        of.backward_one_chunk = noted(of.backward_one_chunk, "B", of.stage_index)
        of.backward_weight_one_chunk = noted(of.backward_weight_one_chunk, "W", of.stage_index)
    schedule = getattr(schedules, name)(
        stages if num_chunks > 1 else stages[0],
        MICROBATCHES,
        loss_fn=torch.nn.functional.mse_loss,
    )
    data = torch.randn(MICROBATCHES * 64, WIDTH)
    inputs = (data,) if rank == 0 else ()
    is_last = num_stages - 1 in held

    def train() -> None:
        schedule.step(*inputs, **({"target": data, "losses": []} if is_last else {}))

    train()
    run.truth.clear()
    with _profiler(with_stack) as profiler:
        for step in range(STEPS):  # noqa: B007 (the hook reads it)
            train()
            profiler.step()
    run.profile = _exported(profiler)
    dist.destroy_process_group()
    return run


def _layer() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())


def profile_megatron(settings: dict[str, Any], with_stack: bool) -> PlainRun:
    """Megatron's own schedule, on the CPU."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core.pipeline_parallel import schedules

    from rrfp.train.data.batches import open_data
    from rrfp.train.launch.process_groups import parallel_groups, seed_random_states
    from rrfp.train.loop import Trainer
    from rrfp.train.models.model import build_model
    from rrfp.train.ordered_batches import OrderedBatches
    from rrfp.train.settings import TrainSettings
    from tests.megatron.training import SMALL

    torch.set_num_threads(1)
    run = PlainRun({}, [])
    step = 0

    def noted(function: Callable[..., Any], letter: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start_ns = time.time_ns()
            result = function(*args, **kwargs)
            run.truth.append((start_ns, time.time_ns(), step, letter, None, None))
            return result

        return call

    own: Any = schedules
    own.forward_step = noted(own.forward_step, "F")
    own.backward_step = noted(own.backward_step, "B")
    chosen = TrainSettings(**{**SMALL, **settings, "steps": 1 + STEPS})
    with parallel_groups(chosen) as layout:
        seed_random_states(chosen, layout)
        data = open_data(chosen)
        gpt = build_model(chosen, layout, data)
        schedule = schedules.get_forward_backward_func()
        batches = OrderedBatches(chosen, layout, data)
        trainer = Trainer(chosen, layout, gpt, batches, schedule, lambda _: None)
        trainer.train_step(0)
        run.truth.clear()
        with _profiler(with_stack) as profiler:
            for step in range(STEPS):
                trainer.train_step(1 + step)
                profiler.step()
        run.profile = _exported(profiler)
    return run


def _profiler(with_stack: bool) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, with_stack=with_stack)


def _exported(profiler: Any) -> dict[str, Any]:
    path = Path(f"profile-{os.getpid()}.json").absolute()
    try:
        profiler.export_chrome_trace(str(path))
        profile: dict[str, Any] = json.loads(path.read_bytes())
    finally:
        path.unlink(missing_ok=True)
    return profile

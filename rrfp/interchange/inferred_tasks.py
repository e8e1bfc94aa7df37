"""Numbers tasks by their order, which the schedules of Megatron and of torch fix.

- A call of the schedule ends for the first rank of a pipeline when every forward has had its
  backward. Other ranks' calls have as many.
- A rank with one stage runs its forwards in the order of the microbatches. One with several runs
  them as Megatron's interleaved schedule does; how many it has is found by comparing the order of
  forwards and backwards, and which forward each backward belongs to, with that schedule's. An order
  that fits neither is refused: nothing tells the microbatches then.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from rrfp.errors import RrfpError
from rrfp.interchange.spans import RankSpans, TaskSpan, TransferSpan
from rrfp.schedule.hints import Order
from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.trace.records import Phase, PhaseRecord, RankInfo, WaitRecord

# What a trace tells of a rank whose tasks it times but does not number.
#
# A **call** is one run of a forward or a backward. Its place in the pipeline, its microbatch and
# its step follow from the order of the calls (`rrfp.interchange.inferred_tasks`).


class Call(NamedTuple):
    """One run of a forward or a backward."""

    launched_ns: int
    """When the host began it; its work may run later, on a GPU."""
    start_ns: int
    end_ns: int
    kind: Kind
    pair: int | None = None
    """A number that a forward shares with its backward; None if the trace does not tell."""


class Extent(NamedTuple):
    """From when to when."""

    start_ns: int
    end_ns: int


class Transfer(NamedTuple):
    """Time in which a rank sent or received."""

    start_ns: int
    end_ns: int
    is_receive: bool
    """Whether it belongs to the next task rather than the previous one."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The ranks that share a rank's pipeline and its tensors, each in the order of their places;
    empty where the trace does not tell."""

    pipeline: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()


@dataclass(slots=True)
class UnnamedRank:
    """One rank, on its own clock."""

    number: int
    host: str = "unknown"
    pid: int = 0
    groups: Groups = field(default_factory=Groups)
    calls: list[Call] = field(default_factory=list)
    """In the order of their launches."""
    transfers: list[Transfer] = field(default_factory=list)
    syncs: list[Extent] = field(default_factory=list)
    """When it reduced gradients."""
    schedules: list[Extent] = field(default_factory=list)
    """The calls of the schedule, by the host's time; empty if the trace does not tell."""
    step_numbers: list[int] = field(default_factory=list)
    """Of `schedules`; empty where they are counted."""


_CALLS = {
    "forward_step": Kind.F,
    "backward_step": Kind.B,
    "forward-compute": Kind.F,
    "backward-compute": Kind.B,
    "megatron.microbatch.forward": Kind.F,
    "megatron.microbatch.backward": Kind.B,
}
"""How Megatron calls them: its functions, its timers and its OpenTelemetry spans."""
_PATH_OF_MEGATRON = re.compile(r"megatron\.core\.(?:\w+\.)*")
_TRANSFER = re.compile(
    r"(?:megatron\.p2p\.|P2PCommunicator\.)?"
    r"(?:(?:send|recv)_(?:forward|backward)(?:_(?:send|recv)_(?:forward|backward))*"
    r"|(?:forward|backward)-(?:send|recv)(?:-(?:forward|backward)-(?:send|recv))*)"
)


def kind_of_call(name: str) -> Kind | None:
    """The kind of task that a range of this name holds; None for any other range."""
    return _CALLS.get(_PATH_OF_MEGATRON.sub("", name, count=1), _CALLS.get(name))


def is_transfer(name: str) -> bool:
    """Whether a range of this name holds a send or a receive of Megatron's."""
    return _TRANSFER.fullmatch(_PATH_OF_MEGATRON.sub("", name, count=1)) is not None


# The times of the GPU in place of the host's, which only launched the work.


class Kernel(NamedTuple):
    """What the GPU ran."""

    start_ns: int
    end_ns: int
    correlation: int
    """A number that it shares with its launch."""
    is_transfer: bool


def is_nccl_transfer(name: str) -> bool:
    """Whether a kernel of this name sends or receives."""
    return "nccl" in name and "SendRecv" in name


def put_on_gpu(rank: UnnamedRank, kernels: Sequence[Kernel], launches: Mapping[int, int]) -> int:
    """Give each task the time of the kernels that were launched in it, and transfers that of
    NCCL's kernels; returns how many tasks had no kernel, which are left out.

    `kernels` are in the order of their beginnings; `launches` has when the host launched each.
    """
    launched_ns = [call.launched_ns for call in rank.calls]
    work: dict[int, list[Kernel]] = {}
    moved = []
    for kernel in kernels:
        time_ns = launches.get(kernel.correlation)
        if kernel.is_transfer:
            moved.append(kernel)
        elif time_ns is not None:
            place = bisect_right(launched_ns, time_ns) - 1
            if place >= 0 and time_ns < rank.calls[place].end_ns:
                work.setdefault(place, []).append(kernel)
    num_idle = len(rank.calls) - len(work)
    rank.calls = [
        rank.calls[place]._replace(
            start_ns=found[0].start_ns, end_ns=max(kernel.end_ns for kernel in found)
        )
        for place, found in sorted(work.items())
    ]
    on_host = rank.transfers
    called_ns = [transfer.start_ns for transfer in on_host]
    rank.transfers = []
    for kernel in moved:
        # The kernel does not tell whether it receives; the call that launched it does.
        place = bisect_right(called_ns, launches.get(kernel.correlation, kernel.start_ns)) - 1
        is_receive = place >= 0 and on_host[place].is_receive
        rank.transfers.append(Transfer(kernel.start_ns, kernel.end_ns, is_receive))
    return num_idle


# Where each rank stands in the run, from the groups that its trace tells.


_PIPELINE = ("PIPELINE_MODEL_PARALLEL_GROUP", "mesh_pp", "pp")
_TENSOR = ("TENSOR_MODEL_PARALLEL_GROUP", "mesh_tp", "tp")
"""The descriptions of groups: Megatron's, and those of torch's device meshes."""


class Place(NamedTuple):
    pp_rank: int
    tp_rank: int
    dp_rank: int
    num_pp_ranks: int


def groups_of(described: Mapping[str, Sequence[int]]) -> Groups:
    """The groups of a rank, from all its groups by their descriptions."""
    return Groups(_first(described, _PIPELINE), _first(described, _TENSOR))


def _first(described: Mapping[str, Sequence[int]], names: Sequence[str]) -> tuple[int, ...]:
    return next((tuple(described[name]) for name in names if name in described), ())


def places_of(ranks: Sequence[UnnamedRank], world_size: int) -> tuple[dict[int, Place], list[str]]:
    """The place of each rank, and notes on how it was found.

    Where no trace tells a pipeline group, all ranks of the run count as one pipeline.
    Raises RrfpError when the groups leave out their own rank.
    """
    notes = []
    if any(not rank.groups.pipeline for rank in ranks):
        notes.append(
            "the trace does not tell which ranks make up a pipeline: all of them are taken for "
            "one, in the order of their numbers"
        )
    everyone = tuple(range(world_size))
    pipelines = {rank.number: rank.groups.pipeline or everyone for rank in ranks}
    places = {}
    counted: dict[tuple[int, tuple[int, ...]], int] = {}
    for rank in sorted(ranks, key=lambda rank: rank.number):
        pipeline, tensor = pipelines[rank.number], rank.groups.tensor or (rank.number,)
        if rank.number not in pipeline or rank.number not in tensor:
            raise RrfpError(
                f"the trace of rank {rank.number} describes the group "
                f"{list(pipeline if rank.number not in pipeline else tensor)[:8]} as its own, "
                "which leaves it out; import the files of one run"
            )
        tp_rank = tensor.index(rank.number)
        replicas = [key for key in counted if key[0] == tp_rank]
        dp_rank = counted.setdefault((tp_rank, pipeline), len(replicas))
        places[rank.number] = Place(pipeline.index(rank.number), tp_rank, dp_rank, len(pipeline))
    return places, notes


_MOST_CHUNKS = 64
_MOST_FORWARDS = 1 << 22
"""Of all ranks of a pipeline in a step. No run has more, but a damaged trace may say so."""
_Step = tuple[int, list[Call]]
"""Its number and its calls."""


def number_calls(
    ranks: Sequence[UnnamedRank], world_size: int, source: str
) -> tuple[list[RankSpans], list[str]]:
    """The spans of ranks whose tasks are told without numbers, and notes on how they were numbered.

    Raises RrfpError when there is no pipeline, or when its order does not tell the microbatches.
    """
    places, notes = places_of(ranks, world_size)
    steps, more = _steps(ranks, places, source)
    num_chunks = _num_chunks(ranks, steps, places, source)
    notes += [
        *more,
        f"the {source} does not name microbatches: forwards and backwards are numbered in their "
        "order"
        + ("" if num_chunks == 1 else f", as {num_chunks} chunks a rank, interleaved by Megatron"),
    ]
    return [
        _spans(rank, steps[rank.number], places[rank.number], num_chunks) for rank in ranks
    ], notes


def check_pipeline(ranks: Sequence[UnnamedRank], source: str) -> None:
    """Raise RrfpError unless the ranks run tasks and send to each other."""
    if not any(rank.calls for rank in ranks):
        raise RrfpError(
            f"the {source} has no forward or backward; record the job with rrfp run --dispatch "
            "megatron SCRIPT, or profile a step that trains"
        )
    if not any(rank.transfers for rank in ranks):
        raise RrfpError(
            f"the {source} has forwards and backwards, and nothing that its ranks send to each "
            "other: it is of no pipeline; import one of a job with pipeline parallelism"
        )


def _steps(
    ranks: Sequence[UnnamedRank], places: dict[int, Place], source: str
) -> tuple[dict[int, list[_Step]], list[str]]:
    """The calls of each rank by step."""
    if all(rank.schedules for rank in ranks):
        told = {rank.number: list(_told_steps(rank)) for rank in ranks}
        num_cut = sum(len(rank.schedules) - len(told[rank.number]) for rank in ranks)
        cut = f"{num_cut} calls of the schedule are not whole in the {source} and are left out"
        return told, [cut] if num_cut else []
    # The rank whose forwards are all at one time ahead of its backwards tells where steps end.
    sizes = min((_sizes(rank.calls) for rank in ranks if rank.calls), key=len)
    if not sizes:
        raise RrfpError(
            f"the {source} does not hold one whole step: no rank's forwards all have their "
            "backward; profile whole steps, with profiler.step() after the optimizer's"
        )
    if len(sizes) > 1 and max(sizes) == 1 and all(map(_is_last, places.values())):
        raise RrfpError(
            f"the {source} is of a last pipeline rank alone, whose {len(sizes)} forwards each have "
            "their backward next, so that nothing tells where a step ends; import another pipeline "
            "rank's file with it, or profile with with_stack=True"
        )
    found = {rank.number: list(_counted_steps(rank.calls, sizes)) for rank in ranks}
    num_whole = min(map(len, found.values()))
    if not num_whole:
        worst = min(found, key=lambda number: len(found[number]))
        raise RrfpError(
            f"the {source} has a step of {sizes[0]} forwards and backwards, and rank {worst} has "
            "no step like it; import profiles of the same steps of one run"
        )
    left_out = [
        rank.number
        for rank in ranks
        if sum(len(calls) for _, calls in found[rank.number][:num_whole]) < len(rank.calls)
    ]
    notes = (
        [f"what {len(left_out)} of {len(ranks)} ranks ran after the last whole step is left out"]
        if left_out
        else []
    )
    return {number: steps[:num_whole] for number, steps in found.items()}, notes


def _told_steps(rank: UnnamedRank) -> Iterator[_Step]:
    position = 0
    numbers = rank.step_numbers or range(len(rank.schedules))
    for number, schedule in zip(numbers, rank.schedules, strict=True):
        calls = []
        while position < len(rank.calls) and rank.calls[position].launched_ns < schedule.end_ns:
            if rank.calls[position].launched_ns >= schedule.start_ns:
                calls.append(rank.calls[position])
            position += 1
        if 2 * sum(call.kind is Kind.F for call in calls) == len(calls) or all(
            call.kind is Kind.F for call in calls
        ):
            yield number, calls


def _is_last(place: Place) -> bool:
    return place.pp_rank == place.num_pp_ranks - 1


def _sizes(calls: list[Call]) -> list[int]:
    """How many forwards each step has, if each ends when every forward has had its backward."""
    sizes = []
    forwards = backwards = 0
    for call in calls:
        forwards += call.kind is Kind.F
        backwards += call.kind is Kind.B
        if backwards > forwards:
            return []  # It begins in the middle of a step.
        if forwards == backwards:
            sizes.append(forwards)
            forwards = backwards = 0
    return sizes


def _counted_steps(calls: list[Call], sizes: list[int]) -> Iterator[_Step]:
    position = 0
    for number, size in enumerate(sizes):
        part = calls[position : position + 2 * size]
        if sum(call.kind is Kind.F for call in part) != size or len(part) != 2 * size:
            return
        yield number, part
        position += 2 * size


def _num_chunks(
    ranks: Sequence[UnnamedRank],
    steps: dict[int, list[_Step]],
    places: dict[int, Place],
    source: str,
) -> int:
    """How many stages every rank holds; the order of the first training step of each tells."""
    trained = [
        (places[rank.number], calls)
        for rank in ranks
        for calls in _first_training(steps[rank.number])
    ]
    if not trained:
        return 1
    if all(_is_first_in_first_out(calls) for _, calls in trained) and (
        all(_tells_pairs(calls) for _, calls in trained)
        or any(all(_runs_as(name, 1, *each) for each in trained) for name in ("1f1b", "gpipe"))
    ):
        return 1
    for num_chunks in range(2, _MOST_CHUNKS):
        if all(_runs_as("interleaved", num_chunks, *each) for each in trained):
            return num_chunks
    place, calls = trained[0]
    letters = " ".join(call.kind for call in calls[:12])
    raise RrfpError(
        f"the {source} names no microbatches, and the order of pipeline rank {place.pp_rank} "
        f"({letters} ...) is not 1F1B's, GPipe's or Megatron's interleaved one, so that nothing "
        "tells them; put each task into "
        'torch.profiler.record_function(f"PP:{stage}F{microbatch}") (B for its backward)'
    )


def _first_training(steps: list[_Step]) -> Iterator[list[Call]]:
    for _, calls in steps:
        if any(call.kind is Kind.B for call in calls):
            yield calls
            return


def _pairs(calls: list[Call]) -> list[int | None]:
    """Of each backward, which forward it belongs to, by place."""
    places: dict[int | None, int] = {}
    forwards = (call for call in calls if call.kind is Kind.F)
    for index, call in enumerate(forwards):
        places[call.pair] = index
    return [
        None if call.pair is None else places.get(call.pair)
        for call in calls
        if call.kind is Kind.B
    ]


def _tells_pairs(calls: list[Call]) -> bool:
    return None not in _pairs(calls)


def _is_first_in_first_out(calls: list[Call]) -> bool:
    return all(pair in (None, index) for index, pair in enumerate(_pairs(calls)))


def _row(name: str, num_chunks: int, place: Place, num_forwards: int) -> tuple[Task, ...]:
    """What a rank runs in an order; nothing where that order is not for such a pipeline."""
    num_tasks = place.num_pp_ranks * num_forwards
    if num_forwards % num_chunks or not 0 < num_tasks <= _MOST_FORWARDS:
        return ()
    shape = Shape(place.num_pp_ranks, num_forwards // num_chunks, num_chunks)
    return _order(name, shape).rows[place.pp_rank] if ORDERS[name].fits(shape) else ()


@lru_cache(maxsize=16)
def _order(name: str, shape: Shape) -> Order:
    return ORDERS[name].for_shape(shape)


def _runs_as(name: str, num_chunks: int, place: Place, calls: list[Call]) -> bool:
    """Whether a rank's step has the order of that name, as far as its calls tell."""
    row = _row(name, num_chunks, place, sum(call.kind is Kind.F for call in calls))
    if [call.kind for call in calls] != [task.kind for task in row]:
        return False
    forwards = {
        (task.stage, task.microbatch): index
        for index, task in enumerate(task for task in row if task.kind is Kind.F)
    }
    expected = [forwards[task.stage, task.microbatch] for task in row if task.kind is Kind.B]
    return all(pair in (None, index) for pair, index in zip(_pairs(calls), expected, strict=True))


def _spans(rank: UnnamedRank, steps: list[_Step], place: Place, num_chunks: int) -> RankSpans:
    stages = tuple(chunk * place.num_pp_ranks + place.pp_rank for chunk in range(num_chunks))
    info = RankInfo(rank.number, *place[:3], stages, rank.host, rank.pid)
    spans = RankSpans(info)
    for number, calls in steps:
        spans.tasks += _tasks(number, calls, place, num_chunks)
    _put_into_steps(rank, spans)
    spans.phases = spans.schedules()
    numbers = rank.step_numbers or range(len(rank.schedules))
    told = dict(zip(numbers, rank.schedules, strict=True))
    spans.phases = [_widened(phase, told.get(phase.step)) for phase in spans.phases]
    return spans


def _widened(phase: PhaseRecord, schedule: Extent | None) -> PhaseRecord:
    """A step from where its call of the schedule began to where it ended, if that is told. On a GPU
    work may go on after the call has returned."""
    if schedule is None:
        return phase
    return PhaseRecord(
        min(phase.start_ns, schedule.start_ns),
        max(phase.end_ns, schedule.end_ns),
        phase.step,
        Phase.SCHEDULE,
    )


def _tasks(step: int, calls: list[Call], place: Place, num_chunks: int) -> Iterator[TaskSpan]:
    forwards = [call for call in calls if call.kind is Kind.F]
    backwards = [call for call in calls if call.kind is Kind.B]
    name = "1f1b" if num_chunks == 1 else "interleaved"
    row = _row(name, num_chunks, place, len(forwards))
    own = place.pp_rank
    named = [(task.stage, task.microbatch) for task in row if task.kind is Kind.F] or [
        (own, index) for index in range(len(forwards))
    ]
    for call, of in zip(forwards, named, strict=True):
        yield TaskSpan(call.start_ns, call.end_ns, step, Kind.F, *of)
    expected = [(task.stage, task.microbatch) for task in row if task.kind is Kind.B]
    for index, (call, pair) in enumerate(zip(backwards, _pairs(calls), strict=True)):
        of = named[pair] if pair is not None else (expected or named)[index]
        yield TaskSpan(call.start_ns, call.end_ns, step, Kind.B, *of)


def _put_into_steps(rank: UnnamedRank, spans: RankSpans) -> None:
    """Give sends and the reduction of gradients to the step before them, receives to the one that
    follows; what lies among a step's tasks is of that step."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for task in sorted(spans.tasks):
        first.setdefault(task.step, task.start_ns)
        last[task.step] = max(last.get(task.step, task.end_ns), task.end_ns)
    order = list(first)
    starts_ns = list(first.values())
    for start_ns, end_ns, is_receive in rank.transfers:
        place = bisect_right(starts_ns, start_ns) - 1
        is_after = place < 0 or start_ns >= last[order[place]]
        place += is_receive and is_after
        if 0 <= place < len(order):
            spans.transfers.append(TransferSpan(start_ns, end_ns, order[place]))
    for start_ns, end_ns in rank.syncs:
        place = bisect_right(starts_ns, start_ns) - 1
        if place >= 0:
            spans.waits.append(WaitRecord(start_ns, end_ns, order[place], Cause.GRADIENT_SYNC))

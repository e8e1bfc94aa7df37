"""Infers the stage, microbatch and step of tasks from their order in Megatron's and torch's
schedules.

- A step ends on the first rank of a pipeline when every forward has had its backward. Other ranks'
  steps have the same number of tasks.
- A rank with one stage runs its forwards in the order of the microbatches. A rank with several
  stages follows Megatron's interleaved schedule. Their number is found by comparing the order of
  forwards and backwards, and the forward of each backward, with that schedule. Any other order is
  refused, because the microbatches are then unknown.
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
from rrfp.trace.records import RankInfo, WaitRecord

# A rank whose tasks have times in the trace, but no numbers.
#
# A **call** is one run of a forward or a backward. Its stage, microbatch and step follow from the
# order of the calls.


class Call(NamedTuple):
    """One run of a forward or a backward."""

    launched_ns: int
    """The time at which the host began it; its work may run later, on a GPU."""
    start_ns: int
    end_ns: int
    kind: Kind
    pair: int | None = None
    """A number that a forward shares with its backward; None if it is unknown."""


class Extent(NamedTuple):
    """A time interval."""

    start_ns: int
    end_ns: int


class Transfer(NamedTuple):
    """An interval in which a rank sent or received."""

    start_ns: int
    end_ns: int
    is_receive: bool
    """True if it belongs to the next task and not to the previous one."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The ranks of a rank's pipeline-parallel and tensor-parallel groups, in order; empty if
    unknown."""

    pipeline: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()


@dataclass(slots=True)
class InferredRank:
    """A rank's calls, transfers and schedules, on its own clock."""

    number: int
    host: str = "unknown"
    pid: int = 0
    groups: Groups = field(default_factory=Groups)
    calls: list[Call] = field(default_factory=list)
    """The calls in the order of their launches."""
    transfers: list[Transfer] = field(default_factory=list)
    syncs: list[Extent] = field(default_factory=list)
    """The intervals in which it reduced gradients."""
    schedules: list[Extent] = field(default_factory=list)
    """The calls of the schedule, in the host's time; empty if they are unknown."""
    step_numbers: list[int] = field(default_factory=list)
    """The step of each of `schedules`; empty to count them from 0."""


_CALLS = {
    "forward_step": Kind.F,
    "backward_step": Kind.B,
    "forward-compute": Kind.F,
    "backward-compute": Kind.B,
    "megatron.microbatch.forward": Kind.F,
    "megatron.microbatch.backward": Kind.B,
}
"""Megatron's names of tasks: its functions, its timers and its OpenTelemetry spans."""
_PATH_OF_MEGATRON = re.compile(r"megatron\.core\.(?:\w+\.)*")
_TRANSFER = re.compile(
    r"(?:megatron\.p2p\.|P2PCommunicator\.)?"
    r"(?:(?:send|recv)_(?:forward|backward)(?:_(?:send|recv)_(?:forward|backward))*"
    r"|(?:forward|backward)-(?:send|recv)(?:-(?:forward|backward)-(?:send|recv))*)"
)


def kind_of_call(name: str) -> Kind | None:
    """The kind of task in a range with Megatron's name for a forward or a backward, with or without
    its module's path; None for any other name."""
    return _CALLS.get(_PATH_OF_MEGATRON.sub("", name, count=1), _CALLS.get(name))


def is_transfer(name: str) -> bool:
    """True if a range of this name is a send or a receive of Megatron, with or without its module's
    path."""
    return _TRANSFER.fullmatch(_PATH_OF_MEGATRON.sub("", name, count=1)) is not None


# Replacing the host's times by the GPU's, as the host only launches the work.


class Kernel(NamedTuple):
    """A kernel, or a memory operation of the GPU."""

    start_ns: int
    end_ns: int
    correlation: int
    """The number that it shares with its launch."""
    is_transfer: bool


def is_nccl_transfer(name: str) -> bool:
    """True if a kernel of this name sends or receives."""
    return "nccl" in name and "SendRecv" in name


def put_on_gpu(rank: InferredRank, kernels: Sequence[Kernel], launches: Mapping[int, int]) -> int:
    """Move each call to the times of the kernels launched in it, and replace transfers by NCCL's
    kernels, changing `rank`. Removes calls without kernels, and returns their number.

    `kernels` are in the order of their starts; `launches` has the host's launch time of each, by
    correlation. A kernel of NCCL is a receive if the host's last transfer before its launch is one.
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
        # A kernel's name does not state its direction, but the call that launched it does.
        place = bisect_right(called_ns, launches.get(kernel.correlation, kernel.start_ns)) - 1
        is_receive = place >= 0 and on_host[place].is_receive
        rank.transfers.append(Transfer(kernel.start_ns, kernel.end_ns, is_receive))
    return num_idle


# The place of each rank in the run, from its process groups.


_PIPELINE = ("PIPELINE_MODEL_PARALLEL_GROUP", "mesh_pp", "pp")
_TENSOR = ("TENSOR_MODEL_PARALLEL_GROUP", "mesh_tp", "tp")
"""Descriptions of process groups: Megatron's, and those of torch's device meshes."""


class Place(NamedTuple):
    """A rank's place in the layout."""

    pp_rank: int
    tp_rank: int
    dp_rank: int
    num_pp_ranks: int


def groups_of(described: Mapping[str, Sequence[int]]) -> Groups:
    """Select a rank's pipeline and tensor groups from the ranks of all its groups, by Megatron's or
    torch's descriptions; a group without such a description is empty."""
    return Groups(_first(described, _PIPELINE), _first(described, _TENSOR))


def _first(described: Mapping[str, Sequence[int]], names: Sequence[str]) -> tuple[int, ...]:
    """The ranks of the first of these descriptions that exists; empty without one."""
    return next((tuple(described[name]) for name in names if name in described), ())


def places_of(ranks: Sequence[InferredRank], world_size: int) -> tuple[dict[int, Place], list[str]]:
    """The place of each rank by its number, and notes on how it was found.

    A rank without a known pipeline group is assumed to be in one pipeline with all ranks of the
    run, one without a tensor group to be alone. Each further pipeline with the same tensor-parallel
    rank is another replica. Raises RrfpError if a rank is not in its own group.
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
"""The limit of all ranks' forwards in a step. Only a damaged trace has more."""
_Step = tuple[int, list[Call]]
"""The number and the calls of a step."""


def number_calls(
    ranks: Sequence[InferredRank], world_size: int, source: str
) -> tuple[list[RankSpans], list[str]]:
    """The spans of ranks whose tasks have no numbers, and notes on how they were numbered. `source`
    is the trace's name for messages. Raises RrfpError if the order does not determine the
    microbatches."""
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


def check_pipeline(ranks: Sequence[InferredRank], source: str) -> None:
    """Raise RrfpError if no rank runs a task, or no rank sends or receives."""
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
    ranks: Sequence[InferredRank], places: dict[int, Place], source: str
) -> tuple[dict[int, list[_Step]], list[str]]:
    """The complete steps of each rank by its number, and notes on what is left out: by calls of the
    schedule if all ranks have them, otherwise counted from the order of forwards and backwards.
    Counting raises RrfpError if no step is complete on all ranks, or if only last pipeline ranks
    are there and alternate, so that nothing shows where a step ends."""
    if all(rank.schedules for rank in ranks):
        steps = {rank.number: list(_steps_of_schedules(rank)) for rank in ranks}
        num_cut = sum(len(rank.schedules) - len(steps[rank.number]) for rank in ranks)
        cut = f"{num_cut} calls of the schedule are not whole in the {source} and are left out"
        return steps, [cut] if num_cut else []
    # Use the rank with the fewest steps: others may finish all forwards' backwards within a step.
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


def _steps_of_schedules(rank: InferredRank) -> Iterator[_Step]:
    """Yield the number and the calls of each call of the schedule that has as many backwards as
    forwards, or only forwards; others are skipped."""
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
    """True if the rank is the last one of its pipeline."""
    return place.pp_rank == place.num_pp_ranks - 1


def _sizes(calls: list[Call]) -> list[int]:
    """The number of forwards of each complete step, if a step ends when every forward has had its
    backward. Empty if a backward has no forward before it, as when the calls begin within a
    step."""
    sizes = []
    forwards = backwards = 0
    for call in calls:
        forwards += call.kind is Kind.F
        backwards += call.kind is Kind.B
        if backwards > forwards:
            return []
        if forwards == backwards:
            sizes.append(forwards)
            forwards = backwards = 0
    return sizes


def _counted_steps(calls: list[Call], sizes: list[int]) -> Iterator[_Step]:
    """Split calls into steps of these numbers of forwards, with as many backwards, until they do
    not match; yields each step's number and calls."""
    position = 0
    for number, size in enumerate(sizes):
        part = calls[position : position + 2 * size]
        if sum(call.kind is Kind.F for call in part) != size or len(part) != 2 * size:
            return
        yield number, part
        position += 2 * size


def _num_chunks(
    ranks: Sequence[InferredRank],
    steps: dict[int, list[_Step]],
    places: dict[int, Place],
    source: str,
) -> int:
    """The number of stages of every rank, from the first training step of each: 1 if backwards
    follow the order of their forwards, by known pairs or as in 1F1B or GPipe; otherwise the least
    for which all ranks run as interleaved. 1 without training steps. Raises RrfpError if no number
    matches."""
    trained = []
    for rank in ranks:
        each = (calls for _, calls in steps[rank.number] if any(c.kind is Kind.B for c in calls))
        if calls := next(each, None):
            trained.append((places[rank.number], calls))
    if not trained:
        return 1
    if all(_is_first_in_first_out(calls) for _, calls in trained) and (
        all(None not in _pairs(calls) for _, calls in trained)
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


def _pairs(calls: list[Call]) -> list[int | None]:
    """The index of each backward's forward among the forwards; None if it is unknown."""
    places: dict[int | None, int] = {}
    forwards = (call for call in calls if call.kind is Kind.F)
    for index, call in enumerate(forwards):
        places[call.pair] = index
    return [
        None if call.pair is None else places.get(call.pair)
        for call in calls
        if call.kind is Kind.B
    ]


def _is_first_in_first_out(calls: list[Call]) -> bool:
    """True if no known pair contradicts that backwards run in the order of their forwards."""
    return all(pair in (None, index) for index, pair in enumerate(_pairs(calls)))


def _row(name: str, num_chunks: int, place: Place, num_forwards: int) -> tuple[Task, ...]:
    """A rank's tasks in a hint's order; empty if the hint does not support such a pipeline, or the
    numbers are impossible."""
    num_tasks = place.num_pp_ranks * num_forwards
    if num_forwards % num_chunks or not 0 < num_tasks <= _MOST_FORWARDS:
        return ()
    shape = Shape(place.num_pp_ranks, num_forwards // num_chunks, num_chunks)
    return _order(name, shape).rows[place.pp_rank] if ORDERS[name].fits(shape) else ()


@lru_cache(maxsize=16)
def _order(name: str, shape: Shape) -> Order:
    """The order of this hint for a shape (cached)."""
    return ORDERS[name].for_shape(shape)


def _runs_as(name: str, num_chunks: int, place: Place, calls: list[Call]) -> bool:
    """True if a rank's step can have the order of this hint: its kinds match, and its known pairs
    too."""
    row = _row(name, num_chunks, place, sum(call.kind is Kind.F for call in calls))
    if [call.kind for call in calls] != [task.kind for task in row]:
        return False
    forwards = {
        (task.stage, task.microbatch): index
        for index, task in enumerate(task for task in row if task.kind is Kind.F)
    }
    expected = [forwards[task.stage, task.microbatch] for task in row if task.kind is Kind.B]
    return all(pair in (None, index) for pair, index in zip(_pairs(calls), expected, strict=True))


def _spans(rank: InferredRank, steps: list[_Step], place: Place, num_chunks: int) -> RankSpans:
    """The spans of one rank, with numbered tasks, transfers, gradient reductions, and a `SCHEDULE`
    phase per step."""
    stages = tuple(chunk * place.num_pp_ranks + place.pp_rank for chunk in range(num_chunks))
    info = RankInfo(rank.number, *place[:3], stages, rank.host, rank.pid)
    spans = RankSpans(info)
    for number, calls in steps:
        spans.tasks += _tasks(number, calls, place, num_chunks)
    _put_into_steps(rank, spans)
    spans.phases = spans.schedules()
    numbers = rank.step_numbers or range(len(rank.schedules))
    # On a GPU, work may continue after the call of the schedule has returned.
    calls_of_schedule = dict(zip(numbers, rank.schedules, strict=True))
    for index, phase in enumerate(spans.phases):
        if extent := calls_of_schedule.get(phase.step):
            start_ns, end_ns = (
                min(phase.start_ns, extent.start_ns),
                max(phase.end_ns, extent.end_ns),
            )
            spans.phases[index] = phase._replace(start_ns=start_ns, end_ns=end_ns)
    return spans


def _tasks(step: int, calls: list[Call], place: Place, num_chunks: int) -> Iterator[TaskSpan]:
    """Yield the calls of a step as tasks, all forwards before all backwards. Stages and
    microbatches follow from the order; a backward with a known pair gets its forward's."""
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


def _put_into_steps(rank: InferredRank, spans: RankSpans) -> None:
    """Add a rank's transfers and gradient reductions to `spans`, each with the last step that began
    before it, a receive between steps with the step after it. Those without such a step are left
    out."""
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

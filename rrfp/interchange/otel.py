"""Reads Megatron-LM's OpenTelemetry spans, exported as OTLP in JSON.

Megatron-LM opens spans since its pull request 6438 (`--otel-enabled`, span groups `step`,
`microbatch` and `communication`, exported by all ranks): `megatron.microbatch.forward` and
`.backward` around each task, `megatron.p2p.*` around blocking transfers, `megatron.train.iteration`
with `megatron.iteration` around a step, `megatron.evaluate.step` around an evaluation. The resource
identifies the rank: `dl.rank`, `dl.pipeline_parallel.size`, `dl.tensor_parallel.size`.

The files are those of the OpenTelemetry collector's file exporter: one JSON object per line, each
with `resourceSpans`. Spans have the host's times, and contain neither stages nor microbatches.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rrfp.errors import RrfpError
from rrfp.interchange.inferred_tasks import (
    Call,
    Extent,
    Groups,
    InferredRank,
    Transfer,
    check_pipeline,
    is_transfer,
    kind_of_call,
    number_calls,
)
from rrfp.interchange.json_stream import JsonStream, writable
from rrfp.interchange.spans import RankSpans, Source, listed
from rrfp.trace.perfetto.format import MOST_OF_A_KIND
from rrfp.trace.records import counted, evaluation_step

_NAME = "OpenTelemetry trace"
_STEPS = ("megatron.train.iteration", "megatron.train_step")
_EVALUATIONS = ("megatron.evaluate.step",)
_GRADIENT_SYNC = ("megatron.grad_sync.finish",)
_INSTANCE = re.compile(r".*-rank(\d{1,7})")
_TIME = re.compile(r"\d{1,19}", re.ASCII)
_HOST_TIMES = (
    "the spans are the host's: where a GPU does the work, they time its launches, and the wait for "
    "it wherever the host waits"
)


class _Span(NamedTuple):
    start_ns: int
    end_ns: int
    name: str
    iteration: int | None


@dataclass(slots=True)
class _Exporter:
    """One rank's spans, and its resource's attributes."""

    attributes: Mapping[str, object]
    path: Path
    spans: list[_Span] = field(default_factory=list)


def read_spans(paths: Sequence[Path]) -> tuple[list[RankSpans], Source]:
    """The spans of a run from its files, each of which may contain any number of ranks. Ranks
    without tasks are left out; of a step that ran more than once, the last time counts. Raises
    RrfpError if the files are not OTLP, or contain no tasks."""
    exporters: dict[int, _Exporter] = {}
    for path in paths:
        for number, attributes, spans in _resources(path):
            exporters.setdefault(number, _Exporter(attributes, path)).spans += spans
    with_tasks = {
        number: each
        for number, each in exporters.items()
        if any(kind_of_call(span.name) for span in each.spans)
    }
    if not with_tasks:
        raise RrfpError(
            f"{paths[0]} has no span megatron.microbatch.forward; run Megatron-LM with "
            "--otel-span-groups per_step,microbatch and MEGATRON_OTEL_EXPORT_STRATEGY=all_ranks"
        )
    sizes = {name: _size(with_tasks, name) for name in ("pipeline", "tensor", "data")}
    num_ranks = max(1 + max(with_tasks), sizes["pipeline"] * sizes["tensor"] * sizes["data"])
    if num_ranks > MOST_OF_A_KIND:
        raise RrfpError(
            f"the {_NAME} says that its run had {num_ranks} ranks, and no run has more than "
            f"{MOST_OF_A_KIND}; export it again"
        )
    repeated = {step for each in with_tasks.values() for step in _drop_repeated(each)}
    ranks = [_rank(number, each, num_ranks, sizes) for number, each in sorted(with_tasks.items())]
    check_pipeline(ranks, _NAME)
    numbered, notes = number_calls(ranks, num_ranks, _NAME)
    if repeated:
        notes.append(
            f"{counted(len(repeated), 'step')} ran more than once, as in a job that was resumed "
            f"({listed(sorted(repeated))}): the last time counts, and what ran before is left out"
        )
    notes.append(_HOST_TIMES)
    return numbered, Source(_NAME, len(paths), "cpu", True, num_ranks, tuple(notes))


def _drop_repeated(exporter: _Exporter) -> Iterator[int]:
    """Remove a rank's spans of iterations that it repeated later, and yield their numbers. Sorts
    its spans."""
    exporter.spans.sort(key=lambda span: span[:2])
    latest: dict[int, _Span] = {}
    dropped = []
    for span in exporter.spans:
        if span.name not in _STEPS or span.iteration is None:
            continue
        before = latest.get(span.iteration)
        if before is not None and span.start_ns < before.end_ns:
            continue  # It is nested in the span of the same iteration.
        if before is not None:
            dropped.append(before)
            yield span.iteration
        latest[span.iteration] = span
    dropped.sort()
    starts_ns = [span.start_ns for span in dropped]

    def is_dropped(span: _Span) -> bool:
        place = bisect_right(starts_ns, span.start_ns) - 1
        return place >= 0 and span.start_ns < dropped[place].end_ns

    exporter.spans = [span for span in exporter.spans if not is_dropped(span)]


def _rank(
    number: int, exporter: _Exporter, num_ranks: int, sizes: Mapping[str, int]
) -> InferredRank:
    """Sort a rank's spans into calls, transfers, gradient reductions and schedules; other spans are
    skipped. A schedule extends over the tasks of its step, and an evaluation has a negative
    number."""
    host = exporter.attributes.get("host.name")
    rank = InferredRank(number, writable(host) if isinstance(host, str) else "unknown")
    rank.groups = _groups(number, num_ranks, sizes)
    steps = []
    num_evaluations = 0
    for span in exporter.spans:
        start_ns, end_ns, name, iteration = span
        if kind := kind_of_call(name):
            rank.calls.append(Call(start_ns, start_ns, end_ns, kind))
        elif is_transfer(name):
            rank.transfers.append(Transfer(start_ns, end_ns, "recv" in name))
        elif name in _GRADIENT_SYNC:
            rank.syncs.append(Extent(start_ns, end_ns))
        elif name in _STEPS and iteration is not None:
            steps.append((span, iteration))
        elif name in _EVALUATIONS:
            steps.append((span, evaluation_step(num_evaluations)))
            num_evaluations += 1
    starts_ns = [call.launched_ns for call in rank.calls]
    for span, step in steps:
        first = bisect_left(starts_ns, span.start_ns)
        inside = rank.calls[first : bisect_left(starts_ns, span.end_ns)]
        if inside:
            # Use the extent of the tasks, because the span also contains work of the training loop.
            rank.schedules.append(Extent(inside[0].start_ns, inside[-1].end_ns + 1))
            rank.step_numbers.append(step)
    return rank


def _groups(number: int, num_ranks: int, sizes: Mapping[str, int]) -> Groups:
    """The groups of a rank in Megatron's order: neighbors form a tensor group, and the ranks of a
    pipeline are farthest apart. A pipeline of one rank is empty; both groups are if the pipeline's
    or the tensor group's size does not divide the ranks."""
    pipeline, tensor = sizes["pipeline"], sizes["tensor"]
    if num_ranks % pipeline or num_ranks % tensor:
        return Groups()
    apart = num_ranks // pipeline
    first = number // tensor * tensor
    return Groups(
        tuple(number % apart + place * apart for place in range(pipeline)) if pipeline > 1 else (),
        tuple(range(first, first + tensor)),
    )


def _size(exporters: Mapping[int, _Exporter], name: str) -> int:
    """The size of a parallelism such as `tensor`, in all ranks' attributes; 1 if they do not state
    a possible one. Raises RrfpError if they state different ones."""
    stated = [each.attributes.get(f"dl.{name}_parallel.size") for each in exporters.values()]
    sizes = {size for size in stated if type(size) is int and 0 < size < MOST_OF_A_KIND}
    if len(sizes) > 1:
        raise RrfpError(
            f"the {_NAME} is of runs with different sizes of {name} parallelism "
            f"({', '.join(map(str, sorted(sizes)))}); import one run at a time"
        )
    return next(iter(sizes), 1)


def _resources(path: Path) -> Iterator[tuple[int, dict[str, object], list[_Span]]]:
    """Yield the rank, the attributes and the spans of each resource in a file. One without a rank
    is skipped, or raises RrfpError if it has tasks."""
    stream = JsonStream(path)
    while stream.first():
        request = stream.value()
        for resource in _each(request, "resourceSpans"):
            attributes = _attributes(resource.get("resource"))
            spans = [
                _span(path, span)
                for scope in _each(resource, "scopeSpans")
                for span in _each(scope, "spans")
            ]
            if (number := _number(attributes)) is None:
                if any(kind_of_call(span.name) for span in spans):
                    raise RrfpError(
                        f"{path} has spans whose resource does not tell the rank; export them with "
                        "dl.rank or service.instance.id, as Megatron-LM does"
                    )
                continue
            yield number, attributes, spans


def _number(attributes: Mapping[str, object]) -> int | None:
    """The rank in a resource's attributes, from `dl.rank` or the end of `service.instance.id`; None
    without one."""
    number = attributes.get("dl.rank")
    if type(number) is int and 0 <= number < MOST_OF_A_KIND:
        return number
    match = _INSTANCE.fullmatch(str(attributes.get("service.instance.id")))
    return int(match[1]) if match else None


def _span(path: Path, span: Mapping[str, Any]) -> _Span:
    """Decode a span. An end before its start becomes the start, an impossible iteration None.
    Raises RrfpError for an invalid name or time."""
    name = span.get("name")
    times = [str(span.get(key)) for key in ("startTimeUnixNano", "endTimeUnixNano")]
    if not isinstance(name, str) or not all(map(_TIME.fullmatch, times)):
        raise RrfpError(
            f"{path} has a span '{str(name)[:40]}' from {times[0][:20]} to {times[1][:20]}; export "
            "it as OTLP in JSON"
        )
    start_ns, end_ns = map(int, times)
    iteration = _attributes(span).get("megatron.iteration")
    if not isinstance(iteration, int) or not 0 <= iteration < MOST_OF_A_KIND:
        iteration = None
    return _Span(start_ns, max(start_ns, end_ns), name, iteration)


def _attributes(owner: object) -> dict[str, object]:
    """The integer and text attributes of a span or a resource; other values become None. OTLP
    writes integers as text, which is converted back."""
    found: dict[str, object] = {}
    for attribute in _each(owner, "attributes"):
        key, value = attribute.get("key"), attribute.get("value")
        if isinstance(key, str) and isinstance(value, dict):
            number = value.get("intValue")
            if isinstance(number, str) and _TIME.fullmatch(number):
                number = int(number)
            found[key] = value.get("stringValue") if number is None else number
    return found


def _each(owner: object, key: str) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in a list that is a member of `owner`; none if there is no such list. Items
    that are not objects are skipped."""
    values = owner.get(key) if isinstance(owner, dict) else None
    for value in values if isinstance(values, list) else ():
        if isinstance(value, dict):
            yield value

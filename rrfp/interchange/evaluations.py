"""Evaluations told by what they ran, where a trace numbers them among the steps that train."""

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from rrfp.interchange.spans import RankSpans, TaskSpan, TransferSpan
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import Phase, PhaseRecord, WaitRecord
from rrfp.trace.steps import evaluation_step, is_evaluation

_Place = tuple[int, int]
"""A rank and one of its stages."""
_Span = TypeVar("_Span", TaskSpan, WaitRecord, TransferSpan, PhaseRecord)


def tell_evaluations(ranks: list[RankSpans]) -> None:
    """Number the steps that ran forwards only as evaluations, in their order; the others keep their
    numbers, by which they are found in the trace that was imported.

    Where no step has a backward, or evaluations are told already, nothing is changed.
    """
    kinds: defaultdict[int, set[Kind]] = defaultdict(set)
    ran: defaultdict[int, defaultdict[_Place, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank in ranks:
        for task in rank.tasks:
            kinds[task.step].add(task.kind)
            ran[task.step][rank.info.rank, task.stage].add(task.microbatch)
    if all(found == {Kind.F} for found in kinds.values()) or any(map(is_evaluation, kinds)):
        return
    finished = set.intersection(
        *({each.step for each in rank.phases if each.phase == Phase.SCHEDULE} for rank in ranks)
    )
    # Of a step that was cut short, the backwards may be what is lacking: so may those of the last
    # one, where the trace does not tell that the call of the schedule has ended.
    if not all(rank.tells_waits for rank in ranks):
        finished -= {max(kinds)}
    places = {(rank.info.rank, stage) for rank in ranks for stage in rank.info.stages}
    tested = [
        step
        for step in sorted(finished)
        if kinds[step] == {Kind.F} and _is_whole(ran[step], places)
    ]
    numbers = {step: evaluation_step(number) for number, step in enumerate(tested)}
    for rank in ranks if numbers else ():
        rank.tasks = _renumbered(rank.tasks, numbers)
        rank.waits = _renumbered(rank.waits, numbers)
        rank.transfers = _renumbered(rank.transfers, numbers)
        rank.phases = _renumbered(rank.phases, numbers)


def _is_whole(microbatches: Mapping[_Place, set[int]], places: set[_Place]) -> bool:
    """Whether every stage ran the same microbatches."""
    return microbatches.keys() == places and len(set(map(frozenset, microbatches.values()))) == 1


def _renumbered(spans: list[_Span], numbers: Mapping[int, int]) -> list[_Span]:
    return [span._replace(step=numbers.get(span.step, span.step)) for span in spans]

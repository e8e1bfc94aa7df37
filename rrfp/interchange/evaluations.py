"""Evaluations in traces that number them among the steps that train, told by what they ran."""

from collections import defaultdict
from collections.abc import Mapping

from rrfp.interchange.spans import RankSpans
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import Phase
from rrfp.trace.steps import evaluation_step, is_evaluation

_Place = tuple[int, int]
"""A rank and one of its stages."""


def tell_evaluations(ranks: list[RankSpans]) -> None:
    """Number the steps that ran only forwards as evaluations, in their order. The others keep their
    numbers, so that they can be found in the imported trace.

    If no step has a backward, or the trace tells evaluations itself, nothing changes.
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
    # A step that was cut short may have lost its backwards. So may the last one, if the trace does
    # not tell that the call of the schedule has ended.
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
        rank.renumber(numbers)


def _is_whole(microbatches: Mapping[_Place, set[int]], places: set[_Place]) -> bool:
    """Whether every stage ran the same microbatches."""
    return microbatches.keys() == places and len(set(map(frozenset, microbatches.values()))) == 1

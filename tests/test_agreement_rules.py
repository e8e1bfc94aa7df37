"""The intersection of the ready sets against the paper's unanimous first picks."""

import pytest

from benchmarks.agreement_rules import measure
from rrfp.schedule.policy import AgreementRule
from rrfp.schedule.tasks import Task
from tests.cases import random_case
from tests.naive_dispatcher import NaiveDispatcher


class Both(NaiveDispatcher):
    """Decides by the intersection and asks, at the same moments, what unanimity would decide."""

    num_deferred_by_unanimity_alone = 0

    def choice(self) -> Task | None:
        if not self.group.leads:
            return None
        common = self.first_pick(set.intersection(*self.arrived))
        unanimous = self.unanimous_pick()
        assert unanimous in (None, common)
        self.num_deferred_by_unanimity_alone += unanimous is None and common is not None
        return common

    def unanimous_pick(self) -> Task | None:
        first_picks = {self.first_pick(arrived) for arrived in self.arrived}
        return first_picks.pop() if len(first_picks) == 1 else None


def test_the_intersection_runs_whatever_unanimity_runs_and_more() -> None:
    num_deferred = 0
    for seed in range(40):
        case = random_case(seed, num_chunks=1)
        deciders = case.deciders(Both, case.order)
        case.play(deciders)
        num_deferred += sum(
            each.num_deferred_by_unanimity_alone for of_rank in deciders for each in of_rank
        )
    assert num_deferred > 0


@pytest.mark.parametrize("num_members", [2, 4])
def test_the_intersection_defers_fewer_rounds_of_whole_steps(num_members: int) -> None:
    unanimous, intersection = (
        measure(rule, num_members, skew=3.0, seeds=range(4))
        for rule in (AgreementRule.UNANIMOUS, AgreementRule.INTERSECTION)
    )
    assert intersection.deferred < unanimous.deferred
    assert intersection.deferred_share < unanimous.deferred_share
    assert intersection.makespan_ns < unanimous.makespan_ns


@pytest.mark.parametrize("rule", AgreementRule)
def test_members_that_see_arrivals_together_defer_nothing(rule: AgreementRule) -> None:
    rounds = measure(rule, num_members=4, skew=0.0, seeds=[0])
    assert rounds.asked > 0
    assert rounds.deferred == 0

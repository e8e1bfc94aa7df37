"""How often each agreement rule defers when members see arrivals at different moments.

    python -m benchmarks.agreement_rules

A *round* is a question to a group's leader while some member has something that it may run; it is
*deferred* when nobody runs for it. Steps in virtual time: BF at 4 pipeline ranks of 2 or 4 members
each and 32 microbatches, tasks of lognormal time, every message late at each member by its own
uniform draw of up to `skew` mean task times. Reports to the leader take no time, so that nothing
but the arrivals differs between the members.
"""

import random
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from rrfp.schedule.dispatcher import Group
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import AgreementRule, Policy
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task
from tests.properties.naive_dispatcher import NaiveDispatcher
from tests.properties.virtual_time import Node, VirtualConditions, play

SHAPE = Shape(num_ranks=4, num_microbatches=32)
TASK_NS = 1000
SKEWS = (0.1, 0.3, 1.0, 3.0)
SEEDS = range(8)


class Rounds(NamedTuple):
    """Counts and times of an agreement rule over some steps."""

    asked: int
    deferred: int
    makespan_ns: int

    @property
    def deferred_share(self) -> float:
        return self.deferred / self.asked


class _CountsRounds(NaiveDispatcher):
    """The specification of the dispatcher, which knows each member's first pick."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_asked = 0
        self.num_deferred = 0

    def choice(self) -> Task | None:
        choice = super().choice()
        if self.group.leads and any(self.permitted(arrived) for arrived in self.arrived):
            self.num_asked += 1
            self.num_deferred += choice is None
        return choice


def measure(
    rule: AgreementRule, num_members: int, skew: float, seeds: Iterable[int] = SEEDS
) -> Rounds:
    """Play one step a seed under a rule; the same seeds bring the same times to every rule."""
    steps = [_step(rule, num_members, skew, seed) for seed in seeds]
    return Rounds(*(sum(counts) for counts in zip(*steps, strict=True)))


def _step(rule: AgreementRule, num_members: int, skew: float, seed: int) -> Rounds:
    policy = Policy(HINTS["bf"], agreement=rule)
    deciders = [
        [
            _CountsRounds(SHAPE, rank, policy, Group(num_members, leads=member == 0))
            for member in range(num_members)
        ]
        for rank in range(SHAPE.num_ranks)
    ]

    def duration(_node: Node, task: Task) -> int:
        # The time depends on the task alone, so that a rule's decisions change no task time.
        return 1 + int(TASK_NS * random.Random(f"{seed} {task}").lognormvariate(0, 0.5))

    @cache
    def lateness(sender: Node, receiver: Node) -> random.Random:
        return random.Random(f"{seed} {sender} {receiver}")

    def latency(sender: Node, receiver: Node) -> int:
        if sender.rank == receiver.rank:
            return 0
        return int(skew * TASK_NS * lateness(sender, receiver).random())

    members = range(num_members)
    conditions = VirtualConditions(duration, latency, collectives=[[members]] * SHAPE.num_stages)
    history = play(SHAPE, deciders, conditions)
    leaders = [of_rank[0] for of_rank in deciders]
    return Rounds(
        sum(leader.num_asked for leader in leaders),
        sum(leader.num_deferred for leader in leaders),
        history.makespan_ns,
    )


def main() -> None:
    print("members  skew   deferred: unanimous  intersection   step: intersection / unanimous")
    for num_members in (2, 4):
        for skew in SKEWS:
            unanimous = measure(AgreementRule.UNANIMOUS, num_members, skew)
            intersection = measure(AgreementRule.INTERSECTION, num_members, skew)
            print(
                f"{num_members:7}  {skew:4}  {unanimous.deferred_share:20.1%}"
                f"{intersection.deferred_share:14.1%}"
                f"{intersection.makespan_ns / unanimous.makespan_ns:33.3f}"
            )


if __name__ == "__main__":
    main()

"""What recording cost: the last statement of the rank that it cost most."""

from rrfp.trace.check import recording_fraction
from rrfp.trace.records import CostRecord, PhaseRecord, RankInfo, RankRecords, Recording


def _rank(rank: int, steps_ns: list[int], costs_ns: list[int]) -> RankRecords:
    return RankRecords(
        RankInfo(rank, rank, 0, 0, (rank,), "node", 1),
        phases=[
            phase
            for step, length_ns in enumerate(steps_ns)
            for phase in (
                PhaseRecord(5, 5 + length_ns, step, "schedule"),
                PhaseRecord(0, 10_000, step, "optimizer"),
            )
        ],
        costs=[CostRecord(0, step, 1, cost_ns) for step, cost_ns in enumerate(costs_ns)],
    )


def test_the_worst_rank_counts_with_all_of_its_steps() -> None:
    ranks = [_rank(0, [100, 300], [1, 4]), _rank(1, [200, 200], [5, 8])]
    assert recording_fraction(Recording({}, ranks)) == 8 / 400


def test_a_rank_that_finished_no_step_or_stated_no_cost_does_not_count() -> None:
    ranks = [_rank(0, [], [7]), _rank(1, [50], [1]), _rank(2, [50], [])]
    assert recording_fraction(Recording({}, ranks)) == 1 / 50
    assert recording_fraction(Recording({}, [ranks[0], ranks[2]])) is None
    assert recording_fraction(Recording({}, [])) is None

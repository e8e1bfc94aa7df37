"""Trials: what settings share under a seed, and what their rows say."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.planning.trials import Row, Setting, Trial, run_settings
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import Hint, kinds_of
from rrfp.schedule.named_hints import ALTERNATIONS, HINTS, hint_named
from rrfp.schedule.order import Order
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.model import Links, StepCosts
from rrfp.simulate.jitter import parse_jitter, uniforms
from rrfp.simulate.recording import new_recording
from rrfp.simulate.world import TaskTimes
from rrfp.trace.records import step_windows
from tests.effort import examples

MS = 1_000_000


@dataclass(eq=False)
class DrawnCosts:
    """Times drawn for every task, and a note of each time that they are asked for."""

    links: Links = field(default_factory=Links)
    agreement_ns: int = 0
    lateness_ns: int = 0
    gradient_sync_ns: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        self.asked.append((seed, replica))

        def times(kind: str) -> list[list[int]]:
            return [
                [1 + int(9 * MS * u) for u in uniforms(shape.num_microbatches, seed, replica, *key)]
                for stage in range(shape.num_stages)
                for key in ((kind, stage),)
            ]

        return StepCosts(
            TaskTimes(times("F"), times("B"), times("W")),
            self.links,
            self.agreement_ns,
            self.lateness_ns,
            self.gradient_sync_ns,
        )


def setting(
    costs: DrawnCosts,
    hint: str = "bf",
    *,
    num_ranks: int = 3,
    num_microbatches: int = 6,
    dispatch: Dispatch = Dispatch.READY,
    num_members: int = 1,
    num_replicas: int = 1,
    blocking: bool = False,
    admit: Admit = Admit.GIVEN,
    jitter: str = "none",
    hold: int | None = None,
) -> Setting:
    shape = Shape(num_ranks, num_microbatches)
    chosen: Hint = hint_named(hint).on(shape)
    shape = replace(shape, kinds=kinds_of(chosen))
    order: Order = order_of(chosen, shape)
    return Setting(
        shape=shape,
        policy=Policy(chosen, order, dispatch=dispatch, hold=hold),
        costs=costs,
        jitter=parse_jitter(jitter),
        admit=admit,
        blocking=blocking,
        num_members=num_members,
        num_replicas=num_replicas,
    )


def test_what_rows_of_one_shape_share_is_drawn_once_a_seed_and_replica() -> None:
    costs = DrawnCosts()
    settings = [setting(costs, hint, num_replicas=2) for hint in ("bf", "fb", "1f1b")]
    run_settings([replace(each, jitter=settings[0].jitter) for each in settings], range(5, 8))
    assert costs.asked == [(seed, replica) for seed in range(5, 8) for replica in range(2)]


def test_a_row_does_not_depend_on_what_it_is_compared_with() -> None:
    settings = [
        setting(DrawnCosts(), hint, admit=admit, jitter="lognormal:0.5")
        for hint in ("bf", "bfw", "1f1b")
        for admit in Admit
    ]
    together = run_settings(settings, range(4))
    alone = [run_settings([each], range(4))[0] for each in settings]
    assert together == alone
    assert len({row.mean_s for row in together}) > 3


def test_seeds_are_steps_of_their_own() -> None:
    (row,) = run_settings([setting(DrawnCosts())], range(3))
    singles = [run_settings([setting(DrawnCosts())], [seed])[0].trials[0] for seed in range(3)]
    assert list(row.trials) == singles
    assert len(set(singles)) == 3


@pytest.mark.parametrize("hint", [*ALTERNATIONS, "1f1b", "gpipe", "zb-h1"])
@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.integers(1, 4), num=st.integers(1, 6))
@examples(quick=5, thorough=100)
def test_no_step_is_shorter_than_its_floor(hint: str, seed: int, num_ranks: int, num: int) -> None:
    costs = DrawnCosts(Links(latency_ns=MS), agreement_ns=MS // 2, lateness_ns=MS)
    one = setting(costs, hint, num_ranks=num_ranks, num_microbatches=num)
    two = replace(one, num_members=2, num_replicas=2)
    for row in run_settings([one, two], [seed]):
        (trial,) = row.trials
        assert trial.load_ns <= trial.floor_ns <= trial.makespan_ns
        assert 0 <= trial.bubble_fraction < 1


def test_one_rank_runs_at_its_floor_and_load() -> None:
    (row,) = run_settings([setting(DrawnCosts(), num_ranks=1)], range(3))
    assert row.ratio_to_floor == row.ratio_to_load == 1
    assert row.bubble_fraction == 0


def test_replicas_meet_at_the_end_and_reduce() -> None:
    def makespan_ns(num_replicas: int, gradient_sync_ns: int) -> int:
        costs = DrawnCosts(gradient_sync_ns=gradient_sync_ns)
        (row,) = run_settings([setting(costs, num_replicas=num_replicas)], [7])
        return row.trials[0].makespan_ns

    # There is nothing to reduce with.
    assert makespan_ns(1, MS) == makespan_ns(1, 0)
    assert makespan_ns(4, MS) == makespan_ns(4, 0) + MS
    by_count = [makespan_ns(count, 0) for count in (1, 2, 3, 4)]
    assert by_count == sorted(by_count)
    assert by_count[0] < by_count[-1]


def test_a_group_pays_for_agreeing_but_not_where_an_order_binds() -> None:
    def makespan_ns(
        num_members: int, dispatch: Dispatch, agreement_ns: int = 0, lateness_ns: int = 0
    ) -> int:
        costs = DrawnCosts(agreement_ns=agreement_ns, lateness_ns=lateness_ns)
        asked = setting(costs, "1f1b", num_members=num_members, dispatch=dispatch)
        return run_settings([asked], [3])[0].trials[0].makespan_ns

    for dispatch in (Dispatch.READY, Dispatch.FIXED):
        alone = makespan_ns(1, dispatch)
        assert makespan_ns(2, dispatch) == alone
        assert makespan_ns(1, dispatch, agreement_ns=MS, lateness_ns=5 * MS) == alone
        assert makespan_ns(2, dispatch, lateness_ns=5 * MS) > alone
    bound = makespan_ns(2, Dispatch.FIXED)
    assert makespan_ns(2, Dispatch.FIXED, agreement_ns=MS) == bound
    assert makespan_ns(2, Dispatch.READY, agreement_ns=MS) > makespan_ns(2, Dispatch.READY)


def test_links_that_cost_delay_a_step_and_more_so_where_they_block() -> None:
    def makespan_ns(latency_ns: int, *, blocking: bool) -> int:
        costs = DrawnCosts(Links(latency_ns=latency_ns))
        asked = setting(costs, "1f1b", dispatch=Dispatch.FIXED, blocking=blocking)
        return run_settings([asked], [3])[0].trials[0].makespan_ns

    assert makespan_ns(0, blocking=False) < makespan_ns(MS, blocking=False)
    assert makespan_ns(MS, blocking=False) < makespan_ns(MS, blocking=True)


def test_a_recording_is_given_a_step_a_seed() -> None:
    settings = [setting(DrawnCosts(), hint) for hint in ("bf", "bfw")]
    recordings = [new_recording(each.shape, 1, 1, {}) for each in settings]
    rows = run_settings(settings, range(2), recordings=recordings)
    assert rows == run_settings(settings, range(2))
    for each, recording, row in zip(settings, recordings, rows, strict=True):
        for records in recording.ranks:
            assert [phase.step for phase in records.phases] == [0, 1]
            assert len(records.tasks) == 2 * each.shape.num_tasks_of_a_rank
        windows = step_windows(recording)
        assert [end_ns - start_ns for start_ns, end_ns in windows.values()] == [
            trial.makespan_ns for trial in row.trials
        ]


def test_finished_is_told_of_every_trial() -> None:
    told: list[None] = []
    settings: Sequence[Setting] = [setting(DrawnCosts()) for _ in range(3)]
    run_settings(settings, range(4), finished=lambda: told.append(None))
    assert len(told) == 12


def test_what_a_row_says() -> None:
    s = 1_000_000_000
    row = Row(
        (
            Trial(3 * s, 2 * s, s, 4 * s, 0.25, (4, 3), (40, 30), Policy(HINTS["bf"])),
            Trial(5 * s, 3 * s, 2 * s, 6 * s, 0.75, (3, 6), (50, 20), Policy(HINTS["bf"])),
        ),
        num_chunks=2,
    )
    assert (row.mean_s, row.min_s, row.max_s, row.spread) == (4, 3, 5, 0.5)
    assert (row.floor_s, row.ratio_to_floor) == (2.5, 1.6)
    assert (row.load_s, row.ratio_to_load) == (1.5, 4 / 1.5)
    assert (row.bubble_fraction, row.peak_held) == (0.5, (2, 3))
    assert row.peak_held_bytes == (50, 30)
    assert row.bound_s == 5
    other = Row((Trial(2 * s, s, s, None, 0, (1, 1), None, Policy(HINTS["bf"])),), 1)
    assert row.ratio_to(other) == 2
    assert other.bound_s is None
    assert other.peak_held_bytes is None

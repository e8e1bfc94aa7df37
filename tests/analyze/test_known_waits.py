"""Runs whose waits are known beforehand: each analysis names who made the others wait, how long.

The runs are simulated, free of jitter, and what they take is derived here by hand. `N` ranks hold a
stage each, `M` microbatches go through; `f` and `b` are the times of a forward and a backward. In
all but one run GPipe's order binds: all forwards, then all backwards, both from microbatch 0 on.
What is compared is in nanoseconds and exact.
"""

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.compare import Comparison, compare
from rrfp.analyze.critical_path import LINK, critical_path
from rrfp.analyze.deviations import deviations
from rrfp.analyze.findings import Fault, Owner, blame, headline, shares
from rrfp.analyze.frames import Frames, frames_of
from rrfp.analyze.misalignment import misalignment
from rrfp.replay.change import Change
from rrfp.replay.whatif import what_if
from rrfp.schedule.hints import Order, parse_order
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.simulate.engine import StepConditions, TaskTimes
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.records import (
    NS_PER_S,
    PhaseRecord,
    ReceiveRecord,
    Recording,
    SendRecord,
    TaskRecord,
)
from tests.analyze.simulated_runs import (
    MEGATRONS,
    equal_times,
    policy_of,
    random_times,
    simulated,
    simulated_case,
    simulated_run,
)
from tests.properties.cases import Case, cases, examples

F_NS, B_NS = 1_000_000, 2_000_000

Owned = dict[tuple[int, str], int]
"""Nanoseconds by pipeline rank and kind."""


@dataclass(frozen=True)
class Size:
    """How large a pipeline is, and which rank of it is not like the others."""

    num_ranks: int
    num_microbatches: int
    odd_one: int

    @property
    def shape(self) -> Shape:
        return Shape(self.num_ranks, self.num_microbatches)


@st.composite
def sizes(draw: st.DrawFn, last: int = 0) -> Size:
    """Draw 3 to 6 ranks; the odd one is not among the `last` ones."""
    num_ranks = draw(st.integers(3, 6))
    return Size(num_ranks, draw(st.integers(3, 9)), draw(st.integers(0, num_ranks - 1 - last)))


def gpipe(size: Size, world: StepConditions, num_steps: int = 1) -> Recording:
    policy, shape = policy_of("gpipe", size.shape, dispatch=Dispatch.FIXED)
    return simulated_run(policy, shape, [world], num_steps=num_steps)


def times_of(size: Size, forward: Mapping[int, int], backward: Mapping[int, int]) -> TaskTimes:
    """The usual times but for the stages given."""
    num_ranks, num_microbatches = size.num_ranks, size.num_microbatches
    return TaskTimes(
        [[forward.get(stage, F_NS)] * num_microbatches for stage in range(num_ranks)],
        [[backward.get(stage, B_NS)] * num_microbatches for stage in range(num_ranks)],
        [[0] * num_microbatches] * num_ranks,
    )


def window_and_idle(recording: Recording) -> tuple[int, dict[int, dict[str, int]]]:
    """The window, and by rank the idle time of each cause that it has."""
    report = bubbles(frames_of(recording))
    idle_ns = {
        rank.rank: {cause: ns for cause, ns in rank.causes_ns.items() if ns}
        for rank in report.ranks
    }
    return report.window_ns, idle_ns


def owners(recording: Recording) -> Owned:
    path = critical_path(frames_of(recording))
    return {(owner.pp_rank, owner.kind): owner.time_ns for owner in path.owners}


def summed(*parts: tuple[int, str, int]) -> Owned:
    """Sum the time of each owner."""
    owned: defaultdict[tuple[int, str], int] = defaultdict(int)
    for pp_rank, kind, time_ns in parts:
        owned[pp_rank, kind] += time_ns
    return {who: time_ns for who, time_ns in owned.items() if time_ns}


def links_ns(recording: Recording) -> dict[tuple[int, int], dict[str, float]]:
    """By link from rank to rank, the medians and 95th percentiles of what misalignment tells."""
    names = [f"{what}_s_{share}" for what in ("queued", "starved") for share in ("median", "p95")]
    return {
        (row["from"], row["to"]): {name: row[name] * NS_PER_S for name in names}
        for row in misalignment(frames_of(recording)).to_dicts()
    }


def worst(links: Mapping[tuple[int, int], Mapping[str, float]], name: str) -> tuple[int, int]:
    return max(links, key=lambda link: links[link][name])


def replayed_ns(recording: Recording, change: Change) -> int:
    """Return the replayed step time with a change; without it the replay is exact."""
    report = what_if(recording, lambda run: [change])
    assert report.replay_error == 0
    return report.rows[0].makespan_ns


def nonzero(idle_ns: Mapping[Cause, int]) -> dict[str, int]:
    return {cause.value: ns for cause, ns in idle_ns.items() if ns}


def lacks_forward(size: Size, rank: int) -> Cause:
    """Why a rank waits for its next forward under GPipe's order. The last one has a backward there,
    which that order forbids."""
    return Cause.ORDER if rank == size.num_ranks - 1 else Cause.FORWARD_INPUT


# One slow stage, k, whose tasks take f' and b'.


def slow_stage(size: Size, slower: int, num_steps: int = 1) -> Recording:
    slow = size.odd_one
    times = times_of(size, {slow: F_NS * slower}, {slow: B_NS * slower})
    return gpipe(size, StepConditions(times), num_steps)


def slow_window_ns(size: Size, slower: int) -> int:
    """The forwards fill k stages (k f), stage k takes M f', and the last of them goes on to the end
    ((N-1-k) f). The backwards come back to stage k ((N-1-k) b), which takes M b', and go on to the
    first (k b)."""
    others = size.num_ranks - 1
    return (others + slower * size.num_microbatches) * (F_NS + B_NS)


@examples(quick=15, thorough=500)
@given(size=sizes(), slower=st.integers(2, 4))
def test_a_slow_stage_lets_the_others_wait_for_their_inputs(size: Size, slower: int) -> None:
    recording = slow_stage(size, slower)
    num_ranks, num_microbatches, slow = size.num_ranks, size.num_microbatches, size.odd_one
    window_ns, idle_ns = window_and_idle(recording)
    assert window_ns == slow_window_ns(size, slower)
    extra = (slower - 1) * (num_microbatches - 1)
    for rank, found in idle_ns.items():
        behind = num_ranks - 1 - rank
        if rank < slow:
            # Its forwards run one behind the other, and wait in stage k's queue. From its last one
            # on it waits for gradients: for the first what the rest of the pipeline takes, for the
            # others what stage k takes longer than itself.
            expected = {
                Cause.WARMUP: rank * F_NS,
                Cause.DRAIN: rank * B_NS,
                Cause.BACKWARD_INPUT: behind * (F_NS + B_NS)
                + (slower - 1) * num_microbatches * F_NS
                + (slower - 1) * num_microbatches * B_NS,
            }
        elif rank == slow:
            expected = {
                Cause.WARMUP: rank * F_NS,
                Cause.DRAIN: rank * B_NS,
                Cause.BACKWARD_INPUT: behind * (F_NS + B_NS),
            }
        else:
            # It waits as long for each forward but the first as stage k takes longer; its backwards
            # run one behind the other, and wait there in stage k's queue.
            expected = {
                Cause.WARMUP: (rank - 1 + slower) * F_NS,
                lacks_forward(size, rank): extra * F_NS,
                Cause.BACKWARD_INPUT: behind * (F_NS + B_NS),
                Cause.DRAIN: (rank - 1 + slower) * B_NS + extra * B_NS,
            }
        assert found == nonzero(expected)


@examples(quick=15, thorough=500)
@given(size=sizes(), slower=st.integers(2, 4))
def test_a_slow_stage_owns_the_step_and_has_the_queues(size: Size, slower: int) -> None:
    recording = slow_stage(size, slower)
    num_ranks, num_microbatches, slow = size.num_ranks, size.num_microbatches, size.odd_one
    # All of stage k's tasks, and one of each kind of every other stage, on the way there and back.
    count = {rank: num_microbatches * slower if rank == slow else 1 for rank in range(num_ranks)}
    assert owners(recording) == summed(
        *((rank, Kind.F, count[rank] * F_NS) for rank in count),
        *((rank, Kind.B, count[rank] * B_NS) for rank in count),
    )
    links = links_ns(recording)
    # Microbatch m lies there since m tasks of the neighbour, and starts after m of stage k.
    queued = median(range(num_microbatches)) * (slower - 1)
    for neighbour, time_ns in ((slow - 1, F_NS), (slow + 1, B_NS)):
        if 0 <= neighbour < num_ranks:
            assert links[neighbour, slow]["queued_s_median"] == pytest.approx(queued * time_ns)
            # What leaves stage k lets its neighbour wait for each but the first.
            starved = (slower - 1) * time_ns
            onward = (slow, slow + 1) if neighbour < slow else (slow, slow - 1)
            if onward in links:
                assert links[onward]["starved_s_median"] == pytest.approx(starved)
    assert worst(links, "queued_s_median")[1] == slow


@examples(quick=10, thorough=200)
@given(size=sizes(), slower=st.integers(2, 4))
def test_without_the_slow_stage_the_step_is_that_of_an_even_pipeline(
    size: Size, slower: int
) -> None:
    # Huang et al. 2019: (M + N - 1) (f + b).
    even_ns = (size.num_microbatches + size.num_ranks - 1) * (F_NS + B_NS)
    change = Change(median_stage=size.odd_one)
    assert replayed_ns(slow_stage(size, slower), change) == even_ns
    # The usual changes include it.
    told = [row.what for row in what_if(slow_stage(size, slower)).rows]
    assert f"stage {size.odd_one} as fast as the median" in told


def test_a_stage_that_became_slow_moves_work_and_the_waits_for_it() -> None:
    size = Size(4, 6, 2)
    even = gpipe(size, StepConditions(times_of(size, {}, {})), num_steps=3)
    comparison = compared(even, slow_stage(size, 2, num_steps=3))
    ratio = comparison.step_time_ratio
    assert ratio.low == ratio.median == ratio.high
    assert ratio.median == pytest.approx(slow_window_ns(size, 2) / slow_window_ns(size, 1))
    # Means over the ranks, from what the two tests above derive. Stage 2 does twice its work.
    assert moved_ns(comparison, 4) == {
        "work": 6 * (F_NS + B_NS),
        # Rank 3 comes a forward later.
        "warmup": F_NS,
        "order": 5 * F_NS,
        # Ranks 0 and 1 wait for 6 tasks of either kind that are longer.
        "backward_input": 2 * 6 * (F_NS + B_NS),
        "drain": 6 * B_NS,
    }


def compared(first: Recording, second: Recording) -> Comparison:
    return compare(frames_of(first), frames_of(second))


def moved_ns(comparison: Comparison, num_ranks: int) -> dict[str, float]:
    """Return the time of each cause in the second run beyond the first, over all ranks."""
    return {
        cause: round(each.median * NS_PER_S * num_ranks, 3)
        for cause, each in comparison.causes_s.items()
        if each.leaves_out(0)
    }


# One slow link, from k to k+1, whose messages take L > f one behind the other; no other takes any.


def slow_link(size: Size, transfer_ns: int) -> Recording:
    def transfer(sender: int, receiver: int, task: Task) -> int:
        return transfer_ns if (sender, receiver) == (size.odd_one, size.odd_one + 1) else 0

    return gpipe(size, StepConditions(times_of(size, {}, {}), transfer))


TRANSFERS = st.integers(2, 5).map(lambda factor: factor * F_NS)


@examples(quick=15, thorough=500)
@given(size=sizes(last=1), transfer_ns=TRANSFERS)
def test_a_slow_link_lets_all_behind_it_wait(size: Size, transfer_ns: int) -> None:
    recording = slow_link(size, transfer_ns)
    num_ranks, num_microbatches, sender = size.num_ranks, size.num_microbatches, size.odd_one
    window_ns, idle_ns = window_and_idle(recording)
    # k+1 forwards, M messages, the last forward to the end, and the backwards of an even pipeline.
    assert window_ns == (
        num_ranks * F_NS
        + num_microbatches * transfer_ns
        + (num_microbatches + num_ranks - 1) * B_NS
    )
    for rank, found in idle_ns.items():
        behind = num_ranks - 1 - rank
        if rank <= sender:
            expected = {
                Cause.WARMUP: rank * F_NS,
                # Its last forward, and the time until the last message has come.
                Cause.BACKWARD_INPUT: behind * (F_NS + B_NS)
                + num_microbatches * (transfer_ns - F_NS)
                + F_NS,
            }
        else:
            expected = {
                Cause.WARMUP: rank * F_NS + transfer_ns,
                lacks_forward(size, rank): (num_microbatches - 1) * (transfer_ns - F_NS),
                Cause.BACKWARD_INPUT: behind * (F_NS + B_NS),
            }
        assert found == nonzero(expected | {Cause.DRAIN: rank * B_NS})


@examples(quick=15, thorough=500)
@given(size=sizes(last=1), transfer_ns=TRANSFERS)
def test_a_slow_link_is_named(size: Size, transfer_ns: int) -> None:
    recording = slow_link(size, transfer_ns)
    num_ranks, num_microbatches, sender = size.num_ranks, size.num_microbatches, size.odd_one
    # Back from the end: all backwards of rank 0, one of each other; a forward of each rank behind
    # the link; what lies between the last message's arrival and the end of its sender's last task;
    # all forwards of the sender, and one of each rank before it.
    on_the_link_ns = F_NS + num_microbatches * (transfer_ns - F_NS)
    assert owners(recording) == summed(
        (0, Kind.B, num_microbatches * B_NS),
        *((rank, Kind.B, B_NS) for rank in range(1, num_ranks)),
        *((rank, Kind.F, F_NS) for rank in range(num_ranks) if rank != sender),
        (sender, Kind.F, num_microbatches * F_NS),
        (sender + 1, LINK, on_the_link_ns),
    )
    links = links_ns(recording)
    assert links[sender, sender + 1]["starved_s_median"] == pytest.approx(transfer_ns - F_NS)
    forward = {link: found for link, found in links.items() if link[0] < link[1]}
    assert worst(forward, "starved_s_p95")[0] >= sender
    assert all(found["queued_s_p95"] == 0 for found in forward.values())
    # With free links it is an even pipeline.
    even_ns = (num_microbatches + num_ranks - 1) * (F_NS + B_NS)
    assert replayed_ns(recording, Change(free_links=True)) == even_ns


# Backpressure: a limit of 1 lets a rank run its next forward only after its last backward.


@examples(quick=15, thorough=500)
@given(size=sizes())
def test_a_limit_of_one_runs_one_microbatch_after_the_other(size: Size) -> None:
    num_ranks, num_microbatches = size.num_ranks, size.num_microbatches
    policy, shape = policy_of("bf", size.shape, limit=1)
    recording = simulated_run(policy, shape, [StepConditions(equal_times(shape, F_NS, B_NS, 0))])
    both_ns = F_NS + B_NS
    window_ns, idle_ns = window_and_idle(recording)
    assert window_ns == num_microbatches * num_ranks * both_ns
    # The first rank's next forward is always there, but for the last time.
    there_and_back_ns = (num_ranks - 1) * both_ns
    assert idle_ns.pop(0) == nonzero(
        {
            Cause.LIMIT: (num_microbatches - 1) * there_and_back_ns,
            Cause.BACKWARD_INPUT: there_and_back_ns,
        }
    )
    for rank, found in idle_ns.items():
        # The ranks behind it, for each microbatch, and the ranks before it, between two of them:
        # for which of its inputs it waits meanwhile is the hint's to say.
        waits_ns = num_microbatches * (num_ranks - 1 - rank) + (num_microbatches - 1) * rank
        inputs_ns = found.pop(Cause.FORWARD_INPUT, 0) + found.pop(Cause.BACKWARD_INPUT, 0)
        assert inputs_ns == waits_ns * both_ns
        assert found == nonzero({Cause.WARMUP: rank * F_NS, Cause.DRAIN: rank * B_NS})
    # Nothing but tasks is on the way of a microbatch there and back, M times over.
    assert owners(recording) == summed(
        *(
            (rank, kind, num_microbatches * time_ns)
            for rank in range(num_ranks)
            for kind, time_ns in ((Kind.F, F_NS), (Kind.B, B_NS))
        )
    )
    even_ns = (num_microbatches + num_ranks - 1) * both_ns
    assert replayed_ns(recording, Change(limit=num_ranks)) == even_ns


# An order that forbids what is there: rank 1 is to run the last microbatch second.


def out_of_turn(num_microbatches: int) -> Order:
    rest = [*range(1, num_microbatches - 1)]
    rows = (
        (0, range(num_microbatches), range(num_microbatches)),
        (1, [0, num_microbatches - 1, *rest], range(num_microbatches)),
    )
    return parse_order(
        "".join(
            ",".join([f"{rank}F{m}" for m in forwards] + [f"{rank}B{m}" for m in backwards]) + "\n"
            for rank, forwards, backwards in rows
        ),
        Shape(2, num_microbatches),
        "out of turn",
    )


@examples(quick=15, thorough=200)
@given(num_microbatches=st.integers(3, 12))
def test_an_order_that_forbids_ready_work_is_named(num_microbatches: int) -> None:
    order = out_of_turn(num_microbatches)
    world = StepConditions(equal_times(order.shape, F_NS, B_NS, 0))
    recording = simulated_run(Policy(order, order, Dispatch.FIXED), order.shape, [world])
    # Rank 1 ends F0 at 2 f, and waits for the last forward, which rank 0 ends at M f. The others
    # are there; it runs them, then all backwards, and rank 0 ends one behind it.
    forbidden_ns = (num_microbatches - 2) * F_NS
    window_ns, idle_ns = window_and_idle(recording)
    even_ns = (num_microbatches + 1) * (F_NS + B_NS)
    assert window_ns == even_ns + forbidden_ns
    assert idle_ns == {
        0: {Cause.BACKWARD_INPUT: F_NS + forbidden_ns + B_NS},
        1: nonzero({Cause.WARMUP: F_NS, Cause.ORDER: forbidden_ns, Cause.DRAIN: B_NS}),
    }
    assert owners(recording) == {
        (0, Kind.F): num_microbatches * F_NS,
        (1, Kind.F): (num_microbatches - 1) * F_NS,
        (1, Kind.B): B_NS,
        (0, Kind.B): num_microbatches * B_NS,
    }
    (link,) = (found for link, found in links_ns(recording).items() if link == (0, 1))
    # Microbatch 0 and the last one start at once; m comes at (m+1) f and starts at (M+m) f.
    queued = [0, *[num_microbatches - 1] * (num_microbatches - 2), 0]
    assert link["queued_s_median"] == pytest.approx(median(queued) * F_NS)
    # As a hint the same order costs nothing.
    assert replayed_ns(recording, Change(dispatch=Dispatch.READY)) == even_ns


@examples(quick=15, thorough=200)
@given(num_microbatches=st.integers(3, 12))
def test_how_far_readiness_departs_from_that_order(num_microbatches: int) -> None:
    order = out_of_turn(num_microbatches)
    world = StepConditions(equal_times(order.shape, F_NS, B_NS, 0))
    policy = Policy(order, order_of(order, order.shape))
    first, second = deviations(frames_of(simulated_run(policy, order.shape, [world]))).to_dicts()
    assert first["deviating_fraction"] == 0
    # Rank 1 runs 1, 2, ... ahead of the last one, which stands before each of them.
    num_tasks, num_ahead = 2 * num_microbatches, num_microbatches - 2
    assert second["dispatches"] == num_tasks
    assert second["deviating_fraction"] == pytest.approx(num_ahead / num_tasks)
    assert second["mean_displacement"] == pytest.approx(num_ahead / num_tasks)
    assert second["max_displacement"] == 1
    num_pairs = num_tasks * (num_tasks - 1) / 2
    assert second["kendall_tau_distance"] == pytest.approx(num_ahead / num_pairs)


# Skew in a group of two: activations come to its second member s later than to the first.


def skewed(num_microbatches: int, skew_ns: int, num_steps: int = 1) -> Recording:
    """Stage 0 takes three times as long for a forward as stage 1, which waits for each."""
    size = Size(2, num_microbatches, 0)

    def lateness(member: int, task: Task) -> int:
        return skew_ns if task.kind is Kind.F else 0

    world = StepConditions(times_of(size, {0: 3 * F_NS}, {}), num_members=2, lateness=lateness)
    return gpipe(size, world, num_steps)


SKEWS = st.integers(1, 20).map(lambda twentieths: twentieths * F_NS // 10)


@examples(quick=15, thorough=500)
@given(num_microbatches=st.integers(3, 9), skew_ns=SKEWS)
def test_a_late_member_costs_its_group_coordination(num_microbatches: int, skew_ns: int) -> None:
    recording = skewed(num_microbatches, skew_ns)
    window_ns, idle_ns = window_and_idle(recording)
    even_ns = num_microbatches * 3 * F_NS + F_NS + (num_microbatches + 1) * B_NS
    # Every forward of stage 1 starts s late, and ends before the next one's message comes.
    assert window_ns == even_ns + skew_ns
    gap_ns, num_gaps = 2 * F_NS, num_microbatches - 1
    waits_for_gradients = {Cause.BACKWARD_INPUT: skew_ns + F_NS + B_NS}
    assert idle_ns == {
        0: waits_for_gradients,
        1: waits_for_gradients,
        # Until an activation comes there are backwards only, which the order forbids. Then the
        # first member has it, and waits for the other one.
        2: nonzero(
            {
                Cause.WARMUP: 3 * F_NS + skew_ns,
                Cause.ORDER: num_gaps * (gap_ns - skew_ns),
                Cause.COORDINATION: num_gaps * skew_ns,
                Cause.DRAIN: B_NS,
            }
        ),
        3: {
            Cause.WARMUP: 3 * F_NS + skew_ns,
            Cause.ORDER: num_gaps * gap_ns,
            Cause.DRAIN: B_NS,
        },
    }
    # The last member's message counts: from the end of the task that sent it.
    assert owners(recording) == {
        (0, Kind.F): num_microbatches * 3 * F_NS,
        (1, LINK): skew_ns,
        (1, Kind.F): F_NS,
        (1, Kind.B): B_NS,
        (0, Kind.B): num_microbatches * B_NS,
    }
    # One half of the messages, to either member, is queued for s and the other one not at all.
    forward = links_ns(recording)[0, 1]
    assert forward["queued_s_median"] == pytest.approx(skew_ns / 2)
    assert forward["queued_s_p95"] == pytest.approx(skew_ns)
    assert replayed_ns(recording, Change(free_links=True)) == even_ns


def test_skew_that_came_moves_coordination_alone_where_there_was_slack() -> None:
    num_microbatches, skew_ns = 6, F_NS // 2
    comparison = compared(skewed(num_microbatches, 0, 3), skewed(num_microbatches, skew_ns, 3))
    # Over four ranks: the second members wait as before, and the first ones for them instead.
    assert moved_ns(comparison, 4) == {
        "warmup": 2 * skew_ns,
        "order": -5 * skew_ns,
        "backward_input": 2 * skew_ns,
        "coordination": 5 * skew_ns,
    }


# Runs whose waits are known by construction: what owns most names the cause, place and time.


SHAPE = Shape(4, 8)
TIMES = equal_times(SHAPE, 10, 10, 10)


def slowed(stage: int, factor: int) -> TaskTimes:
    """One stage takes that many times as long as the others."""
    times = [[10 * factor if each == stage else 10] * 8 for each in range(4)]
    return TaskTimes(times, times, times)


def first_of(frames: Frames) -> tuple[object, ...]:
    found = shares(frames, blame(frames))[0]
    return found.what, found.pp_rank, found.sender, found.time_ns


@pytest.mark.parametrize("stage", range(4))
def test_a_slow_stage(stage: int) -> None:
    frames = frames_of(simulated("bf", SHAPE, slowed(stage, 3), num_steps=2))
    # 8 F and 8 B that take 20 and 40 ns longer.
    assert first_of(frames) == (Fault.SLOW_STAGE, stage, None, pytest.approx(480, rel=0.01))


@pytest.mark.parametrize("limit", [2, 4])
def test_a_slow_stage_is_named_also_where_a_limit_withholds_what_would_only_wait(
    limit: int,
) -> None:
    frames = frames_of(simulated("bf", SHAPE, slowed(3, 3), limit=limit))
    assert bubbles(frames).ranks[0].causes_ns[Cause.LIMIT] > 0
    assert first_of(frames)[:2] == (Fault.SLOW_STAGE, 3)


@pytest.mark.parametrize(("sender", "receiver", "every_ns"), [(1, 2, 10), (2, 1, 30), (3, 2, 30)])
def test_a_slow_link(sender: int, receiver: int, every_ns: int) -> None:
    """The sender has a message ready at a fixed interval."""

    def transfer(a: int, b: int, task: Task) -> int:
        return 90 if (a, b) == (sender, receiver) else 0

    frames = frames_of(simulated("bf", SHAPE, TIMES, transfer=transfer))
    # The last of eight messages of 90 ns waits for those before it.
    owned_ns = pytest.approx(8 * 90 - 7 * every_ns, rel=0.01)
    assert first_of(frames) == (Fault.LINK, receiver, sender, owned_ns)


def test_a_link_that_carries_one_message_owns_all_of_it() -> None:
    found = blame(frames_of(simulated("bf", Shape(2, 1), transfer=lambda *_: 25)))
    assert found.owners_ns[Owner(Fault.LINK, 1, 0)] == 25
    assert found.owners_ns[Owner(Fault.LINK, 0, 1)] == 25
    assert found.step_ns == 2 * 25 + 2 * (10 + 20)


def test_a_limit_that_forces_backpressure() -> None:
    frames = frames_of(simulated("bf", SHAPE, TIMES, limit=1))
    withheld_ns = bubbles(frames).ranks[0].causes_ns[Cause.LIMIT]
    assert first_of(frames) == (Cause.LIMIT, 0, None, pytest.approx(withheld_ns, rel=0.01))


def test_a_binding_order_that_keeps_ready_work_waiting() -> None:
    uneven = [[10 + 20 * ((m + stage) % 2) for m in range(8)] for stage in range(4)]
    times = TaskTimes(uneven, [[10] * 8] * 4, [[10] * 8] * 4)
    frames = frames_of(simulated("1f1b", SHAPE, times, dispatch=Dispatch.FIXED))
    withheld_ns = bubbles(frames).ranks[0].causes_ns[Cause.ORDER]
    assert first_of(frames) == (Cause.ORDER, 0, None, pytest.approx(withheld_ns, rel=0.01))


@pytest.mark.parametrize("stage", [1, 2])
def test_members_of_a_group_whose_messages_come_apart(stage: int) -> None:
    frames = frames_of(
        simulated(
            "bf",
            SHAPE,
            TIMES,
            num_members=2,
            lateness=lambda member, task: 60 if member == 1 and task.stage == stage else 0,
        )
    )
    # The first F and the last B are late, and nothing covers that.
    assert first_of(frames) == (Cause.COORDINATION, stage, None, pytest.approx(120, rel=0.01))


def test_a_rank_that_enters_late() -> None:
    """The whole step is moved behind a data phase of the first rank; the others were there."""
    recording = simulated("bf", SHAPE, TIMES)
    for records in recording.ranks:
        records.tasks[:] = [
            TaskRecord(task.start_ns + 500, task.end_ns + 500, *task[2:]) for task in records.tasks
        ]
        records.sends[:] = [
            SendRecord(each.start_ns + 500, each.end_ns + 500, *each[2:]) for each in records.sends
        ]
        records.receives[:] = [
            ReceiveRecord(each.start_ns + 500, each.end_ns + 500, *each[2:])
            for each in records.receives
        ]
        records.waits.clear()
        entry_ns = 500 if records.info.rank == 0 else 0
        end_ns = records.phases[0].end_ns + 500
        records.phases[:] = [PhaseRecord(entry_ns, end_ns, 0, "schedule")]
    assert first_of(frames_of(recording)) == (Fault.ENTRY, 0, None, 500)


def test_replicas_that_sum_their_gradients() -> None:
    policy, shape = policy_of("bf", SHAPE)
    recording = simulated_run(policy, shape, [StepConditions(TIMES), StepConditions(TIMES)])
    assert sum(
        ns
        for owner, ns in blame(frames_of(recording)).owners_ns.items()
        if owner.what == Cause.GRADIENT_SYNC
    ) == 5  # fmt: skip


def test_uneven_tasks_are_no_slow_stage() -> None:
    rng = random.Random(3)
    rows = [[rng.choice([10, 10, 10, 70]) for _ in range(32)] for _ in range(4)]
    shape = Shape(4, 32)
    # Each stage has the same times in another sequence.
    rows = [rng.sample(rows[0], len(rows[0])) for _ in range(4)]
    found = blame(frames_of(simulated("bf", shape, TaskTimes(rows, rows, rows))))
    by_what = {owner.what: 0.0 for owner in found.owners_ns}
    for owner, ns in found.owners_ns.items():
        by_what[owner.what] += ns
    assert Fault.SLOW_STAGE not in by_what
    assert by_what[Fault.UNEVEN] > 0


def test_a_run_of_megatrons_own_schedule_names_its_transfers() -> None:
    frames = frames_of(read_trace(MEGATRONS))
    found = shares(frames, blame(frames))
    assert found[0].what == Cause.TRANSFER
    assert "--dispatch ready" in found[0].advice


def test_a_slow_stage_of_a_run_without_messages_is_found_by_its_work() -> None:
    policy, shape = policy_of("1f1b", SHAPE, dispatch=Dispatch.FIXED)
    worlds = [StepConditions(slowed(2, 3), blocking=True)]
    recording = simulated_run(policy, shape, worlds, links="blocking")
    for records in recording.ranks:
        records.sends.clear()
        records.receives.clear()
    assert first_of(frames_of(recording))[:2] == (Fault.SLOW_STAGE, 2)


@examples(quick=30, thorough=500)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_every_nanosecond_has_an_owner(case: Case, seed: int) -> None:
    times = random_times(random.Random(seed), case.shape)
    frames = frames_of(simulated_case(case, times, transfer=lambda *_: seed % 50))
    found = blame(frames)
    assert sum(found.owners_ns.values()) == pytest.approx(found.step_ns, rel=1e-9)
    assert min(found.owners_ns.values()) > 0
    shown = shares(frames, found)
    assert [each.time_ns for each in shown] == sorted(
        (each.time_ns for each in shown), reverse=True
    )
    assert found.busiest_ns <= found.step_ns * (1 + 1e-9)
    headline(frames, found)


def test_the_advice_on_a_limit_says_the_next_one_to_try() -> None:
    policy, shape = policy_of("bf", SHAPE, limit=1)
    frames = frames_of(simulated_run(policy, shape, [StepConditions(TIMES)]))
    assert "Try --limit 2," in shares(frames, blame(frames))[0].advice


def test_a_run_of_one_rank_or_of_forwards_alone_has_no_links() -> None:
    one = frames_of(simulated("bf", Shape(1, 4)))
    assert shares(one, blame(one)) == []
    forwards = replace(Shape(2, 4), kinds=FORWARD_ONLY)
    blame(frames_of(simulated("bf", forwards)))

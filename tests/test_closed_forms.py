"""Makespans that the literature gives in closed form, through the simulator, to the nanosecond.

Equal stages and microbatches, free links, the order binding. F, B and W are the times of a whole
rank's forward, input gradient and weight gradient; where the backward is whole, B is all of it.
"""

from hypothesis import given
from hypothesis import strategies as st

from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.step import play
from rrfp.simulate.time_bounds import floor
from rrfp.simulate.world import World
from tests.effort import examples
from tests.step_times import equal_times

RANKS = st.integers(1, 6)
TIMES = st.integers(1, 50)


def makespan_and_floor(
    name: str, shape: Shape, forward: int, input_gradient: int, weight_gradient: int = 0
) -> tuple[int, int]:
    """With the times of one chunk."""
    order = ORDERS[name].on(shape)
    times = equal_times(order.shape, forward, input_gradient, weight_gradient)
    run = play(order.shape, Policy(order, order, Dispatch.FIXED), World(times))
    return run.makespan_ns, floor(order.shape, times).ns


@examples(quick=50, thorough=1000)
@given(ranks=RANKS, microbatches=st.integers(1, 20), f=TIMES, b=TIMES)
def test_gpipe_and_1f1b_fill_and_drain_once(ranks: int, microbatches: int, f: int, b: int) -> None:
    # Huang et al. 2019; Narayanan et al. 2021, section 2.2.1. No schedule of whole backwards beats
    # it: it is the floor.
    expected = (microbatches + ranks - 1) * (f + b)
    for name in ("gpipe", "1f1b"):
        shape = Shape(ranks, microbatches)
        assert makespan_and_floor(name, shape, f, b) == (expected, expected)


@examples(quick=50, thorough=500)
@given(ranks=RANKS, rounds=st.integers(1, 4), chunks=st.integers(2, 4), f=TIMES, b=TIMES)
def test_interleaving_divides_the_bubble_by_its_chunks(
    ranks: int, rounds: int, chunks: int, f: int, b: int
) -> None:
    # Narayanan et al. 2021, section 2.2.2: (N - 1)(F + B) / C. With f = F / C and b = B / C:
    shape = Shape(ranks, rounds * ranks, chunks)
    expected = shape.num_microbatches * chunks * (f + b) + (ranks - 1) * (f + b)
    assert makespan_and_floor("interleaved", shape, f, b) == (expected, expected)


@examples(quick=100, thorough=2000)
@given(ranks=RANKS, more=st.integers(0, 20), f=TIMES, b=TIMES, w=TIMES)
def test_zb_h1_has_its_paper_s_bubble_and_a_larger_one_where_w_is_longest(
    ranks: int, more: int, f: int, b: int, w: int
) -> None:
    # Qi et al. 2024 (ICLR), table 2: (N - 1)(F + B - W), from N microbatches on. That fits while W
    # is no longer than F and B are; a longer one fills no more of the bubble than these leave.
    shape = Shape(ranks, ranks + more)
    makespan, floor_ns = makespan_and_floor("zb-h1", shape, f, b, w)
    assert floor_ns <= makespan
    bubble = makespan - shape.num_microbatches * (f + b + w)
    assert bubble == (ranks - 1) * (f + b - min(f, b, w))


@examples(quick=30, thorough=500)
@given(ranks=st.integers(1, 12), more=st.integers(2, 12), time=TIMES)
def test_v_half_and_v_min_have_half_and_two_thirds_of_1f1b_s_bubble(
    ranks: int, more: int, time: int
) -> None:
    # Qi et al. 2024 (arXiv 2405.15362): about N/2M and 2N/3M of the load where F, B and W are
    # equal. On chunks of half a rank's times 1F1B idles for 6(N - 1).
    idle = {
        "v-half": max(ranks - 1, 3 * ranks - (4 if ranks % 2 else 7)),
        "v-min": max(ranks - 1, 4 * ranks - (5 if ranks % 3 else 7)),
    }
    shape = Shape(ranks, ranks + more, 2, Placement.V)
    for name, bubble in idle.items():
        makespan, floor_ns = makespan_and_floor(name, shape, time, time, time)
        assert floor_ns <= makespan == (6 * shape.num_microbatches + bubble) * time

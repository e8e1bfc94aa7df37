"""Tests that no rank exceeds the limit on D or the hold, and that no step stalls under them."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given

from rrfp.errors import UsageError
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.dispatcher import Dispatcher
from rrfp.schedule.named_hints import HINTS, hint_named
from rrfp.schedule.policy import (
    Auto,
    Bytes,
    Dispatch,
    Policy,
    ShareOf1F1B,
    format_bytes,
    parse_hold,
)
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import ComputeIdle, Kind, RunTask
from tests.properties.cases import (
    SEEDS,
    Case,
    arrive,
    ask,
    examples,
    hint_dispatcher,
    random_case,
    random_case_in_bytes,
    run_on,
    task,
)
from tests.properties.naive_dispatcher import NaiveDispatcher
from tests.properties.virtual_time import History, check_step

# The bounds that withhold arrived tasks: the limit on D with its drain mode, and the hold.


LOOP = Shape(2, 4, num_chunks=2)  # rank 0 holds stages 0 and 2, rank 1 stages 1 and 3
V = Shape(2, 4, num_chunks=2, placement=Placement.V)  # rank 0 holds 0 and 3, rank 1 holds 1 and 2


# The limit, with one chunk per rank.


def test_at_the_limit_only_backwards_run_and_a_forward_here_is_withheld() -> None:
    dispatcher = hint_dispatcher("f-first", Shape(3, 4), 1, limit=2)
    arrive(dispatcher, "1F0 1F1")
    assert run_on(dispatcher) == "1F0 1F1"
    arrive(dispatcher, "1F2")
    assert ask(dispatcher) == "limit"
    arrive(dispatcher, "1B1")
    assert run_on(dispatcher) == "1B1 1F2"


def test_at_the_limit_without_a_forward_here_the_cause_is_the_missing_input() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 4), 1, limit=1)
    arrive(dispatcher, "1F0")
    assert ask(dispatcher) == "1F0"
    assert ask(dispatcher) == "forward_input"
    arrive(dispatcher, "1F1")
    assert ask(dispatcher) == "limit"


def test_withheld_forwards_are_not_counted_as_ready() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 4), 1, limit=1)
    arrive(dispatcher, "1F0 1F1 1F2 1B0")
    ask(dispatcher)
    (run,) = dispatcher.handle(0, ComputeIdle())
    assert run == RunTask(
        task=task("1B0"),
        chunk=0,
        hint_position=3,
        ready=1,
        skipped=2,
        depth=0,
        held=0,
        ready_forwards=0,
        ready_backwards=1,
    )


def test_a_forward_only_step_has_no_limit() -> None:
    dispatcher = hint_dispatcher("bf", Shape(2, 3, kinds=FORWARD_ONLY), 0, limit=1)
    assert run_on(dispatcher) == "0F0 0F1 0F2"
    assert ask(dispatcher) == "done"


# The limit with several chunks: a rank at it finishes microbatches one by one, in index order.


def test_at_the_limit_chunks_finish_the_smallest_microbatch_and_nothing_else() -> None:
    dispatcher = hint_dispatcher("bf", LOOP, 0, limit=2)
    arrive(dispatcher, "2F1 2F2")
    assert ask(dispatcher) == "0F0"
    assert ask(dispatcher) == "0F1"
    assert ask(dispatcher) == "limit"  # 2F0 is next, and 2F1 has arrived
    arrive(dispatcher, "2F0 2B1")
    assert ask(dispatcher) == "2F0"
    assert ask(dispatcher) == "limit"
    arrive(dispatcher, "2B0")
    assert ask(dispatcher) == "2B0"
    assert ask(dispatcher) == "limit"
    arrive(dispatcher, "0B0")
    assert ask(dispatcher) == "0B0"  # D is 1: the hint ranks again
    assert ask(dispatcher) == "0F2"


def test_the_microbatch_after_the_smallest_takes_its_turn_when_that_one_is_finished() -> None:
    dispatcher = hint_dispatcher("f-first", Shape(1, 3, num_chunks=2), 0, limit=1)
    assert run_on(dispatcher) == "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0F2 1F2 1B2 0B2"
    assert ask(dispatcher) == "done"


def test_d_exceeds_the_limit_by_at_most_the_number_of_chunks() -> None:
    dispatcher = hint_dispatcher("f-first", V, 0, limit=3)
    arrive(dispatcher, "3F0 3F1 3F2")
    runs = [dispatcher.handle(0, ComputeIdle())[-1] for _ in range(4)]
    assert [(str(run.task), run.depth) for run in runs if isinstance(run, RunTask)] == [
        ("0F0", 1),
        ("0F1", 2),
        ("0F2", 3),
        ("3F0", 4),
    ]
    assert ask(dispatcher) == "3B0"
    assert ask(dispatcher) == "limit"


def test_weight_gradients_run_while_a_rank_waits_for_its_smallest_microbatch() -> None:
    shape = Shape(2, 4, num_chunks=2, kinds=SPLIT_BACKWARD)
    dispatcher = hint_dispatcher("bfw", shape, 0, limit=3)
    arrive(dispatcher, "2F0")
    assert [ask(dispatcher) for _ in range(4)] == ["0F0", "0F1", "0F2", "2F0"]
    arrive(dispatcher, "2F1 2B0")
    assert run_on(dispatcher) == "2B0 2W0"
    assert ask(dispatcher) == "limit"
    arrive(dispatcher, "0B0")
    assert run_on(dispatcher) == "0B0 0F3 2F1 0W0"


def test_a_draining_rank_counts_only_permitted_tasks_as_ready() -> None:
    dispatcher = hint_dispatcher("bf", LOOP, 0, limit=1)
    ask(dispatcher)
    arrive(dispatcher, "2F0 2F1")
    (run,) = dispatcher.handle(0, ComputeIdle())
    assert isinstance(run, RunTask)
    assert (str(run.task), run.ready, run.ready_forwards) == ("2F0", 1, 1)


# The hold: a forward of chunk c may start while fewer than hold - (C - 1 - c) slots are in use.


def test_a_hold_bounds_the_slots_in_use() -> None:
    dispatcher = hint_dispatcher("f-first", Shape(3, 4), 1, hold=2)
    arrive(dispatcher, "1F0 1F1 1F2")
    assert run_on(dispatcher) == "1F0 1F1"
    assert ask(dispatcher) == "hold"
    arrive(dispatcher, "1B1")
    assert run_on(dispatcher) == "1B1 1F2"


def test_a_hold_keeps_slots_for_the_deeper_chunks() -> None:
    dispatcher = hint_dispatcher("bf", LOOP, 0, hold=3)
    assert run_on(dispatcher) == "0F0 0F1"  # the third slot is for stage 2
    assert ask(dispatcher) == "hold"
    arrive(dispatcher, "2F1")
    assert ask(dispatcher) == "2F1"
    assert ask(dispatcher) == "hold"
    arrive(dispatcher, "2B1")
    assert ask(dispatcher) == "2B1"
    assert ask(dispatcher) == "hold"
    arrive(dispatcher, "0B1")
    assert run_on(dispatcher) == "0B1 0F2"


def test_a_hold_of_a_slot_a_chunk_carries_one_microbatch_at_a_time() -> None:
    dispatcher = hint_dispatcher("f-first", Shape(1, 2, num_chunks=3), 0, hold=3)
    assert run_on(dispatcher) == "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"


def test_a_slot_is_in_use_until_a_split_off_weight_gradient() -> None:
    dispatcher = hint_dispatcher("bfw", Shape(3, 4, kinds=SPLIT_BACKWARD), 1, hold=1)
    arrive(dispatcher, "1F0 1F1 1B0")
    assert run_on(dispatcher) == "1F0 1B0 1W0 1F1"


def test_forwards_that_the_hold_withholds_are_not_counted_as_ready() -> None:
    dispatcher = hint_dispatcher("bf", LOOP, 0, hold=2)
    ask(dispatcher)
    arrive(dispatcher, "2F0")
    (run,) = dispatcher.handle(0, ComputeIdle())
    assert isinstance(run, RunTask)
    assert (str(run.task), run.ready, run.held) == ("2F0", 1, 2)


def test_at_the_hold_without_a_forward_here_the_cause_is_the_missing_input() -> None:
    dispatcher = hint_dispatcher("bf", Shape(3, 4), 1, hold=1)
    arrive(dispatcher, "1F0")
    assert ask(dispatcher) == "1F0"
    assert ask(dispatcher) == "forward_input"


def test_fixed_dispatch_ignores_both_bounds() -> None:
    shape = Shape(1, 3)
    gpipe = hint_named("gpipe").for_shape(shape)
    limited = Dispatcher(shape, 0, Policy(gpipe, dispatch=Dispatch.FIXED, limit=1))
    held = Dispatcher(shape, 0, Policy(gpipe, dispatch=Dispatch.FIXED, hold=1))
    assert run_on(limited) == run_on(held) == "0F0 0F1 0F2 0B0 0B1 0B2"


def test_a_forward_only_step_has_no_hold() -> None:
    dispatcher = hint_dispatcher("bf", Shape(2, 3, kinds=FORWARD_ONLY), 0, hold=1)
    assert run_on(dispatcher) == "0F0 0F1 0F2"


# Invalid bounds.


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_1_is_refused(limit: int) -> None:
    with pytest.raises(
        UsageError, match=f"the limit is {limit}; it must be a whole number, at least 1"
    ):
        hint_dispatcher("bf", Shape(2, 2), 0, limit=limit)


@pytest.mark.parametrize(("hold", "num_chunks"), [(0, 1), (1, 2), (3, 4)])
def test_a_hold_below_one_slot_a_chunk_is_refused(hold: int, num_chunks: int) -> None:
    with pytest.raises(UsageError, match=r"the hold is .*; it must be a whole number, at least 1"):
        Dispatcher(Shape(2, 2, num_chunks), 0, Policy(HINTS["bf"], hold=Fraction(hold, num_chunks)))


def test_a_limit_and_a_hold_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        hint_dispatcher("bf", Shape(2, 2), 0, limit=2, hold=2)


# Bounds as text.


@pytest.mark.parametrize(
    ("text", "hold", "again"),
    [
        ("12", 12, "12"),
        ("1500000B", Bytes(1_500_000), "1500000B"),
        ("512MiB", Bytes(512 * 2**20), "512MiB"),
        ("40GiB", Bytes(40 * 2**30), "40GiB"),
        ("40gib", Bytes(40 * 2**30), "40GiB"),
        ("40GB", Bytes(40 * 10**9), "40GB"),
        ("1.5 MB", Bytes(1_500_000), "1500000B"),
        ("512kB", Bytes(512_000), "512000B"),
        ("2TB", Bytes(2 * 10**12), "2TB"),
        ("0.5GiB", Bytes(2**29), "512MiB"),
        ("1.0x", ShareOf1F1B(Fraction(1)), "1.0x"),
        ("0.75x", ShareOf1F1B(Fraction(3, 4)), "0.75x"),
        ("auto", Auto.AUTO, "auto"),
    ],
)
def test_a_hold_is_read_and_written(text: str, hold: object, again: str) -> None:
    assert parse_hold(text) == hold
    assert str(parse_hold(text)) == again
    assert parse_hold(again) == hold


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "1.5", "12G", "12  GiB", "0B", "0GB", "0x", "nan", "1e3GiB", "9" * 30 + "B"],
)
def test_an_invalid_hold_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"the hold is '.*'; write 12 \(microbatches\), 1500000B"):
        parse_hold(text)


def test_auto_is_refused_without_a_device() -> None:
    with pytest.raises(UsageError, match="the hold is 'auto'; write"):
        parse_hold("auto", auto=False)


def test_bytes_are_formatted_in_readable_units() -> None:
    assert [format_bytes(num) for num in (0, 999, 1536, 40 * 2**30, 123 * 2**20)] == [
        "0 B",
        "999 B",
        "1.5 KiB",
        "40 GiB",
        "123 MiB",
    ]


# The hold in bytes by hand: two ranks of two chunks (rank 0: stages 0 and 2), three microbatches.

SHORT_LOOP = Shape(2, 3, num_chunks=2)
SIZES = ActivationSizes([[10, 50, 20], [5, 30, 40]])


def dispatcher_of(budget: int, hint: str = "f-first", sizes: ActivationSizes = SIZES) -> Dispatcher:
    policy = Policy(HINTS[hint], hold=Bytes(budget))
    return Dispatcher(SHORT_LOOP, 0, policy, sizes=sizes, validate=True)


def test_a_forward_reserves_bytes_for_the_largest_unfinished_one_of_each_deeper_chunk() -> None:
    dispatcher = dispatcher_of(110)
    # 40 bytes are reserved for 2F2: 10 + 50 fit into the other 70, 20 more do not.
    assert run_on(dispatcher) == "0F0 0F1"
    assert ask(dispatcher) == "hold"
    arrive(dispatcher, "2F0")
    assert ask(dispatcher) == "2F0"
    arrive(dispatcher, "2B0")
    assert ask(dispatcher) == "2B0"
    arrive(dispatcher, "0B0")
    assert run_on(dispatcher) == "0B0 0F2"


def test_a_reserve_shrinks_once_the_heaviest_has_run() -> None:
    sizes = ActivationSizes([[10, 50, 20], [40, 5, 5]])
    dispatcher = dispatcher_of(115, sizes=sizes)
    assert run_on(dispatcher) == "0F0 0F1"
    assert ask(dispatcher) == "hold"  # 20 more do not fit beside the 40 reserved for 2F0
    arrive(dispatcher, "2F0")
    assert ask(dispatcher) == "2F0"
    assert ask(dispatcher) == "hold"
    arrive(dispatcher, "2B0")
    assert run_on(dispatcher) == "2B0 0F2"  # they fit beside the 5 reserved for 2F1


def test_a_light_forward_does_not_overtake_one_that_does_not_fit() -> None:
    shape = Shape(1, 3)
    policy = Policy(HINTS["f-first"], hold=Bytes(60))
    dispatcher = Dispatcher(shape, 0, policy, sizes=ActivationSizes([[20, 50, 5]]))
    assert run_on(dispatcher) == "0F0 0B0 0F1 0F2 0B1 0B2"


def test_pending_weight_gradient_bytes_count_until_w_has_run() -> None:
    shape = Shape(2, 2, kinds=SPLIT_BACKWARD)
    policy = Policy(HINTS["bfw"], hold=Bytes(100))
    sizes = ActivationSizes([[60, 60]], [[30, 45]])
    dispatcher = Dispatcher(shape, 0, policy, sizes=sizes)
    assert ask(dispatcher) == "0F0"
    assert dispatcher.peak_held_bytes == 60
    arrive(dispatcher, "0B0")
    assert [ask(dispatcher) for _ in range(2)] == ["0B0", "0F1"]
    assert dispatcher.peak_held_bytes == 90


def test_a_budget_below_the_least_possible_is_refused_with_the_figure() -> None:
    with pytest.raises(UsageError, match=r"the hold of 89 B \(89 bytes\) .* set it to 90B or more"):
        dispatcher_of(89)
    dispatcher_of(90)


def test_a_hold_in_bytes_needs_sizes() -> None:
    with pytest.raises(ValueError, match="needs the sizes"):
        Dispatcher(SHORT_LOOP, 0, Policy(HINTS["bf"], hold=Bytes(9)))


def test_a_binding_order_has_no_hold_in_bytes() -> None:
    with pytest.raises(UsageError, match="give the hold in microbatches, or use --dispatch ready"):
        Policy(HINTS["bf"], dispatch=Dispatch.FIXED, hold=Bytes(9))


@pytest.mark.parametrize(("activations", "pending_w"), [([[1, -1]], None), ([[3, 3]], [[3, 4]])])
def test_impossible_sizes_are_refused(
    activations: list[list[int]], pending_w: list[list[int]]
) -> None:
    with pytest.raises(ValueError, match=r"negative|more bytes are pending for W"):
        ActivationSizes(activations, pending_w)


# Random steps.


def check(case: Case, history: History) -> None:
    check_step(history, sizes=case.sizes, budgets=case.budgets if case.binds else None)


@pytest.mark.timeout(1200)
@examples(quick=80, thorough=20_000)
@given(SEEDS)
def test_no_step_stalls_or_exceeds_its_budget(seed: int) -> None:
    case = random_case_in_bytes(seed)
    check(case, case.play(case.dispatchers()))


@examples(quick=30, thorough=2_000)
@given(SEEDS)
def test_every_answer_matches_the_specification(seed: int) -> None:
    case = random_case_in_bytes(seed)
    if case.shape.num_microbatches <= 16:
        check(case, case.play(case.checked_dispatchers()))


@examples(quick=30, thorough=2_000)
@given(SEEDS)
def test_with_equal_sizes_it_equals_the_hold_in_microbatches(seed: int) -> None:
    """Every dispatch, wait and count is the same, also if the budget exceeds the hold by less than
    one microbatch."""
    case = random_case(seed, dispatch=Dispatch.READY)
    shape = case.shape
    hold = case.hold or shape.num_chunks
    size = 1 + seed % 1000
    sizes = ActivationSizes([[size] * shape.num_microbatches] * shape.num_stages)
    budget = hold * size + seed % size
    counted = replace(case, limit=None, hold=hold)
    weighed = replace(case, limit=None, hold=None, sizes=sizes, budgets=(budget,) * shape.num_ranks)
    histories = [each.play(each.dispatchers()) for each in (counted, weighed)]
    for node, happened in histories[1].nodes.items():
        for ran in happened.ran:
            assert ran.run.held_bytes == size * ran.run.held, node
        happened.ran[:] = [ran._replace(run=ran.run._replace(held_bytes=0)) for ran in happened.ran]
    assert histories[0] == histories[1]


class PlainCapInBytes(NaiveDispatcher):
    """Runs any forward that fits now, without a reserve for deeper chunks."""

    def reserve(self, stage: int) -> int:
        return 0


class ReserveOfSmallest(NaiveDispatcher):
    """Reserves for each deeper chunk the bytes of its smallest unfinished forward."""

    def reserve(self, stage: int) -> int:
        return sum(
            min(
                (self.size(f) for f in self.unfinished if f.kind is Kind.F and f.stage == deeper),
                default=0,
            )
            for deeper in self.shape.stages_of(self.rank)
            if deeper > stage
        )


class OffByOneByte(NaiveDispatcher):
    """Counts one byte too few."""

    def used(self) -> int:
        return super().used() - 1


class FreesAllAtB(NaiveDispatcher):
    """Counts no pending weight-gradient bytes."""

    def used(self) -> int:
        if self.sizes is None:
            return 0
        return sum(
            self.size(f)
            for f in self.done
            if f.kind is Kind.F and f._replace(kind=Kind.B) not in self.done
        )


@pytest.mark.parametrize("wrong", [PlainCapInBytes, ReserveOfSmallest, OffByOneByte, FreesAllAtB])
def test_a_wrong_rule_is_caught(wrong: type[NaiveDispatcher]) -> None:
    """For example, a plain cap in bytes stalls in some of these trials."""
    num_caught = num_tried = 0
    for seed in range(60):
        case = random_case_in_bytes(seed)
        if not 4 <= case.shape.num_microbatches <= 16 or not case.binds:
            continue
        num_tried += 1
        try:
            check(case, case.play(case.deciders(wrong, case.order)))
        except AssertionError:
            num_caught += 1
    assert num_caught > num_tried / 10


def test_a_plain_cap_in_bytes_stalls() -> None:
    stalled = 0
    for seed in range(60):
        case = random_case_in_bytes(seed)
        if 4 <= case.shape.num_microbatches <= 16 and case.shape.num_chunks > 1:
            assert case.play(case.dispatchers()).is_whole
            stalled += not case.play(case.deciders(PlainCapInBytes, case.order)).is_whole
    assert stalled > 5

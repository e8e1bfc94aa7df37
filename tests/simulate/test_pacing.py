"""Tests that paced runs have the task times of the simulator, by comparison with its records."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.megatron.native.schedule import NativePace
from rrfp.planning.trials import Setting, run_settings
from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Auto, Dispatch, Policy
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.conditions import Conditions, conditions
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.jitter import NO_JITTER, parse_jitter
from rrfp.simulate.step import new_recording
from rrfp.trace.records import SendRecord, StimulusRecord, TaskRecord, WaitRecord
from rrfp.train.pacing import PaceTally, StepPacer, check_pace, make_pace
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks
from tests.megatron.training import SMALL, RankRun, train_natively, train_variants
from tests.properties.cases import examples

pytestmark = pytest.mark.timeout(600)


WORK_NS = 1000
MS = 1_000_000


class FakeTime:
    """A clock that advances only by sleeping and working."""

    def __init__(self) -> None:
        self.now_ns = 0

    def clock(self) -> int:
        return self.now_ns

    def sleep(self, due_ns: int) -> None:
        self.now_ns = max(self.now_ns, due_ns)


def pacer_of(
    time: FakeTime,
    costs: Costs | None,
    jitter: str = "none",
    *,
    shape: Shape,
    admit: Admit = Admit.GIVEN,
    seed: int = 0,
    pp_rank: int = 0,
    dp_rank: int = 0,
) -> StepPacer:
    return StepPacer(
        costs,
        parse_jitter(jitter),
        admit,
        seed,
        shape,
        pp_rank,
        dp_rank,
        sleep=time.sleep,
        clock=time.clock,
    )


@given(
    hint=st.sampled_from(["bf", "bfw", "1f1b"]),
    costs=st.sampled_from(["language", "multimodal"]),
    jitter=st.sampled_from(
        ["none", "lognormal:0.5", "J2", "J3@1+stop:0:0.05:0.1", "length:0.7+slow-stage:1:2"]
    ),
    # A planned order comes from the planner's process, and neither side would find it alone.
    admit=st.sampled_from([Admit.GIVEN, Admit.PYRAMID]),
    seed=st.integers(0, 2**32 - 9),
)
@examples(quick=10, thorough=200)
def test_paced_tasks_take_as_long_as_simulated_ones(
    hint: str, costs: str, jitter: str, admit: Admit, seed: int
) -> None:
    """Compare two steps of two replicas task by task, in the simulator's order."""
    shape = Shape(3, 5)
    chosen = hint_named(hint).for_shape(shape)
    setting = Setting(
        shape=replace(shape, kinds=kinds_of(chosen)),
        policy=Policy(chosen),
        costs=resolve_costs(costs),
        jitter=parse_jitter(jitter),
        admit=admit,
        num_replicas=2,
    )
    recording = new_recording(setting.shape, 1, 2, {})
    run_settings([setting], [seed, seed + 1], recordings=[recording])
    for records in recording.ranks:
        info = records.info
        time = FakeTime()
        pacer = pacer_of(
            time,
            setting.costs,
            jitter,
            shape=shape,
            admit=admit,
            seed=seed,
            pp_rank=info.pp_rank,
            dp_rank=info.dp_rank,
        )
        for phase in records.phases:
            time.now_ns = phase.start_ns
            step = pacer.start_step(phase.step, setting.shape)
            for task in (task for task in records.tasks if task.step == phase.step):
                time.now_ns = task.start_ns
                with step.task(Task(task.stage, Kind(task.kind), task.microbatch)):
                    time.now_ns += WORK_NS
                assert time.now_ns == task.end_ns
            assert pacer.tally == PaceTally(setting.shape.num_tasks_of_a_rank)


def test_the_admission_order_matches_the_simulator() -> None:
    shape = Shape(4, 8)
    pacer = pacer_of(
        FakeTime(), resolve_costs("multimodal"), shape=shape, admit=Admit.PYRAMID, seed=5
    )
    assert pacer.modeled is not None
    costs = resolve_costs("multimodal").step(shape, 7, 0)
    rows = (*costs.times.forward, *costs.times.input_gradient, *costs.times.weight_gradient)
    weights = [sum(of_microbatch) for of_microbatch in zip(*rows, strict=True)]
    admitted = [weights[microbatch] for microbatch in pacer.modeled.order(2)]
    heaviest = admitted.index(max(weights))
    assert sorted(pacer.modeled.order(2)) == list(range(8))
    assert admitted[:heaviest] == sorted(admitted[:heaviest])
    assert admitted[heaviest:] == sorted(admitted[heaviest:], reverse=True)


def test_work_that_takes_longer_than_its_model_is_counted() -> None:
    time, shape = FakeTime(), Shape(2, 4)
    pacer = pacer_of(time, resolve_costs("uniform"), shape=shape)
    step = pacer.start_step(0, shape)
    for microbatch, work_ms in enumerate((1, 21, 19, 24)):
        before_ns = time.now_ns
        with step.task(Task(0, Kind.F, microbatch)):
            time.now_ns += work_ms * MS
        assert time.now_ns - before_ns == max(20, work_ms) * MS
    assert pacer.tally == PaceTally(num_tasks=4, num_over=2, worst_over_ns=4 * MS)
    assert pacer.tally + PaceTally(1, 1, MS) == PaceTally(5, 3, 4 * MS)
    pacer.start_step(1, shape)
    assert pacer.tally == PaceTally()


def test_work_of_a_task_with_zero_time_counts_as_over(tmp_path: Path) -> None:
    costs = tmp_path / "mine.toml"
    costs.write_text("seconds = { F = 0.02, B = 0.02, W = 0 }\n")
    time, shape = FakeTime(), Shape(2, 4, kinds=SPLIT_BACKWARD)
    pacer = pacer_of(time, resolve_costs(str(costs)), shape=shape)
    with pacer.start_step(0, shape).task(Task(0, Kind.W, 0)):
        time.now_ns += MS
    assert pacer.tally == PaceTally(num_tasks=1, num_over=1, worst_over_ns=MS)


def test_a_task_that_fails_is_neither_stretched_nor_counted() -> None:
    time, shape = FakeTime(), Shape(2, 4)
    pacer = pacer_of(time, resolve_costs("uniform"), shape=shape)
    step = pacer.start_step(0, shape)
    with pytest.raises(RuntimeError), step.task(Task(0, Kind.F, 0)):
        raise RuntimeError
    assert (time.now_ns, pacer.tally) == (0, PaceTally())


@pytest.mark.parametrize(
    ("jitter", "taken_ms"),
    [("none", 10.0), ("slow-stage:0:3", 30.0), ("slow-stage:1:3", 10.0), ("stop:0:0.004:0.1", 110)],
)
def test_without_costs_jitter_extends_measured_work(jitter: str, taken_ms: float) -> None:
    time, shape = FakeTime(), Shape(2, 4)
    pacer = pacer_of(time, None, jitter, shape=shape)
    with pacer.start_step(0, shape).task(Task(0, Kind.B, 1)):
        time.now_ns += 10 * MS
    assert time.now_ns == taken_ms * MS
    # Without costs the expected time is unknown, so no task is counted.
    assert pacer.tally == PaceTally()


def test_the_papers_delays_follow_measured_times() -> None:
    """Section 9 of the paper: a tenth of the tasks is delayed by half of the rank's recent mean
    task time (at least 5 ms), times a factor from 0.5 to 1.5."""
    shape = Shape(1, 4000, kinds=FORWARD_ONLY)
    time = FakeTime()
    step = pacer_of(time, None, "J1", shape=shape).start_step(0, shape)
    delays_ms = []
    for microbatch in range(shape.num_microbatches):
        before_ns = time.now_ns
        with step.task(Task(0, Kind.F, microbatch)):
            time.now_ns += 20 * MS
        delays_ms.append((time.now_ns - before_ns) / MS - 20)
    hit = [delay_ms for delay_ms in delays_ms if delay_ms]
    assert 0.08 < len(hit) / len(delays_ms) < 0.12
    assert 5 <= min(hit) < 6
    assert 14 < max(hit) <= 15


def test_a_device_is_busy_for_the_difference_to_its_expected_time() -> None:
    """A device gets the time that is left before its work is done, and reports the real time of
    the work afterwards."""
    time = FakeTime()
    shape = Shape(2, 3, kinds=FORWARD_ONLY)
    costs = resolve_costs("uniform")
    times = costs.step(shape, 0, 0).times.forward[0]
    pacer = pacer_of(time, costs, shape=shape)
    step = pacer.start_step(0, shape)
    tasks = [Task(0, Kind.F, microbatch) for microbatch in range(3)]
    assert step.left_ns(tasks[0], WORK_NS) == times[0] - WORK_NS
    assert step.left_ns(tasks[1], times[1] + 1) == 0
    step.worked(tasks[0], times[0] - 1)
    assert pacer.tally == PaceTally(1)
    # The tally counts the real time, not the expected one.
    step.worked(tasks[1], times[1] + 5)
    assert pacer.tally == PaceTally(2, 1, 5)


def test_jitter_without_costs_extends_the_expected_time_of_a_device() -> None:
    time = FakeTime()
    shape = Shape(2, 2, kinds=FORWARD_ONLY)
    slow = pacer_of(time, None, "slow-stage:1:2", shape=shape, pp_rank=1).start_step(0, shape)
    assert slow.left_ns(Task(1, Kind.F, 0), 7 * MS) == 7 * MS
    assert slow.left_ns(Task(1, Kind.F, 1), 0) == 0


def test_without_costs_and_jitter_there_is_no_pace() -> None:
    assert make_pace(None, NO_JITTER, Admit.GIVEN, 0, Shape(2, 2), 0, 0) is None
    assert make_pace(None, parse_jitter("J0"), Admit.GIVEN, 0, Shape(2, 2), 0, 0) is not None


# Messages of Megatron's own schedule.


class _Latencies:
    """A `StepPace` that records the tasks whose latency is requested."""

    def __init__(self) -> None:
        self.asked: list[Task] = []

    def task(self, task: Task) -> Any:
        raise NotImplementedError

    def left_ns(self, task: Task, work_ns: int) -> int:
        raise NotImplementedError

    def worked(self, task: Task, worked_ns: int) -> None:
        raise NotImplementedError

    def expected_ns(self, task: Task) -> int | None:
        raise NotImplementedError

    def message_ns(self, task: Task) -> int:
        self.asked.append(task)
        return 0


def exchanged(shape: Shape, pp_rank: int, name: str, count: int) -> list[Task]:
    """Return the messages of the first `count` calls of `_communicate` with the argument `name`."""
    pace = _Latencies()

    def communicate(**_: object) -> str:
        return "done"

    paced: Callable[..., str] = NativePace(pace, shape, pp_rank).transfer(communicate)
    nothing = {"tensor_send_next": None, "tensor_send_prev": None, "recv_prev": False}
    for _ in range(count):
        assert paced(**{**nothing, "recv_next": False, name: True}) == "done"
    return pace.asked


@pytest.mark.parametrize("shape", [Shape(4, 8), Shape(4, 8, 2), Shape(3, 6, 2)])
def test_both_ends_of_a_native_transfer_agree_on_its_message(shape: Shape) -> None:
    """A rank's n-th send in a direction is the n-th message that its neighbor receives."""
    for rank in range(shape.num_ranks):
        following = (rank + 1) % shape.num_ranks
        if shape.num_chunks == 1 and following == 0:
            continue
        # The first stage receives no forward, so one of rank 0's chunks receives none.
        count = shape.num_microbatches * (shape.num_chunks - (following == 0))
        sent = exchanged(shape, rank, "tensor_send_next", count)
        assert sent == exchanged(shape, following, "recv_prev", count)
        assert {task.kind for task in sent} == {Kind.F}
        sent = exchanged(shape, following, "tensor_send_prev", count)
        assert sent == exchanged(shape, rank, "recv_next", count)
        assert len(set(sent)) == count


# Valid and invalid settings.


def settings(**chosen: Any) -> TrainSettings:
    return TrainSettings(**{"pp": 4, "microbatches": 8, **chosen})


def csv_of(path: Path, *rows: str) -> str:
    path.write_text("\n".join(("kind,pp_rank,chunk,microbatch,seconds", *rows)))
    return str(path)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"jitter": "lognormal:0.5"}, "add --pace"),
        ({"jitter": "J2+pareto:1.5"}, "add --pace"),
        ({"jitter": "slow-stage:0:0.5"}, "add --pace"),
        ({"jitter": "slow-link:0-1:3"}, "add --pace"),
        ({"jitter": "slow-stage:4:2"}, "names pipeline rank 4"),
        ({"jitter": "J2@7"}, "names pipeline rank 7"),
        ({"jitter": "wobble"}, "is not jitter"),
        ({"pace": "wobble"}, "is not costs"),
        ({"pace": "multimodal", "hold": Auto.AUTO}, "give the hold as a size"),
        ({"pace": "nowhere.csv"}, "cannot read"),
        ({"pace": "language", "jitter": "slow-link:0-1:3"}, "messages take no time"),
        ({"pace": "language", "jitter": "stop:9:1:1"}, "names pipeline rank 9"),
    ],
)
def test_invalid_pace_settings_are_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_pace(settings(**chosen))


def test_costs_must_fit_the_pipeline_and_the_hint(tmp_path: Path) -> None:
    whole = [f"{kind},{rank},,,0.02" for kind in "FB" for rank in range(4)]
    table = csv_of(tmp_path / "whole.csv", *whole)
    check_pace(settings(pace=table))
    with pytest.raises(UsageError, match="names pipeline rank 2 and there are 2"):
        check_pace(settings(pace=table, pp=2))
    short = csv_of(tmp_path / "short.csv", *whole[:-1], "W,0,,,0.01")
    with pytest.raises(UsageError, match="no row for 3B0"):
        check_pace(settings(pace=short, hint="bfw"))


def test_valid_pace_settings_are_accepted() -> None:
    for chosen in (
        {"jitter": "J3+slow-stage:3:1.5+stop:0:0.5:0.1"},
        {"pace": "language", "jitter": "lognormal:0.5"},
        {"pace": "multimodal", "admit": "pyramid", "hint": "bfw"},
        {"pace": "language", "dispatch": str(Dispatch.FIXED)},
        {"pace": "uniform", "chunks": 2, "placement": str(Placement.V)},
    ):
        check_pace(settings(**chosen))


# Paced training in processes: tasks take their simulated times, and training is unchanged.


PACED: dict[str, Any] = {
    **SMALL,
    "pp": 4,
    "steps": 2,
    "pace": "multimodal",
    "jitter": "lognormal:0.3+stop:2:0:0.2",
    "seed": 11,
}


def over_ms(run: RankRun) -> list[float]:
    """Return the ms by which each task took longer than in the simulator without stops."""
    settings = TrainSettings(**PACED)
    costs, jitter = resolve_costs("multimodal"), parse_jitter(PACED["jitter"])
    conditions_of_step: dict[int, Conditions] = {
        step: conditions(costs, jitter, Admit.GIVEN, settings.shape, 11 + step, 0, step)
        for step in range(settings.num_steps)
    }

    def over_of(task: TaskRecord) -> float:
        rows = conditions_of_step[task.step].times.by_kind(split=False)[Kind(task.kind)]
        return (task.end_ns - task.start_ns - rows[task.stage][task.microbatch]) / MS

    return [over_of(task) for task in run.tasks()]


@pytest.mark.slow
def test_tasks_take_their_modelled_times_under_every_dispatch() -> None:
    variants = [{"hint": "bf"}, {"hint": "1f1b", "dispatch": "fixed"}, {"dispatch": "megatron"}]
    by_rank = run_ranks(4, train_variants, PACED, variants, timeout_s=500)
    for pp_rank, runs in enumerate(by_rank):
        for run in runs:
            times_ms = over_ms(run)
            assert len(times_ms) == 2 * 2 * 4
            assert min(times_ms) >= 0
            # On two cores single tasks may be late, but not most of them.
            assert median(times_ms) < 5
            for task in run.tasks() if pp_rank == 2 else ():
                summary = run.summaries[task.step]
                assert summary is not None
                # This rank begins with a stop of 200 ms. Its pace starts shortly before the
                # recorded start of the step.
                assert task.end_ns - summary.start_ns > 190 * MS
        assert {tuple(run.losses) for run in runs} == {tuple(runs[0].losses)}
        assert len({run.parameters_sha256 for run in runs}) == 1


@pytest.mark.slow
def test_a_pace_does_not_change_losses_and_parameters() -> None:
    settings = {**SMALL, "pp": 2, "steps": 2, "seed": 11}
    paced = {"pace": "uniform", "jitter": "J3", "hint": "bfw"}
    (paced_runs, native_runs) = (
        run_ranks(2, train_variants, settings, [paced], timeout_s=300),
        run_ranks(2, train_natively, settings, timeout_s=300),
    )
    for (run,), (native,) in zip(paced_runs, native_runs, strict=True):
        assert run.losses == native.losses
        assert run.grad_norms == native.grad_norms
        assert run.parameters_sha256 == native.parameters_sha256


HOPS = """\
seconds = { F = 0.01, B = 0.01, W = 0.01 }
links = { latency_s = 3e-3 }
"""


@pytest.mark.slow
def test_patience_does_not_change_losses_and_parameters(tmp_path: Path) -> None:
    costs = tmp_path / "hops.toml"
    costs.write_text(HOPS)
    settings = {**SMALL, "pp": 4, "layers": 8, "microbatches": 8, "chunks": 2, "placement": "v"}
    settings |= {"hint": "zb-v", "w": "ranked", "hold": 4, "pace": str(costs), "steps": 4}
    variants = [{"patience": patience} for patience in ("0", "auto", "4ms")]
    by_rank = run_ranks(4, train_variants, settings, variants, timeout_s=300)
    num_waits = [0] * 3
    for runs in by_rank:
        assert {tuple(run.losses) for run in runs} == {tuple(runs[0].losses)}
        assert {tuple(run.grad_norms) for run in runs} == {tuple(runs[0].grad_norms)}
        assert len({run.parameters_sha256 for run in runs}) == 1
        for number, run in enumerate(runs):
            waits = [r for r in run.records if isinstance(r, WaitRecord) and r.cause == "patience"]
            num_waits[number] += len(waits)
            names = [r.name for r in run.records if isinstance(r, StimulusRecord)]
            assert ("Announced" in names) is (number > 0)
            # Announcements are not recorded as messages.
            assert sum(isinstance(r, SendRecord) for r in run.records) < len(run.tasks())
    assert num_waits[0] == 0
    assert num_waits[2] > 0

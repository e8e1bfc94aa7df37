"""What a patient worker waits for, when it gives up, and what it announces to others."""

from rrfp.runtime.protocols import Decided, Event, Forecast
from rrfp.schedule.knobs import IMPATIENT, Patience
from rrfp.schedule.shape import FORWARD_ONLY, Shape
from rrfp.trace.records import NS_PER_S, StimulusRecord
from tests.worker_world import F0, TICK_NS, World, arrived, task

# Patience: bf on the middle one of three stages, which runs 1B0 before 1F1.


def forecast(text: str, heard_ns: int, left_ns: int, step: int = 0, peer: int = 0) -> Forecast:
    return Forecast(peer, step, task(text), heard_ns, left_ns)


def patient_world(*after_1f0: Event, patience: Patience = 10_000) -> World:
    """Runs 1F0 while 1F1 arrives, and then what is given; all else comes when it waits."""
    world = World(script=[[arrived("1F0")]], patience=patience)
    world.during[F0] = [arrived("1F1"), *after_1f0]
    world.script += [[arrived("1B0", peer=2)], [arrived("1B1", peer=2)]]
    return world


def test_a_worker_waits_for_what_was_announced_instead() -> None:
    world = patient_world(forecast("1B0", 0, 500, peer=2))
    world.run_step(Shape(3, 2))
    assert [call for call in world.calls if call.startswith("run")] == [
        *("run 1F0 on [0.0]", "run 1B0 on [0.0]", "run 1F1 on [1.0]", "run 1B1 on [1.0]"),
    ]
    assert world.causes() == ["warmup", "patience", "backward_input"]
    # It waited up to the end of its patience, and no longer.
    (wait_s,) = [each for each in world.inbox.timeouts_s if 0 < each < 1e-3]
    assert 0 < wait_s * NS_PER_S <= 500 + 10_000


def test_a_worker_without_patience_takes_no_notice_and_announces_nothing() -> None:
    world = patient_world(forecast("1B0", 0, 500, peer=2), patience=IMPATIENT)
    world.run_step(Shape(3, 2))
    assert [call for call in world.calls if call.startswith("run")][:2] == [
        *("run 1F0 on [0.0]", "run 1F1 on [1.0]"),
    ]
    assert "patience" not in world.causes()
    assert not any("forecast" in call for call in world.calls)
    names = {record.name for record in world.records if isinstance(record, StimulusRecord)}
    assert names == {"ComputeIdle", "InputArrived"}


def test_a_worker_gives_up_when_its_patience_ends() -> None:
    world = patient_world(forecast("1B0", 0, 500, peer=2))
    world.script[:] = [world.script[0]]
    # Nothing comes, and time passes with each look at the clock.
    later: list[Event] = [arrived("1B0", peer=2), arrived("1B1", peer=2)]
    world.during[task("1F1")] = later
    world.run_step(Shape(3, 2))
    assert [call for call in world.calls if call.startswith("run")] == [
        *("run 1F0 on [0.0]", "run 1F1 on [1.0]", "run 1B0 on [0.0]", "run 1B1 on [1.0]"),
    ]
    assert world.causes() == ["warmup", "patience"]


def test_a_worker_announces_what_it_begins_once_it_knows_how_long_that_takes() -> None:
    world = patient_world()
    world.task_ns = 1000
    world.run_step(Shape(3, 2))
    sent = [call for call in world.calls if not call.startswith("consumed")]
    assert sent == [
        *("run 1F0 on [0.0]", "send 100.0 to 2 for 2F0"),
        f"forecast 2F1 to 2 in {1000 + TICK_NS}",
        *("run 1F1 on [1.0]", "send 101.0 to 2 for 2F1"),
        *("run 1B0 on [0.0]", "send 100.0 to 0 for 0B0"),
        f"forecast 0B1 to 0 in {1000 + TICK_NS}",
        *("run 1B1 on [1.0]", "send 101.0 to 0 for 0B1"),
    ]


def test_what_is_announced_for_the_next_step_waits_for_it() -> None:
    world = patient_world(forecast("1B0", 0, 1, step=1, peer=2))
    shape = Shape(3, 2)
    world.run_step(shape, 0)
    assert "patience" not in world.causes()
    world.script += [[arrived("1F0", step=1)], [arrived("1B0", step=1, peer=2)]]
    world.script += [[arrived("1B1", step=1, peer=2)]]
    world.during[F0] = [arrived("1F1", step=1), forecast("1B0", world.now_ns, 900, 1, 2)]
    world.run_step(shape, 1)
    stimuli = [r for r in world.records if isinstance(r, StimulusRecord) and r.step == 1]
    assert [r.name for r in stimuli][:1] == ["Announced"]


def test_a_group_s_follower_announces_nothing_and_takes_no_notice() -> None:
    world = World(members=(4, 1), patience=10_000)
    world.inbox.put(forecast("1F0", 0, 500))
    world.script += [[arrived("1F0"), Decided(4, 0, 0, F0)]]
    world.run_step(Shape(3, 1, kinds=FORWARD_ONLY))
    names = {record.name for record in world.records if isinstance(record, StimulusRecord)}
    assert names == {"ComputeIdle", "InputArrived", "TaskAgreed"}
    assert not any("forecast" in call for call in world.calls)

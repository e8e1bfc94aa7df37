"""`admit plan` in the drop-in: the order is planned while the step before runs, and the training is
that of Megatron's own schedule on items in that order."""

import itertools
import logging
import os
import select
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rrfp.errors import UsageError
from rrfp.megatron.look_ahead import AheadIterator, AheadIterators
from rrfp.megatron.settings import DispatchSettings
from tests.loops import NUM
from tests.ranks import run_ranks
from tests.rigs import Rig, native, on_rigs, ours
from tests.training import SMALL

VARIED = {**SMALL, "pp": 2, "microbatches": NUM, "variable_lengths": True, "seq_length": 48}
MOST_STEPS = 12

pytestmark = pytest.mark.timeout(310)


def test_settings_that_plan_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="admit 'pyramid' plans nothing; choose admit 'plan'"):
        DispatchSettings(admit="pyramid", plan_ms=5)
    for wrong in (0, -1.0, "5", float("inf")):
        with pytest.raises(UsageError, match="must be a number above 0"):
            DispatchSettings(admit="plan", plan_ms=wrong)  # type: ignore[arg-type]


def test_items_ahead_go_to_the_next_step() -> None:
    ahead = AheadIterator(iter(range(5)))
    assert [next(ahead), next(ahead)] == [0, 1]
    assert ahead.look(2) == [2, 3]
    assert ahead.look(2) == [2, 3]
    assert next(ahead) == 2
    # One is missing, and none is lost.
    assert ahead.look(3) is None
    assert list(ahead) == [3, 4]


def test_a_failure_ahead_comes_in_its_place() -> None:
    def items() -> Any:
        yield 0
        raise OSError("the disk is gone")

    ahead = AheadIterator(items())
    assert ahead.look(2) is None
    assert next(ahead) == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)


def test_draws_that_move_random_states_are_not_looked_at() -> None:
    ahead = AheadIterator(int(torch.randint(4, ())) for _ in range(4))
    assert ahead.look(3) is None
    assert ahead.look(1) is None
    assert len(list(ahead)) == 4


def test_another_iterator_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    both = AheadIterators()
    first, second = iter(range(4)), iter(range(4))
    (looked,) = both.put_in([first])
    assert looked.look(2) == [0, 1]
    with caplog.at_level(logging.WARNING):
        assert list(both.put_in([second])[0]) == [0, 1, 2, 3]
    assert "2 items that were drawn ahead wait for the one before" in caplog.text
    assert list(both.put_in([first])[0]) == [0, 1, 2, 3]
    assert both.put_in([[1, 2], None]) == [[1, 2], None]
    assert both.put_in([second, second]) == [second, second]


def test_a_planned_run_trains_as_in_that_order() -> None:
    assert all(run_ranks(2, on_rigs, train_planned, VARIED, timeout_s=300))


def train_planned(layout: Any, settings: dict[str, Any]) -> bool:
    rig = Rig(settings, layout)
    schedule = ours(admit="plan", plan_ms=20.0, hint="bfw")
    stream = itertools.chain.from_iterable(rig.data(NUM) for _ in range(MOST_STEPS))
    items = list(rig.data(NUM))
    planned = 0
    for _ in range(MOST_STEPS):
        outcome = rig.run(schedule, num_microbatches=NUM, data=stream)
        order = schedule.last_order
        assert sorted(order) == list(range(NUM))
        in_order = iter([items[number] for number in order])
        assert rig.run(native(), num_microbatches=NUM, data=in_order) == outcome
        (links,) = [each for each in schedule._links.values() if each.planner is not None]
        planned += links.planner.last is not None
        if planned == 2:
            break
        if layout.rank == 0:
            # A step of this model ends before the planner's process has begun.
            assert select.select([links.planner._process._answers], [], [], 60)[0]
            time.sleep(0.2)
    assert planned == 2
    process = links.planner._process
    assert (process is not None) == (layout.rank == 0)
    schedule.close()
    links.planner.close()
    return process is None or not Path(f"/proc/{process.pid}").exists() or os.name != "posix"

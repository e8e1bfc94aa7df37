"""The names of ranges in a profile: ours are read as they were written, and others tell nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.interchange.range_names import (
    Maker,
    ScheduleRange,
    TaskRange,
    WaitRange,
    parse_range,
    schedule_range,
    task_range,
    wait_range,
)
from rrfp.schedule.tasks import Cause, Kind
from rrfp.trace.records import evaluation_step

number = st.integers(0, 10**6)


steps = st.one_of(number, number.map(evaluation_step))


@given(number, number, number, steps, st.sampled_from(Kind), st.sampled_from(Cause))
def test_names_are_read_as_they_were_written(
    stage: int, chunk: int, microbatch: int, step: int, kind: Kind, cause: Cause
) -> None:
    name = task_range(kind, stage, chunk, microbatch, step)
    assert parse_range(name) == TaskRange(Maker.RRFP, kind, microbatch, stage, step)
    assert parse_range(wait_range(cause, chunk, step)) == WaitRange(Maker.RRFP, cause, step)
    call = ScheduleRange(step, stage, chunk, microbatch, stage, (chunk, microbatch))
    assert parse_range(schedule_range(call)) == call


def test_a_profile_names_evaluations() -> None:
    step = evaluation_step(4)
    assert task_range(Kind.F, 1, 0, 3, step) == "rrfp F3 stage=1 chunk=0 evaluation=4"
    assert wait_range(Cause.TRANSFER, 12, step) == "rrfp wait transfer 12 evaluation=4"
    call = schedule_range(ScheduleRange(step, 1, 1, 0, 0, (1,)))
    assert call == "rrfp schedule evaluation=4 rank=1 pp=1 tp=0 dp=0 stages=1"


@pytest.mark.parametrize(
    "name",
    [
        *("rrfp", "rrfp ", "rrfp F3", "rrfp X3 stage=0 chunk=0 step=0", "rrfp wait x 1 step=0"),
        *("PP:", "PP:F3", "PP:1Q3", "1F3", "PP:1F3 ", "Forward", "Forward x", "PP:1UNSHARD", ""),
        *("rrfp F3 stage=0 chunk=0 step=-1", "rrfp F3 stage=0 chunk=0 test=1"),
        *("rrfp F٣ stage=0 chunk=0 step=0", f"PP:{'9' * 40}F0"),
    ],
)
def test_other_names_tell_nothing(name: str) -> None:
    assert parse_range(name) is None

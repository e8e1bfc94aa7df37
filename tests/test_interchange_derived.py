"""What is derived of every import alike: clocks, waits and messages."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.frames import frames_of
from rrfp.interchange.assemble import assemble
from rrfp.interchange.formats import import_run
from rrfp.interchange.spans import RankSpans, Source, TaskSpan, TransferSpan, least_shifts
from rrfp.schedule.tasks import Cause, Kind
from rrfp.trace.records import Phase, PhaseRecord, RankInfo, WaitRecord
from tests.effort import examples
from tests.made_profiles import FIXTURES

SOURCE = Source("test", 1, "cpu", True, None)


def test_a_clock_that_is_off_is_found_by_causality_and_told(tmp_path: Path) -> None:
    early_us = 50_000_000
    for rank in range(4):
        told = json.loads(
            gzip.decompress((FIXTURES / f"megatron/rank-{rank}.json.gz").read_bytes())
        )
        for each in told["traceEvents"]:
            each["ts"] -= early_us * (rank >= 2)
        (tmp_path / f"{rank}.json").write_text(json.dumps(told))
    straight = import_run([FIXTURES / "megatron"])
    imported = import_run([tmp_path])
    (note,) = imported.notes
    assert "rank 2 by" in note
    assert "rank 3 by" in note
    assert "rank 0" not in note
    assert straight.notes == ()
    expected, found = (bubbles(frames_of(each.recording)) for each in (straight, imported))
    assert found.window_ns == pytest.approx(expected.window_ns, rel=0.01)
    for left, right in zip(found.ranks, expected.ranks, strict=True):
        assert left.busy_ns == right.busy_ns


def test_shifts_that_contradict_each_other_are_none() -> None:
    assert least_shifts({(0, 1): -5, (1, 0): 100}, [0, 1]) == {0: 0, 1: 5}
    assert least_shifts({(0, 1): -5, (1, 2): -5, (2, 0): 20}, [0, 1, 2]) == {0: 0, 1: 5, 2: 10}
    assert least_shifts({(0, 1): -5, (1, 0): 4}, [0, 1]) is None


def test_an_order_that_no_clock_explains_is_told() -> None:
    def rank(number: int, *tasks: tuple[int, int, Kind]) -> RankSpans:
        return RankSpans(
            RankInfo(number, number, 0, 0, (number,), "h", 1),
            [TaskSpan(start, end, 0, kind, number, 0) for start, end, kind in tasks],
            phases=[PhaseRecord(0, 100, 0, Phase.SCHEDULE)],
        )

    imported = assemble(
        [rank(0, (0, 50, Kind.F), (60, 80, Kind.B)), rank(1, (40, 50, Kind.F), (51, 70, Kind.B))],
        SOURCE,
    )
    assert "which no shift of clocks explains" in imported.notes[0]
    assert bubbles(frames_of(imported.recording)).ranks[0].busy_ns == 70


def test_waits_are_derived_from_who_gives_what() -> None:
    """Two stages, one microbatch, known by construction: rank 0 waits for its gradient until 60,
    moves messages until 65, and does nothing known until 70."""

    def rank(number: int, *tasks: tuple[int, int, Kind]) -> RankSpans:
        return RankSpans(
            RankInfo(number, number, 0, 0, (number,), "h", 1),
            [TaskSpan(start, end, 3, kind, number, 0) for start, end, kind in tasks],
            phases=[PhaseRecord(0, 100, 3, Phase.SCHEDULE)],
        )

    first = rank(0, (0, 10, Kind.F), (70, 90, Kind.B))
    first.transfers = [TransferSpan(10, 12, 3), TransferSpan(30, 65, 3)]
    first.waits = [WaitRecord(92, 97, 3, Cause.GRADIENT_SYNC)]
    second = rank(1, (15, 35, Kind.F), (36, 60, Kind.B))
    recording = assemble([first, second], SOURCE).recording
    causes = bubbles(frames_of(recording)).ranks[0].causes_ns
    expected = {"backward_input": 50, "transfer": 5, "overhead": 5, "gradient_sync": 5, "drain": 5}
    assert {cause: ns for cause, ns in causes.items() if ns} == expected
    messages = frames_of(recording).messages.sort("left_ns")
    # The forward came at once, as no wait tells otherwise; the gradient as the transfer ended.
    assert messages.select("left_ns", "came_ns", "used_ns").rows() == [(10, 10, 15), (60, 65, 70)]


def test_a_task_begins_once_its_input_was_given() -> None:
    """A span of torch.distributed.pipelining on the CPU holds the wait for its input."""
    tasks = [TaskSpan(0, 50, 0, Kind.F, 1, 0)]
    late = RankSpans(RankInfo(1, 1, 0, 0, (1,), "h", 1), tasks, receives_inside=True)
    late.phases = [PhaseRecord(0, 50, 0, Phase.SCHEDULE)]
    giver = RankSpans(RankInfo(0, 0, 0, 0, (0,), "h", 1), [TaskSpan(5, 30, 0, Kind.F, 0, 0)])
    giver.phases = [PhaseRecord(5, 30, 0, Phase.SCHEDULE)]
    recording = assemble([giver, late], SOURCE).recording
    assert recording.ranks[1].tasks[0][:2] == (30, 50)


@pytest.mark.parametrize(("late_ns", "told"), [(900, None), (5_000, "rank 1 by 5 us, ")])
def test_only_shifts_that_matter_are_told(late_ns: int, told: str | None) -> None:
    ranks = [
        RankSpans(
            RankInfo(number, number, 0, 0, (number,), "h", 1),
            [TaskSpan(0, late_ns, 0, Kind.F, number, 0)],
            phases=[PhaseRecord(0, late_ns, 0, Phase.SCHEDULE)],
        )
        for number in range(2 if told is None else 20)
    ]
    notes = assemble(ranks, SOURCE).notes
    assert (notes == ()) == (told is None)
    if told is not None:
        assert told in notes[0]
        assert notes[0].endswith("rank 8 by 40 us, ...")


@st.composite
def runs(draw: st.DrawFn) -> list[RankSpans]:
    """Ranks whose tasks come in any order and at any time, and whose clocks are anywhere."""
    num_ranks, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    inside = draw(st.booleans())
    ranks = []
    for number in range(num_ranks):
        tasks = []
        now_ns = draw(st.integers(-1000, 1000))
        start_ns = now_ns
        keys = [(kind, m) for kind in (Kind.F, Kind.B) for m in range(num_microbatches)]
        for kind, microbatch in draw(st.permutations(keys)):
            now_ns += draw(st.integers(0, 50))
            end_ns = now_ns + draw(st.integers(0, 100))
            tasks.append(TaskSpan(now_ns, end_ns, 0, kind, number, microbatch))
            now_ns = end_ns
        transfers = [
            TransferSpan(at, at + draw(st.integers(0, 60)), 0)
            for at in draw(st.lists(st.integers(start_ns, now_ns), max_size=5))
        ]
        spans = RankSpans(
            RankInfo(number, number, 0, 0, (number,), "h", 1),
            tasks,
            transfers=transfers,
            receives_inside=inside,
        )
        spans.phases = [PhaseRecord(start_ns, now_ns + 1, 0, Phase.SCHEDULE)]
        ranks.append(spans)
    return ranks


@examples(quick=40, thorough=1000)
@given(runs())
def test_causes_sum_to_the_window_and_no_message_comes_early(ranks: list[RankSpans]) -> None:
    recording = assemble(ranks, SOURCE).recording
    frames = frames_of(recording)
    for rank in bubbles(frames).ranks:
        assert rank.busy_ns + sum(rank.causes_ns.values()) == rank.window_ns
    for message in frames.messages.to_dicts():
        assert message["left_ns"] <= message["came_ns"] <= message["used_ns"]
    starts_ns = [task.start_ns for rank in recording.ranks for task in rank.tasks]
    assert min(starts_ns) >= 0

"""The first steps of a run are left out where they were slow for warming up, and that is said."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze.chosen_steps import choose, step_time_ns, warm_up_of
from rrfp.analyze.frames import Frames, frames_of
from rrfp.cli import main as cli
from rrfp.errors import RrfpError
from rrfp.trace.records import PhaseRecord, RankInfo, RankRecords, Recording, TaskRecord
from tests.step_times import OURS


def run_of(lengths_ns: Sequence[int], host: str = "node") -> Frames:
    """A run of one rank, a step of each length."""
    tasks, phases, start_ns = [], [], 0
    for step, length_ns in enumerate(lengths_ns):
        end_ns = start_ns + length_ns
        phases.append(PhaseRecord(start_ns, end_ns, step, "schedule"))
        tasks += [
            TaskRecord(start_ns, end_ns, step, kind, 0, 0, 0, 0, 1, 0, 1, 1, 1, 0) for kind in "FB"
        ]
        start_ns = end_ns
    info = RankInfo(0, 0, 0, 0, (0,), host, 0)
    return frames_of(Recording({}, [RankRecords(info, tasks=tasks, phases=phases)]))


@pytest.mark.parametrize(
    ("lengths_ns", "slow"),
    [
        ((300, 100, 101, 99), (0,)),
        ((900, 300, 100, 101, 99, 100, 98, 103), (0, 1)),
        # A second step that is as the rest ends the warm-up.
        ((900, 100, 300, 100, 101, 99, 100, 98), (0,)),
        # Never more than three, nor a quarter of a run.
        ((900, 900, 900, 900, *(100 for _ in range(16))), (0, 1, 2)),
        ((900, 900, 100, 100), (0,)),
        # A slow step later does not hide it.
        ((900, 100, 100, 100, 5000, 100, 100, 100), (0,)),
        # Nothing stands out: noise, a slow machine from the start, a run that gets slower.
        ((110, 100, 90, 105), ()),
        ((119, 100, 100, 100), ()),
        ((150, 100, 140, 80, 120, 60), ()),
        ((100, 100, 100, 300), ()),
        # Too few steps to say.
        ((900, 100, 100), ()),
        ((900,), ()),
    ],
)
def test_what_is_far_longer_than_the_later_steps_is_warm_up(
    lengths_ns: Sequence[int], slow: tuple[int, ...]
) -> None:
    frames = run_of(lengths_ns)
    assert warm_up_of(frames) == slow
    chosen = choose(frames)
    assert chosen.warm_up == slow
    assert chosen.steps == [step for step in frames.steps if step not in slow]
    assert choose(frames, with_warm_up=True).steps == frames.steps
    asked = choose(frames, range(99))
    assert (asked.steps, asked.warm_up) == (frames.steps, ())


@given(st.lists(st.integers(1, 1000), max_size=40))
def test_most_of_a_run_stays(lengths_ns: list[int]) -> None:
    slow = warm_up_of(run_of(lengths_ns))
    assert len(slow) <= min(3, len(lengths_ns) / 4)
    assert slow == tuple(range(len(slow)))


def test_simulated_ranks_have_nothing_to_warm_up() -> None:
    assert warm_up_of(run_of((900, 100, 100, 100), host="simulated")) == ()


def test_a_step_takes_the_mean_of_those_chosen() -> None:
    frames = choose(run_of((900, 100, 200, 120)))
    assert step_time_ns(frames) == 140
    assert step_time_ns(frames, [1, 3]) == 110
    with pytest.raises(RrfpError, match="no step that every rank finished"):
        step_time_ns(frames, [0])


def _rrfp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", *arguments])
    assert cli.main() == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


SAID = "left out, as warm-up: step 0; --steps 0: takes all\n"


@pytest.mark.parametrize(
    "command", ["findings", "bubbles", "deviations", "misalignment", "critical-path", "whatif"]
)
def test_every_report_leaves_it_out_and_says_so(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = _rrfp(capsys, monkeypatch, command, str(OURS), "--format", "json")
    assert err == SAID
    found = json.loads(out)
    assert found.pop("warm_up_left_out") == [0]
    asked, err = _rrfp(capsys, monkeypatch, command, str(OURS), "--steps", "1:", "--format", "json")
    assert err == ""
    same = json.loads(asked)
    # The commands of findings name the steps that were asked for.
    assert str(same).replace(" --steps 1:", "") == str(found)
    every, err = _rrfp(capsys, monkeypatch, command, str(OURS), "--steps", "0:", "--format", "json")
    assert err == ""
    assert json.loads(every) != found


def test_a_step_that_is_asked_for_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["critical-path", str(OURS), "--step", "0", "--format", "json"]
    out, err = _rrfp(capsys, monkeypatch, *command)
    assert (json.loads(out)["step"], err) == (0, "")


def test_the_report_says_it_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("altair", reason="the extra 'report' is not installed")
    page = tmp_path / "report.html"
    _, err = _rrfp(capsys, monkeypatch, "report", str(OURS), "-o", str(page))
    assert err == SAID
    assert "step 0 left out, as warm-up" in page.read_text()


def test_a_run_without_steps_has_none() -> None:
    assert warm_up_of(frames_of(Recording({}, []))) == ()

"""What a viewer is asked to show first: which tracks, and which step."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze import perfetto_overlay as initial_view
from rrfp.analyze.perfetto_overlay import find_initial_view
from rrfp.errors import RrfpError
from rrfp.schedule.knobs import Bytes
from rrfp.trace.initial_view import InitialView, Preset, typical_step, widened, worst_step
from rrfp.trace.perfetto.format import PATH_OF_CATEGORY, counters_of, stage_path
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import PhaseRecord, RankInfo, RankRecords, Recording
from tests.recordings import make_recording
from tests.test_recorded_memory import a_run

WINDOWS = {0: (0, 9_000), 1: (10_000, 11_000), 2: (20_000, 22_500), 3: (30_000, 34_000)}


def test_the_typical_step_has_the_median_length_and_the_worst_the_longest() -> None:
    assert typical_step(WINDOWS) == 2
    assert worst_step(WINDOWS) == 3


@pytest.mark.parametrize("choose", [typical_step, worst_step])
def test_the_first_step_is_taken_only_if_it_is_alone(choose: Any) -> None:
    assert choose({0: (0, 9_000), 1: (10_000, 11_000)}) == 1
    assert choose({0: (0, 9_000)}) == 0
    assert choose({}) is None


def test_a_step_is_shown_with_a_margin_inside_the_trace() -> None:
    assert widened((20_000, 22_500), 40_000) == (20_000 - 50, 22_500 + 50)
    assert widened((0, 1_000), 1_000) == (0, 1_000)


@given(
    st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)).map(sorted),
    st.integers(0, 10_000),
    st.floats(0, 1),
)
def test_a_step_is_in_view_around_what_is_selected(
    window: list[int], rest_ns: int, share: float
) -> None:
    start_ns, stop_ns = window
    end_ns = stop_ns + rest_ns
    selected_ns = start_ns + int(share * (stop_ns - start_ns))
    view = widened((start_ns, stop_ns), end_ns, selected_ns)
    assert 0 <= view[0] <= start_ns
    assert stop_ns <= view[1] <= end_ns
    # The viewer moves what is selected into the middle, as far as the trace goes.
    length_ns = view[1] - view[0]
    moved_ns = min(max(selected_ns - length_ns // 2, 0), end_ns - length_ns)
    assert moved_ns - 1 <= start_ns
    assert moved_ns + length_ns + 1 >= stop_ns


def _commands(view: InitialView) -> list[tuple[str, list[str]]]:
    commands = json.loads(parse_qs(view.ui_arguments())["startupCommands"][0])
    return [(each["id"].removeprefix("dev.perfetto."), each["args"]) for each in commands]


def test_without_a_preset_all_is_shown() -> None:
    arguments = parse_qs(InitialView().ui_arguments())
    assert set(arguments) == {"hideSidebar", "startupCommands"}


def test_an_address_of_blanks_would_not_be_read_by_the_ui() -> None:
    assert "+" not in InitialView((1, 2), Preset.FLOW, 3).ui_arguments()


@pytest.mark.parametrize("stages", [(2,), (0, 7)])
@pytest.mark.parametrize("dp_ranks", [(0,), (0, 1)])
def test_pipelines_and_stages_are_opened_and_nothing_below(
    stages: tuple[int, ...], dp_ranks: tuple[int, ...]
) -> None:
    ((name, (pattern,)),) = _commands(InitialView())
    assert name == "ExpandTracksByRegex"
    infos = [RankInfo(rank, 0, 0, rank, stages, "node", rank) for rank in dp_ranks]
    for _, name in stage_path(infos[-1], infos):
        assert re.search(pattern, name)
    for path in PATH_OF_CATEGORY.values():
        assert not any(re.search(pattern, name) for _, name in path)


@pytest.mark.parametrize(
    ("preset", "tracks"),
    [
        (Preset.BUBBLES, {"compute", "wait"}),
        (Preset.HINTS, {"compute", "hint", "D"}),
        (Preset.FLOW, {"compute", "send to stages 0 7", "receive from stage 1"}),
    ],
)
def test_a_preset_pins_its_tracks_and_opens_a_workspace_of_them(
    preset: Preset, tracks: set[str]
) -> None:
    names = {name for path in PATH_OF_CATEGORY.values() for _, name in path}
    names |= counters_of(a_run(Bytes(10_000)).ranks[0]).keys()
    names |= {"send to stages 0 7", "receive from stage 1"}
    commands = _commands(InitialView(preset=preset))
    assert [name for name, _ in commands if name != "ExpandTracksByRegex"] == [
        "PinTracksByRegex",
        "CopyTracksToWorkspaceByRegexWithAncestors",
        "SwitchWorkspace",
    ]
    for command, arguments in commands:
        if command.startswith(("Pin", "Copy")):
            assert {name for name in names if re.search(arguments[0], name)} == tracks


# From a trace.


def _recording(*windows_of_ranks: list[tuple[int, int]]) -> Recording:
    """A run whose ranks were in the schedule at these times, a pair a step."""
    ranks = []
    for rank, windows in enumerate(windows_of_ranks):
        records = RankRecords(RankInfo(rank, rank, 0, 0, (rank,), "node", 100 + rank))
        for step, (start_ns, end_ns) in enumerate(windows):
            records.phases.append(PhaseRecord(start_ns, end_ns, step, "schedule"))
        ranks.append(records)
    return Recording({}, ranks)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.pftrace"


def test_the_worst_step_that_every_rank_finished_is_found(path: Path) -> None:
    windows = list(WINDOWS.values())
    write_trace(path, _recording(windows, [(s + 100, e + 100) for s, e in windows[:3]]))
    found = find_initial_view(path, Preset.BUBBLES)
    assert found.step == 2
    assert found.view == InitialView((20_000 - 52, 22_600 + 52), Preset.BUBBLES)


@pytest.mark.parametrize("recording", [_recording(), _recording([(0, 1)], [])])
def test_without_a_whole_step_all_is_shown(path: Path, recording: Recording) -> None:
    write_trace(path, recording)
    assert find_initial_view(path, None).view == InitialView()
    found = find_initial_view(path, Preset.FLOW)
    assert (found.view, found.step) == (InitialView(preset=Preset.FLOW), None)


def test_the_flow_selects_the_message_that_was_waited_for_longest(path: Path) -> None:
    recording = make_recording(3, 4, 2, forward_ns=1_000_000, backward_ns=1_000)
    sends = [send for send in recording.ranks[1].sends if send.step == 1 and send.kind == "F"]
    write_trace(path, recording)
    found = find_initial_view(path, Preset.FLOW)
    assert found.step == 1
    # The last stage is idle from the start until the first forward has come all the way.
    assert found.view.selected_ns == sends[0].start_ns


def test_a_flow_without_messages_selects_nothing(path: Path) -> None:
    recording = make_recording(2, 3, 2)
    for records in recording.ranks:
        records.sends.clear()
        records.receives.clear()
    write_trace(path, recording)
    found = find_initial_view(path, Preset.FLOW)
    assert (found.step, found.view.selected_ns) == (1, None)


def test_a_large_trace_is_searched_only_for_a_preset(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(path, make_recording(2, 2, 3))
    monkeypatch.setattr(initial_view, "_MAX_BYTES", 100)
    assert find_initial_view(path, None).view == InitialView()
    assert find_initial_view(path, Preset.HINTS).view.window is not None


def test_a_file_that_is_no_whole_trace_is_refused(path: Path) -> None:
    write_trace(path, make_recording(2, 2, 3))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RrfpError, match="truncated"):
        find_initial_view(path, None)

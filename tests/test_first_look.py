"""What a viewer is asked to show first: open stages, and a typical step."""

import json
import re
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from rrfp.errors import RrfpError
from rrfp.trace.first_look import find_typical_step, typical_step, ui_arguments
from rrfp.trace.perfetto import write_trace
from rrfp.trace.records import PhaseRecord, RankInfo, RankRecords, Recording
from rrfp.trace.tracks import PATH_OF_CATEGORY, stage_path
from tests.recordings import make_recording


def _recording(*windows_of_ranks: list[tuple[int, int]]) -> Recording:
    """A run whose ranks were in the schedule at these times, a pair a step."""
    ranks = []
    for rank, windows in enumerate(windows_of_ranks):
        records = RankRecords(RankInfo(rank, rank, 0, 0, (rank,), "node", 100 + rank))
        for step, (start_ns, end_ns) in enumerate(windows):
            records.phases.append(PhaseRecord(start_ns, end_ns, step, "schedule"))
        ranks.append(records)
    return Recording({}, ranks)


def test_the_step_of_median_length_is_shown_with_a_margin() -> None:
    first = [(0, 9_000), (10_000, 11_000), (20_000, 22_000), (30_000, 34_000)]
    second = [(0, 9_000), (10_000, 11_000), (20_100, 22_500), (30_000, 34_000)]
    assert typical_step(_recording(first, second)) == (20_000 - 50, 22_500 + 50)


def test_a_step_that_some_rank_did_not_finish_is_passed_over() -> None:
    whole = [(0, 1_000), (2_000, 3_000)]
    assert typical_step(_recording(whole, whole[:1])) == (0, 1_020)


def test_the_window_stays_inside_the_trace() -> None:
    assert typical_step(_recording([(0, 1_000)])) == (0, 1_000)


@pytest.mark.parametrize("recording", [_recording(), _recording([(0, 1)], [])])
def test_without_a_whole_step_all_is_shown(recording: Recording) -> None:
    assert typical_step(recording) is None
    assert "vis" not in ui_arguments(None)


def test_a_file_that_is_no_whole_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    write_trace(path, make_recording(2, 2, 3))
    assert find_typical_step(path) is not None
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RrfpError, match="truncated"):
        find_typical_step(path)


@pytest.mark.parametrize("stages", [(2,), (0, 7)])
@pytest.mark.parametrize("dp_ranks", [(0,), (0, 1)])
def test_pipelines_and_stages_are_opened_and_nothing_below(
    stages: tuple[int, ...], dp_ranks: tuple[int, ...]
) -> None:
    (command,) = json.loads(parse_qs(ui_arguments(None))["startupCommands"][0])
    assert command["id"] == "dev.perfetto.ExpandTracksByRegex"
    pattern = re.compile(command["args"][0])
    infos = [RankInfo(rank, 0, 0, rank, stages, "node", rank) for rank in dp_ranks]
    for _, name in stage_path(infos[-1], infos):
        assert pattern.search(name)
    for path in PATH_OF_CATEGORY.values():
        assert not any(pattern.search(name) for _, name in path)

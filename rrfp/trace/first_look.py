"""What a viewer shows first: the stages opened, and one typical step of the run."""

import json
from pathlib import Path
from statistics import median_low
from urllib.parse import quote

from rrfp.trace.records import Recording
from rrfp.trace.steps import Window, step_windows

_MAX_BYTES = 64_000_000
"""A larger trace is not searched: that would take longer than the viewer takes to load it."""

_MARGIN_FRACTION = 0.02

_OPEN_STAGES = quote(
    json.dumps([{"id": "dev.perfetto.ExpandTracksByRegex", "args": ["^(pipeline|stage)"]}])
)
"""A command of the Perfetto UI; the names are those of `rrfp.trace.tracks`."""


def ui_arguments(window: Window | None) -> str:
    """The arguments of an address of the Perfetto UI that ask for the first look."""
    arguments = f"hideSidebar=true&startupCommands={_OPEN_STAGES}"
    if window is None:
        return arguments
    return f"{arguments}&visStart={window[0]}&visEnd={window[1]}"


def find_typical_step(trace: Path) -> Window | None:
    """The window of the step of median length, with a margin; None where a trace has no whole step
    or is too large to be searched. Raises RrfpError for a file that is no trace of a run."""
    # Perfetto's module is slow to import.
    from rrfp.trace.perfetto import read_trace

    if trace.stat().st_size > _MAX_BYTES:
        return None
    return typical_step(read_trace(trace))


def typical_step(recording: Recording) -> Window | None:
    """The window of the step of median length, with a margin; None without a whole step."""
    windows = step_windows(recording)
    if not windows:
        return None
    # The first step warms caches up, and is the longest of most runs.
    candidates = list(windows.values())[1:] or list(windows.values())
    length_ns = median_low(end_ns - start_ns for start_ns, end_ns in candidates)
    start_ns, end_ns = next(window for window in candidates if window[1] - window[0] == length_ns)
    margin_ns = int(length_ns * _MARGIN_FRACTION)
    # The viewer ignores a window that reaches beyond the trace.
    last_ns = max(phase.end_ns for records in recording.ranks for phase in records.phases)
    return max(start_ns - margin_ns, 0), min(end_ns + margin_ns, last_ns)

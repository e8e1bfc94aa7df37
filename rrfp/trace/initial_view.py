"""What a viewer shows first: which tracks, and which step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, urlencode

from rrfp.trace.records import Window

_MARGIN_FRACTION = 0.02


class Preset(StrEnum):
    """A question about a run; its tracks answer it."""

    BUBBLES = "bubbles"
    """Why did each stage wait?"""
    HINTS = "hints"
    """Where did each stage depart from its hint's order, and how far did it run ahead?"""
    FLOW = "flow"
    """How did messages travel from stage to stage?"""


# Names from `rrfp.trace.perfetto.format`, of tracks with slices: a pinned group shows nothing.
_TRACKS_OF = {
    Preset.BUBBLES: "^(compute|wait|critical path)$",
    Preset.HINTS: "^(compute|hint|D)$",
    Preset.FLOW: "^(compute$|send to |receive from )",
}
_STAGES = "^(pipeline|stage|analysis)"


@dataclass(frozen=True, slots=True)
class InitialView:
    """What to show of a trace; by default all of it, with the stages expanded."""

    window: Window | None = None
    """The part of the trace in view. A viewer ignores a window that extends beyond the trace."""
    preset: Preset | None = None
    selected_ns: int | None = None
    """Select the slice that begins at this time, so that its arrows are drawn. The viewer then
    centres the window on it."""

    def ui_arguments(self) -> str:
        """The URL arguments that make the Perfetto UI show this view
        (https://perfetto.dev/docs/visualization/commands-automation-reference)."""
        arguments = {"hideSidebar": "true", "startupCommands": json.dumps(self._commands())}
        if self.window is not None:
            arguments["visStart"], arguments["visEnd"] = map(str, self.window)
        if self.selected_ns is not None:
            arguments["ts"] = str(self.selected_ns)
        return urlencode(arguments, quote_via=quote)

    def _commands(self) -> list[dict[str, object]]:
        if self.preset is None:
            return [_command("ExpandTracksByRegex", _STAGES)]
        tracks = _TRACKS_OF[self.preset]
        return [
            # A pinned track does not show its stage, but a workspace of these tracks alone does.
            # So open such a workspace, and pin the tracks in the workspace of all tracks.
            _command("PinTracksByRegex", tracks),
            _command("ExpandTracksByRegex", _STAGES),
            _command("CopyTracksToWorkspaceByRegexWithAncestors", tracks, self.preset),
            _command("SwitchWorkspace", self.preset),
            _command("ExpandTracksByRegex", "."),
        ]


def _command(name: str, *arguments: str) -> dict[str, object]:
    return {"id": f"dev.perfetto.{name}", "args": arguments}


def typical_step(windows: Mapping[int, Window]) -> int | None:
    """The step of median length, not counting the first unless it is the only one. None without
    steps."""
    return _middle(_lengths_after_warm_up(windows))


def middle_step(windows: Mapping[int, Window]) -> int | None:
    """The step of median length, of all of them. None without steps."""
    return _middle({step: end_ns - start_ns for step, (start_ns, end_ns) in windows.items()})


def worst_step(windows: Mapping[int, Window]) -> int | None:
    """The longest step, not counting the first unless it is the only one. None without steps."""
    lengths_ns = _lengths_after_warm_up(windows)
    return max(lengths_ns, key=lengths_ns.__getitem__, default=None)


def _middle(lengths_ns: Mapping[int, int]) -> int | None:
    shortest_first = sorted(lengths_ns, key=lengths_ns.__getitem__)
    return shortest_first[(len(shortest_first) - 1) // 2] if shortest_first else None


def _lengths_after_warm_up(windows: Mapping[int, Window]) -> dict[int, int]:
    """The length in ns of each step but the first, which warms up caches and is usually longest. A
    first step that is the only one stays."""
    in_time = sorted(windows, key=windows.__getitem__)
    steps = in_time[1:] or in_time
    return {step: windows[step][1] - windows[step][0] for step in steps}


def widened(window: Window, end_ns: int, selected_ns: int | None = None) -> Window:
    """The part of a trace to show for a window.

    It has a margin, keeps the whole window in view when the selection is centred, and stays within
    the trace, which ends at `end_ns`.
    """
    start_ns, stop_ns = window
    margin_ns = int((stop_ns - start_ns) * _MARGIN_FRACTION)
    start_ns, stop_ns = start_ns - margin_ns, stop_ns + margin_ns
    if selected_ns is not None:
        half_ns = max(selected_ns - start_ns, stop_ns - selected_ns)
        start_ns, stop_ns = selected_ns - half_ns, selected_ns + half_ns
        # Shift rather than cut, because the viewer keeps the width.
        beyond_ns = max(stop_ns - end_ns, 0) or min(start_ns, 0)
        start_ns, stop_ns = start_ns - beyond_ns, stop_ns - beyond_ns
    return max(start_ns, 0), min(stop_ns, end_ns)

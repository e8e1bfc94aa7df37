"""The initial view of a trace in the Perfetto UI: its tracks, and its step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, urlencode

from rrfp.trace.records import Window

_MARGIN_FRACTION = 0.02


class Preset(StrEnum):
    """A set of tracks that answers a question about a run."""

    BUBBLES = "bubbles"
    """Why did each stage wait?"""
    HINTS = "hints"
    """At which tasks did each stage depart from its hint's order, and how far did it run ahead?"""
    FLOW = "flow"
    """How did messages travel from stage to stage?"""


# Names of tracks in `rrfp.trace.perfetto.format`, without groups, which show nothing when pinned.
_TRACKS_OF = {
    Preset.BUBBLES: "^(compute|wait|critical path)$",
    Preset.HINTS: "^(compute|hint|D)$",
    Preset.FLOW: "^(compute$|send to |receive from )",
}
_STAGES = "^(pipeline|stage|analysis)"


@dataclass(frozen=True, slots=True)
class InitialView:
    """The part of a trace to show; by default all of it, with the stages expanded."""

    window: Window | None = None
    """The time window to show. A viewer ignores a window that extends beyond the trace."""
    preset: Preset | None = None
    selected_ns: int | None = None
    """The start of the slice to select, so that its arrows are drawn. The viewer then centers the
    window on it."""

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
        """The commands that the UI runs at its start: expand the stages, and with a preset pin its
        tracks and open a workspace that contains only them."""
        if self.preset is None:
            return [_command("ExpandTracksByRegex", _STAGES)]
        tracks = _TRACKS_OF[self.preset]
        return [
            # A pinned track does not show its stage, but a workspace of only these tracks does. So
            # open such a workspace, and pin the tracks in the default workspace.
            _command("PinTracksByRegex", tracks),
            _command("ExpandTracksByRegex", _STAGES),
            _command("CopyTracksToWorkspaceByRegexWithAncestors", tracks, self.preset),
            _command("SwitchWorkspace", self.preset),
            _command("ExpandTracksByRegex", "."),
        ]


def _command(name: str, *arguments: str) -> dict[str, object]:
    """A start-up command of the Perfetto UI as JSON; `name` lacks its prefix `dev.perfetto.`."""
    return {"id": f"dev.perfetto.{name}", "args": arguments}


def typical_step(windows: Mapping[int, Window]) -> int | None:
    """The step of median length, without the first step in time unless it is the only one. None
    without steps."""
    return _middle(_lengths_after_warm_up(windows))


def middle_step(windows: Mapping[int, Window]) -> int | None:
    """The step of median length among all steps. None without steps."""
    return _middle({step: end_ns - start_ns for step, (start_ns, end_ns) in windows.items()})


def worst_step(windows: Mapping[int, Window]) -> int | None:
    """The longest step, without the first step in time unless it is the only one. None without
    steps."""
    lengths_ns = _lengths_after_warm_up(windows)
    return max(lengths_ns, key=lengths_ns.__getitem__, default=None)


def _middle(lengths_ns: Mapping[int, int]) -> int | None:
    """The step of median length, the shorter one of two; None without steps."""
    shortest_first = sorted(lengths_ns, key=lengths_ns.__getitem__)
    return shortest_first[(len(shortest_first) - 1) // 2] if shortest_first else None


def _lengths_after_warm_up(windows: Mapping[int, Window]) -> dict[int, int]:
    """The length of each step in ns, without the first step, which warms up caches and is usually
    the longest, unless it is the only one."""
    in_time = sorted(windows, key=windows.__getitem__)
    steps = in_time[1:] or in_time
    return {step: windows[step][1] - windows[step][0] for step in steps}


def widened(window: Window, end_ns: int, selected_ns: int | None = None) -> Window:
    """The part of a trace to show for a window: with a margin of 2% on each side, wide enough that
    the whole window stays in view when the viewer centers `selected_ns`, and within the trace,
    which ends at `end_ns`."""
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

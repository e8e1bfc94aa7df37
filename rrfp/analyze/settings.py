"""The settings of a run in its trace; other people's traces may hold anything there, or nothing."""

from typing import Any

from rrfp.analyze.frames import Frames
from rrfp.trace.run_policy import stated_policy


def run_settings(frames: Frames) -> dict[str, Any]:
    """The settings by flag; empty if the trace has none."""
    settings = frames.settings.get("settings")
    return settings if isinstance(settings, dict) else {}


def run_limit(frames: Frames) -> int | None:
    """The limit on D that the run had; None where it had no limit, or the trace does not tell."""
    limit = stated_policy(frames.settings).get("limit")
    return limit if type(limit) is int else None

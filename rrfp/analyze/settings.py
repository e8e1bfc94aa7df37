"""What a run was set to, as its trace tells it; a foreign trace may tell anything, or nothing."""

from typing import Any

from rrfp.analyze.frames import Frames
from rrfp.schedule.dispatcher import DEFAULT_LIMIT, Dispatch


def run_settings(frames: Frames) -> dict[str, Any]:
    """The settings, by flag; empty where the trace does not tell."""
    settings = frames.settings.get("settings")
    return settings if isinstance(settings, dict) else {}


def run_limit(frames: Frames) -> int | None:
    """The limit on D that the run had; None: no one, or the trace does not tell."""
    settings = run_settings(frames)
    limit = settings.get("limit")
    if type(limit) is int:
        return limit
    is_usual = settings.get("dispatch") == Dispatch.READY and settings.get("hold") is None
    return DEFAULT_LIMIT if is_usual and not frames.settings.get("simulated") else None

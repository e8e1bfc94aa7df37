"""Which part of a trace a viewer is to show first."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from rrfp.analyze.cache import CachedTrace
from rrfp.analyze.chosen import choose, evaluations_of
from rrfp.analyze.frames import Frames, windows
from rrfp.analyze.misalignment import timed_messages
from rrfp.trace.first_look import FirstLook, Preset, typical_step, view_of, worst_step

_MAX_BYTES = 64_000_000
"""A larger trace is not searched for a typical step: that would take longer than the viewer takes
to load it."""


@dataclass(frozen=True, slots=True)
class StepLook:
    """A look at one step."""

    look: FirstLook
    step: int | None
    """None: no step was searched for, or none was finished, and all of the trace is in view."""


def find_look(trace: Path, preset: Preset | None, *, evaluations: bool = False) -> StepLook:
    """A typical step of a trace, or with a preset the worst one: the longest that every rank
    finished, where it can be after the first. A step that trains, unless there are only
    evaluations or one of these is asked for.

    Raises RrfpError for a file that is no whole trace of a run, and UsageError where it has none of
    the evaluations asked for.
    """
    if preset is None and not evaluations and trace.stat().st_size > _MAX_BYTES:
        return StepLook(FirstLook(), None)
    whole = CachedTrace(trace).frames()
    only_evaluates = len(evaluations_of(whole)) == len(whole.steps) > 0
    frames = choose(whole, evaluations=evaluations or only_evaluates)
    found = {step: (start, end) for step, start, end in windows(frames).iter_rows()}
    step = typical_step(found) if preset is None else worst_step(found)
    if step is None:
        return StepLook(FirstLook(preset=preset), None)
    selected_ns = None
    if preset is Preset.FLOW:
        selected_ns = _costliest_message(frames.of_steps([step]))
    # The trace ends with a phase, which closes each step.
    end_ns = whole.phases.select(pl.col("end_ns").max()).item()
    window = view_of(found[step], end_ns, selected_ns)
    return StepLook(FirstLook(window, preset, selected_ns), step)


def _costliest_message(frames: Frames) -> int | None:
    """When the message was sent for which a stage idled longest; None where there is none."""
    messages = timed_messages(frames).sort("starved_ns", "left_ns")
    return None if messages.is_empty() else messages["left_ns"][-1]

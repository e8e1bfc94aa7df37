"""Which part of a trace a viewer shows first."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from rrfp.analyze.cache import CachedTrace
from rrfp.analyze.chosen import choose, evaluations_of
from rrfp.analyze.frames import Frames
from rrfp.analyze.misalignment import timed_messages
from rrfp.trace.initial_view import InitialView, Preset, typical_step, widened, worst_step

_MAX_BYTES = 64_000_000
"""A larger trace is not searched for a typical step: the search would take longer than the viewer
takes to load it."""


@dataclass(frozen=True, slots=True)
class StepView:
    """The initial view of one step."""

    view: InitialView
    step: int | None
    """None when all of the trace is in view: no step was searched for, or none was finished."""


def find_initial_view(trace: Path, preset: Preset | None, *, evaluations: bool = False) -> StepView:
    """A typical step of a trace, or with a preset the longest that every rank finished.

    The first step is taken only if it is alone. The step is one that trains, unless the run only
    evaluates or `evaluations` asks for one of its evaluations.

    Raises RrfpError for a file that is not a whole trace, and UsageError for `evaluations` of a run
    without any.
    """
    if preset is None and not evaluations and trace.stat().st_size > _MAX_BYTES:
        return StepView(InitialView(), None)
    whole = CachedTrace(trace).frames()
    only_evaluates = len(evaluations_of(whole)) == len(whole.steps) > 0
    # Which first step is passed over, the view itself decides: it shows one, and averages none.
    frames = choose(whole, evaluations=evaluations or only_evaluates, with_warm_up=True)
    found = {step: (start, end) for step, start, end in frames.windows.iter_rows()}
    step = typical_step(found) if preset is None else worst_step(found)
    if step is None:
        return StepView(InitialView(preset=preset), None)
    selected_ns = None
    if preset is Preset.FLOW:
        selected_ns = _costliest_message(frames.of_steps([step]))
    # The trace ends with a phase, which closes each step.
    end_ns = whole.phases.select(pl.col("end_ns").max()).item()
    window = widened(found[step], end_ns, selected_ns)
    return StepView(InitialView(window, preset, selected_ns), step)


def _costliest_message(frames: Frames) -> int | None:
    """When the message was sent for which a stage idled longest; None without messages."""
    messages = timed_messages(frames).sort("starved_ns", "left_ns")
    return None if messages.is_empty() else messages["left_ns"][-1]

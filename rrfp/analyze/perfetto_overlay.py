"""A track with the critical paths of steps for the Perfetto UI, and the initial view of a trace."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from rrfp.analyze.critical_path import LINK, Segment, critical_path
from rrfp.analyze.frame_files import CachedTrace
from rrfp.analyze.frames import Frames, choose_steps, evaluation_steps
from rrfp.analyze.misalignment import timed_messages
from rrfp.errors import RrfpError
from rrfp.schedule.tasks import Kind
from rrfp.trace.initial_view import InitialView, Preset, typical_step, widened, worst_step
from rrfp.trace.perfetto.writer import Slice, encode_track
from rrfp.trace.records import spread_evenly

TRACK = "critical path"
_MOST_TASKS = 60_000
"""The number of tasks of steps with a shown path; computing the paths takes about a second."""


def path_track(frames: Frames, shown: int | None = None) -> tuple[bytes, list[int]]:
    """Encode the critical paths of finished steps as a track to append to the trace.

    Also returns the covered steps in order of time: all, or in a long run evenly spread ones and
    `shown` if it is finished; none and no bytes if no step was finished.
    """
    windows = {step: start_ns for step, start_ns, _ in frames.windows.iter_rows()}
    if not windows:
        return b"", []
    num_tasks = frames.scan("task").select(pl.len()).collect().item()
    most = max(1, _MOST_TASKS * len(frames.steps) // max(1, num_tasks))
    chosen = list(windows)
    if len(chosen) > most:
        chosen = spread_evenly(chosen, most - 1) if most > 1 else []
        chosen += [shown] if shown in windows and shown not in chosen else []
    chosen.sort(key=windows.__getitem__)
    return encode_track(TRACK, path_slices(frames, chosen)), chosen


def path_slices(frames: Frames, steps: Iterable[int]) -> Iterator[Slice]:
    """Yield the critical paths of these steps, in the given order, as slices in order of time.

    A task's name is like `2F0`, which gives it the color of its kind. A wait is named by its cause
    and a link by its ends. Steps whose path cannot be computed are skipped.
    """
    for step in steps:
        with suppress(RrfpError):
            of_step = frames.of_steps([step])
            segments = critical_path(of_step, step).segments
            yield from _slices(of_step, step, segments)


def replica_of(frames: Frames, step: int, segments: Sequence[Segment]) -> int | None:
    """Return the replica with most tasks of a path, the first of equals; None if no task is
    found."""
    found = Counter(task["dp_rank"] for task in _tasks_of(frames, step, segments).values())
    return min(found, key=lambda replica: (-found[replica], replica)) if found else None


def _slices(frames: Frames, step: int, segments: Sequence[Segment]) -> Iterator[Slice]:
    """Convert the segments of a path into named slices with notes; empty segments are skipped."""
    tasks = _tasks_of(frames, step, segments)
    for segment in segments:
        if segment.start_ns >= segment.end_ns:
            continue
        name, task = segment.kind, tasks.get(segment)
        notes: list[tuple[str, int | str]] = [("pp_rank", segment.pp_rank), ("step", step)]
        if task is not None:
            name = f"{task['stage']}{segment.kind}{task['microbatch']}"
            notes += [(key, task[key]) for key in ("stage", "microbatch", "dp_rank")]
        elif segment.kind == LINK:
            name = f"link {segment.sender} → {segment.pp_rank}"
        yield Slice(segment.start_ns, segment.end_ns, name, tuple(notes))


def _tasks_of(
    frames: Frames, step: int, segments: Sequence[Segment]
) -> dict[Segment, dict[str, int]]:
    """Return the task of each work segment: one of its kind and pipeline rank that ends with it.

    Segments without such a task are left out.
    """
    work = [segment for segment in segments if segment.kind in list(Kind)]
    asked = pl.DataFrame(
        [(number, each.pp_rank, each.kind, each.end_ns) for number, each in enumerate(work)],
        schema={"number": pl.Int64, "pp_rank": pl.Int64, "kind": pl.String, "end_ns": pl.Int64},
        orient="row",
    )
    found = asked.join(
        frames.tasks.filter(pl.col("step") == step), on=["pp_rank", "kind", "end_ns"]
    ).unique("number", keep="first", maintain_order=True)
    names = ("number", "stage", "microbatch", "dp_rank")
    return {work[row["number"]]: row for row in found.select(names).iter_rows(named=True)}


# The initial view of a trace.


_MAX_BYTES = 64_000_000
"""Larger traces are not searched for a typical step, which would take longer than loading them."""


@dataclass(frozen=True, slots=True)
class StepView:
    """The initial view of one step."""

    view: InitialView
    step: int | None
    """None if the view shows the whole trace: it is too large, or no step was finished."""


def find_initial_view(trace: Path, preset: Preset | None, *, evaluations: bool = False) -> StepView:
    """Choose a typical step of a trace, or with a preset the longest finished step.

    Without a preset or `evaluations`, a trace above 64 MB is shown whole. The first step is chosen
    only if there is no other. It is a training step, unless `evaluations` is set or the run has
    only evaluations. `Preset.FLOW` also selects the message that starved a stage longest.
    Raises RrfpError for a file that is not a complete trace, and UsageError for `evaluations` of a
    run without evaluations.
    """
    if preset is None and not evaluations and trace.stat().st_size > _MAX_BYTES:
        return StepView(InitialView(), None)
    whole = CachedTrace(trace).frames()
    only_evaluates = len(evaluation_steps(whole)) == len(whole.steps) > 0
    # `typical_step` itself skips the first step.
    frames = choose_steps(whole, evaluations=evaluations or only_evaluates, with_warm_up=True)
    found = {step: (start, end) for step, start, end in frames.windows.iter_rows()}
    step = typical_step(found) if preset is None else worst_step(found)
    if step is None:
        return StepView(InitialView(preset=preset), None)
    selected_ns = None
    if preset is Preset.FLOW:
        selected_ns = _costliest_message(frames.of_steps([step]))
    # A phase closes each step, so the trace ends with one.
    end_ns = whole.phases.select(pl.col("end_ns").max()).item()
    window = widened(found[step], end_ns, selected_ns)
    return StepView(InitialView(window, preset, selected_ns), step)


def _costliest_message(frames: Frames) -> int | None:
    """Return the time in ns at which the message was sent that starved a stage longest.

    None without messages.
    """
    messages = timed_messages(frames).sort("starved_ns", "left_ns")
    return None if messages.is_empty() else messages["left_ns"][-1]

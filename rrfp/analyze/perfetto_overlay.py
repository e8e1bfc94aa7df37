"""The critical paths of steps as slices that a viewer shows on a track of their own."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from rrfp.analyze.critical_path import LINK, Segment, critical_path
from rrfp.analyze.frame_files import CachedTrace
from rrfp.analyze.frames import Frames, choose, evaluations_of
from rrfp.analyze.misalignment import timed_messages
from rrfp.errors import RrfpError
from rrfp.schedule.tasks import Kind
from rrfp.trace.initial_view import InitialView, Preset, typical_step, widened, worst_step
from rrfp.trace.perfetto.writer import Slice, encode_track
from rrfp.trace.records import spread_evenly

TRACK = "critical path"
_MOST_TASKS = 60_000
"""The tasks of all steps whose path is shown, so that finding it takes about a second."""


def path_track(frames: Frames, shown: int | None = None) -> tuple[bytes, list[int]]:
    """The critical paths of finished steps as a track that is appended to the trace, and the steps
    that it covers: all of them or, of a long run, some, the one `shown` among them."""
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
    """The critical path of each of these steps, in order of time. A task is named as in `2F0`, so
    that it has the color of its kind; a wait has the name of its cause, and a link those of its
    ends. Steps whose path cannot be found are left out."""
    for step in steps:
        with suppress(RrfpError):
            of_step = frames.of_steps([step])
            segments = critical_path(of_step, step).segments
            yield from _slices(of_step, step, segments)


def replica_of(frames: Frames, step: int, segments: Sequence[Segment]) -> int | None:
    """The replica that most tasks of a path belong to; None where none is found."""
    found = Counter(task["dp_rank"] for task in _tasks_of(frames, step, segments).values())
    return min(found, key=lambda replica: (-found[replica], replica)) if found else None


def _slices(frames: Frames, step: int, segments: Sequence[Segment]) -> Iterator[Slice]:
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
    """The task that each segment of work is: one of its kind and place that ends as it does."""
    work = [segment for segment in segments if segment.kind in list(Kind)]
    asked = pl.DataFrame(
        [(number, each.pp_rank, each.kind, each.end_ns) for number, each in enumerate(work)],
        schema={
            "number": pl.Int64,
            "pp_rank": pl.Int64,
            "kind": pl.String,
            "end_ns": pl.Int64,
        },
        orient="row",
    )
    found = asked.join(
        frames.tasks.filter(pl.col("step") == step), on=["pp_rank", "kind", "end_ns"]
    ).unique("number", keep="first", maintain_order=True)
    names = ("number", "stage", "microbatch", "dp_rank")
    return {work[row["number"]]: row for row in found.select(names).iter_rows(named=True)}


# Which part of a trace a viewer shows first.


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
    """The send time of the message for which a stage idled longest; None without messages."""
    messages = timed_messages(frames).sort("starved_ns", "left_ns")
    return None if messages.is_empty() else messages["left_ns"][-1]

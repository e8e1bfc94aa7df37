"""The critical paths of steps as slices that a viewer shows on a track of their own."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import polars as pl

from rrfp.analyze.frames import Frames
from rrfp.analyze.path.critical_path import critical_path
from rrfp.analyze.path.segments import LINK, Segment
from rrfp.errors import RrfpError
from rrfp.schedule.tasks import Kind
from rrfp.trace.perfetto.extra_track import Slice, encode_track
from rrfp.trace.steps import spread_evenly

TRACK = "critical path"
_MOST_TASKS = 60_000
"""Of all steps whose path is shown: finding it takes a second then."""


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
    that it has the colour of its kind; a wait has the name of its cause, and a link those of its
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

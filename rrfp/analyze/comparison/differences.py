"""Where two runs differ in more than their schedule, so that nobody compares unlike things."""

import json
from collections.abc import Iterator
from typing import Any

from rrfp.analyze.frames import Frames
from rrfp.analyze.settings import run_settings

Differences = dict[str, dict[str, tuple[Any, Any]]]
"""By what differs (`model`, `data`, `layout`, `times`): each setting with its two values."""

_SETTINGS = {
    "model": (
        *("model", "layers", "hidden", "heads", "experts", "tie_embeddings", "dropout", "dtype"),
        *("recompute", "device"),
    ),
    "data": (
        *("data", "text_key", "tokenizer", "microbatches", "micro_batch_size", "seq_length"),
        *("variable_lengths", "max_images", "image_size", "patch_size", "blank_images", "seed"),
    ),
    "layout": ("pp", "tp", "cp", "dp", "ep", "chunks", "placement", "sequence_parallel"),
    "times": ("costs", "pace", "jitter"),
}
_MOST_LETTERS = 40


def differences(first: Frames, second: Frames) -> Differences:
    """The settings that both runs tell and that differ, and what their records show to differ: the
    microbatches of a step, the stages, the ranks. A schedule's own settings are left out."""
    a, b = run_settings(first), run_settings(second)
    found: Differences = {
        what: {
            name: (a[name], b[name])
            for name in names
            if name in a and name in b and a[name] != b[name]
        }
        for what, names in _SETTINGS.items()
    }
    for what, name, values in _recorded(first, second):
        known = {"stages": ("pp", "chunks"), "ranks": ("pp", "tp", "cp", "dp")}.get(name, (name,))
        if values[0] != values[1] and not any(each in found[what] for each in known):
            found[what][name] = values
    return {what: settings for what, settings in found.items() if settings}


def warning(found: Differences) -> str:
    """In a sentence, what differs; empty if nothing does."""
    if not found:
        return ""
    told = []
    for what, settings in found.items():
        values = [f"{name} {_told(a)} and {_told(b)}" for name, (a, b) in settings.items()]
        told.append(f"{what} ({', '.join(values)})")
    *most, last = told
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"Not the schedule alone differs between A and B, but their {listed} too."


def _recorded(first: Frames, second: Frames) -> Iterator[tuple[str, str, tuple[int, int]]]:
    both = (first, second)

    def counts(column: str) -> tuple[int, int]:
        a, b = (frames.tasks[column].n_unique() for frames in both)
        return a, b

    yield "data", "microbatches", counts("microbatch")
    yield "layout", "stages", counts("stage")
    yield "layout", "ranks", (first.run.height, second.run.height)


def _told(value: object) -> str:
    words = value if isinstance(value, str) else json.dumps(value)
    return words if len(words) <= _MOST_LETTERS else f"{words[:_MOST_LETTERS]}..."

"""The figures of a step under the names that dashboards and programs get, one unit in each name."""

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any, NamedTuple

from rrfp.watch.alarms import Alarm
from rrfp.watch.figures import StepFigures

TOLD = {
    "loss": "The step's mean loss.",
    "heldout_loss": "The loss of the held-out data.",
    "grad_norm": "The norm of the gradients.",
    "step_time_s": "The time of a whole step, data and optimizer included, in seconds.",
    "tokens_per_s": "Tokens that were trained on in a second.",
    "schedule_time_s": "The time of a step's schedule, in seconds.",
    "bubble_fraction": "The share of the schedule's time that ranks are idle.",
    "busy_fraction": "The share of the schedule's time that a pipeline rank works.",
    "wait_fraction": "The share of the schedule's time that ranks wait for this cause.",
    "peak_held": "The most activations that a pipeline rank kept, in chunks.",
    "peak_held_bytes": "The most bytes of activations that a pipeline rank kept, where known.",
    "link_time_fraction": "The time of a link's messages, as a share of the schedule's.",
    "slow": "How much longer something slow takes, as a share; only while it is slow.",
}
"""Every measure, and what it is."""

_OF_METRICS = ("loss", "heldout_loss", "grad_norm", "step_time_s")


class Measure(NamedTuple):
    """One number of a step."""

    name: str
    label: tuple[str, str] | None
    """What it is of: a name and a value."""
    value: float

    @property
    def path(self) -> str:
        """`busy_fraction/pp_rank_3`, for dashboards without labels."""
        return self.name if self.label is None else f"{self.name}/{self.label[0]}_{self.label[1]}"


def of_metrics(line: dict[str, Any]) -> Iterator[Measure]:
    """The measures of a line of `metrics.jsonl`."""
    for name in _OF_METRICS:
        value = line.get(name)
        if isinstance(value, int | float):
            yield Measure(name, None, float(value))
    tokens, seconds = line.get("tokens"), line.get("step_time_s")
    if isinstance(tokens, int | float) and isinstance(seconds, int | float) and seconds > 0:
        yield Measure("tokens_per_s", None, tokens / seconds)


def of_step(step: StepFigures, active: Iterable[Alarm]) -> Iterator[Measure]:
    """The measures of a step that was recorded, and what is slow in it."""
    yield Measure("schedule_time_s", None, step.window_s)
    yield Measure("bubble_fraction", None, step.bubble_fraction)
    for pp_rank, ranks in step.by_stage().items():
        label = "pp_rank", str(pp_rank)
        yield Measure("busy_fraction", label, fmean(rank.busy_fraction for rank in ranks))
        yield Measure("peak_held", label, float(max(rank.peak_held for rank in ranks)))
        if most_bytes := max(rank.peak_held_bytes for rank in ranks):
            yield Measure("peak_held_bytes", label, float(most_bytes))
    for cause, share in step.wait_fractions().items():
        yield Measure("wait_fraction", ("cause", cause), share)
    for (sender, receiver), link in step.links.items():
        yield Measure("link_time_fraction", ("link", f"{sender}-{receiver}"), link.fraction)
    for alarm in active:
        yield Measure("slow", ("place", alarm.short), alarm.rise)


def as_json(measures: Iterable[Measure]) -> dict[str, Any]:
    """Measures as one object; those with a label as an object each, by its value."""
    found: dict[str, Any] = {}
    for name, label, value in measures:
        if label is None:
            found[name] = value
        else:
            found.setdefault(name, {})[label[1]] = value
    return found

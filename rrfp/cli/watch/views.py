"""The page of a run that is going: 24 lines of 80 columns are enough."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rrfp.cli.console import console
from rrfp.schedule.policy import format_bytes
from rrfp.trace.records import NS_PER_S, STEP, counted
from rrfp.watch.alarms import (
    Alarm,
    Alert,
    alert_environment,
    measures_as_json,
    measures_of_metrics,
    measures_of_step,
)
from rrfp.watch.figures import RankFigures, StepFigures, extra_work
from rrfp.watch.follow import Follower, RunState, Update
from rrfp.watch.slowness import WINDOW

_MOST_STAGES = 12
_MOST_ALARMS = 3
_BAR_WIDTH = 24
_LEAST_EXTRA, _LEAST_TOLD = 0.1, 0.01
_COLORS = {RunState.GOING: "green", RunState.SILENT: "yellow", RunState.KILLED: "red"}


def page(
    follower: Follower, stand: RunState, told: str, notes: Sequence[str] = ()
) -> RenderableType:
    """The run as it stands now."""
    parts: list[RenderableType] = [_headline(follower, stand, told)]
    recent = list(follower.steps)[-WINDOW:]
    if recent:
        parts += [_figures(follower, recent), Text(), _stages(recent), Text(), _waits(recent)]
        parts += _slowness(follower)
        # What is slow now has more work for that reason.
        if not follower.active and (uneven := _uneven(recent)) is not None:
            parts.append(uneven)
    elif follower.metrics:
        parts.append(Text(_of_metrics(follower)))
        parts += [Text(), _stages_of_metrics(follower)]
        if stand is not RunState.WAITING:
            parts.append(Text("There are no records, so neither causes nor who is slow."))
    if follower.begins_late and follower.steps:
        parts.append(Text("Its earlier steps were left out: the run has recorded for long."))
    parts += map(Text, notes)
    return Group(*parts)


def _headline(follower: Follower, stand: RunState, told: str) -> Text:
    line = Text(f"{follower.run.path}  ")
    if follower.session > 1:
        line.append(f"session {follower.session}  ")
    if (step := follower.last_step) is not None:
        line.append(f"{_num_steps(follower, step)}  ")
    line.append(told, style=_COLORS.get(stand, ""))
    return line


def _num_steps(follower: Follower, step: int) -> str:
    """`41 of 200 steps`."""
    settings = follower.description.get("settings")
    asked = settings.get("steps") if isinstance(settings, dict) else None
    of = f" of {asked}" if isinstance(asked, int) else ""
    return f"{step + 1}{of} steps"


def _figures(follower: Follower, recent: Sequence[StepFigures]) -> Text:
    window_s = fmean(step.window_s for step in recent)
    bubble = fmean(step.bubble_fraction for step in recent)
    schedule = f"schedule {duration(window_s)}, of which bubble {bubble:.0%}"
    metrics = _of_metrics(follower)
    return Text(f"{metrics}  {schedule}" if metrics else schedule)


def _of_metrics(follower: Follower) -> str:
    """`loss 3.2145  0.43 s a step  1,234 tokens/s`, as far as it is known."""
    line = follower.metrics
    told = []
    loss, seconds, tokens = (line.get(name) for name in ("loss", "step_time_s", "tokens"))
    if isinstance(loss, int | float):
        told.append(f"loss {loss:.4f}")
    if isinstance(seconds, int | float) and seconds > 0:
        told.append(f"{duration(seconds)} a step")
        if isinstance(tokens, int | float):
            told.append(f"{tokens / seconds:,.0f} tokens/s")
    return "  ".join(told)


def _stages(recent: Sequence[StepFigures]) -> Table:
    shown = recent[-1].by_stage()
    busy = {stage: fmean(_busy(step, stage) for step in recent) for stage in shown}
    most = sorted(sorted(busy, key=lambda stage: -busy[stage])[:_MOST_STAGES])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    word = "pp rank" if any(len(r.info.stages) > 1 for r in shown[most[0]]) else "stage"
    for name in (word, "ranks", "busy", "", "waits most for", "held"):
        table.add_column(name, no_wrap=True, header_style="dim")
    for stage in most:
        ranks = shown[stage]
        table.add_row(
            str(stage),
            _told_ranks(ranks),
            ProgressBar(total=1.0, completed=busy[stage], width=_BAR_WIDTH),
            f"{busy[stage]:4.0%}",
            _most_waited(recent, stage),
            _told_held(ranks),
        )
    if len(busy) > len(most):
        table.caption = f"the {len(most)} busiest of {len(busy)}"
    return table


def _busy(step: StepFigures, stage: int) -> float:
    ranks = [rank for rank in step.ranks.values() if rank.info.pp_rank == stage]
    return fmean(rank.busy_fraction for rank in ranks) if ranks else 0.0


def _told_held(ranks: Sequence[RankFigures]) -> str:
    """The most activations kept, and the most bytes where they are known."""
    held = str(max(rank.peak_held for rank in ranks))
    most_bytes = max(rank.peak_held_bytes for rank in ranks)
    return f"{held}  {format_bytes(most_bytes)}" if most_bytes else held


def _told_ranks(ranks: Sequence[RankFigures]) -> str:
    numbers = sorted(rank.info.rank for rank in ranks)
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers)) if len(numbers) <= 4 else f"{len(numbers)} ranks"


def _most_waited(recent: Sequence[StepFigures], stage: int) -> str:
    waits: Counter[str] = Counter()
    num = 0
    for step in recent:
        for rank in step.ranks.values():
            if rank.info.pp_rank == stage:
                waits.update(rank.wait_fractions)
                num += 1
    if not waits:
        return ""
    cause, share = waits.most_common(1)[0]
    return f"{cause} {share / num:.0%}"


def _waits(recent: Sequence[StepFigures]) -> Text:
    total: Counter[str] = Counter()
    for step in recent:
        total.update(step.wait_fractions())
    shares = [(cause, share / len(recent)) for cause, share in total.most_common(4)]
    told = [f"{cause} {share:.0%}" for cause, share in shares if share >= _LEAST_TOLD]
    return Text(f"Idle in the last {counted(len(recent), STEP)}: {', '.join(told) or 'hardly'}")


def _slowness(follower: Follower) -> list[RenderableType]:
    active = follower.active
    if active:
        lines = [Text(f"Slow: {alarm.text}", style="bold red") for alarm in active[:_MOST_ALARMS]]
        if len(active) > _MOST_ALARMS:
            lines.append(Text(f"and {len(active) - _MOST_ALARMS} more"))
        return [*lines]
    if len(follower.steps) < WINDOW:
        return [Text(f"Who is slow shows after {WINDOW} steps.")]
    leading: Alarm | None = follower.leading
    if leading is None or leading.rise < 0.005:
        return [Text("Slow: nobody.")]
    return [Text(f"Slow: nobody. Most: {leading.text}.")]


def _uneven(recent: Sequence[StepFigures]) -> Text | None:
    extra = extra_work(recent)
    if not extra:
        return None
    stage, share = max(extra.items(), key=lambda each: each[1])
    if share < _LEAST_EXTRA:
        return None
    return Text(f"Stage {stage} has {share:.0%} more work than the others have on average.")


def _stages_of_metrics(follower: Follower) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    busy = follower.metrics.get("busy_fraction")
    for stage, share in enumerate(busy[:_MOST_STAGES] if isinstance(busy, list) else []):
        if not isinstance(share, int | float):
            continue
        bar = ProgressBar(total=1.0, completed=share, width=_BAR_WIDTH)
        table.add_row(f"stage {stage}", bar, f"{share:4.0%} busy")
    return table


def duration(seconds: float) -> str:
    """`0.43 s`, `12.1 ms`."""
    from rrfp.analyze.table import format_time

    return format_time(seconds * NS_PER_S)


# The forms in which a run is told of: a live page, the page once, or a line for each event.

OVER = RunState.ENDED, RunState.KILLED
"""How a run stands that nobody needs to watch any longer."""
_MOST_NOTES = 3


class Teller(Protocol):
    """Tells of what each look at a run has found."""

    def begin(self) -> None: ...

    def tell(self, news: Update, stand: RunState, told: str) -> None: ...

    def note(self, sentence: str) -> None:
        """Something besides the run: an exporter or a command that failed."""

    def end(self, stand: RunState, told: str) -> None: ...

    def close(self) -> None:
        """Leave the terminal as it was; a second call does nothing."""


def has_terminal() -> bool:
    return sys.stdout.isatty()


class LivePage:
    """A page that redraws itself. Alerts stay above it when it has gone."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._console = console()
        self._live = Live(console=self._console, auto_refresh=False)
        self._notes: list[str] = []

    def begin(self) -> None:
        self._live.start()

    def tell(self, news: Update, stand: RunState, told: str) -> None:
        for alert in news.alerts:
            self._console.print(alert.text, soft_wrap=True)
        self._live.update(self._page(stand, told), refresh=True)

    def note(self, sentence: str) -> None:
        self._notes = [*self._notes, f"note: {sentence}"][-_MOST_NOTES:]

    def end(self, stand: RunState, told: str) -> None:
        self._live.update(self._page(stand, told), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _page(self, stand: RunState, told: str) -> RenderableType:
        return page(self._follower, stand, told, self._notes)


class OncePage:
    """The page, once."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._notes: list[str] = []

    def begin(self) -> None:
        pass

    def tell(self, news: Update, stand: RunState, told: str) -> None:
        pass

    def note(self, sentence: str) -> None:
        self._notes.append(f"note: {sentence}")

    def end(self, stand: RunState, told: str) -> None:
        console().print(page(self._follower, stand, told, self._notes))

    def close(self) -> None:
        pass


class Lines:
    """A line for each step, alert and change, for people or as JSON; or only for alerts."""

    def __init__(self, follower: Follower, *, as_json: bool, only_alerts: bool) -> None:
        self._follower = follower
        self._as_json = as_json
        self._only_alerts = only_alerts
        self._stand: RunState | None = None

    def begin(self) -> None:
        pass

    def tell(self, news: Update, stand: RunState, told: str) -> None:
        # That it is over comes last, from `end`.
        if stand is not self._stand and stand not in OVER:
            self._stand = stand
            if not (self._only_alerts and stand is RunState.GOING):
                self._tell_stand(stand, told)
        if not self._only_alerts:
            if self._as_json or not news.steps:
                for line in news.metrics:
                    self._tell_metrics(line, is_alone=not self._follower.steps)
            for step, active in news.steps:
                self._tell_step(step, active, news.metrics)
        for alert in news.alerts:
            self._tell_alert(alert)

    def note(self, sentence: str) -> None:
        print(f"note: {sentence}", file=sys.stderr)

    def end(self, stand: RunState, told: str) -> None:
        if stand is not self._stand:
            self._tell_stand(stand, told)

    def close(self) -> None:
        pass

    def _tell_stand(self, stand: RunState, told: str) -> None:
        path = str(self._follower.run.path)
        step = self._follower.last_step
        self._print({"event": stand, "run": path, "step": step, "text": told}, f"{path}: {told}")

    def _tell_metrics(self, line: dict[str, Any], *, is_alone: bool) -> None:
        measures = list(measures_of_metrics(line))
        if self._as_json:
            self._print(
                {"event": "metrics", "step": line.get("step"), **measures_as_json(measures)}, ""
            )
        elif is_alone and isinstance(step := line.get("step"), int):
            told = "  ".join(f"{name} {value:.4g}" for name, _, value in measures)
            self._print({}, f"step {step}  {told}")

    def _tell_step(
        self, step: StepFigures, active: list[Alarm], metrics: Sequence[dict[str, Any]]
    ) -> None:
        figures = measures_as_json(measures_of_step(step, active))
        loss = next((line.get("loss") for line in metrics if line.get("step") == step.step), None)
        waits = list(step.wait_fractions().items())[:1]
        told = [
            f"step {step.step}",
            *([f"loss {loss:.4f}"] if isinstance(loss, int | float) else []),
            duration(step.window_s),
            f"bubble {step.bubble_fraction:.0%}",
            f"busy {' '.join(f'{_mean(ranks):.0%}' for ranks in step.by_stage().values())}",
            *(f"most for {cause} {share:.0%}" for cause, share in waits),
            *(f"slow: {alarm.place}" for alarm in active),
        ]
        self._print({"event": "step", "step": step.step, **figures}, "  ".join(told))

    def _tell_alert(self, alert: Alert) -> None:
        named = alert_environment(alert, str(self._follower.run.path))
        event = {
            "event": named["RRFP_ALERT"],
            "step": alert.step,
            "kind": alert.alarm.kind,
            "ranks": alert.alarm.ranks,
            "pp_rank": alert.alarm.pp_rank,
            "dp_rank": alert.alarm.dp_rank,
            "link": alert.alarm.link,
            "hosts": alert.alarm.hosts,
            "since_step": alert.alarm.since_step,
            "rise_fraction": alert.alarm.rise,
            "text": alert.text,
        }
        self._print(event, alert.text)

    def _print(self, event: dict[str, object], text: str) -> None:
        print(json.dumps(event) if self._as_json else text, flush=True)


def _mean(ranks: Sequence[Any]) -> float:
    return fmean(rank.busy_fraction for rank in ranks)

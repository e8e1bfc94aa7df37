"""The forms in which a run is told of: a live page, the page once, or a line for each event."""

import json
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Protocol

from rich.console import RenderableType
from rich.live import Live

from rrfp.cli.console import console
from rrfp.cli.watch.page import duration, page
from rrfp.watch.alarms import (
    Alarm,
    Alert,
    alert_environment,
    measures_as_json,
    measures_of_metrics,
    measures_of_step,
)
from rrfp.watch.figures import StepFigures
from rrfp.watch.follow import Follower, RunState, Update

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

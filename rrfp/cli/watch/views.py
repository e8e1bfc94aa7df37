"""The views of `rrfp watch`: a page that fits 24 lines of 80 columns, or a line for each event."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

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
_LEAST_EXTRA, _LEAST_SHARE = 0.1, 0.01
_COLORS = {RunState.GOING: "green", RunState.SILENT: "yellow", RunState.KILLED: "red"}


def page(
    follower: Follower, state: RunState, sentence: str, notes: Sequence[str] = ()
) -> RenderableType:
    """Make the page of a run: state, figures, stages, main waits, slow places (or else a stage with
    much more work) and notes. Without records it has the state, the metrics and the stages' busy
    shares."""
    parts: list[RenderableType] = [_headline(follower, state, sentence)]
    recent = list(follower.steps)[-WINDOW:]
    if recent:
        parts += [_figures(follower, recent), Text(), _stages(recent), Text(), _waits(recent)]
        parts += _slowness(follower)
        # A slow place has more work because it is slow.
        if not follower.active and (uneven := _uneven(recent)) is not None:
            parts.append(uneven)
    elif follower.metrics:
        parts.append(Text(_format_metrics(follower)))
        parts += [Text(), _stages_of_metrics(follower)]
        if state is not RunState.WAITING:
            parts.append(Text("No records: neither causes of waits nor slow places are known."))
    if follower.begins_late and follower.steps:
        parts.append(Text("Earlier steps are left out, because the run has many records."))
    parts += map(Text, notes)
    return Group(*parts)


def _headline(follower: Follower, state: RunState, sentence: str) -> Text:
    """A line with directory, session (from the second on), number of steps and state of the run."""
    line = Text(f"{follower.run.path}  ")
    if follower.session > 1:
        line.append(f"session {follower.session}  ")
    if (step := follower.last_step) is not None:
        line.append(f"{_num_steps(follower, step)}  ")
    line.append(sentence, style=_COLORS.get(state, ""))
    return line


def _num_steps(follower: Follower, step: int) -> str:
    """Format the number of steps, one more than the last step: `41 of 200 steps`, or `41 steps` if
    the number requested is unknown."""
    settings = follower.description.get("settings")
    asked = settings.get("steps") if isinstance(settings, dict) else None
    of = f" of {asked}" if isinstance(asked, int) else ""
    return f"{step + 1}{of} steps"


def _figures(follower: Follower, recent: Sequence[StepFigures]) -> Text:
    """A line with metrics, mean schedule time and bubble of recent steps."""
    window_s = fmean(step.window_s for step in recent)
    bubble = fmean(step.bubble_fraction for step in recent)
    schedule = f"schedule {duration(window_s)}, bubble {bubble:.0%}"
    metrics = _format_metrics(follower)
    return Text(f"{metrics}  {schedule}" if metrics else schedule)


def _format_metrics(follower: Follower) -> str:
    """Format the last metrics as `loss 3.2145  430 ms a step  1,234 tokens/s`, without unknown
    values; empty without any."""
    line = follower.metrics
    words = []
    loss, seconds, tokens = (line.get(name) for name in ("loss", "step_time_s", "tokens"))
    if isinstance(loss, int | float):
        words.append(f"loss {loss:.4f}")
    if isinstance(seconds, int | float) and seconds > 0:
        words.append(f"{duration(seconds)} a step")
        if isinstance(tokens, int | float):
            words.append(f"{tokens / seconds:,.0f} tokens/s")
    return "  ".join(words)


def _stages(recent: Sequence[StepFigures]) -> Table:
    """A table of the busiest stages (at most twelve) in their order: ranks, mean busy share, main
    wait, and most activations held in the last step."""
    shown = recent[-1].by_stage()
    busy = {stage: fmean(_busy(step, stage) for step in recent) for stage in shown}
    most = sorted(sorted(busy, key=lambda stage: -busy[stage])[:_MOST_STAGES])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    word = "pp rank" if any(len(r.info.stages) > 1 for r in shown[most[0]]) else "stage"
    for name in (word, "ranks", "busy", "", "main wait", "held"):
        table.add_column(name, no_wrap=True, header_style="dim")
    for stage in most:
        ranks = shown[stage]
        table.add_row(
            str(stage),
            _format_ranks(ranks),
            ProgressBar(total=1.0, completed=busy[stage], width=_BAR_WIDTH),
            f"{busy[stage]:4.0%}",
            _main_wait(recent, stage),
            _format_held(ranks),
        )
    if len(busy) > len(most):
        table.caption = f"the {len(most)} busiest of {len(busy)}"
    return table


def _busy(step: StepFigures, stage: int) -> float:
    """Return the mean busy share of the ranks of a stage in a step; 0 without ranks."""
    ranks = [rank for rank in step.ranks.values() if rank.info.pp_rank == stage]
    return fmean(rank.busy_fraction for rank in ranks) if ranks else 0.0


def _format_held(ranks: Sequence[RankFigures]) -> str:
    """Format the peak of held microbatches of any of these ranks, and of bytes if known: `8  1.2
    GiB`."""
    held = str(max(rank.peak_held for rank in ranks))
    most_bytes = max(rank.peak_held_bytes for rank in ranks)
    return f"{held}  {format_bytes(most_bytes)}" if most_bytes else held


def _format_ranks(ranks: Sequence[RankFigures]) -> str:
    """Format the numbers of ranks: `0-3` for three or more in a row, `1,5` for up to four, else `9
    ranks`."""
    numbers = sorted(rank.info.rank for rank in ranks)
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers)) if len(numbers) <= 4 else f"{len(numbers)} ranks"


def _main_wait(recent: Sequence[StepFigures], stage: int) -> str:
    """Return the cause for which a stage waited longest, as `backward_input 22%`, a share of the
    ranks' time; empty without waits."""
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
    """A line with the four largest causes of idle time in recent steps, without those below 1%."""
    total: Counter[str] = Counter()
    for step in recent:
        total.update(step.wait_fractions())
    shares = [(cause, share / len(recent)) for cause, share in total.most_common(4)]
    words = [f"{cause} {share:.0%}" for cause, share in shares if share >= _LEAST_SHARE]
    return Text(f"Idle in the last {counted(len(recent), STEP)}: {', '.join(words) or 'hardly'}")


def _slowness(follower: Follower) -> list[RenderableType]:
    """Lines about slow places (at most three), or else one line about the place that is closest to
    being slow, if any is. Before WINDOW steps one line says that slowness is not known yet."""
    active = follower.active
    if active:
        lines = [Text(f"Slow: {alarm.text}", style="bold red") for alarm in active[:_MOST_ALARMS]]
        if len(active) > _MOST_ALARMS:
            lines.append(Text(f"and {len(active) - _MOST_ALARMS} more"))
        return [*lines]
    if len(follower.steps) < WINDOW:
        return [Text(f"Slow ranks are detected after {WINDOW} steps.")]
    leading: Alarm | None = follower.leading
    if leading is None or leading.rise < 0.005:
        return [Text("No rank is slow.")]
    return [Text(f"No rank is slow yet. Closest: {leading.text}.")]


def _uneven(recent: Sequence[StepFigures]) -> Text | None:
    """A line about the stage with the most work, if it exceeds the mean of the others by at least
    10%; None if not."""
    extra = extra_work(recent)
    if not extra:
        return None
    stage, share = max(extra.items(), key=lambda each: each[1])
    if share < _LEAST_EXTRA:
        return None
    return Text(f"Stage {stage} has {share:.0%} more work than the others have on average.")


def _stages_of_metrics(follower: Follower) -> Table:
    """A table of busy shares from metrics, for runs without records; at most twelve stages."""
    table = Table.grid(padding=(0, 2, 0, 0))
    busy = follower.metrics.get("busy_fraction")
    for stage, share in enumerate(busy[:_MOST_STAGES] if isinstance(busy, list) else []):
        if not isinstance(share, int | float):
            continue
        bar = ProgressBar(total=1.0, completed=share, width=_BAR_WIDTH)
        table.add_row(f"stage {stage}", bar, f"{share:4.0%} busy")
    return table


def duration(seconds: float) -> str:
    """Format seconds with a unit and three digits: `1.23 s`, `430 ms`, `12.1 ms`."""
    from rrfp.analyze.table import format_time

    return format_time(seconds * NS_PER_S)


# Views of a run: a page or lines.


OVER = RunState.ENDED, RunState.KILLED
"""The states of a run after which nothing more is shown."""
_MOST_NOTES = 3


def print_note(sentence: str) -> None:
    """Print on stderr that an exporter or the alert command failed."""
    print(f"note: {sentence}", file=sys.stderr)


class View:
    """Shows what the follower of a run has found; by default nothing."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def begin(self) -> None:
        """Start the display, before the first update. This class does nothing."""

    def update(self, news: Update, state: RunState, sentence: str) -> None:
        """Show what is new; `sentence` describes the run's state. This class shows nothing."""

    def note(self, sentence: str) -> None:
        """Show that an exporter or the alert command failed. This class shows nothing."""

    def end(self, state: RunState, sentence: str) -> None:
        """Show the final state, after the last update. This class shows nothing."""

    def close(self) -> None:
        """Restore the terminal; a second call does nothing. This class has nothing to restore."""


class OncePage(View):
    """Prints the page once, at the end."""

    def __init__(self, follower: Follower) -> None:
        super().__init__(follower)
        self._notes: list[str] = []

    def note(self, sentence: str) -> None:
        """Add a note to the page that `end` prints."""
        self._notes.append(f"note: {sentence}")

    def end(self, state: RunState, sentence: str) -> None:
        """Print the page with the notes on stdout."""
        console().print(self._page(state, sentence))

    def _page(self, state: RunState, sentence: str) -> RenderableType:
        """Make the page of the run in this state, with the notes."""
        return page(self._follower, state, sentence, self._notes)


class LivePage(OncePage):
    """A page that is redrawn; alerts are printed above it and stay."""

    def __init__(self, follower: Follower) -> None:
        super().__init__(follower)
        self._console = console()
        self._live = Live(console=self._console, auto_refresh=False)

    def begin(self) -> None:
        """Start the display that is redrawn."""
        self._live.start()

    def update(self, news: Update, state: RunState, sentence: str) -> None:
        """Print new alerts above the page, and redraw the page."""
        for alert in news.alerts:
            self._console.print(alert.text, soft_wrap=True)
        self.end(state, sentence)

    def note(self, sentence: str) -> None:
        """Add a note to the page, which shows the last three from the next redraw on."""
        super().note(sentence)
        del self._notes[:-_MOST_NOTES]

    def end(self, state: RunState, sentence: str) -> None:
        """Redraw the page now."""
        self._live.update(self._page(state, sentence), refresh=True)

    def close(self) -> None:
        """End the redrawing, and leave the last page on the terminal."""
        self._live.stop()


class Lines(View):
    """Prints a line for each step, alert and change of state, as text or JSON; or without steps."""

    def __init__(self, follower: Follower, *, as_json: bool, only_alerts: bool) -> None:
        super().__init__(follower)
        self._as_json = as_json
        self._only_alerts = only_alerts
        self._state: RunState | None = None

    def update(self, news: Update, state: RunState, sentence: str) -> None:
        """Print what is new in this order: a changed state, metrics, steps, alerts.

        With `only_alerts` metrics, steps and the state GOING are left out. As text, metrics are
        printed only if no steps came. The states in OVER are left to `end`.
        """
        # `end` prints that the run is over, after everything else.
        if state is not self._state and state not in OVER:
            self._state = state
            if not (self._only_alerts and state is RunState.GOING):
                self._print_state(state, sentence)
        if not self._only_alerts:
            if self._as_json or not news.steps:
                for line in news.metrics:
                    self._print_metrics(line, has_records=bool(self._follower.steps))
            for step, active in news.steps:
                self._print_step(step, active, news.metrics)
        for alert in news.alerts:
            self._print_alert(alert)

    def note(self, sentence: str) -> None:
        """Print a note on stderr, as text in every mode."""
        print_note(sentence)

    def end(self, state: RunState, sentence: str) -> None:
        """Print the last state, unless it was printed before."""
        if state is not self._state:
            self._print_state(state, sentence)

    def _print_state(self, state: RunState, sentence: str) -> None:
        """Print the run's directory and the sentence about its state, or a JSON event with the last
        step."""
        path = str(self._follower.run.path)
        step = self._follower.last_step
        event: dict[str, object] = {"event": state, "run": path, "step": step, "text": sentence}
        self._print(event, f"{path}: {sentence}")

    def _print_metrics(self, line: dict[str, Any], *, has_records: bool) -> None:
        """Print a line of metrics.jsonl as a JSON event. As text it is printed only for a run
        without records, and only if it has a step."""
        measures = list(measures_of_metrics(line))
        if self._as_json:
            self._print(
                {"event": "metrics", "step": line.get("step"), **measures_as_json(measures)}, ""
            )
        elif not has_records and isinstance(step := line.get("step"), int):
            figures = "  ".join(f"{name} {value:.4g}" for name, _, value in measures)
            self._print({}, f"step {step}  {figures}")

    def _print_step(
        self, step: StepFigures, active: list[Alarm], metrics: Sequence[dict[str, Any]]
    ) -> None:
        """Print a line about a step: loss if known, schedule time, bubble, busy share of each
        stage, largest wait and slow places; or a JSON event with all measures."""
        loss = next((line.get("loss") for line in metrics if line.get("step") == step.step), None)
        waits = list(step.wait_fractions().items())[:1]
        busy = (fmean(rank.busy_fraction for rank in ranks) for ranks in step.by_stage().values())
        words = [
            f"step {step.step}",
            *([f"loss {loss:.4f}"] if isinstance(loss, int | float) else []),
            duration(step.window_s),
            f"bubble {step.bubble_fraction:.0%}",
            f"busy {' '.join(f'{share:.0%}' for share in busy)}",
            *(f"main wait: {cause} {share:.0%}" for cause, share in waits),
            *(f"slow: {alarm.place}" for alarm in active),
        ]
        event = {
            "event": "step",
            "step": step.step,
            **measures_as_json(measures_of_step(step, active)),
        }
        self._print(event, "  ".join(words))

    def _print_alert(self, alert: Alert) -> None:
        """Print the text of an alert, or a JSON event with its parts."""
        alarm = alert.alarm
        event = {
            "event": alert_environment(alert, str(self._follower.run.path))["RRFP_ALERT"],
            "step": alert.step,
            "kind": alarm.kind,
            "ranks": alarm.ranks,
            "pp_rank": alarm.pp_rank,
            "dp_rank": alarm.dp_rank,
            "link": alarm.link,
            "hosts": alarm.hosts,
            "since_step": alarm.since_step,
            "rise_fraction": alarm.rise,
            "text": alert.text,
        }
        self._print(event, alert.text)

    def _print(self, event: dict[str, object], text: str) -> None:
        """Print the event as JSON, or else the text, as one line on stdout that is flushed."""
        print(json.dumps(event) if self._as_json else text, flush=True)

"""Progress bars on a terminal, and the display of a training run."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, Timer
from types import TracebackType
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rrfp.cli.console import console
from rrfp.train.settings import TrainSettings

_POLL_S = 1.0
_HIDDEN_S = 1.0
"""Shorter work shows no bar."""


@contextmanager
def progress(
    what: str, total: int, num_done: Callable[[], int] | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr for `total` items, and remove it at the end. Nothing is shown
    for one item, or if stderr is no terminal.

    Yields a function that is called with the number of items just completed. If `num_done` is
    given, a thread polls it every second for the number completed so far instead.
    """
    if total == 1 or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total, completed=num_done() if num_done else 0)
        ended = Event()

        def follow(ask: Callable[[], int]) -> None:
            while not ended.wait(_POLL_S):
                progress.update(task, completed=ask())

        threads = [Thread(target=follow, args=(num_done,), daemon=True)] if num_done else []
        for thread in threads:
            thread.start()
        try:
            yield lambda count: progress.advance(task, count)
        finally:
            ended.set()
            for thread in threads:
                thread.join()


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a bar with the elapsed time on stderr, once the block has run for a second; removed at
    the end. Nothing is shown if stderr is no terminal.

    Nothing else may be printed meanwhile.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=console(stderr=True), transient=True)
    bar.add_task(what, total=None)
    timer = Timer(_HIDDEN_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()


_METRICS_POLL_S = 0.2
_BAR_WIDTH = 40


class TrainDisplay:
    """Prints step, loss and speed on stderr while a run trains; on a terminal also busy fractions.

    A thread follows the run's `metrics.jsonl` until the `with` block ends. A terminal is redrawn;
    other streams get a line for each step.
    """

    def __init__(self, metrics: Path, settings: TrainSettings, first_step: int = 0) -> None:
        """`first_step` is the first step that this session trains."""
        self._path = metrics
        self._settings = settings
        # A resumed run replaces the file, which then begins with the steps of the checkpoint.
        self._stale = metrics.stat().st_ino if metrics.exists() else None
        self._next_step = first_step
        self._offset = 0
        self._last: dict[str, Any] | None = None
        self._heldout: float | None = None
        self._start_s = time.monotonic()
        self._console = console(stderr=True)
        self._live = Live(console=self._console, get_renderable=self._picture, refresh_per_second=5)
        self._ended = Event()
        self._thread = Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        settings = self._settings
        self._console.print(
            f"Training {settings.model.layers} layers with {_layout(settings)}, "
            f"dispatch {settings.policy.dispatch}, hint {settings.hint.name}\n"
            f"The run's directory is {self._path.parent}",
            highlight=False,
            soft_wrap=True,
        )
        if self._console.is_terminal:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._live.is_started:
            self._live.stop()

    def warn(self, sentence: str) -> None:
        """Print a warning on stderr, above the redrawn lines on a terminal."""
        self._console.print(
            f"Warning: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )

    def _follow(self) -> None:
        """Read new metrics every 0.2 s until the `with` block ends, and once more then (the
        thread)."""
        while not self._ended.wait(_METRICS_POLL_S):
            self._read()
        self._read()

    def _read(self) -> None:
        """Read the complete lines added to the metrics since the last call, keep the last step and
        held-out loss, and print a line for each step unless a terminal is redrawn.

        Skips steps before this session's first, and a file that was there before a resumed run
        replaced it.
        """
        try:
            file = self._path.open("rb")
        except OSError:
            return
        with file:
            if os.fstat(file.fileno()).st_ino == self._stale:
                return
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                last = json.loads(line)
                if last["step"] < self._next_step:
                    continue
                self._last = last
                if last["heldout_loss"] is not None:
                    self._heldout = last["heldout_loss"]
                if not self._live.is_started:
                    self._console.print(self._headline(), highlight=False)

    def _headline(self) -> Text:
        """Return the line about the last step: number, loss, held-out loss if known, tokens/s and
        s/step. Before the first step it counts the seconds since the start."""
        last = self._last
        if last is None:
            seconds = time.monotonic() - self._start_s
            return Text(f"starting {self._settings.layout.world_size} ranks ... {seconds:.0f} s")
        speed = last["tokens"] / last["step_time_s"]
        heldout = "" if self._heldout is None else f"(held-out {self._heldout:.4f})   "
        return Text(
            f"step {last['step'] + 1}/{self._settings.num_steps}   "
            f"loss {last['loss']:.4f}   {heldout}"
            f"{speed:,.0f} tokens/s   {last['step_time_s']:.2f} s/step"
        )

    def _picture(self) -> RenderableType:
        """Return what a terminal shows: the headline, and below it a bar of the busy fraction for
        each pipeline rank once there is a step."""
        if self._last is None:
            return self._headline()
        shape = self._settings.shape
        stages = Table.grid(padding=(0, 2, 0, 0))
        for pp_rank, busy in enumerate(self._last["busy_fraction"]):
            stages.add_row(
                f"stage {', '.join(map(str, shape.stages_of(pp_rank)))}",
                ProgressBar(total=1.0, completed=busy, width=_BAR_WIDTH),
                f"{busy:4.0%} busy",
            )
        return Group(self._headline(), stages)


def _layout(settings: TrainSettings) -> str:
    """Describe the parallelism of a run as `pp 4, tp 1, dp 2`; the expert-parallel size and the
    chunks only if they are above 1."""
    layout = settings.layout
    named = [f"pp {layout.pp}", f"tp {layout.tp}", f"dp {layout.num_replicas}"]
    if layout.ep > 1:
        named.append(f"ep {layout.ep}")
    if layout.chunks > 1:
        named.append(f"{layout.chunks} chunks in a {layout.placement}")
    return ", ".join(named)

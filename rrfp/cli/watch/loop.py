"""Looks at a run again and again until it has ended, and passes on what is new."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from rrfp.cli.terminal import has_reader
from rrfp.cli.watch.views import OVER, Teller
from rrfp.errors import RrfpError, first_line
from rrfp.watch.alarms import alert_environment, measures_of_metrics, measures_of_step
from rrfp.watch.exporters import Exporter
from rrfp.watch.follow import Follower, Update

_TIMEOUT_S = 60.0
_POLL_S = 0.05


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    deadline_s: float


class AlertCommand:
    """A command line for the shell, which gets what happened in environment variables. What it
    prints is shown only if it fails, and after a minute it is ended."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._running: list[_Running] = []

    def start(self, facts: Mapping[str, str]) -> None:
        """May raise OSError."""
        # Closed when the command has ended.
        output = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            ["/bin/sh", "-c", self._line],
            env={**os.environ, **facts},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._running.append(_Running(process, output, time.monotonic() + _TIMEOUT_S))

    def ended(self) -> list[str]:
        """A sentence for each command that has failed since the last call."""
        told = []
        for each in list(self._running):
            code = each.process.poll()
            if code is None:
                if time.monotonic() < each.deadline_s:
                    continue
                _end(each.process)
                told.append(f"the alert command was ended after {_TIMEOUT_S:.0f} s")
            elif code:
                each.output.seek(0)
                said = first_line(each.output.read().decode(errors="replace"))
                told.append(f"the alert command ended with {code}: {said}")
            each.output.close()
            self._running.remove(each)
        return told

    def close(self) -> list[str]:
        """Wait for the commands that still run, and give what `ended` gives."""
        told = self.ended()
        while self._running:
            time.sleep(_POLL_S)
            told += self.ended()
        return told


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


# The loop.


def watch_run(
    follower: Follower,
    teller: Teller,
    exporters: MutableMapping[str, Exporter],
    command: AlertCommand | None,
    *,
    once: bool,
    sleep: Callable[[], None],
) -> None:
    """Follow a run until it has ended; with `once`, until all that is there has been read.

    `exporters` are closed here, and taken out of the mapping when one fails.
    """
    try:
        teller.begin()
        while True:
            # The state is read first: the poll then finds all that a finished run has written.
            stand, _ = follower.state()
            news = follower.poll()
            _send(follower, news, exporters, teller)
            _alert(follower, news, command, teller)
            is_last = not news.has_more and (once or stand in OVER)
            now, told = follower.state()
            teller.tell(news, now, told)
            if is_last and (once or now in OVER):
                teller.end(now, told)
                break
            if not has_reader():
                break
            if not news.has_more:
                sleep()
    finally:
        _close(follower, exporters, command, teller)


def _send(
    follower: Follower, news: Update, exporters: MutableMapping[str, Exporter], teller: Teller
) -> None:
    if not (news.steps or news.metrics):
        return
    for asked, exporter in list(exporters.items()):
        try:
            for line in news.metrics:
                if isinstance(step := line.get("step"), int):
                    exporter.add(step, "metrics", list(measures_of_metrics(line)))
            for figures, active in news.steps:
                exporter.add(figures.step, "records", list(measures_of_step(figures, active)))
            exporter.flush()
        except (RrfpError, OSError) as error:
            del exporters[asked]
            teller.note(f"--export {asked} has ended: {error}")


def _alert(follower: Follower, news: Update, command: AlertCommand | None, teller: Teller) -> None:
    if command is None:
        return
    for alert in news.alerts:
        try:
            command.start(alert_environment(alert, str(follower.run.path)))
        except OSError as error:
            teller.note(f"the alert command was not started: {error}")
    for sentence in command.ended():
        teller.note(sentence)


def _close(
    follower: Follower,
    exporters: MutableMapping[str, Exporter],
    command: AlertCommand | None,
    teller: Teller,
) -> None:
    teller.close()
    follower.close()
    for asked, exporter in exporters.items():
        try:
            exporter.close()
        except (RrfpError, OSError) as error:
            teller.note(f"--export {asked}: {error}")
    if command is not None:
        for sentence in command.close():
            teller.note(sentence)

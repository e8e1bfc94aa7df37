"""The loop of `rrfp watch`: follows a run and updates a view, exporters and the alert command."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from rrfp.cli.terminal import has_reader
from rrfp.cli.watch.views import OVER, View, print_note
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
    """Runs the user's shell command for each alert, without waiting for it.

    The command gets the alert in environment variables and is killed after a minute. Its output is
    shown only if it fails.
    """

    def __init__(self, line: str) -> None:
        self._line = line
        self._running: list[_Running] = []

    def start(self, facts: Mapping[str, str]) -> None:
        """Start the command in a shell with these additional environment variables, and do not wait
        for it. May raise OSError."""
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
        """Return a sentence for each command that has failed since the last call. Commands that
        have run for a minute are killed, which is a failure."""
        failures = []
        for each in list(self._running):
            code = each.process.poll()
            if code is None:
                if time.monotonic() < each.deadline_s:
                    continue
                _end(each.process)
                failures.append(f"the alert command was ended after {_TIMEOUT_S:.0f} s")
            elif code:
                each.output.seek(0)
                output = first_line(each.output.read().decode(errors="replace"))
                failures.append(f"the alert command ended with {code}: {output}")
            each.output.close()
            self._running.remove(each)
        return failures

    def close(self) -> list[str]:
        """Wait until the running commands have ended or were killed, and return a sentence for each
        failure."""
        failures = self.ended()
        while self._running:
            time.sleep(_POLL_S)
            failures += self.ended()
        return failures


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a command with SIGKILL and wait for the command."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def watch_run(
    follower: Follower,
    view: View,
    exporters: MutableMapping[str, Exporter],
    command: AlertCommand | None,
    *,
    once: bool,
    sleep: Callable[[], None],
) -> None:
    """Follow a run until it has ended, or the reader of stdout has gone; with `once`, until
    everything present has been read.

    Each round passes news to the exporters, the alert command and the view. At the end it closes
    them. An exporter that fails is removed from the mapping.
    """
    try:
        view.begin()
        while True:
            # The state comes before the poll, which then finds everything that an ended run wrote.
            state, _ = follower.state()
            news = follower.poll()
            _send(follower, news, exporters, view)
            _alert(follower, news, command, view)
            is_last = not news.has_more and (once or state in OVER)
            now, sentence = follower.state()
            view.update(news, now, sentence)
            if is_last and (once or now in OVER):
                view.end(now, sentence)
                break
            if not has_reader():
                break
            if not news.has_more:
                sleep()
    finally:
        _close(follower, exporters, command, view)


def _send(
    follower: Follower, news: Update, exporters: MutableMapping[str, Exporter], view: View
) -> None:
    """Pass new steps, and new metrics that have a step, to the exporters. An exporter that fails is
    removed, and the view shows why."""
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
            view.note(f"--export {asked} has ended: {error}")


def _alert(follower: Follower, news: Update, command: AlertCommand | None, view: View) -> None:
    """Start the command for each new alert, and show failures of earlier ones. Does nothing without
    a command."""
    if command is None:
        return
    for alert in news.alerts:
        try:
            command.start(alert_environment(alert, str(follower.run.path)))
        except OSError as error:
            view.note(f"the alert command was not started: {error}")
    for sentence in command.ended():
        view.note(sentence)


def _close(
    follower: Follower,
    exporters: MutableMapping[str, Exporter],
    command: AlertCommand | None,
    view: View,
) -> None:
    """Close view, follower and exporters, and wait for alert commands. Failures of exporters and
    commands are not raised but printed on stderr, below the closed view."""
    view.close()
    follower.close()
    for asked, exporter in exporters.items():
        try:
            exporter.close()
        except (RrfpError, OSError) as error:
            print_note(f"--export {asked}: {error}")
    if command is not None:
        for sentence in command.close():
            print_note(sentence)

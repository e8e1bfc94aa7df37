"""Looks at a run again and again until it has ended, and passes on what is new."""

from collections.abc import Callable, MutableMapping

from rrfp.cli.terminal import has_reader
from rrfp.cli.watch.alert_command import AlertCommand
from rrfp.cli.watch.telling import OVER, Teller
from rrfp.errors import RrfpError
from rrfp.watch.alarms import alert_environment, measures_of_metrics, measures_of_step
from rrfp.watch.exporters.exporter import Exporter
from rrfp.watch.follow import Follower, Update


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
            # Asked before the look, which then finds all that a run that is over has written.
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
                    exporter.take(step, "metrics", list(measures_of_metrics(line)))
            for figures, active in news.steps:
                exporter.take(figures.step, "records", list(measures_of_step(figures, active)))
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

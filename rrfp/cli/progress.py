"""Bars on a terminal: how much of a command's work is done, or that it is under way."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread, Timer

_POLL_S = 1.0
_PATIENCE_S = 1.0
"""Work that takes less is not told of."""


@contextmanager
def progress(
    what: str, total: int, num_done: Callable[[], int] | None = None
) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how much of `total` is done and how long the rest will take.

    Yields what to call when more is done. If nobody can call it, `num_done` is asked now and then.
    The bar leaves nothing behind.
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

    from rrfp.cli.terminal.console import console

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
    """Show on a terminal that work whose end is not known is under way, and for how long, once it
    has taken a second. Nothing may be printed meanwhile. The bar leaves nothing behind."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from rrfp.cli.terminal.console import console

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=console(stderr=True), transient=True)
    bar.add_task(what, total=None)
    timer = Timer(_PATIENCE_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()

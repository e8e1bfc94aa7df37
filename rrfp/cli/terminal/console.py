"""What draws tables and live pages; `rrfp.cli.terminal.guard` says why rich alone does not."""

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rrfp.cli.terminal.guard import shown


def console(*, stderr: bool = False) -> Console:
    """A console that shows text as it is: what is told may look like rich's own markup, figures in
    it are no finds, and nothing in it steers the terminal."""
    return _GuardedConsole(stderr=stderr, highlight=False, markup=False, emoji=False)


class _GuardedConsole(Console):
    @property
    def file(self) -> IO[str]:
        """What lies behind the guarded stream, also while something is redrawn: for that time rich
        puts a proxy of its own before it."""
        file = super().file
        return getattr(file, "rich_proxied_file", file)

    @file.setter
    def file(self, file: IO[str]) -> None:
        self._file = file

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)

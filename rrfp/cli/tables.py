"""A table with its title and what it says in words: printed on a terminal or as Markdown."""

import csv
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rrfp.cli.terminal import shown

if TYPE_CHECKING:
    import polars as pl


# What draws tables and live pages; `rrfp.cli.terminal` says why rich alone does not.


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


# CSV whose texts a spreadsheet shows and does not run.


_FORMULA = re.compile(r"[=+\-@\t\r]")


def print_csv(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a heading and rows on stdout."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([harmless(cell) for cell in row] for row in rows)


def csv_of(report: "pl.DataFrame") -> str:
    """A table with its heading."""
    import polars as pl

    texts = (column for column in report if column.dtype == pl.String)
    return report.with_columns(
        pl.Series(each.name, [harmless(cell) for cell in each], pl.String) for each in texts
    ).write_csv()


def harmless(cell: object) -> object:
    """A text that a spreadsheet would take for a formula, behind an apostrophe; else the cell as it
    is. A number stays one, whatever its sign."""
    is_formula = isinstance(cell, str) and _FORMULA.match(cell) and not _is_number(cell)
    return f"'{cell}" if is_formula else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


MARK = "▲"
"""Behind a figure that stands out."""
_WIDTH = 79
"""A terminal's, less the space before the first column."""
_GAP = 2
"""Between two columns."""
_MOST_LETTERS = 16
"""A column of text that is longer wraps."""
_LEAST_LETTERS = 8
"""A column of text that is narrower is hard to read."""
_MARKDOWN = re.compile(r"[\\|*_`<\[\]~]")


@dataclass(frozen=True, slots=True)
class Column:
    """A column; a line break in its heading is one on a terminal only."""

    heading: str
    cells: Sequence[str]
    is_text: bool = False
    """Text is set left and may wrap; figures are set right and never do."""
    is_whole: bool = False
    """Text that wraps only where nothing else helps, as names that people copy."""
    marked: Collection[int] = ()
    """The rows whose cells stand out."""
    colour: str = ""
    """What the column shows in charts; terminals show it above the heading."""

    @property
    def width(self) -> int:
        """How wide it wants to be, in letters."""
        texts = [*self.heading.splitlines(), *self.texts()]
        width = max(map(len, texts), default=0)
        return min(width, _MOST_LETTERS) if self.is_text and not self.is_whole else width

    @property
    def least_width(self) -> int:
        """How narrow it may become before others are left out."""
        if not self.is_text or self.is_whole:
            return self.width
        words = (word for text in (self.heading, *self.cells) for word in text.split())
        return min(self.width, max(_LEAST_LETTERS, max(map(len, words), default=0)))

    def texts(self) -> list[str]:
        """The cells, with marks; the others keep the marks' place free."""
        if not self.marked:
            return list(self.cells)
        return [
            f"{cell}{MARK if row in self.marked else ' '}" for row, cell in enumerate(self.cells)
        ]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table for people."""

    title: str
    """A line, or several of which the last is the table's own."""
    columns: Sequence[Column]
    notes: Sequence[str] = ()
    """What it says, in sentences."""
    num_names: int = 1
    """So many columns name a row; they recur where a table is cut to fit the terminal."""
    has_total: bool = False
    """The last row is that of all others together."""
    dispensable: Sequence[str] = ()
    """The headings of columns that a terminal leaves out, one by one, where the table is too wide;
    Markdown has them all."""
    num_first: int = 0
    """So many rows stand apart from those below them."""
    mark_told: str = "far above the others"
    """What a mark says."""

    def print(self, console: Console) -> None:
        """Print it; a table wider than 80 columns goes on below itself."""
        if self.title:
            console.print(Text(self.title, style="bold"))
        for columns in self._parts(console.width - 1):
            in_colour = console.color_system is not None
            console.print(self._table(columns, console.width - 1, in_colour=in_colour))
        for note in self._told():
            console.print(Text(note))

    def markdown(self) -> str:
        """The same in GitHub's Markdown."""

        def line(cells: Sequence[str], style: str = "") -> str:
            words = (escaped(cell.strip()) for cell in cells)
            return f"| {' | '.join(f'{style}{each}{style}' if each else '' for each in words)} |"

        head = [each.heading.replace("-\n", "").replace("\n", " ") for each in self.columns]
        rows = list(zip(*(each.texts() for each in self.columns), strict=True))
        lines = []
        for title in self.title.splitlines():
            lines += [f"**{escaped(title)}**", ""]
        lines.append(line(head))
        lines.append(f"| {' | '.join(':--' if each.is_text else '--:' for each in self.columns)} |")
        for number, row in enumerate(rows, start=1):
            lines.append(line(row, "**" if self.has_total and number == len(rows) else ""))
        for note in self._told():
            lines += ["", escaped(note)]
        return "\n".join(lines) + "\n"

    def _told(self) -> list[str]:
        notes = [note for note in self.notes if note]
        if self.mark_told and any(each.marked for each in self.columns):
            notes.insert(0, f"{MARK} {self.mark_told}")
        return notes

    def _parts(self, width: int) -> list[list[Column]]:
        """The columns, cut so that each part fits beside the names, and none stands there alone;
        without those dispensable ones for which the terminal is not wide enough."""
        columns = list(self.columns)
        for heading in self.dispensable:
            if _least_width(columns) > width:
                columns = [each for each in columns if each.heading != heading]
        names = columns[: self.num_names]
        parts = [[*names]]
        for column in columns[self.num_names :]:
            if _width([*parts[-1], column]) > _WIDTH and len(parts[-1]) > len(names):
                parts.append([*names])
            parts[-1].append(column)
        if len(parts) > 1 and len(parts[-1]) == len(names) + 1 < len(parts[-2]) - 1:
            parts[-1].insert(len(names), parts[-2].pop())
        return parts

    def _table(self, columns: Sequence[Column], width: int, *, in_colour: bool) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        is_too_wide = _least_width(columns) > width
        with_blocks = in_colour and any(each.colour for each in columns)
        for each in columns:
            heading = Text(each.heading)
            if with_blocks and each.colour:
                heading = Text.assemble(("■\n", each.colour), each.heading)
            if each.is_text:
                table.add_column(
                    heading,
                    overflow="fold",
                    vertical="bottom",
                    no_wrap=each.is_whole and not is_too_wide,
                    # The others give way before the names do.
                    max_width=each.width if is_too_wide else None,
                )
            else:
                table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
        num_rows = len(columns[0].cells)
        for row in range(num_rows):
            is_total = self.has_total and row == num_rows - 1
            if is_total or (row and row == self.num_first):
                table.add_section()
            cells = (
                Text(text, style="bold" if row in each.marked else "")
                for each, text in zip(columns, (each.texts()[row] for each in columns), strict=True)
            )
            table.add_row(*cells, style="bold" if is_total else None)
        return table


def _width(columns: Sequence[Column]) -> int:
    return sum(each.width + _GAP for each in columns)


def _least_width(columns: Sequence[Column]) -> int:
    return sum(each.least_width + _GAP for each in columns)


def escaped(words: str) -> str:
    """Text in which nothing is Markdown, on one line."""
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(words.split()))

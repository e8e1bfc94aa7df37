"""Prints tables on stdout in each format, on consoles that escape control characters."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import IO, TYPE_CHECKING, Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from rrfp.analyze.table import Column, Table, csv_of_frame
from rrfp.cli.options import Format, RowFormat
from rrfp.cli.terminal import escape_controls
from rrfp.errors import UsageError

if TYPE_CHECKING:
    import polars as pl


def console(*, stderr: bool = False) -> Console:
    """Return a rich console on stdout or stderr that prints text as it is, without markup, emoji
    and highlighting, but with control characters escaped."""
    return _GuardedConsole(stderr=stderr, highlight=False, markup=False, emoji=False)


class _GuardedConsole(Console):
    """A rich console that escapes control characters in the text that it prints."""

    @property
    def file(self) -> IO[str]:
        """The stream to write to: the original behind a guarded one, or behind rich's proxy during
        a redraw, because escaping would break rich's colors."""
        file = super().file
        return getattr(file, "rich_proxied_file", file)

    @file.setter
    def file(self, file: IO[str]) -> None:
        """Set the stream to write to."""
        self._file = file

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield rich's segments with control characters of texts escaped; rich's own control
        segments stay."""
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else Segment(escape_controls(segment.text), segment.style)
            )


def print_report(
    tables: Sequence[Table], output_format: Format, more: Mapping[str, object] | None = None
) -> None:
    """Print tables on stdout: one by one for people, and for CSV and Parquet as one data frame of
    all.

    The JSON document is the first table's, with the members of `more`. Raises UsageError for
    Parquet on a terminal.
    """
    match output_format:
        case Format.TABLE | Format.MD:
            print_tables(tables, markdown=output_format is Format.MD)
        case Format.JSON:
            print(json.dumps({**tables[0].document(), **(more or {})}))
        case Format.CSV:
            sys.stdout.write(csv_of_frame(_concatenated(tables)))
        case Format.PARQUET:
            if sys.stdout.isatty():
                raise UsageError(
                    "--format parquet is no text for a terminal; send it to a file with "
                    "> report.parquet"
                )
            # Writing through a buffer avoids polars' own error for a closed pipe.
            file = BytesIO()
            _concatenated(tables).write_parquet(file)
            sys.stdout.buffer.write(file.getvalue())


def _concatenated(tables: Sequence[Table]) -> "pl.DataFrame":
    """Return one data frame with the rows for programs of all tables."""
    import polars as pl

    return pl.concat([table.frame() for table in tables])


def print_rows(table: Table, output_format: RowFormat, *, may_have_formulas: bool = True) -> None:
    """Print one table on stdout without building a data frame. In CSV, texts that a spreadsheet
    would run are escaped if it `may_have_formulas`."""
    match output_format:
        case RowFormat.TABLE | RowFormat.MD:
            print_tables([table], markdown=output_format is RowFormat.MD)
        case RowFormat.JSON:
            print(json.dumps(table.document()))
        case RowFormat.CSV:
            print(table.csv(may_have_formulas=may_have_formulas), end="")


def print_tables(tables: Sequence[Table], *, markdown: bool) -> None:
    """Print tables for people on stdout, laid out for a terminal or as Markdown."""
    if markdown:
        print("\n".join(table.markdown() for table in tables), end="")
        return
    terminal = console()
    for table in tables:
        print_table(table, terminal)


def print_table(table: Table, terminal: Console) -> None:
    """Print a table with its title and notes; columns beyond 79 characters or the terminal's width
    follow in another table below."""
    if table.title:
        terminal.print(Text(table.title, style="bold"))
    width = terminal.width - 1
    in_color = terminal.color_system is not None
    for columns in _split_columns(table, width):
        terminal.print(_rich_table(table, columns, width, in_color=in_color))
    for note in table.notes():
        terminal.print(Text(note))


_WIDTH = 79
"""The width of a terminal in characters, less the space before the first column."""
_GAP = 2
"""Characters between two columns."""
_MOST_LETTERS = 16
"""Wider columns of text wrap."""
_LEAST_LETTERS = 8
"""Columns of text do not become narrower."""


@dataclass(frozen=True, slots=True)
class _Cells:
    """A column with the cells that a terminal shows."""

    column: Column
    texts: Sequence[str]

    @property
    def heading(self) -> str:
        """The column's heading, empty if it has none."""
        return self.column.heading or ""

    @property
    def may_wrap(self) -> bool:
        """True for columns of text, except names."""
        return self.column.unit.is_text and not self.column.unit.is_name

    @property
    def width(self) -> int:
        """The width in characters of the longest cell or line of the heading, at most 16 where text
        may wrap."""
        width = max(map(len, (*self.heading.splitlines(), *self.texts)), default=0)
        return min(width, _MOST_LETTERS) if self.may_wrap else width

    @property
    def least_width(self) -> int:
        """The smallest acceptable width in characters: where text may wrap, the width of the
        longest word, but at least 8 and at most the preferred width; else the preferred width."""
        if not self.may_wrap:
            return self.width
        words = (word for text in (self.heading, *self.texts) for word in text.split())
        return min(self.width, max(_LEAST_LETTERS, max(map(len, words), default=0)))


def _split_columns(table: Table, width: int) -> list[list[_Cells]]:
    """Split the columns into parts of at most 79 and `width` characters; each part repeats the name
    columns, and a part with one other column may be wider.

    Drops dispensable columns first, one by one until the smallest widths of all columns fit
    `width`. A last part with one figure takes another from the part before if that has three.
    """
    columns = [_Cells(column, texts) for column, texts in table.shown()]
    for heading in table.dispensable:
        if _least_width(columns) > width:
            columns = [each for each in columns if each.heading != heading]
    names = columns[: table.num_names]
    parts = [[*names]]
    for column in columns[table.num_names :]:
        if _width([*parts[-1], column]) > min(width, _WIDTH) and len(parts[-1]) > len(names):
            parts.append([*names])
        parts[-1].append(column)
    if len(parts) > 1 and len(parts[-1]) == len(names) + 1 < len(parts[-2]) - 1:
        parts[-1].insert(len(names), parts[-2].pop())
    return parts


def _width(columns: Sequence[_Cells]) -> int:
    """Return the preferred width in characters of columns side by side, with the gaps."""
    return sum(each.width + _GAP for each in columns)


def _least_width(columns: Sequence[_Cells]) -> int:
    """Return the smallest acceptable width in characters of columns side by side, with the gaps."""
    return sum(each.least_width + _GAP for each in columns)


def _rich_table(
    table: Table, columns: Sequence[_Cells], width: int, *, in_color: bool
) -> RichTable:
    """Make the rich table of some columns: lead and total rows apart, marked cells and the total
    bold. If `in_color`, headings of columns with a color get a block of it."""
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    is_too_wide = _least_width(columns) > width
    with_blocks = in_color and any(each.column.color for each in columns)
    # Multi-line headings align at the bottom, and so must their cells.
    vertical: Literal["top", "bottom"] = (
        "bottom" if with_blocks or any("\n" in each.heading for each in columns) else "top"
    )
    for each in columns:
        heading = Text(each.heading)
        if with_blocks and each.column.color:
            heading = Text.assemble(("■\n", each.column.color), each.heading)
        if each.column.unit.is_text:
            drawn.add_column(
                heading,
                overflow="fold",
                vertical=vertical,
                no_wrap=each.column.unit.is_name and not is_too_wide,
                # Other columns shrink before the names.
                max_width=each.width if is_too_wide else None,
            )
        else:
            drawn.add_column(heading, justify="right", vertical=vertical, no_wrap=True)
    num_rows = len(columns[0].texts)
    for row in range(num_rows):
        is_total = table.has_total and row == num_rows - 1
        if is_total or (row == 1 and table.has_lead):
            drawn.add_section()
        value_row = row - table.has_lead
        cells = (
            Text(each.texts[row], style="bold" if value_row in each.column.marked else "")
            for each in columns
        )
        drawn.add_row(*cells, style="bold" if is_total else None)
    return drawn

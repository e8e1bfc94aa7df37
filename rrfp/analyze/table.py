"""The table that an analysis returns, its number formats, and Markdown, CSV, Parquet and JSON.

A `Table` is data: columns with values and units, the rows that stand out, and sentences of
conclusion. People and programs read the same rows. A column with a heading is for people, a column
with a key is for programs, and a column with both shows one value to both. `rrfp.cli.console`
writes tables to a terminal and `rrfp.analyze.html` writes them into a page.
"""

import csv
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Any

from rrfp.schedule.policy import format_bytes
from rrfp.trace.records import NS_PER_S

if TYPE_CHECKING:
    import polars as pl

from enum import Enum
from statistics import median

# Number formats: times with units, parts that add up, and outliers.


_FAR = 3.5
"""A modified z-score above this is an outlier (Iglewicz and Hoaglin 1993)."""
_SCALE = 0.6745
_LEAST_EXCESS = 0.1
"""An outlier exceeds the median by at least this share of it, however small the spread is."""


class TimeUnit(Enum):
    """The units of time, the largest first; a unit's value is its length in nanoseconds."""

    S = NS_PER_S
    MS = 1_000_000
    US = 1_000
    NS = 1

    @property
    def symbol(self) -> str:
        return "µs" if self is TimeUnit.US else self.name.lower()

    @classmethod
    def of(cls, time_ns: float) -> "TimeUnit":
        """Return the largest unit that a time in ns reaches, or else nanoseconds."""
        return next((unit for unit in cls if abs(time_ns) >= unit.value), cls.NS)


def format_time(time_ns: float) -> str:
    """Return `1.23 s` or `45.6 ms`: three significant digits, and more only from 1000 s on."""
    # Rounding comes first, because it may reach the next unit or power of ten.
    rounded_ns = float(f"{time_ns:.3g}")
    unit = TimeUnit.of(rounded_ns)
    value = rounded_ns / unit.value
    if abs(value) < 100:
        return f"{value:#.3g} {unit.symbol}"
    return f"{time_ns / unit.value:.0f} {unit.symbol}"


def apportioned(parts: Sequence[float], total: int) -> list[int]:
    """Scale parts to whole numbers that sum to `total`, by the largest-remainder method.

    Returns zeros if all parts are zero.
    """
    whole = sum(parts)
    if not whole:
        return [0] * len(parts)
    exact = [part * total / whole for part in parts]
    found = [int(each // 1) for each in exact]
    by_rest = sorted(range(len(parts)), key=lambda place: (found[place] - exact[place], place))
    for place in by_rest[: total - sum(found)]:
        found[place] += 1
    return found


def format_tenths(number: int) -> str:
    """Return `12.3` for 123 tenths."""
    return f"{number / 10:.1f}"


class Times:
    """Formats times with one decimal in a common unit, chosen for the longest."""

    def __init__(self, times_ns: Iterable[float]) -> None:
        # At least ten units of the longest time give it three digits.
        self.unit = TimeUnit.of(max(map(abs, times_ns), default=0) / 10)

    def format(self, time_ns: float) -> str:
        """Return `0.6 ms`, `0`, or `<0.1 ms` for times below a twentieth of the unit."""
        if not time_ns:
            return "0"
        if 0 < time_ns < self.unit.value / 20:
            return f"<0.1 {self.unit.symbol}"
        return f"{self.number(time_ns)} {self.unit.symbol}"

    def number(self, time_ns: float) -> str:
        """Return the time in the common unit without its symbol, `0.6`."""
        return f"{time_ns / self.unit.value:.1f}"


def outliers(values: Sequence[float]) -> frozenset[int]:
    """Return the indices of values far above the median: by modified z-score, and by 10%.

    Fewer than three values, or values with a median of 0 or less, have no outliers.
    """
    if len(values) < 3:
        return frozenset()
    middle = median(values)
    spread = median(abs(value - middle) for value in values)
    return frozenset(
        place
        for place, value in enumerate(values)
        if _SCALE * (value - middle) > _FAR * spread and value > (1 + _LEAST_EXCESS) * middle > 0
    )


# The table and its columns.


MARK = "▲"
"""The sign after an outlier."""
_MARKDOWN = re.compile(r"[\\|*_`<\[\]~]")
_FORMULA = re.compile(r"[=+\-@\t\r]")


@dataclass(frozen=True, slots=True)
class Unit:
    """The text format of the values of a column."""

    format: Callable[[Any], str]
    is_text: bool = False
    """Text is aligned left and may wrap. Figures are aligned right and never wrap."""
    is_name: bool = False
    """Names are text that people copy; they wrap only if nothing else helps."""


def figure(spec: str, scale: int = 1) -> Unit:
    """Return the unit of numbers that are multiplied by `scale` and written by a format spec."""
    return Unit(lambda value: format(scale * value, spec))


def times(times_ns: Iterable[float]) -> Unit:
    """Return the unit of times in nanoseconds, all written in the largest unit that the longest has
    ten of."""
    return Unit(Times(times_ns).format)


def seconds(times_s: Iterable[float]) -> Unit:
    """Return the unit of times in seconds, all written in the largest unit that the longest has ten
    of."""
    common = Times(time_s * NS_PER_S for time_s in times_s)
    return Unit(lambda time_s: common.format(time_s * NS_PER_S))


TEXT = Unit(str, is_text=True)
NAME = Unit(str, is_text=True, is_name=True)
NUMBER = Unit(str)
COMPACT = figure("g")
RATIO = figure(".3f")
PERCENT = figure(".1f", 100)
CHANGE = figure("z.1f", 100)
"""Percent that may be negative; it never shows a negative zero."""
TENTHS = Unit(format_tenths)
BYTES = Unit(format_bytes)


@dataclass(frozen=True, slots=True)
class Column:
    """A column: for people if it has a heading, for programs if it has a key."""

    heading: str | None
    """Line breaks apply to terminals only. None hides the column from people."""
    values: "Sequence[Any] | pl.Series"
    """A value for each row. People read None as an empty cell."""
    unit: Unit = NUMBER
    key: str = ""
    """The name of the column in CSV and Parquet."""
    path: str | None = None
    """The location of the value in a JSON row, names joined by dots. None means the key; an empty
    path hides the column from JSON."""
    marked: Collection[int] = ()
    """The indices of rows whose values are outliers."""
    lead: Any = None
    """The value in the table's lead row."""
    total: Any = None
    """The value in the table's total row."""
    color: str = ""
    """The color of the column's subject in charts, shown above the heading on a terminal."""
    is_on_pages_only: bool = False
    """True for details that only HTML pages show."""

    @property
    def json_path(self) -> str:
        """Location of the value in a JSON row: `path`, or the key without one.

        Empty if not in JSON.
        """
        return self.key if self.path is None else self.path

    def texts(self, *, has_lead: bool, has_total: bool) -> list[str]:
        """Return the cells that people read, with lead and total.

        If any cell is marked, the others keep a mark's width.
        """
        gap = " " if self.marked else ""
        cells = [
            f"{self._text(value)}{MARK if row in self.marked else gap}"
            for row, value in enumerate(self.values)
        ]
        lead = [f"{self._text(self.lead)}{gap}"] if has_lead else []
        total = [f"{self._text(self.total)}{gap}"] if has_total else []
        return [*lead, *cells, *total]

    def _text(self, value: Any) -> str:
        """Format a value with the column's unit; text stays as it is, and None is empty."""
        if isinstance(value, str):
            return value
        return "" if value is None else self.unit.format(value)


@dataclass(frozen=True, slots=True)
class Table:
    """A report for people and for programs."""

    title: str
    """One line, or several lines, the last of which is the title of the table itself."""
    columns: Sequence[Column]
    conclusions: Sequence[str] = ()
    """Sentences below the table; empty ones are left out."""
    num_names: int = 1
    """The number of leading columns that name a row; repeated if a terminal splits the table."""
    has_lead: bool = False
    """True if people read a separate first row, which programs do not get."""
    has_total: bool = False
    """True if people read a last row of sums, which programs do not get."""
    dispensable: Sequence[str] = ()
    """Headings of columns that a narrow terminal drops, in this order."""
    mark_meaning: str = "far above the others"
    caption: str = ""
    """The title on a page, if it differs."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The members of the JSON document beside the rows."""
    rows_key: str = ""
    """The member of the JSON document that holds the rows; if empty, the document has none."""

    def shown(self, *, on_page: bool = False) -> list[tuple[Column, list[str]]]:
        """Return the columns with a heading, each with its cells as text.

        Columns for pages only are left out unless `on_page`.
        """
        return [
            (each, each.texts(has_lead=self.has_lead, has_total=self.has_total))
            for each in self.columns
            if each.heading is not None and (on_page or not each.is_on_pages_only)
        ]

    def notes(self) -> list[str]:
        """Return the conclusions that are not empty, after the meaning of marks if any row is
        marked."""
        notes = [each for each in self.conclusions if each]
        if self.mark_meaning and any(each.marked for each in self.columns):
            notes.insert(0, f"{MARK} {self.mark_meaning}")
        return notes

    def markdown(self) -> str:
        """Return title, table and notes in GitHub's Markdown; a total row is bold."""

        def line(cells: Sequence[str], style: str = "") -> str:
            words = (escape_markdown(cell.strip()) for cell in cells)
            return f"| {' | '.join(f'{style}{each}{style}' if each else '' for each in words)} |"

        shown = self.shown()
        rows = list(zip(*(cells for _, cells in shown), strict=True))
        lines = []
        for title in self.title.splitlines():
            lines += [f"**{escape_markdown(title)}**", ""]
        lines.append(line([joined_heading(each) for each, _ in shown]))
        lines.append(
            f"| {' | '.join(':--' if each.unit.is_text else '--:' for each, _ in shown)} |"
        )
        for number, row in enumerate(rows, start=1):
            lines.append(line(row, "**" if self.has_total and number == len(rows) else ""))
        for note in self.notes():
            lines += ["", escape_markdown(note)]
        return "\n".join(lines) + "\n"

    def frame(self) -> "pl.DataFrame":
        """Return the columns with a key as a data frame; list values become space-separated texts.

        Values that are a series stay as they are.
        """
        import polars as pl

        return pl.DataFrame({each.key: _flat(each.values) for each in self.columns if each.key})

    def csv(self, *, may_have_formulas: bool = True) -> str:
        """Return the columns with a key as CSV, without a data frame.

        If it `may_have_formulas`, text that a spreadsheet would run gets an apostrophe in front.
        """
        keyed = [each for each in self.columns if each.key]
        guard = without_formula if may_have_formulas else lambda cell: cell
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(each.key for each in keyed)
        rows = zip(*(_flat(each.values) for each in keyed), strict=True)
        writer.writerows(map(guard, row) for row in rows)
        return text.getvalue()

    def records(self) -> list[dict[str, Any]]:
        """Return the rows for programs as JSON objects, nested by the columns' dotted paths."""
        placed = [each for each in self.columns if each.json_path]
        found: list[dict[str, Any]] = [{} for _ in placed[0].values] if placed else []
        for column in placed:
            *parents, name = column.json_path.split(".")
            for record, value in zip(found, column.values, strict=True):
                target = record
                for parent in parents:
                    target = target.setdefault(parent, {})
                target[name] = value
        return found

    def document(self) -> dict[str, object]:
        """Return the facts, and the rows under `rows_key` if that is set, as one JSON object."""
        rows = {self.rows_key: self.records()} if self.rows_key else {}
        return {**self.facts, **rows}


def joined_heading(column: Column) -> str:
    """Return a column's heading on one line, with hyphenated words joined; empty for None."""
    return (column.heading or "").replace("-\n", "").replace("\n", " ")


def escape_markdown(words: str) -> str:
    """Escape Markdown in a text and join its lines."""
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(words.split()))


def csv_of_frame(frame: "pl.DataFrame") -> str:
    """Return a data frame as CSV; text that a spreadsheet would run gets an apostrophe in front."""
    import polars as pl

    texts = (column for column in frame if column.dtype == pl.String)
    return frame.with_columns(
        pl.Series(each.name, [without_formula(cell) for cell in each], pl.String) for each in texts
    ).write_csv()


def without_formula(cell: object) -> object:
    """Put an apostrophe before text, but not numbers, that a spreadsheet would run as a formula."""
    is_formula = isinstance(cell, str) and _FORMULA.match(cell) and not _is_number(cell)
    return f"'{cell}" if is_formula else cell


def _is_number(text: str) -> bool:
    """Return whether Python reads a text as a float."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _flat(values: "Sequence[Any] | pl.Series") -> "Sequence[Any] | pl.Series":
    """Return the values with lists joined by spaces, because CSV has no lists.

    A series is returned as it is.
    """
    if not isinstance(values, Sequence):
        return values
    return [
        " ".join(map(str, value)) if isinstance(value, list | tuple) else value for value in values
    ]

"""CSV whose texts a spreadsheet shows and does not run."""

import csv
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

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

"""Costs as rows in CSV: seconds by kind, pipeline rank, chunk and microbatch."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass

from rrfp.errors import UsageError
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.model import (
    LONGEST_S,
    StepCosts,
    check_chunk,
    check_rank,
    check_takes_time,
    part_of,
)
from rrfp.simulate.world import TaskTimes
from rrfp.trace.records import NS_PER_S

COLUMNS = ("kind", "pp_rank", "chunk", "microbatch", "seconds")
_MOST = 10**6
"""The largest rank, chunk or microbatch; a larger one is a typing error."""

_Key = tuple[Kind, int, int | None, int | None]
"""Kind, pipeline rank, chunk and microbatch; None stands for all."""


@dataclass(frozen=True, slots=True)
class RowCosts:
    """A `Costs` from rows, the same for every seed and replica."""

    name: str
    """What errors call the rows."""
    rows_ns: Mapping[_Key, int]

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        # Rows may list more microbatches than this step has, but not more ranks or chunks.
        for _, rank, chunk, _ in self.rows_ns:
            check_rank(rank, shape, self.name)
            check_chunk(chunk or 0, shape, self.name)
        times = TaskTimes(*(self._rows(shape, kind) for kind in Kind))
        check_takes_time(times, self.name)
        return StepCosts(times)

    def _rows(self, shape: Shape, kind: Kind) -> list[list[int]]:
        """Nanoseconds of the tasks of one kind, by stage and microbatch."""
        if kind is Kind.W and not shape.splits_backward and self._knows_no_weight_gradient:
            # B was measured as a whole, and the step has no W.
            return [[0] * shape.num_microbatches] * shape.num_stages
        return [self._row(shape, stage, kind) for stage in range(shape.num_stages)]

    @property
    def _knows_no_weight_gradient(self) -> bool:
        return all(kind is not Kind.W for kind, *_ in self.rows_ns)

    def _row(self, shape: Shape, stage: int, kind: Kind) -> list[int]:
        """Nanoseconds of a stage's tasks of one kind, by microbatch."""
        rank, chunk = shape.rank_of(stage), shape.chunk_of(stage)
        rows_ns, num_chunks = self.rows_ns, shape.num_chunks
        times_ns = []
        for microbatch in range(shape.num_microbatches):
            # The more specific row wins; a chunk is more specific than a microbatch.
            time_ns = rows_ns.get((kind, rank, chunk, microbatch))
            if time_ns is None:
                time_ns = rows_ns.get((kind, rank, chunk, None))
            if time_ns is None:
                whole_ns = rows_ns.get((kind, rank, None, microbatch))
                if whole_ns is None:
                    whole_ns = rows_ns.get((kind, rank, None, None))
                if whole_ns is None:
                    raise UsageError(
                        f"{self.name} has no row for {Task(stage, kind, microbatch)}: kind {kind}, "
                        f"pp_rank {rank}, chunk {chunk}, microbatch {microbatch}; add one"
                    )
                time_ns = part_of(whole_ns, num_chunks, chunk)
            times_ns.append(time_ns)
        return times_ns


def parse_rows(content: str, name: str) -> RowCosts:
    """Read rows of costs from CSV; `name` is what errors call it.

    Raises UsageError, with the line, for missing or unknown columns, an invalid value, and two rows
    for the same tasks.
    """
    reader = csv.reader(io.StringIO(content), strict=True)
    rows_ns: dict[_Key, int] = {}
    lines: dict[_Key, int] = {}
    places: dict[str, int] | None = None
    try:
        for cells in reader:
            line = f"{name}, line {reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if places is None:
                places = _places(cells, line)
                continue
            if len(cells) != len(COLUMNS):
                raise UsageError(
                    f"{line} has {len(cells)} cells, not one for each of {', '.join(COLUMNS)}; "
                    "correct it"
                )
            row = {column: cells[place].strip() for column, place in places.items()}
            key = (
                _kind(row["kind"], line),
                _index(row["pp_rank"], "pp_rank", line),
                _index(row["chunk"], "chunk", line) if row["chunk"] else None,
                _index(row["microbatch"], "microbatch", line) if row["microbatch"] else None,
            )
            if key in lines:
                raise UsageError(
                    f"{line} is for the same tasks as line {lines[key]}; remove one of them"
                )
            lines[key] = reader.line_num
            rows_ns[key] = _nanoseconds(row["seconds"], line)
    except csv.Error as error:
        raise UsageError(
            f"{name}, line {reader.line_num} is not CSV ({error}); correct it"
        ) from None
    if not rows_ns:
        raise UsageError(f"{name} has no rows of costs; give {', '.join(COLUMNS)} for every task")
    return RowCosts(name, rows_ns)


def _places(cells: list[str], line: str) -> dict[str, int]:
    """The position of each column, by its heading."""
    heading = [cell.strip() for cell in cells]
    if sorted(heading) != sorted(COLUMNS):
        raise UsageError(
            f"{line} has the columns {','.join(heading)}; they must be {','.join(COLUMNS)}"
        )
    return {column: heading.index(column) for column in COLUMNS}


def _kind(text: str, line: str) -> Kind:
    if text not in tuple(Kind):
        raise UsageError(f"{line}: kind is '{text}'; it must be F, B or W")
    return Kind(text)


def _index(text: str, column: str, line: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) > _MOST:
        raise UsageError(
            f"{line}: {column} is '{text}'; it must be a whole number from 0 to {_MOST}"
        )
    return int(text)


def _nanoseconds(text: str, line: str) -> int:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    # Also refuses NaN, which compares as false.
    if not 0 <= seconds <= LONGEST_S:
        raise UsageError(
            f"{line}: seconds is '{text}'; it must be a number from 0 to {LONGEST_S:g}"
        )
    return round(seconds * NS_PER_S)

"""Costs as rows in CSV: seconds, and bytes, by kind, pipeline rank, chunk and microbatch."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass

from rrfp.errors import UsageError
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.model import (
    LONGEST_S,
    MOST_BYTES,
    StepCosts,
    check_chunk,
    check_rank,
    check_takes_time,
    part_of,
)
from rrfp.simulate.engine import TaskTimes
from rrfp.trace.records import NS_PER_S

COLUMNS = ("kind", "pp_rank", "chunk", "microbatch", "seconds")
BYTES = "bytes"
"""An optional column: of F what is kept from it until it is freed, of W what of that is kept from B
until W."""
_MOST = 10**6
"""The largest rank, chunk or microbatch; a larger one is a typing error."""

_Key = tuple[Kind, int, int | None, int | None]
"""Kind, pipeline rank, chunk and microbatch; None stands for all."""


@dataclass(frozen=True, slots=True)
class _Row:
    """The content of one line."""

    line: int
    time_ns: int
    num_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Found:
    """The row that counts for a task, and the chunks that it covers."""

    row: _Row
    num_parts: int
    part: int

    @property
    def time_ns(self) -> int:
        """The row's time in ns or, if the row covers several chunks, the even part of this one."""
        return part_of(self.row.time_ns, self.num_parts, self.part)

    @property
    def num_bytes(self) -> int | None:
        """The row's bytes, divided likewise; None if the row has none."""
        whole = self.row.num_bytes
        return None if whole is None else part_of(whole, self.num_parts, self.part)


_FoundRows = list[list[_Found]]
"""By stage and microbatch."""


@dataclass(frozen=True, slots=True)
class RowCosts:
    """A `Costs` from rows, the same for every seed and replica."""

    name: str
    """The name of the rows in errors."""
    rows: Mapping[_Key, _Row]

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Return the costs of a step, the same for every seed and replica. Without rows for W the
        weight gradient takes no time, unless the shape splits it off. Raises UsageError if a row
        names a rank or chunk that the shape lacks, if a task has no row, and if no task takes any
        time."""
        # Rows may list more microbatches than this step has, but not more ranks or chunks.
        for _, rank, chunk, _ in self.rows:
            check_rank(rank, shape, self.name)
            check_chunk(chunk or 0, shape, self.name)
        forward, input_gradient, weight_gradient = (self._found(shape, kind) for kind in Kind)
        # Without a row for W, B was measured as a whole, and the step has no W.
        no_weight_gradient = [[0] * shape.num_microbatches] * shape.num_stages
        times = TaskTimes(
            _times_ns(forward),
            _times_ns(input_gradient),
            _times_ns(weight_gradient) or no_weight_gradient,
        )
        check_takes_time(times, self.name)
        return StepCosts(times, sizes=self._sizes(forward, weight_gradient))

    def _found(self, shape: Shape, kind: Kind) -> _FoundRows:
        """Return the rows of the tasks of one kind, by stage and microbatch; empty for a W that
        neither the step nor the file has. Raises UsageError for a task without a row."""
        knows_kind = any(kind is each for each, *_ in self.rows)
        if kind is Kind.W and not shape.splits_backward and not knows_kind:
            return []
        return [
            [
                self._found_for(shape, Task(stage, kind, microbatch))
                for microbatch in range(shape.num_microbatches)
            ]
            for stage in range(shape.num_stages)
        ]

    def _found_for(self, shape: Shape, task: Task) -> _Found:
        """Return the most specific row for a task (by chunk, then by microbatch), and the task's
        part of it. Raises UsageError without any."""
        stage, kind, microbatch = task
        rank, chunk = shape.rank_of(stage), shape.chunk_of(stage)
        # The more specific row wins; a chunk is more specific than a microbatch.
        for of_chunk, of_microbatch in (
            (chunk, microbatch),
            (chunk, None),
            (None, microbatch),
            (None, None),
        ):
            row = self.rows.get((kind, rank, of_chunk, of_microbatch))
            if row is not None:
                whole = of_chunk is None
                return _Found(row, shape.num_chunks if whole else 1, chunk if whole else 0)
        raise UsageError(
            f"{self.name} has no row for {task}: kind {kind}, pp_rank {rank}, chunk {chunk}, "
            f"microbatch {microbatch}; add one"
        )

    def _sizes(self, forward: _FoundRows, weight_gradient: _FoundRows) -> ActivationSizes | None:
        """Return the activation sizes; None if no row of F or W in use has bytes. Otherwise raises
        UsageError if a row of F lacks them, or W has more than its F."""
        says_owed = _has_bytes(weight_gradient)
        if not says_owed and not _has_bytes(forward):
            return None
        kept = [
            [
                self._activation_bytes(found, Task(stage, Kind.F, each))
                for each, found in enumerate(row)
            ]
            for stage, row in enumerate(forward)
        ]
        owed = [
            [
                self._pending_bytes(found, forward[stage][each], Task(stage, Kind.W, each))
                for each, found in enumerate(row)
            ]
            for stage, row in enumerate(weight_gradient)
        ]
        return ActivationSizes(kept, owed if says_owed else None)

    def _activation_bytes(self, found: _Found, task: Task) -> int:
        """Return the bytes of a task's row. Raises UsageError if it has none."""
        num_bytes = found.num_bytes
        if num_bytes is None:
            raise UsageError(
                f"{self.name}, line {found.row.line} gives {task} no bytes, and other lines give "
                "them; add bytes to every F, or to none"
            )
        return num_bytes

    def _pending_bytes(self, found: _Found, forward: _Found, task: Task) -> int:
        """Return the bytes pending for W: all of its F if the row has none. Raises UsageError if
        they are more than its F keeps."""
        owed, kept = found.num_bytes, forward.num_bytes or 0
        if owed is None:
            return kept
        whole_owed, whole_kept = found.row.num_bytes or 0, forward.row.num_bytes or 0
        if whole_owed * forward.num_parts > whole_kept * found.num_parts:
            raise UsageError(
                f"{self.name}, line {found.row.line} lets {task} keep {owed} bytes, and line "
                f"{forward.row.line} gives its F {kept}; give W at most as many"
            )
        # Divided into whole bytes, one of them may be rounded up and the other down.
        return min(owed, kept)


def _times_ns(rows: _FoundRows) -> list[list[int]]:
    """Return the times of these tasks in ns, by stage and microbatch."""
    return [[found.time_ns for found in row] for row in rows]


def _has_bytes(rows: _FoundRows) -> bool:
    """True if any of these rows has bytes."""
    return any(found.row.num_bytes is not None for row in rows for found in row)


def parse_rows(content: str, name: str) -> RowCosts:
    """Parse costs in CSV; `name` is what errors call it. Empty lines are skipped, and the first
    other line has the headings.

    Raises UsageError, with the line, for missing, unknown or repeated columns, a wrong number of
    cells, an invalid value, two rows for the same tasks, and a text that is not CSV; also if there
    are no rows.
    """
    reader = csv.reader(io.StringIO(content), strict=True)
    rows: dict[_Key, _Row] = {}
    places: dict[str, int] | None = None
    try:
        for cells in reader:
            line = f"{name}, line {reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if places is None:
                places = _places(cells, line)
                continue
            if len(cells) != len(places):
                raise UsageError(
                    f"{line} has {len(cells)} cells, not one for each of {', '.join(places)}; "
                    "correct it"
                )
            row = {column: cells[place].strip() for column, place in places.items()}
            key = (
                _kind(row["kind"], line),
                _index(row["pp_rank"], "pp_rank", line),
                _index(row["chunk"], "chunk", line) if row["chunk"] else None,
                _index(row["microbatch"], "microbatch", line) if row["microbatch"] else None,
            )
            if key in rows:
                raise UsageError(
                    f"{line} is for the same tasks as line {rows[key].line}; remove one of them"
                )
            rows[key] = _Row(
                reader.line_num,
                _nanoseconds(row["seconds"], line),
                _bytes(row.get(BYTES, ""), key[0], line),
            )
    except csv.Error as error:
        raise UsageError(
            f"{name}, line {reader.line_num} is not CSV ({error}); correct it"
        ) from None
    if not rows:
        raise UsageError(f"{name} has no rows of costs; give {', '.join(COLUMNS)} for every task")
    return RowCosts(name, rows)


def _places(cells: list[str], line: str) -> dict[str, int]:
    """Return the position of each column, by its heading. Raises UsageError for missing, unknown or
    repeated columns; only the bytes are optional."""
    heading = [cell.strip() for cell in cells]
    columns = (*COLUMNS, BYTES) if BYTES in heading else COLUMNS
    if sorted(heading) != sorted(columns):
        raise UsageError(
            f"{line} has the columns {','.join(heading)}; they must be {','.join(COLUMNS)}, and "
            f"may have {BYTES}"
        )
    return {column: heading.index(column) for column in columns}


def _kind(text: str, line: str) -> Kind:
    """Parse a kind of task. Raises UsageError for anything but F, B and W."""
    if text not in tuple(Kind):
        raise UsageError(f"{line}: kind is '{text}'; it must be F, B or W")
    return Kind(text)


def _index(text: str, column: str, line: str) -> int:
    """Parse a rank, chunk or microbatch, a whole number from 0 to 1,000,000. Raises UsageError for
    anything else."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) > _MOST:
        raise UsageError(
            f"{line}: {column} is '{text}'; it must be a whole number from 0 to {_MOST}"
        )
    return int(text)


def _nanoseconds(text: str, line: str) -> int:
    """Parse seconds, and return them in ns. Raises UsageError unless they are a number from 0 to
    3600."""
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


def _bytes(text: str, kind: Kind, line: str) -> int | None:
    """Parse a number of bytes; None if the cell is empty. Raises UsageError for anything else, and
    for bytes in a row of B."""
    if not text:
        return None
    if kind is Kind.B:
        raise UsageError(
            f"{line}: bytes is '{text}' in a row of B; leave it empty, and give bytes to F and W"
        )
    if not (text.isascii() and text.isdecimal()) or len(text) > 16 or int(text) > MOST_BYTES:
        raise UsageError(
            f"{line}: bytes is '{text}'; it must be a whole number from 0 to {MOST_BYTES}"
        )
    return int(text)

"""What one rank has spilled, read without keeping it: once for what must be known first, and once
for the records."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

from rrfp.trace.records import RECORD_TYPES, Phase, PhaseRecord, RankInfo, RankRecords, num_times
from rrfp.trace.segments import number_of
from rrfp.trace.spill import add_flush, header_of, iter_lines

_Flush = tuple[Path, int, Any]
"""A line with the file and the number that name it in an error."""

_PHASE = next(name for name, each in RECORD_TYPES.items() if each is PhaseRecord)
_STEP_OF_PHASE, _NAME_OF_PHASE = (1 + PhaseRecord._fields.index(f) for f in ("step", "phase"))
_TIME = 1
_END = {name: num_times(each) for name, each in RECORD_TYPES.items()}
"""The place of the last time in a row of each type, whose first entry is its name."""


class SpilledRank:
    """The segments of one rank. Every method may raise OSError, and RrfpError for a damaged
    file."""

    def __init__(self, info: RankInfo, segments: Sequence[Path]) -> None:
        self.info = info
        self._segments = segments
        self.first_ns: int | None = None
        """When its first record began, on its own clock; None without any. Of all that `survey`
        finds."""
        self.last_ns = 0
        """When its last record ended."""
        self.num_bytes = sum(path.stat().st_size for path in segments)
        self.num_flushes = 0
        self.ended_steps: list[int] = []
        """The steps that it ended, in their order, if earlier ones were removed; else empty."""

    @classmethod
    def of(cls, segments: Sequence[Path]) -> Self | None:
        """The rank with these segments; None if it died before its header was complete."""
        for path in segments:
            for line in iter_lines(path):
                return cls(header_of(path, line.value), segments)
        return None

    @property
    def begins_late(self) -> bool:
        """Whether earlier segments were removed."""
        return number_of(self._segments[0]) > 1

    def survey(self, num_recent: int) -> RankRecords:
        """Find out what there is; returns the last records, at least so many."""
        recent: deque[_Flush] = deque()
        num_rows = 0
        for flush in self._flushes():
            *_, rows = flush
            self._take(flush)
            if num_recent:
                recent.append(flush)
                num_rows += len(rows)
                while num_rows - len(recent[0][-1]) >= num_recent:
                    num_rows -= len(recent.popleft()[-1])
        return self._records(recent)

    def parts(self, num_flushes: int) -> Iterator[RankRecords]:
        """The records of so many flushes at a time."""
        flushes = self._flushes()
        while part := list(islice(flushes, num_flushes)):
            yield self._records(part)

    def _flushes(self) -> Iterator[_Flush]:
        return chain.from_iterable(map(_flushes_of, self._segments))

    def _take(self, flush: _Flush) -> None:
        *_, rows = flush
        try:
            first_ns = min(row[_TIME] for row in rows)
            last_ns = max(row[_END[row[0]]] for row in rows)
            self.first_ns = min(first_ns, first_ns if self.first_ns is None else self.first_ns)
            self.last_ns = max(last_ns, self.last_ns)
        except (TypeError, LookupError, ValueError):
            # This says what is wrong with it, and takes an empty one for what it is.
            self._records([flush])
            return
        self.num_flushes += 1
        if self.begins_late:
            self.ended_steps += (
                row[_STEP_OF_PHASE]
                for row in rows
                if row[0] == _PHASE and row[_NAME_OF_PHASE] == Phase.SCHEDULE
            )

    def _records(self, flushes: Sequence[_Flush] | deque[_Flush]) -> RankRecords:
        records = RankRecords(self.info)
        lists = records.by_name()
        for path, number, value in flushes:
            add_flush(path, number, value, lists)
        return records


def _flushes_of(path: Path) -> Iterator[_Flush]:
    for line in islice(iter_lines(path), 1, None):
        yield path, line.number, line.value

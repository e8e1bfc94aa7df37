"""Reads what has been added to a file of records since the last look, and nothing twice.

The file stays open. So the last records of a run are still read when its launcher has made them
into a trace and removed them. Nothing is locked and nothing written: the run takes no notice.
"""

from collections.abc import Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.json_text import parsed
from rrfp.trace.files.reading import LONGEST_LINE_BYTES, lines_of, open_regular
from rrfp.trace.records import RankInfo, RankRecords
from rrfp.trace.spills.segments import number_of, segment_after
from rrfp.trace.spills.spill import add_flush, header_of

CHUNK = 4 * 2**20
"""Octets that are read at a time."""


_MOST = 1e300
_UNUSED = ("stimulus", "agreement", "cost", "loss")
"""Records that no figure is made of; with them, reading takes half as long again."""


class RecordsTail:
    """The growing records of one rank, in one file or in segments that follow each other."""

    def __init__(self, segments: Sequence[Path], most: int) -> None:
        """`most` octets are read of what is there already: the last ones. May raise OSError."""
        self.path = path = _first_of(segments, most)
        """The file that is read now."""
        self.info: RankInfo | None = None
        """Who records; None until the rank has written that."""
        self.begins_late = number_of(path) > 1
        """Whether earlier steps were left out."""
        self.grown_ns: int | None = None
        """When the file last grew, in ns since 1970."""
        self._most = most
        self._file: BufferedReader | None = open_regular(path)
        self.has_more = False
        """Whether the last call left something that was there already."""
        self._begun: list[bytes] = []
        self._number = 0

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> RankRecords | None:
        """The flushes that were finished since the last call, up to the size of a chunk or one
        flush; None if there are none. Times are on the rank's own clock.

        Raises RrfpError for what is not a file of records, and OSError.
        """
        if self._file is None:
            return None
        if self.info is None:
            self._file.seek(0)
            header = next(lines_of(self._file, self.path), b"")
            if not header.endswith(b"\n"):
                return None
            self.info = header_of(self.path, self._decoded(header))
            self._number = 1
            self._skip()
        lines = self._new_lines()
        if not lines:
            return None
        records = RankRecords(self.info)
        lists = records.by_name()
        for line in lines:
            self._number += 1
            add_flush(self.path, self._number, _used(self._decoded(line)), lists)
        return records

    def _new_lines(self) -> list[bytes]:
        assert self._file is not None
        octets = self._file.read(CHUNK)
        self.has_more = len(octets) == CHUNK
        if not self.has_more:
            octets += self._enter_next_segment()
        if octets:
            with suppress(OSError):
                self.grown_ns = self.path.stat().st_mtime_ns
        *lines, rest = octets.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._begun, lines[0]))
            self._begun = []
        if rest:
            self._begun.append(rest)
        if sum(map(len, self._begun)) > LONGEST_LINE_BYTES:
            raise self._damaged(b"".join(self._begun[:1]))
        return lines

    def _enter_next_segment(self) -> bytes:
        """Go on to the next segment, if the rank has; returns the rest of this one."""
        assert self._file is not None
        following = segment_after(self.path)
        if following is None:
            return b""
        try:
            file = open_regular(following)
        except FileNotFoundError:
            return b""
        if not file.readline().endswith(b"\n"):
            # The rank has only begun it, and may still write here.
            file.close()
            return b""
        rest = self._file.read()
        self._file.close()
        self.begins_late |= number_of(following) > number_of(self.path) + 1
        self.path, self._file, self.has_more = following, file, True
        return rest

    def _skip(self) -> None:
        """Go on to the last octets of a file that is longer than what is to be read of it."""
        assert self._file is not None
        size = self.path.stat().st_size if self.path.exists() else 0
        if size <= self._file.tell() + self._most:
            return
        self._file.seek(size - self._most)
        # The rest of a flush that began earlier.
        while (octets := self._file.readline(CHUNK)) and not octets.endswith(b"\n"):
            continue
        self.begins_late = True

    def _decoded(self, line: bytes) -> object:
        try:
            return parsed(line)
        except ValueError as error:
            raise self._damaged(line) from error

    def _damaged(self, line: bytes) -> RrfpError:
        return RrfpError(
            f"{self.path} has a line that is not JSON: {line[:40]!r}; the file is damaged, and "
            "the run is not followed any further"
        )


def _first_of(segments: Sequence[Path], most: int) -> Path:
    """The first of the last segments that have at most so many octets, or the last one."""
    size = 0
    for place in range(len(segments) - 1, 0, -1):
        size += segments[place].stat().st_size
        if size + segments[place - 1].stat().st_size > most:
            return segments[place]
    return segments[0]


def _used(flush: object) -> object:
    """A flush without the rows that are not used; `add_flush` refuses what is no flush."""
    if not isinstance(flush, list):
        return flush
    return [row for row in flush if not (isinstance(row, list) and row and row[0] in _UNUSED)]


class LinesTail:
    """The growing `metrics.jsonl` of a run: one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def read(self) -> list[dict[str, object]]:
        """The lines that were finished since the last call. A file that was replaced, as when a run
        goes on from a checkpoint, is read anew. May raise OSError."""
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return []
        with file:
            inode = self._path.stat().st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            lines = [each for each in lines_of(file, self._path) if each.endswith(b"\n")]
        self._offset += sum(map(len, lines))
        found = []
        for line in lines:
            with suppress(ValueError):
                value = parsed(line)
                if isinstance(value, dict) and _fits(value):
                    found.append(value)
        return found


def _fits(line: dict[str, object]) -> bool:
    """Whether each number in a line is one that a float holds; JSON has others."""
    lists = (value if isinstance(value, list) else [value] for value in line.values())
    numbers = (each for values in lists for each in values if isinstance(each, int | float))
    return all(abs(each) < _MOST for each in numbers)

"""A file that gets a line a step of a run: `metrics.jsonl`, `admission.csv`, `dealing.csv`.

A line is written whole or not at all, and none is left out: what a full disk does not take waits in
memory until it does. So the file always holds the first steps of the run without a gap.
"""

import logging
from collections import deque
from pathlib import Path

from rrfp.errors import RrfpError, reason_of
from rrfp.trace.files.whole_file import create_new
from rrfp.trace.files.whole_lines import WholeLines

MOST_WAITING_BYTES = 64 << 20
"""Some 100,000 steps. A disk that has no room for longer has been forgotten."""

_log = logging.getLogger(__name__)


class ReportFile:
    """Appends to such a file. A disk that takes nothing is warned of and alters nothing else."""

    def __init__(self, path: Path, *, is_needed: bool = False) -> None:
        """A run of which nothing else is left ends when the directory of a file `is_needed` is
        removed. May raise OSError."""
        self._path = path
        self._is_needed = is_needed
        self._file: WholeLines | None = WholeLines(path)
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._is_gone = False

    def write(self, line: str) -> None:
        """Add a line. Raises RrfpError if it `is_needed` and nobody would find it."""
        if self._file is None:
            return
        had_room = not self._waiting
        self._waiting.append(line.encode())
        self._num_waiting_bytes += len(self._waiting[-1])
        try:
            self._write_waiting(self._file)
        except FileNotFoundError as error:
            self._note_gone(self._file, reason_of(error))
        except OSError as error:
            if self._num_waiting_bytes > MOST_WAITING_BYTES:
                self._give_up(self._file, reason_of(error))
            elif had_room:
                _log.warning(
                    "%s cannot be written (%s); its lines wait in memory until there is room, and "
                    "the training goes on",
                    self._path,
                    reason_of(error),
                )
        else:
            if not had_room:
                _log.warning("%s is written again; none of its lines is missing", self._path)

    def copy_to(self, path: Path) -> None:
        """Write all lines so far into another file, also those that wait, and also where the file
        is gone. May raise OSError."""
        with create_new(path) as copy:
            if self._file is not None:
                copy.writelines(self._file.read())
            copy.writelines(self._waiting)

    def close(self) -> None:
        """Write what waits, if there is room now, and close; a second call does nothing."""
        file = self._file
        if file is None:
            return
        try:
            self._write_waiting(file)
        except FileNotFoundError as error:
            self._note_gone(file, reason_of(error))
        except OSError as error:
            self._give_up(file, reason_of(error))
        self._file = None
        file.close()

    def _write_waiting(self, file: WholeLines) -> None:
        while self._waiting:
            try:
                file.write(self._waiting[0])
            except OSError:
                file.take_back()
                raise
            self._num_waiting_bytes -= len(self._waiting.popleft())
            file.end()

    def _note_gone(self, file: WholeLines, why: str) -> None:
        """Nobody finds the file any more; it is written on, for `copy_to`."""
        if self._is_needed and not self._path.parent.exists():
            self._file = None
            file.close()
            raise RrfpError(
                f"the run's directory {self._path.parent} was removed or moved away, and nobody "
                "would find the run's results; start it again (with --save a run goes on without "
                "its directory)"
            )
        if not self._is_gone:
            self._is_gone = True
            _log.warning(
                "%s is gone (%s): its lines will not be found, and the training goes on",
                self._path,
                why,
            )

    def _give_up(self, file: WholeLines, why: str) -> None:
        _log.warning(
            "%s cannot be written (%s): it ends here, its last %d lines are lost, and the training "
            "goes on",
            self._path,
            why,
            len(self._waiting),
        )
        self._file = None
        self._waiting.clear()
        file.close()

"""Collects a rank's records while it trains, and writes them to its spill file after each step.

Recording never alters training. A record costs one append, on any thread; encoding and writing wait
for the flush between steps. Records beyond the recorder's capacity are counted and dropped; the
next step is recorded again. If the disk fails, recording switches itself off with one warning and
training continues.

Each record also goes at once into the rank's flight record (`rrfp.trace.flight_record`), so that
the records of the current step survive any end of the rank.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from rrfp.errors import reason_of
from rrfp.runtime.protocols import Clock, monotonic
from rrfp.trace.flight_record import FlightRing, ring_of
from rrfp.trace.records import (
    BegunRecord,
    CostRecord,
    Doing,
    LossRecord,
    RankInfo,
    Record,
    TaskRecord,
    step_name,
)
from rrfp.trace.spill import Row, SpillWriter, row_of, step_of

CAPACITY = 6_000_000
"""Maximum number of records in one step: a minute at 100,000 per second, 1.2 GB at 0.2 kB each."""

_MAX_AT_FAILURE = 200_000
"""Number of records, the latest, that a failing rank still writes: two seconds' work."""

_NUM_BATCHES, _NUM_RECORDS_OF_A_BATCH = 25, 20

_log = logging.getLogger(__name__)


class Recorder:
    """Writes one rank's records to its spill file; without a `path` it does nothing. A `with` block
    closes it at the end, and abandons it on an exception."""

    def __init__(
        self,
        path: Path | None,
        info: RankInfo,
        clock: Clock = monotonic,
        capacity: int = CAPACITY,
        most_bytes: int | None = None,
    ) -> None:
        """`capacity` is the number of records that fit between two flushes. The file holds at most
        about `most_bytes`: older steps are dropped from it."""
        self._clock = clock
        self._capacity = capacity
        self._rows: deque[Row] = deque()
        self._writer: SpillWriter | None = None
        self._ring: FlightRing | None = None
        self._step = 0
        self._num_records = 0
        self._num_lost = 0
        self._has_warned_of_loss = False
        self._loss_lock = threading.Lock()
        self._writing_ns = 0
        self._record_ns = 0.0
        """Measured time that one record costs."""
        self._path = path
        if path is not None:
            try:
                self._writer = SpillWriter(path, info, most_bytes)
            except OSError as error:
                self._switch_off(error)
            else:
                self._ring = _open_ring(ring_of(path))
                self._record_ns = self._measure_record_ns()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self.close()
        else:
            self.abandon()

    @property
    def is_on(self) -> bool:
        """True while records reach the spill file: there is a path, no error has occurred, and it
        is not closed."""
        return self._writer is not None

    @property
    def cost_ns(self) -> int:
        """Estimated time in ns that this rank has spent so far on recording: the number of written
        records times the measured cost of making one, and the time of all flushes."""
        return round(self._num_records * self._record_ns) + self._writing_ns

    def record(self, record: Record) -> None:
        """Write a record to the flight record at once, and queue it for the next flush, or count it
        as lost beyond the capacity. A `BegunRecord` is not queued, nor is any record while
        recording is off. Any thread may call this."""
        if self._ring is not None:
            self._ring.put(record)
        if self._writer is None or type(record) is BegunRecord:
            return
        if len(self._rows) < self._capacity:
            self._rows.append(row_of(record))
        else:
            with self._loss_lock:
                self._num_lost += 1

    def begin(self, step: int, doing: Doing) -> None:
        """Write the activity that begins now to the flight record only."""
        now_ns = self._clock()
        self.record(BegunRecord(now_ns, now_ns, step, doing))

    def flush(self, step: int) -> None:
        """Write the records since the last flush, the number of lost ones, if any, and the cost of
        recording so far; does nothing while recording is off. Any error switches recording off, and
        is not raised. The compute thread calls it at the end of `step`."""
        self._step = step
        if self._writer is None:
            return
        start_ns = self._clock()
        with self._loss_lock:
            num_lost, self._num_lost = self._num_lost, 0
        try:
            self._writer.append(self._pop_rows())
            if num_lost:
                self._warn_of_loss(step, num_lost)
                self._writer.append([row_of(LossRecord(self._clock(), step, num_lost))])
            now_ns = self._clock()
            cost_ns = self.cost_ns + now_ns - start_ns
            cost = CostRecord(now_ns, step, self._num_records, cost_ns)
            self._writer.append([row_of(cost)])
            self._writer.flush()
        except Exception as error:  # training goes on, whatever is wrong with a record
            self._switch_off(error)
        self._writing_ns += self._clock() - start_ns

    def close(self) -> None:
        """Write the records since the last flush, close the spill file and remove the flight
        record, which stays only if recording was switched off. A second call does nothing."""
        self._close_spill()
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def abandon(self) -> None:
        """Close the spill file of a rank that fails, within bounded time: of the records since the
        last flush write only the latest 200,000, and count the others as lost. The flight record,
        which has the rank's last activity, stays."""
        num_over = max(0, len(self._rows) - _MAX_AT_FAILURE)
        for _ in range(num_over):
            self._rows.popleft()
        with self._loss_lock:
            self._num_lost += num_over
        if self._rows:
            self._step = step_of(self._rows[-1])
        self._close_spill()
        self._ring = None

    def _close_spill(self) -> None:
        """Write the remaining records, and close the spill file. An error switches recording
        off."""
        if self._rows:
            self.flush(self._step)
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.close()
            except OSError as error:
                self._switch_off(error)

    def _measure_record_ns(self) -> float:
        """Measure the time in ns for two clock readings, one record, and its append: the median
        over batches, because other processes may interrupt some. Removes the records that it
        made."""
        clock = self._clock
        batches_ns = []
        for _ in range(_NUM_BATCHES):
            begin_ns = clock()
            for _ in range(_NUM_RECORDS_OF_A_BATCH):
                start_ns = clock()
                self.record(TaskRecord(start_ns, clock(), 0, "F", 0, 0, 0, 0, 1, 0, 1, 1, 1, 0))
            batches_ns.append(clock() - begin_ns)
        self._rows.clear()
        self._num_lost = 0
        if self._ring is not None:
            self._ring.clear()
        return median(batches_ns) / _NUM_RECORDS_OF_A_BATCH

    def _pop_rows(self) -> Iterator[Row]:
        """Remove, count and yield the rows present now; another thread may add more meanwhile."""
        for _ in range(len(self._rows)):
            self._num_records += 1
            yield self._rows.popleft()

    def _warn_of_loss(self, step: int, num_lost: int) -> None:
        """Log a warning that records were lost; only in the first call."""
        if not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            _log.warning(
                "%s recorded more than %d records on this rank; its last %d are lost, and the "
                "trace counts what later steps lose",
                step_name(step),
                self._capacity,
                num_lost,
            )

    def _switch_off(self, error: Exception) -> None:
        """Write nothing more to the spill file after an error, with one warning: drop the queued
        records, note the reason in the flight record, which goes on, and close the spill file."""
        writer, self._writer = self._writer, None
        self._rows.clear()
        reason = f"{self._path}: {reason_of(error)}"
        if self._ring is not None:
            self._ring.note_off(self._step, reason)
        _log.warning(
            "recording is switched off in %s, as its records cannot be written (%s); the training "
            "goes on, and the trace lacks what comes from there on",
            step_name(self._step),
            reason,
        )
        if writer is not None:
            # The one warning was already given.
            with suppress(OSError):
                writer.close()


def _open_ring(path: Path) -> FlightRing | None:
    """Make the file of a flight record; log a warning and return None if the disk refuses."""
    try:
        return FlightRing(path)
    except OSError as error:
        _log.warning(
            "there is no room for the flight record %s (%s); the training goes on without it, but "
            "if the run dies, the records of its last step are lost",
            path,
            error.strerror,
        )
        return None

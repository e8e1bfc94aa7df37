"""Takes a rank's records while it trains, and spills them once a step.

Recording never alters training. Taking a record is one append, by any thread; encoding and writing
wait for the flush between steps; and when the disk fails, recording switches itself off with one
warning and the training goes on.
"""

import logging
from collections import deque
from pathlib import Path

from rrfp.runtime.protocols import Clock, monotonic
from rrfp.trace.records import CostRecord, RankInfo, Record, TaskRecord
from rrfp.trace.spill import SpillWriter, encode_rows

_NUM_CALIBRATIONS = 500

_log = logging.getLogger(__name__)


class Recorder:
    """Records one rank into its spill file, or nothing at all when `path` is None."""

    def __init__(self, path: Path | None, info: RankInfo, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._records: deque[Record] = deque()
        self._writer: SpillWriter | None = None
        self._step = 0
        self._num_records = 0
        self._writing_ns = 0
        self._taking_ns = 0.0
        if path is not None:
            try:
                self._writer = SpillWriter(path, info)
            except OSError as error:
                self._switch_off(error)
            else:
                self._taking_ns = _measure_taking_ns(clock)

    @property
    def is_on(self) -> bool:
        """Whether what is recorded reaches the file."""
        return self._writer is not None

    @property
    def cost_ns(self) -> int:
        """What recording has cost this rank so far: taking, encoding and writing records."""
        return round(self._num_records * self._taking_ns) + self._writing_ns

    def record(self, record: Record) -> None:
        """Take a record; it is written at the next flush. Any thread may call this."""
        if self._writer is not None:
            self._records.append(record)

    def flush(self, step: int) -> None:
        """Write what was recorded since the last flush, and what recording has cost up to here.

        Called by the compute thread at the end of a step.
        """
        self._step = step
        if self._writer is None:
            return
        start_ns = self._clock()
        # A record that another thread appends meanwhile stays for the next flush.
        records = [self._records.popleft() for _ in range(len(self._records))]
        self._num_records += len(records)
        try:
            rows = encode_rows(records)
            now_ns = self._clock()
            cost_ns = self.cost_ns + now_ns - start_ns
            rows += encode_rows([CostRecord(now_ns, step, self._num_records, cost_ns)])
            self._writer.append(rows)
        except Exception as error:  # whatever is wrong with a record, the training goes on
            self._switch_off(error)
        self._writing_ns += self._clock() - start_ns

    def close(self) -> None:
        """Write what came after the last flush and close the file; closing twice is harmless."""
        if self._records:
            self.flush(self._step)
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.close()
            except OSError as error:
                self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        writer, self._writer = self._writer, None
        self._records.clear()
        _log.warning("recording is switched off, the training goes on: %s", error)
        if writer is not None:
            try:
                writer.close()
            except OSError:
                # Closing writes what is still buffered and fails as the write before it did; the
                # one warning has been given.
                return


def _measure_taking_ns(clock: Clock) -> float:
    """The time that one record takes: two looks at the clock, the record, and its append."""
    records: deque[Record] = deque()
    begin_ns = clock()
    for _ in range(_NUM_CALIBRATIONS):
        start_ns = clock()
        records.append(TaskRecord(start_ns, clock(), 0, "F", 0, 0, 0, 0, 1, 0, 1, 1, 1, 0))
    return (clock() - begin_ns) / _NUM_CALIBRATIONS

"""The request to record a job: its steps, directory and limits. Imports no torch."""

import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rrfp.errors import UsageError
from rrfp.trace.run_dir import RUNS


def print_to_stderr(sentence: str) -> None:
    """Print `rrfp: ` and a sentence to stderr. Does not use the script's logging, which might hide
    it or repeat it on every rank. Does nothing if the script has removed stderr, and never
    raises."""
    stderr = getattr(sys, "stderr", None)
    if stderr is not None:  # a script may have removed it
        logging.StreamHandler(stderr).handle(logging.makeLogRecord({"msg": f"rrfp: {sentence}"}))


_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Restarts of a job's processes by torchrun, and requeues by Slurm."""
_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Training steps `start` to `stop - 1`, and the evaluations between them; by default all."""

    start: int = 0
    stop: int = sys.maxsize

    @classmethod
    def of(cls, text: str | None) -> Self:
        """Parse `A:B` like a Python slice; either number may be left out. None means all steps.
        Raises UsageError for other text, and for an empty window."""
        if text is None:
            return cls()
        match = re.fullmatch(r"(\d{0,18}):(\d{0,18})", str(text))
        if match is None:
            raise UsageError(
                f"the steps to record are {text!r}; give a range such as '20:40', '20:' or ':40'"
            )
        window = cls(int(match[1] or 0), int(match[2]) if match[2] else sys.maxsize)
        if window.start >= window.stop:
            raise UsageError(
                f"the range of steps to record, '{text}', is empty; the second number must be the "
                "larger one"
            )
        return window

    def has_step(self, step: int) -> bool:
        """True if a training step is in the window."""
        return self.start <= step < self.stop

    def has_evaluation(self, num_trained: int) -> bool:
        """True if an evaluation after `num_trained` training steps lies between two steps of the
        window. An evaluation before the first step only needs that step in the window."""
        is_first = num_trained == self.start == 0
        return self.has_step(num_trained) and (is_first or self.has_step(num_trained - 1))

    def is_over(self, num_trained: int) -> bool:
        """True if no step after `num_trained` training steps can be in the window."""
        return num_trained >= self.stop

    def __str__(self) -> str:
        return f"{self.start or ''}:{'' if self.stop == sys.maxsize else self.stop}"

    def without_steps(self, num_begun: int) -> str:
        """Format the reason why a job that began `num_begun` training steps recorded none: none
        ended, or none was in the window."""
        began = f"the job began {num_begun} step{'' if num_begun == 1 else 's'}"
        if num_begun > self.start:
            return f"{began} and ended none"
        until = "on" if self.stop == sys.maxsize else f"to {self.stop - 1}"
        return f"{began}, and those from {self.start} {until} were to be recorded"


@dataclass(frozen=True, slots=True)
class RecordingRequest:
    """The parameters of a requested recording."""

    by: str
    """The caller: `rrfp run`, `install()` or `trace_native()`."""
    out: Path | None = None
    """The run's directory; None means `<time>-<hint>/` in `runs`."""
    window: StepWindow = StepWindow()
    force: bool = False
    """True replaces the run in `out`."""
    runs: Path = RUNS
    trace_mb: int | None = None
    """The limit in MB for records and trace on disk (`rrfp.trace.spill`)."""

    def __post_init__(self) -> None:
        """Make paths absolute now, because a script may change the directory before its first
        step."""
        object.__setattr__(self, "runs", self.runs.absolute())
        if self.out is not None:
            object.__setattr__(self, "out", self.out.absolute())


def num_restarts() -> int:
    """The number of restarts of the job that this process's launcher reports: torchrun's restarts
    plus Slurm's requeues; 0 for a value that is not a number. After the failure of one node,
    torchrun counts the restart on that node only."""
    counts = [os.environ.get(name, "") for name in _RESTART_COUNTS]
    return sum(int(count) for count in counts if count.isdecimal())


def may_be_restarted() -> bool:
    """True if the environment shows that the job has been restarted, or that torchrun may restart
    it (`TORCHELASTIC_MAX_RESTARTS` is not 0)."""
    return num_restarts() > 0 or os.environ.get(_MAX_RESTARTS, "0") != "0"

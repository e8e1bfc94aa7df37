"""What of a job is recorded, and where to. Imports no torch."""

import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rrfp.errors import UsageError
from rrfp.trace.run_dir import RUNS

# What a job is told at its end: a sentence on stderr.
#
# The logging of a script would hide it, or repeat it on every rank in a form of its own.


def print_to_stderr(sentence: str) -> None:
    """Write a sentence to stderr, whatever the script's logging is. Never raises."""
    stderr = getattr(sys, "stderr", None)
    if stderr is not None:  # a script may have removed it
        logging.StreamHandler(stderr).handle(logging.makeLogRecord({"msg": f"rrfp: {sentence}"}))


_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""How often torchrun has started a job's processes anew, and how often Slurm has requeued it."""
_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Training steps `start` to `stop - 1`, and the evaluations between them; by default all."""

    start: int = 0
    stop: int = sys.maxsize

    @classmethod
    def of(cls, text: str | None) -> Self:
        """Read `A:B` as Python reads a slice; either number may be left out. None means all steps.
        Raises UsageError for anything else, and for a window without steps."""
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
        """Whether a training step is in the window."""
        return self.start <= step < self.stop

    def has_evaluation(self, num_trained: int) -> bool:
        """Whether an evaluation that comes after that many training steps lies between two steps of
        the window. Before the first and after the last step of a job, one of them is enough."""
        is_first = num_trained == self.start == 0
        return self.has_step(num_trained) and (is_first or self.has_step(num_trained - 1))

    def is_over(self, num_trained: int) -> bool:
        """Whether nothing more can be in the window after that many training steps."""
        return num_trained >= self.stop

    def __str__(self) -> str:
        return f"{self.start or ''}:{'' if self.stop == sys.maxsize else self.stop}"

    def without_steps(self, num_begun: int) -> str:
        """Why a job that has begun so many training steps has none recorded."""
        began = f"the job began {num_begun} step{'' if num_begun == 1 else 's'}"
        if num_begun > self.start:
            return f"{began} and ended none"
        until = "on" if self.stop == sys.maxsize else f"to {self.stop - 1}"
        return f"{began}, and those from {self.start} {until} were to be recorded"


@dataclass(frozen=True, slots=True)
class RecordingRequest:
    """A recording that somebody has asked for."""

    by: str
    """What asked for it: `rrfp run`, `install()` or `trace_native()`."""
    out: Path | None = None
    """The run's directory; None means `<time>-<hint>/` in `runs`."""
    window: StepWindow = StepWindow()
    force: bool = False
    """Whether to replace the run in `out`."""
    runs: Path = RUNS
    trace_mb: int | None = None
    """The most that the records and the trace take on disk (`rrfp.trace.spill`)."""

    def __post_init__(self) -> None:
        """Paths count from where the recording was asked for: a script may change the directory
        before its first step."""
        object.__setattr__(self, "runs", self.runs.absolute())
        if self.out is not None:
            object.__setattr__(self, "out", self.out.absolute())


def num_restarts() -> int:
    """How often this process' launcher says that it has started the job again. Where one node has
    failed, torchrun counts on that node only."""
    told = [os.environ.get(name, "") for name in _RESTART_COUNTS]
    return sum(int(count) for count in told if count.isdecimal())


def may_be_restarted() -> bool:
    """Whether the job may have been started before, as far as this process alone can know."""
    return num_restarts() > 0 or os.environ.get(_MAX_RESTARTS, "0") != "0"

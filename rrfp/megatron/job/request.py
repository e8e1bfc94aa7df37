"""What of a job is recorded, and where to. Imports no torch."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rrfp.errors import UsageError


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


@dataclass(frozen=True, slots=True)
class RecordingRequest:
    """A recording that somebody has asked for."""

    by: str
    """What asked for it: `rrfp run`, `install()` or `trace_native()`."""
    out: Path | None = None
    """The run's directory; None means `runs/<time>-<hint>/`."""
    window: StepWindow = StepWindow()
    force: bool = False
    """Whether to replace the run in `out`."""

"""How a rank reports its failure to the launcher: in the error file that the launcher names.

The variable and the format are those of torch's elastic launcher, so that torchrun can read the
report too.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rrfp.trace.files.whole_file import open_whole
from rrfp.trace.outcome import Culprit

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable with the file's path."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Why a rank ended, in its own words."""

    sentence: str
    exit_code: int
    is_consequence: bool
    """Whether another rank failed first, and this one only lost its peer."""
    is_silence: bool
    """Whether another rank did not answer for too long; it may still be alive."""
    detail: str = ""
    """Further lines below the sentence: the grid of a stall."""
    at_s: float = field(default=0.0, compare=False)
    """When it was written, on the host's monotonic clock: the time of day may jump."""
    culprit: Culprit | None = None
    """Whose fault it was, and who found that."""

    @property
    def is_own(self) -> bool:
        """Whether the cause is this rank's own."""
        return not (self.is_consequence or self.is_silence)

    def write(self) -> None:
        """Write the report to where the launcher of this process looks for it."""
        path = os.environ.get(ERROR_FILE)
        if path is None:
            return
        message = {
            "message": self.sentence,
            "extraInfo": {"timestamp": int(time.time())},
            "report": asdict(replace(self, at_s=time.monotonic())),
        }
        # Atomically, because the launcher ends this process if another one has failed too.
        with open_whole(Path(path)) as file:
            file.write(json.dumps({"message": message}).encode())

    @classmethod
    def read(cls, error_file_data: Mapping[str, Any]) -> Self | None:
        """The report in a rank's error file; None if it is not one of ours."""
        message = error_file_data.get("message")
        if isinstance(message, dict) and "report" in message:
            report = cls(**message["report"])
            culprit = message["report"].get("culprit")
            return report if culprit is None else replace(report, culprit=Culprit.decode(culprit))
        return None

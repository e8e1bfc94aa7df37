"""How a rank's failure reaches the launcher: a report in the error file that it names.

Variable and form are those of torch's elastic launcher, so that torchrun can read the report too.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rrfp.trace.whole_file import open_whole

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable with the file's path."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Why a rank ended, in its own words."""

    sentence: str
    exit_code: int
    is_consequence: bool
    """Another rank's failure came first: this one only lost its peer."""
    is_silence: bool
    """Another rank did not answer for too long; it may still be there."""
    detail: str = ""
    """What goes below the sentence, on lines of its own: the grid of a stall."""

    def write(self) -> None:
        """Leave the report where the launcher that started this process looks for it."""
        path = os.environ.get(ERROR_FILE)
        if path is None:
            return
        message = {
            "message": self.sentence,
            "extraInfo": {"timestamp": int(time.time())},
            "report": asdict(self),
        }
        # Whole or not at all: the launcher ends this process when another one has failed too.
        with open_whole(Path(path)) as file:
            file.write(json.dumps({"message": message}).encode())

    @classmethod
    def read(cls, error_file_data: Mapping[str, Any]) -> Self | None:
        """The report in what a rank's error file holds, if it is one of ours."""
        message = error_file_data.get("message")
        if isinstance(message, dict) and "report" in message:
            return cls(**message["report"])
        return None

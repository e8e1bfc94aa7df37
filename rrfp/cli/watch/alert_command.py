"""Runs a user's command for each alert, beside the watching, which does not wait for it."""

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from rrfp.errors import first_line

_TIMEOUT_S = 60.0
_POLL_S = 0.05


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    deadline_s: float


class AlertCommand:
    """A command line for the shell, which gets what happened in environment variables. What it
    prints is shown only if it fails, and after a minute it is ended."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._running: list[_Running] = []

    def start(self, facts: Mapping[str, str]) -> None:
        """May raise OSError."""
        # Closed when the command has ended.
        output = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            ["/bin/sh", "-c", self._line],
            env={**os.environ, **facts},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._running.append(_Running(process, output, time.monotonic() + _TIMEOUT_S))

    def ended(self) -> list[str]:
        """A sentence for each command that has failed since the last call."""
        told = []
        for each in list(self._running):
            code = each.process.poll()
            if code is None:
                if time.monotonic() < each.deadline_s:
                    continue
                _end(each.process)
                told.append(f"the alert command was ended after {_TIMEOUT_S:.0f} s")
            elif code:
                each.output.seek(0)
                said = first_line(each.output.read().decode(errors="replace"))
                told.append(f"the alert command ended with {code}: {said}")
            each.output.close()
            self._running.remove(each)
        return told

    def close(self) -> list[str]:
        """Wait for the commands that still run, and give what `ended` gives."""
        told = self.ended()
        while self._running:
            time.sleep(_POLL_S)
            told += self.ended()
        return told


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()

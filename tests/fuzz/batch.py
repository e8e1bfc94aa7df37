"""One process that feeds a reader a number of inputs: `python -m tests.fuzz.batch`.

It prints how each input ended, as one line of JSON. If the process hangs or crashes, the last line
identifies the input that caused it.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from unittest.mock import patch

from rrfp.cli.errors import DEBUG_VARIABLE
from rrfp.errors import RrfpError
from tests.fuzz.damage import damaged, damaged_inside
from tests.fuzz.readers import READERS, Attempt, Reader

LONGEST_S = 30
"""The longest time of an input, in seconds of the processor: the machine may be busy."""
MOST_BYTES = 1 << 30


class TookTooLongError(BaseException):
    """An input took longer than `LONGEST_S`. A BaseException, so that no reader catches it."""


class Inputs:
    """Makes numbered damaged copies of a reader's files."""

    def __init__(self, reader: Reader, whole: Path, seed: int) -> None:
        self._reader, self._whole, self._seed = reader, whole, seed
        self._files = sorted(
            file.relative_to(whole) for each in reader.damaged for file in whole.glob(each)
        )
        self._contents = {file: (whole / file).read_bytes() for file in self._files}

    def write(self, number: int, directory: Path) -> Attempt:
        """Write an input into a new directory, and draw the attempt to make on it."""
        draw = random.Random(f"{self._seed} {self._reader.name} {number}")
        file = draw.choice(self._files)
        data = self._contents[file]
        found = damaged_inside(file.name, draw, data) if draw.random() < 0.5 else None
        if found is None:
            like = tuple(self._contents[each] for each in self._files if each != file)
            found = damaged(draw, data, like)
        shutil.copytree(self._whole, directory, symlinks=True)
        (directory / file).write_bytes(found)
        return draw.choice(self._reader.attempts)


def main(name: str, seed: int, numbers: range, keep: Path) -> None:
    reader = READERS[name]
    report = _take_stdout()
    with tempfile.TemporaryDirectory(prefix="rrfp-fuzz-") as folder, chdir(folder):
        whole = Path(folder, "whole")
        whole.mkdir()
        reader.make(whole)
        inputs = Inputs(reader, whole, seed)
        # Try undamaged files first, so that the memory of loaded modules does not count as an
        # input's.
        right = {attempt: _try_on_copy(whole, attempt) for attempt in reader.attempts}
        _take_stderr()
        _limit_memory()
        signal.signal(signal.SIGPROF, _too_long)
        directory = Path(folder, "input")
        for number in numbers:
            report({"begun": number})
            attempt = inputs.write(number, directory)
            began_s = time.process_time()
            ended, why = _end_of(directory, attempt, right[attempt] if reader.same else None)
            took_s = time.process_time() - began_s
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            noise = _take_stderr()
            why += "" if reader.has_log else noise
            if peak > MOST_BYTES:
                why += f"it took {peak >> 20} MiB"
            report({"number": number, "ended": ended, "why": why, "s": took_s, "bytes": peak})
            if why:
                kept = keep / f"{name.replace(' ', '-')}-{seed}-{number}"
                shutil.copytree(directory, kept, symlinks=True, dirs_exist_ok=True)
            if peak > MOST_BYTES:
                return  # The peak never falls, so later inputs need another process.
            shutil.rmtree(directory)


def _take_stdout() -> Callable[[dict[str, object]], None]:
    """Redirect stdout to /dev/null, also for Rust, and return a function that writes a line of JSON
    to the original stdout."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)

    def report(result: dict[str, object]) -> None:
        lines.write(json.dumps(result) + "\n")
        lines.flush()

    return report


def _take_stderr() -> str:
    """Empty the file behind stderr, and return the text that a panic of Rust or a library in C has
    written there, bypassing `sys.stderr`."""
    if not os.fstat(2).st_size:
        return ""
    text = os.pread(2, 3000, 0).decode("utf-8", "replace")
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    return f"past sys.stderr it wrote {text}"


def _try_on_copy(whole: Path, attempt: Attempt) -> object:
    copy = whole.with_name("copy")
    shutil.copytree(whole, copy, symlinks=True)
    try:
        with chdir(copy):
            return attempt()
    finally:
        shutil.rmtree(copy)


def _limit_memory() -> None:
    """Limit the address space of this process to its present size plus `MOST_BYTES`."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _too_long(*_: object) -> None:
    raise TookTooLongError


def _end_of(directory: Path, attempt: Attempt, right: object) -> tuple[str, str]:
    """Make an attempt. Returns `read`, `refused` or `found`, and a description of the fault found,
    if any. `right` is the expected output, or None if any output is right."""
    try:
        output = _try(directory, attempt)
    except RrfpError:
        return "refused", ""
    except TookTooLongError:
        return "found", f"more than {LONGEST_S} s:\n{traceback.format_exc()[-3000:]}"
    except BaseException:
        why = traceback.format_exc()[-3000:]
        # Repeat the attempt with the traceback that a command does not show otherwise.
        with patch.dict(os.environ, {DEBUG_VARIABLE: "1"}):
            try:
                _try(directory, attempt)
            except BaseException as error:
                why += str(error)
        return "found", why
    if right is not None and output != right:
        return "found", f"its output changed: {str(output)[:1000]}"
    return "refused" if str(output).startswith(("1: ", "2: ")) else "read", ""


def _try(directory: Path, attempt: Attempt) -> object:
    with chdir(directory), _within(LONGEST_S):
        return attempt()


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    _, _name, _seed, _first, _stop, _keep = sys.argv
    main(_name, int(_seed), range(int(_first), int(_stop)), Path(_keep))

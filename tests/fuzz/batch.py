"""One process that feeds a reader a number of inputs: `python -m tests.fuzz.batch`.

It tells how each ended, a line of JSON an input. A hang or a crash ends the process, and so whoever
reads its lines knows which input was to blame.
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
from tests.fuzz.reader import Attempt, Reader
from tests.fuzz.readers import READERS

LONGEST_S = 30
"""Of the processor's time; other processes may be using the machine as well."""
MOST_BYTES = 1 << 30


class TookTooLongError(BaseException):
    """An input took longer than any may. No reader catches it."""


class Inputs:
    """The damaged copies of what a reader reads, by number."""

    def __init__(self, reader: Reader, whole: Path, seed: int) -> None:
        self._reader, self._whole, self._seed = reader, whole, seed
        self._files = sorted(
            file.relative_to(whole) for each in reader.damaged for file in whole.glob(each)
        )
        self._contents = {file: (whole / file).read_bytes() for file in self._files}

    def write(self, number: int, directory: Path) -> Attempt:
        """Write an input, and draw what is tried on it."""
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
    tell = _teller()
    with tempfile.TemporaryDirectory(prefix="rrfp-fuzz-") as folder, chdir(folder):
        whole = Path(folder, "whole")
        whole.mkdir()
        reader.make(whole)
        inputs = Inputs(reader, whole, seed)
        # Once each on what is whole: what is loaded then is not the input's.
        right = {attempt: _tried_on_a_copy(whole, attempt) for attempt in reader.attempts}
        _noise()
        _bound_memory()
        signal.signal(signal.SIGPROF, _too_long)
        directory = Path(folder, "input")
        for number in numbers:
            tell({"begun": number})
            attempt = inputs.write(number, directory)
            began_s = time.process_time()
            ended, why = _ended(directory, attempt, right[attempt] if reader.same else None)
            took_s = time.process_time() - began_s
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            noise = _noise()
            why += "" if reader.has_log else noise
            if peak > MOST_BYTES:
                why += f"it took {peak >> 20} MiB"
            tell({"number": number, "ended": ended, "why": why, "s": took_s, "bytes": peak})
            if why:
                kept = keep / f"{name.replace(' ', '-')}-{seed}-{number}"
                shutil.copytree(directory, kept, symlinks=True, dirs_exist_ok=True)
            if peak > MOST_BYTES:
                return  # The peak stays, so the inputs that follow need another process.
            shutil.rmtree(directory)


def _teller() -> Callable[[dict[str, object]], None]:
    """Tells on what was stdout; what readers print there, also from Rust, goes nowhere."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)

    def tell(told: dict[str, object]) -> None:
        lines.write(json.dumps(told) + "\n")
        lines.flush()

    return tell


def _noise() -> str:
    """What was written to the process' own stderr, a file, since the last call: by a panic of Rust,
    or a library in C."""
    if not os.fstat(2).st_size:
        return ""
    told = os.pread(2, 3000, 0).decode("utf-8", "replace")
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    return f"past sys.stderr it wrote {told}"


def _tried_on_a_copy(whole: Path, attempt: Attempt) -> object:
    copy = whole.with_name("copy")
    shutil.copytree(whole, copy, symlinks=True)
    try:
        with chdir(copy):
            return attempt()
    finally:
        shutil.rmtree(copy)


def _bound_memory() -> None:
    """Refuse this process more memory than an input may take, beyond what it has mapped."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _too_long(*_: object) -> None:
    raise TookTooLongError


def _ended(directory: Path, attempt: Attempt, right: object) -> tuple[str, str]:
    """How an attempt ended, and what is wrong with that if anything is."""
    try:
        told = _tried(directory, attempt)
    except RrfpError:
        return "refused", ""
    except TookTooLongError:
        return "found", f"more than {LONGEST_S} s:\n{traceback.format_exc()[-3000:]}"
    except BaseException:
        why = traceback.format_exc()[-3000:]
        # Again, for the traceback that a command does not show.
        with patch.dict(os.environ, {DEBUG_VARIABLE: "1"}):
            try:
                _tried(directory, attempt)
            except BaseException as error:
                why += str(error)
        return "found", why
    if right is not None and told != right:
        return "found", f"it told otherwise: {str(told)[:1000]}"
    return "refused" if str(told).startswith(("1: ", "2: ")) else "read", ""


def _tried(directory: Path, attempt: Attempt) -> object:
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

"""`python -m tests.fuzz`: so many damaged inputs over all readers, and a table of how they ended.

Every batch of inputs is a process of its own; one that hangs or crashes costs the rest nothing.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.readers import READERS

_LONGEST_S = 300
"""On the clock, for the start of a process and for an input: one that waits takes no time of the
processor, by which `tests.fuzz.batch` ends it."""
_BATCH = 1500
_SHOWN = 3


@dataclass(slots=True)
class Tally:
    """How the inputs of a reader ended."""

    ended: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    most_bytes: int = 0
    seconds: float = 0.0
    found: list[dict[str, Any]] = field(default_factory=list)

    def add(self, told: dict[str, Any]) -> None:
        self.ended["found" if told["why"] else told["ended"]] += 1
        self.longest_s = max(self.longest_s, told["s"])
        self.most_bytes = max(self.most_bytes, told["bytes"])
        self.seconds += told["s"]
        if told["why"]:
            self.found.append(told)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="over all readers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reader", action="append", choices=READERS, help="only this one")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="for what is found")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    names = asked.reader or list(READERS)
    shares = sum(READERS[name].share for name in names)
    begun_s = time.monotonic()
    total: Counter[str] = Counter()
    _say(
        f"{'reader':32}{'inputs':>7}{'read':>7}{'refused':>8}{'found':>6}{'longest':>9}{'peak':>9}"
    )
    with ThreadPoolExecutor(asked.processes) as pool:
        tallies = {}
        for name in names:
            count = -(-asked.inputs * READERS[name].share // shares)
            numbers = range(asked.first, asked.first + count)
            tallies[name] = pool.submit(_fuzz, name, asked.seed, numbers, asked.keep.absolute())
        try:
            for name, tally in tallies.items():
                total += _show(name, tally.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)  # nobody waits for the other readers
            raise
    _say(f"{sum(total.values())} inputs in {time.monotonic() - begun_s:.0f} s: {dict(total)}")
    if total["found"]:
        _say(f"What was found is in {asked.keep}")
    return min(total["found"], 1)


def _show(name: str, tally: Tally) -> Counter[str]:
    _say(
        f"{name:32}{sum(tally.ended.values()):7}{tally.ended['read']:7}{tally.ended['refused']:8}"
        f"{tally.ended['found']:6}{tally.longest_s:7.1f} s{tally.most_bytes >> 20:5} MiB"
        f"  ({tally.seconds:.0f} s)"
    )
    for told in tally.found[:_SHOWN]:
        _say(f"--- input {told['number']} of {name}: {told['why']}")
    return tally.ended


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _fuzz(name: str, seed: int, numbers: range, keep: Path) -> Tally:
    tally = Tally()
    first = numbers.start
    while first < numbers.stop:
        first = _batch(name, seed, range(first, min(numbers.stop, first + _BATCH)), keep, tally)
    return tally


def _batch(name: str, seed: int, numbers: range, keep: Path, tally: Tally) -> int:
    """Run one process, and give the number of the first input that it did not come to."""
    command = [sys.executable, "-m", "tests.fuzz.batch", name, str(seed)]
    following, begun = numbers.start, False
    with (
        tempfile.TemporaryFile() as noise,
        subprocess.Popen(
            [*command, str(numbers.start), str(numbers.stop), str(keep)],
            stdout=subprocess.PIPE,
            stderr=noise,
            env=os.environ | {"POLARS_MAX_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        ) as process,
    ):
        for told in _told(process):
            begun = "begun" in told
            if not begun:
                tally.add(told)
                following = told["number"] + 1
        code = process.wait()
        noise.seek(0)
        why = f"its process ended with {code}: {noise.read().decode('utf-8', 'replace')[-3000:]}"
    if begun:
        tally.add({"number": following, "why": why, "ended": "found", "s": 0.0, "bytes": 0})
        return following + 1
    if following == numbers.start:
        raise SystemExit(f"the reader of {name} is not fuzzed, as {why}")
    return following


def _told(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The lines of a process until it ends, or is ended for its silence."""
    assert process.stdout is not None
    rest = b""
    while select.select([process.stdout], [], [], _LONGEST_S)[0]:
        octets = os.read(process.stdout.fileno(), 1 << 16)
        if not octets:
            return
        *lines, rest = (rest + octets).split(b"\n")
        yield from map(json.loads, lines)
    process.kill()


if __name__ == "__main__":
    raise SystemExit(main())

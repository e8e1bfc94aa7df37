"""`python -m tests.fuzz`: feed damaged inputs to all readers and print a table of how they ended.

Every batch of inputs runs in a process of its own, so that a hang or a crash affects no other
input.
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

_LONGEST_SLEEP_S = 300
"""How long a process may print nothing while all its threads sleep. Time in which it runs, or waits
for a processor or a disk, does not count; `tests.fuzz.batch` limits the processor's time."""
_POLL_S = 1.0
_BATCH = 1500
_MOST_SHOWN = 3


@dataclass(slots=True)
class Tally:
    """How the inputs of a reader ended."""

    ended: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    most_bytes: int = 0
    seconds: float = 0.0
    found: list[dict[str, Any]] = field(default_factory=list)

    def add(self, result: dict[str, Any]) -> None:
        self.ended["found" if result["why"] else result["ended"]] += 1
        self.longest_s = max(self.longest_s, result["s"])
        self.most_bytes = max(self.most_bytes, result["bytes"])
        self.seconds += result["s"]
        if result["why"]:
            self.found.append(result)


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
    _print(
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
                total += _print_tally(name, tally.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)  # Do not run the other readers.
            raise
    _print(f"{sum(total.values())} inputs in {time.monotonic() - begun_s:.0f} s: {dict(total)}")
    if total["found"]:
        _print(f"What was found is in {asked.keep}")
    return min(total["found"], 1)


def _print_tally(name: str, tally: Tally) -> Counter[str]:
    _print(
        f"{name:32}{sum(tally.ended.values()):7}{tally.ended['read']:7}{tally.ended['refused']:8}"
        f"{tally.ended['found']:6}{tally.longest_s:7.1f} s{tally.most_bytes >> 20:5} MiB"
        f"  ({tally.seconds:.0f} s)"
    )
    for result in tally.found[:_MOST_SHOWN]:
        _print(f"--- input {result['number']} of {name}: {result['why']}")
    return tally.ended


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _fuzz(name: str, seed: int, numbers: range, keep: Path) -> Tally:
    tally = Tally()
    first = numbers.start
    while first < numbers.stop:
        first = _batch(name, seed, range(first, min(numbers.stop, first + _BATCH)), keep, tally)
    return tally


def _batch(name: str, seed: int, numbers: range, keep: Path, tally: Tally) -> int:
    """Run one process, and return the number of the first input that it did not reach."""
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
        for result in _results(process):
            begun = "begun" in result
            if not begun:
                tally.add(result)
                following = result["number"] + 1
        code = process.wait()
        noise.seek(0)
        why = f"its process ended with {code}: {noise.read().decode('utf-8', 'replace')[-3000:]}"
    if begun:
        tally.add({"number": following, "why": why, "ended": "found", "s": 0.0, "bytes": 0})
        return following + 1
    if following == numbers.start:
        raise SystemExit(f"the reader of {name} is not fuzzed, as {why}")
    return following


def _results(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The lines of a process until it ends; kills it if it sleeps for `_LONGEST_SLEEP_S`."""
    assert process.stdout is not None
    rest = b""
    slept_s = 0.0
    while slept_s < _LONGEST_SLEEP_S:
        if select.select([process.stdout], [], [], _POLL_S)[0]:
            octets = os.read(process.stdout.fileno(), 1 << 16)
            if not octets:
                return
            *lines, rest = (rest + octets).split(b"\n")
            yield from map(json.loads, lines)
            slept_s = 0.0
        elif is_asleep(process.pid):
            slept_s += _POLL_S
    process.kill()


def is_asleep(pid: int) -> bool:
    """True if all threads of a process sleep; one that waits for a processor or a disk does not."""
    try:
        states = [
            (thread / "stat").read_text().rpartition(")")[2].split()[0]
            for thread in Path(f"/proc/{pid}/task").iterdir()
        ]
    except OSError:  # A thread ended meanwhile.
        return False
    return all(state in "ST" for state in states)


if __name__ == "__main__":
    raise SystemExit(main())

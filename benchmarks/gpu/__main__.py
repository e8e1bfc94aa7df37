"""Measures what is to hold on a GPU, for the table of docs/gpu.md: `python -m benchmarks.gpu`.

Without a GPU it says so and exits with 0; a line that does not hold makes it 1.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.lines import LINES, Line
from rrfp.runtime.device.cuda_runtime import CudaPresence, check_cuda, installed_torch
from rrfp.runtime.isolated_call import NoAnswerError

HEAD = ("line", "goal", "figure", "when", "where", "commit")
NOT_RUN = "not run"
_CORES_A_RUN = 4
_GPU_BYTES_A_RUN = 16 * 2**30
"""Up to eight ranks, each with a context of half a GiB, and what they compute."""
_ROOT = Path(__file__).parent.parent.parent


def main() -> int:
    """Print each row once it and those before it are measured."""
    presence = check_cuda()
    if presence.problem is not None:
        print(f"Nothing is measured: {presence.problem}")
        return 0
    all_hold = True
    for row, holds in table(LINES, presence):
        print(row, flush=True)
        all_hold &= holds
    return 0 if all_hold else 1


def table(lines: Iterable[Line], presence: CudaPresence) -> Iterator[tuple[str, bool]]:
    """The rows of the page, and whether each holds. Times are measured one after the other, then
    the rest side by side."""
    yield _row(HEAD), True
    yield "|---" * len(HEAD) + "|", True
    run = _run(presence)
    untimed = []
    for line in lines:
        if line.is_timed:
            yield _measured(line, run)
        else:
            untimed.append(line)
    with ThreadPoolExecutor(_num_at_once(presence)) as pool:
        yield from pool.map(lambda line: _measured(line, run), untimed)


def _measured(line: Line, run: tuple[str, str, str]) -> tuple[str, bool]:
    """The row of a line, and whether it holds."""
    lacks = line.lacks()
    if lacks is not None:
        return _row((line.name, line.goal, f"{NOT_RUN}: {lacks}", "", "", "")), True
    try:
        measured = line.measure()
    except NoAnswerError as error:
        figure, holds = f"failed: {error}", False
    else:
        figure, holds = measured.figure, measured.holds
        if not holds:
            figure = f"{figure}: missed"
    return _row((line.name, line.goal, figure, *run)), holds


def _num_at_once(presence: CudaPresence) -> int:
    """How many runs go side by side, up to eight ranks each."""
    room = min(gpu.memory_bytes for gpu in presence.gpus) // _GPU_BYTES_A_RUN
    return max(1, min(room, len(os.sched_getaffinity(0)) // _CORES_A_RUN))


def _run(presence: CudaPresence) -> tuple[str, str, str]:
    """When, where and on what commit."""
    torch = installed_torch()
    assert torch is not None
    num, gpus = len(presence.gpus), presence.gpus[0].name
    if num > 1:
        gpus = f"{num} x {gpus}"
    return (
        f"{datetime.now(UTC):%Y-%m-%d}",
        f"{gpus}, torch {torch.version}",
        _commit(),
    )


def _commit() -> str:
    """The commit that is checked out, with a + where files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())

"""Measures what is to hold on a GPU, for the table of docs/gpu.md: `python -m benchmarks.gpu`.

Without a GPU it says so and exits with 0; a line that does not hold makes it 1.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.lines import LINES, Line
from rrfp.runtime.device.cuda_presence import CudaPresence, cuda_presence, installed_torch
from rrfp.runtime.probe import NoAnswerError

HEAD = ("line", "goal", "figure", "when", "where", "commit")
NOT_RUN = "not run"
_ROOT = Path(__file__).parent.parent.parent


def main() -> int:
    """Print a row as soon as it is measured."""
    presence = cuda_presence()
    if presence.problem is not None:
        print(f"Nothing is measured: {presence.problem}")
        return 0
    all_hold = True
    for row, holds in table(LINES, presence):
        print(row, flush=True)
        all_hold &= holds
    return 0 if all_hold else 1


def table(lines: Iterable[Line], presence: CudaPresence) -> Iterator[tuple[str, bool]]:
    """The rows of the page, measured one after the other, and whether each holds."""
    yield _row(HEAD), True
    yield _row(("---",) * len(HEAD)), True
    run = _run(presence)
    for line in lines:
        lacks = line.lacks()
        if lacks is not None:
            yield _row((line.name, line.goal, f"{NOT_RUN}: {lacks}", "", "", "")), True
            continue
        figure, holds = _measured(line)
        yield _row((line.name, line.goal, figure, *run)), holds


def _measured(line: Line) -> tuple[str, bool]:
    """The figure of a line in words, and whether it holds."""
    try:
        measured = line.measure()
    except NoAnswerError as error:
        return f"failed: {error}", False
    return measured.figure if measured.holds else f"{measured.figure}: missed", measured.holds


def _run(presence: CudaPresence) -> tuple[str, str, str]:
    """When, where and on what commit."""
    torch = installed_torch()
    assert torch is not None
    return (
        f"{datetime.now(UTC):%Y-%m-%d}",
        f"{len(presence.gpus)} x {presence.gpus[0].name}, torch {torch.version}",
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

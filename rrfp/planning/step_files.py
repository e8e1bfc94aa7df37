"""Files of a run with a line per step: `admission.csv` and `dealing.csv`.

A line lists, for each replica, the numbers of its microbatches in the order in which they enter.
`--admit` or `--admit-across` with such a file repeats the run.
"""

from collections.abc import Sequence
from pathlib import Path

from rrfp.schedule.admission import format_admission
from rrfp.trace.safe_files import ReportFile, open_whole

Orders = Sequence[Sequence[int]]
"""By replica: the numbers of microbatches in the order in which they enter."""


class StepFile:
    """Writes such a file, on one rank."""

    def __init__(self, path: Path, given: Orders, first_step: int = 0) -> None:
        """Keep the lines of the steps before `first_step`. Those without a line get `given`, the
        line of a step that enters as the data give it."""
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        # An interrupted write leaves half a line.
        complete = [line for line in lines if line.endswith("\n")][:first_step]
        complete += [format_admission(given)] * (first_step - len(complete))
        with open_whole(path) as file:
            file.write("".join(complete).encode())
        self._file = ReportFile(path)

    def write(self, orders: Orders) -> None:
        """Write the line of the next step, which has ended."""
        self._file.write(format_admission(orders))

    def close(self) -> None:
        self._file.close()


def part_of(path: Path, replica: int) -> Path:
    """The file of one replica, until `join_parts` joins all of them."""
    return path.with_name(f"{path.stem}-{replica}{path.suffix}")


def join_parts(path: Path) -> None:
    """Join the files of all replicas, up to the last step that all of them have. Does nothing
    without files."""
    parts: list[Path] = []
    while (part := part_of(path, len(parts))).exists():
        parts.append(part)
    if not parts:
        return
    lines = [part.read_text("utf-8").splitlines() for part in parts]
    with open_whole(path) as file:
        for orders in zip(*lines, strict=False):
            file.write(f"{'; '.join(orders)}\n".encode())
    for part in parts:
        part.unlink()

"""The planned orders of a recorded job, as a file that `admit` takes: a line a step.

The first rank of each replica writes its own; at the end the leader of the recording joins them.
"""

from collections.abc import Sequence
from pathlib import Path

from rrfp.schedule.admission import format_admission
from rrfp.trace.files.whole_file import open_own, open_whole


class OrdersFile:
    """What one replica's first rank writes."""

    def __init__(self, path: Path, replica: int) -> None:
        """`path` is that of the joined file."""
        self._file = open_own(_part(path, replica), anew=True)

    def write(self, order: Sequence[int]) -> None:
        """The order of the next step."""
        self._file.write(format_admission([order]).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def join_orders(path: Path) -> None:
    """Join the files of all replicas, up to the last step that all of them have; without any, there
    is nothing to do."""
    parts: list[Path] = []
    while (part := _part(path, len(parts))).exists():
        parts.append(part)
    if not parts:
        return
    lines = [part.read_text("utf-8").splitlines() for part in parts]
    with open_whole(path) as file:
        for of_step in zip(*lines, strict=False):
            file.write(f"{'; '.join(of_step)}\n".encode())
    for part in parts:
        part.unlink()


def _part(path: Path, replica: int) -> Path:
    return path.with_name(f"{path.stem}-{replica}{path.suffix}")

"""The planned orders of a recorded job, as a file that `admit` takes: a line a step.

The first rank of each replica writes its own; at the end the leader of the recording joins them.
"""

from collections.abc import Sequence
from pathlib import Path

from rrfp.schedule.admission import format_admission
from rrfp.schedule.balance import Hands, format_dealing
from rrfp.trace.safe_files import ReportFile, open_own, open_whole

# What a run has dealt, as a file that `admit_across` takes: a line a step.


class AssignmentFile:
    """The file, written by one rank of the run.

    A step without a line of its own, before the one that a run goes on from, has what the data
    give.
    """

    def __init__(
        self, path: Path, num_replicas: int, num_microbatches: int, first_step: int = 0
    ) -> None:
        """Keep the lines of the steps before `first_step`."""
        kept = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        # An interrupted write leaves half a line.
        whole = [line for line in kept if line.endswith("\n")][:first_step]
        firsts = range(0, num_replicas * num_microbatches, num_microbatches)
        given = format_dealing([range(first, first + num_microbatches) for first in firsts])
        with open_whole(path) as file:
            file.write(("".join(whole) + given * (first_step - len(whole))).encode())
        self._file = ReportFile(path)

    def write(self, hands: Hands) -> None:
        """Write the next step, which has ended."""
        self._file.write(format_dealing(hands))

    def close(self) -> None:
        self._file.close()


class AdmissionFile:
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


def join_admission_files(path: Path) -> None:
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

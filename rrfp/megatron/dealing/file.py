"""What a run has dealt, as a file that `admit_across` takes: a line a step."""

from pathlib import Path

from rrfp.schedule.dealing import Hands, format_dealing
from rrfp.trace.report_file import ReportFile
from rrfp.trace.whole_file import open_whole


class DealingFile:
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

"""TensorBoard: event files in a directory, by torch's SummaryWriter."""

from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from rrfp.errors import UsageError
from rrfp.watch.alarms import Measure


def open_at(where: str, run: str) -> "TensorboardFiles":
    """Write to a directory of the run's own in `where`, so that TensorBoard tells runs apart."""
    return TensorboardFiles(Path(where) / run)


class TensorboardFiles:
    """Every measure as a scalar under its path."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{directory} cannot be made ({error.strerror}); give --export tensorboard a "
                "directory that can be written"
            ) from error
        self._writer = SummaryWriter(str(directory))

    def take(self, step: int, source: str, measures: Sequence[Measure]) -> None:
        del source
        for measure in measures:
            self._writer.add_scalar(measure.path, measure.value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

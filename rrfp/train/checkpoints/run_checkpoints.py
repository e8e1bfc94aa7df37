"""When a run saves, and when it ends early."""

from collections.abc import Callable
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.train.checkpoints.directory import CheckpointDir
from rrfp.train.checkpoints.loading import load
from rrfp.train.checkpoints.saving import GO_ON, Saver
from rrfp.train.checkpoints.session import Session
from rrfp.train.checkpoints.tensors import TrainedTensors
from rrfp.train.models.model import ModelChunks
from rrfp.train.ranks.parallel import Layout
from rrfp.train.ranks.stopping import agree
from rrfp.train.settings import TrainSettings


class RunCheckpoints:
    """The checkpoints of a session. Every rank calls its methods, at the same steps."""

    def __init__(
        self,
        session: Session,
        settings: TrainSettings,
        layout: Layout,
        model: ModelChunks,
        copy_metrics: Callable[[Path], None],
    ) -> None:
        """Loads the checkpoint that the session goes on from, if there is one. `copy_metrics`
        writes the metrics so far into a file, on rank 0."""
        assert settings.run.save is not None
        self._settings = settings
        tensors = TrainedTensors(model, settings, layout)
        if session.checkpoint is not None:
            load(session.checkpoint, settings, layout, tensors)
        directory = CheckpointDir(settings.run.save)
        self._saver = Saver(directory, session, settings, layout, tensors, copy_metrics)

    def finish_step(self, step: int) -> bool:
        """Save after a step if it is time to. Returns whether the run ends here: a rank was asked
        to end by SIGTERM. One that cannot be written is warned of, and the next is tried."""
        is_asked, is_busy = agree(is_busy=self._saver.is_writing)
        if self._saver.is_pending and not is_busy:
            self._saver.finish()
        finished = step + 1
        every = self._settings.run.save_every
        is_due = every is not None and finished % every == 0
        if is_asked or is_due or finished == self._settings.num_steps:
            self._saver.save(finished)
        return is_asked

    def close(self) -> None:
        """Wait for the last checkpoint. Raises RrfpError if it could not be written."""
        self._saver.finish()
        if self._saver.failure:
            raise RrfpError(self._saver.failure + GO_ON)

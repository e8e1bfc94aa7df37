"""Saves a run's checkpoints, at once or beside the training.

All ranks plan a checkpoint together and write their own files. It counts when every rank has
written: rank 0 then describes it and gives it its name.
"""

import shutil
import threading
import traceback
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError, first_line
from rrfp.megatron.cpu.checkpoints import prepare_checkpoints
from rrfp.runtime.decoding import text
from rrfp.trace.description import versions
from rrfp.trace.rundir import RunDir
from rrfp.train.checkpoints import random_states
from rrfp.train.checkpoints.directory import CheckpointDir
from rrfp.train.checkpoints.manifest import METRICS, Manifest
from rrfp.train.checkpoints.plans import plans_exchanged
from rrfp.train.checkpoints.tensors import TrainedTensors
from rrfp.train.ranks.exchange import all_gather_json, broadcast_json
from rrfp.train.ranks.parallel import Layout
from rrfp.train.settings import TrainSettings


class Saver:
    """Saves one rank's part of the checkpoints. Every rank calls its methods, at the same steps."""

    def __init__(
        self,
        directory: CheckpointDir,
        run: RunDir,
        settings: TrainSettings,
        layout: Layout,
        tensors: TrainedTensors,
    ) -> None:
        self._directory = directory
        self._run = run
        self._settings = settings
        self._layout = layout
        self._tensors = tensors
        self._pending: _Pending | None = None
        prepare_checkpoints()

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes a checkpoint beside the training."""
        return self._pending is not None and self._pending.thread.is_alive()

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint was begun that is not finished; the same on every rank."""
        return self._pending is not None

    def save(self, step: int) -> None:
        """Begin the checkpoint after `step` steps, and finish it unless the run saves
        asynchronously. Raises RrfpError naming the directory if it cannot be written."""
        self.finish()
        saving = self._begin(step)
        with plans_exchanged():
            try:
                request = self._request(saving)
                if self._layout.rank == 0:
                    # Now, because steps that are trained meanwhile add to them.
                    shutil.copyfile(self._run.metrics, saving / METRICS)
            except (OSError, RuntimeError) as error:
                if (reason := _reason_of_disk(error)) is None:
                    raise
                self._directory.discard(saving)
                raise self._failed(step, reason) from error
        self._pending = _Pending(step, saving, request, _writing(request, staged=self._is_async))
        if not self._is_async:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and give it its name."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.thread.join()
        reasons = [reason for reason in all_gather_json(pending.thread.error, text) if reason]
        if reasons:
            if self._layout.rank == 0:
                self._directory.discard(pending.saving)
            raise self._failed(pending.step, reasons[0])
        try:
            with plans_exchanged():
                for finalize in pending.request.finalize_fns:
                    finalize()
            if self._layout.rank == 0:
                self._name(pending)
        except OSError as error:
            self._directory.discard(pending.saving)
            raise self._failed(pending.step, str(error.strerror)) from error
        # No rank goes on, or ends, before the checkpoint counts.
        dist.barrier()

    @property
    def _is_async(self) -> bool:
        return self._settings.run.save_async

    def _begin(self, step: int) -> Path:
        """The directory that all ranks write into; rank 0 makes it."""
        name = ""
        if self._layout.rank == 0:
            try:
                name = self._directory.begin(step).name
            except OSError as error:
                raise self._failed(step, str(error.strerror)) from error
        return self._directory.path / broadcast_json(name, text)

    def _request(self, saving: Path) -> Any:
        """Plan the checkpoint with all ranks; returns Megatron's AsyncRequest."""
        from megatron.core import dist_checkpointing

        save = dist_checkpointing.save
        # Since 0.18 the default is a strategy of a package of its own.
        has_choice = "async_strategy" in signature(save).parameters
        chosen = {"async_strategy": "mcore"} if has_choice else {}
        state = {
            "tensors": {str(n): each for n, each in enumerate(self._tensors.saved())},
            "random_states": random_states.captured(self._layout),
        }
        return save(state, str(saving), async_sharded_save=True, **chosen)

    def _name(self, pending: "_Pending") -> None:
        manifest = Manifest(
            step=pending.step,
            settings=self._settings.described(),
            run=str(self._run.path.resolve()),
            versions=versions(),
            files={},
        )
        self._directory.finish(pending.saving, manifest)
        self._directory.remove_older(self._settings.run.keep)

    def _failed(self, step: int, reason: str) -> RrfpError:
        return RrfpError(
            f"the checkpoint of step {step} could not be written to {self._directory.path} "
            f"({reason}); make room there, then go on from the last one with --resume"
        )


class _Writing(threading.Thread):
    """Writes a rank's files. It is a thread also where the run waits for it, so that there is one
    way."""

    def __init__(self, write: Callable[[], None]) -> None:
        super().__init__(name="rrfp-checkpoint")
        self._write = write
        self.error = ""
        """Why it failed; empty if it did not."""

    def run(self) -> None:
        try:
            self._write()
        except Exception as error:
            told = f"{type(error).__name__}: {first_line(str(error))}"
            self.error = _reason_of_disk(error) or told


def _reason_of_disk(error: BaseException) -> str | None:
    """Why a file could not be written; None for an error of another kind. torch's writer of files
    raises a RuntimeError, sometimes on top of the system's own error and sometimes without it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.strerror or str(cause)
        cause = cause.__cause__ or cause.__context__
    frames = traceback.extract_tb(error.__traceback__)
    is_of_writing = any(frame.filename == torch.serialization.__file__ for frame in frames)
    return f"torch says: {first_line(str(error))}" if is_of_writing else None


class _Pending:
    """A checkpoint that is being written."""

    def __init__(self, step: int, saving: Path, request: Any, thread: _Writing) -> None:
        self.step = step
        self.saving = saving
        self.request = request
        self.thread = thread


def _writing(request: Any, *, staged: bool) -> _Writing:
    """Start writing what a request asks for; staged, training may change the tensors meanwhile."""
    arguments = [*request.async_fn_args]
    if staged and request.preload_fn is not None:
        arguments[1] = request.preload_fn()

    def write() -> None:
        if request.async_fn is not None:
            request.async_fn(*arguments, **request.async_fn_kwargs)

    thread = _Writing(write)
    thread.start()
    return thread

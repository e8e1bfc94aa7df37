"""Saves a run's checkpoints, synchronously or in the background.

All ranks plan a checkpoint together, and each writes its own files. When all have written, rank 0
checks that all files are in its directory, writes the manifest and renames the directory.

A disk that is full now may have space at the next checkpoint, so a checkpoint that cannot be
written does not end the training. All ranks learn of it and continue, and earlier checkpoints stay.
"""

import errno
import logging
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException

from rrfp.errors import RrfpError, first_line
from rrfp.megatron.cpu.checkpoints import deferred_writes, digested_writes, prepare_checkpoints
from rrfp.strict_json import integer, items, member, text
from rrfp.trace.run_dir import RunDir
from rrfp.trace.run_json import next_session, versions
from rrfp.trace.safe_files import open_whole, remove_unfinished
from rrfp.train.checkpoints.directory import METRICS, Checkpoint, CheckpointDir, Manifest
from rrfp.train.checkpoints.plans import exchanging_plans, reason_of
from rrfp.train.checkpoints.run_start import check_continues, check_unused
from rrfp.train.checkpoints.tensors import TrainedTensors, captured_random_states, load
from rrfp.train.data.sources import data_contents
from rrfp.train.launch.collectives import all_gather_json, broadcast_json
from rrfp.train.launch.process_groups import Layout
from rrfp.train.launch.stopping import agree_on_stop
from rrfp.train.models.model import ModelChunks
from rrfp.train.settings import TrainSettings

_AGREE_S = 10.0
"""Interval at which ranks exchange flags while one reads or writes files: that may take longer than
the timeout of a collective, which is some minutes."""


@dataclass(frozen=True, slots=True)
class Session:
    """The part of a run that one call of `rrfp train` executes."""

    run: RunDir
    checkpoint: Checkpoint | None = None
    """The checkpoint from which it resumes; None for a start from the seed."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """The digests of the training data, for the manifests."""

    @property
    def first_step(self) -> int:
        """Index of the session's first step: 0 without a checkpoint."""
        return 0 if self.checkpoint is None else self.checkpoint.step


@contextmanager
def session_of(run: RunDir, settings: TrainSettings, layout: Layout) -> Iterator[Session]:
    """Begin the next session of the run in this directory and yield it; every rank calls this.
    Without --save, only yield a session from the seed.

    Rank 0 locks the checkpoints until the block ends and, with --resume, chooses the newest whole
    one for all ranks; the lock ensures that no other one is being completed. The run's metrics
    become those of that checkpoint, or empty. Raise UsageError if the run cannot continue it,
    without --resume if --save has one, or as `CheckpointDir.locked` and `data_contents` do, and
    RrfpError on a rank that cannot read it.
    """
    if settings.run.save is None:
        yield Session(run)
        return
    # Only rank 0 needs them. But reading may take long, and the others would time out in their
    # collective if rank 0 read alone.
    contents = data_contents(settings)
    directory = CheckpointDir(settings.run.save)
    is_rank_0 = layout.rank == 0
    with directory.locked() if is_rank_0 else nullcontext():
        chosen: dict[str, object] = {}
        found = _newest(directory, is_rank_0=is_rank_0) if settings.run.resume else None
        if is_rank_0:
            if not settings.run.resume:
                check_unused(directory.path, directory.newest(with_content=False))
            elif found is not None:
                check_continues(settings, contents, found)
            for file in (run.run_json, run.metrics):
                remove_unfinished(file)
            run = next_session(run.path)
            restore_metrics(run, found)
            chosen = {"session": run.session, "name": "" if found is None else found.path.name}

        def decode(value: object) -> tuple[int, Path | None]:
            name = text(member(value, "name"))
            return integer(member(value, "session")), directory.path_of(name) if name else None

        number, path = broadcast_json(chosen, decode)
        checkpoint = None
        if path is not None:
            try:
                checkpoint = Checkpoint(path, Manifest.read(path))
            except (OSError, ValueError) as error:
                raise RrfpError(
                    f"rank {layout.rank} cannot read the checkpoint {path} ({error}); see whether "
                    "all hosts share that directory"
                ) from error
        yield Session(RunDir(run.path, number), checkpoint, contents)


def _newest(directory: CheckpointDir, *, is_rank_0: bool) -> Checkpoint | None:
    """Return the newest whole checkpoint, or None, on rank 0; the other ranks wait for its search
    and return None."""
    with ThreadPoolExecutor(1, thread_name_prefix="rrfp-checkpoint") as pool:
        searches = [pool.submit(directory.newest)] if is_rank_0 else []
        is_busy = True
        while is_busy:
            _, is_busy = agree_on_stop(is_busy=bool(wait(searches, _AGREE_S).not_done))
        return searches[0].result() if is_rank_0 else None


def restore_metrics(run: RunDir, checkpoint: Checkpoint | None) -> None:
    """Replace a run's metrics by those in a checkpoint; empty an existing file if `checkpoint` is
    None. May raise OSError."""
    if checkpoint is None:
        if run.metrics.exists():
            with open_whole(run.metrics):
                pass
        return
    with (checkpoint.path / METRICS).open("rb") as saved, open_whole(run.metrics) as file:
        shutil.copyfileobj(saved, file)


_log = logging.getLogger(__name__)

GO_ON = ", then go on from the last one with --resume"
"""Advice that ends an error about a failed or slow write."""
_WRITING_S = 3600.0
"""How long a rank may take to write its files."""


class Saver:
    """Saves checkpoints. Every rank has one and calls its methods at the same steps."""

    def __init__(
        self,
        directory: CheckpointDir,
        session: Session,
        settings: TrainSettings,
        layout: Layout,
        tensors: TrainedTensors,
        copy_metrics: Callable[[Path], None],
    ) -> None:
        """`copy_metrics` writes the run's current metrics into a file, on rank 0."""
        self._copy_metrics = copy_metrics
        self.failure = ""
        """Why the last checkpoint could not be written, equal on all ranks; empty if it was."""
        self._directory = directory
        self._session = session
        self._settings = settings
        self._layout = layout
        self._tensors = tensors
        self._pending: _Pending | None = None
        prepare_checkpoints()

    @property
    def is_writing(self) -> bool:
        """True while this rank writes a checkpoint in the background."""
        return self._pending is not None and self._pending.writing.is_alive()

    @property
    def is_pending(self) -> bool:
        """True if a checkpoint was begun and `finish` has not run since; equal on all ranks."""
        return self._pending is not None

    def save(self, step: int) -> None:
        """Finish the last checkpoint, begin the one after `step` steps, and finish it too unless
        the run saves in the background. If the disk refuses a write, set `failure` and warn; while
        ranks plan the checkpoint, raise RrfpError instead. Raise as `finish` does."""
        self.finish()
        self.failure = ""
        saving = self._begin(step)
        if saving is None:
            return
        with exchanging_plans():
            try:
                request = self._request(saving)
            except (OSError, RuntimeError, CheckpointException) as error:
                if isinstance(error, RuntimeError) and _reason_of_disk(error) is None:
                    raise
                # The other ranks are in the middle of planning and cannot continue.
                self._directory.discard(saving)
                raise RrfpError(self._describe_failure(step, error) + GO_ON) from error
        # Files are written from CPU memory.
        is_staged = self._is_async or self._layout.device.type != "cpu"
        problem = ""
        if self._layout.rank == 0:
            try:
                # Now, because later steps add to them.
                self._copy_metrics(saving / METRICS)
            except OSError as error:
                problem = self._describe_failure(step, error)
        self._pending = _start_writing(step, saving, request, problem, is_staged=is_staged)
        if not self._is_async:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any, and complete it; rank 0 then
        removes all but the newest --keep. If a rank could not write, remove this one, set `failure`
        and warn. Raise RrfpError if files are missing from rank 0's directory or this rank takes
        over an hour."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._await(pending, pending.writing)
        sentence, files = self._gather_written(pending)
        if sentence:
            self._fail(sentence, pending.saving)
            return
        with exchanging_plans(), deferred_writes() as last_writes:
            for finalize in pending.finalize:
                finalize()
        completing = None
        if self._layout.rank == 0:
            # Syncing many files may take long, too.
            completing = _Thread(partial(self._complete, pending, files, last_writes))
        self._await(pending, completing)
        sentence = self._problem_of(pending, completing)
        # No rank continues, or ends, before the checkpoint is complete.
        problems = all_gather_json([sentence, int(_is_permanent(completing))], _decode_problem)
        sentence, is_permanent = next((each for each in problems if each[0]), ("", False))
        if is_permanent:
            self._directory.discard(pending.saving)
            raise RrfpError(sentence)
        if sentence:
            self._fail(sentence, pending.saving)

    def _fail(self, sentence: str, saving: Path | None) -> None:
        """Record the failure, remove this checkpoint's directory if it has one, and warn on rank 0;
        all ranks continue without it."""
        if saving is not None:
            self._directory.discard(saving)
        self.failure = sentence
        if self._layout.rank == 0:
            _log.warning(
                "%s: the training goes on, and the checkpoints before this one stay", sentence
            )

    def _await(self, pending: "_Pending", own: "_Thread | None") -> None:
        """Wait until a thread of this rank (None: none), and those of all others, have ended; every
        rank calls this. Raise RrfpError if this rank's takes over an hour."""
        deadline_s = time.monotonic() + _WRITING_S
        is_busy = True
        while is_busy:
            if own is not None:
                own.join(_AGREE_S)
            _, is_busy = agree_on_stop(is_busy=own is not None and own.is_alive())
            if own is not None and own.is_alive() and time.monotonic() > deadline_s:
                raise RrfpError(
                    f"rank {self._layout.rank} has been writing the checkpoint of step "
                    f"{pending.step} to {self._directory.path} for {_WRITING_S:.0f} s; see what "
                    f"holds up that disk{GO_ON}"
                )

    def _gather_written(self, pending: "_Pending") -> tuple[str, dict[str, "_WrittenFile"]]:
        """Gather from all ranks the lowest rank's problem, empty if no rank has one, and the files
        written, by name."""
        sentence = self._problem_of(pending, pending.writing)
        own = [[name, written.size, written.digest] for name, written in pending.files.items()]
        gathered = all_gather_json([sentence, own], _decode_written)
        problem = next((each for each, _ in gathered if each), "")
        return problem, {name: file for _, files in gathered for name, file in files}

    @property
    def _is_async(self) -> bool:
        """True if the run saves in the background (--save-async)."""
        return self._settings.run.save_async

    def _begin(self, step: int) -> Path | None:
        """Create a directory on rank 0 and return its path on all ranks, which write into it. If
        that fails, set `failure`, warn, and return None."""
        name = sentence = ""
        if self._layout.rank == 0:
            try:
                name = self._directory.begin(step).name
            except OSError as error:
                sentence = self._describe_failure(step, error)

        def decode(value: object) -> tuple[str, Path | None]:
            name, sentence = map(text, items(value, 2))
            return sentence, None if sentence else self._directory.path_of(name)

        sentence, saving = broadcast_json([name, sentence], decode)
        if sentence:
            self._fail(sentence, None)
        return saving

    def _request(self, saving: Path) -> Any:
        """Plan with all ranks how to save tensors and random states, and return Megatron's
        AsyncRequest, which writes later."""
        from megatron.core import dist_checkpointing

        save = dist_checkpointing.save
        # Since 0.18 the default strategy needs a separate package.
        has_choice = "async_strategy" in signature(save).parameters
        chosen = {"async_strategy": "mcore"} if has_choice else {}
        state = {
            "tensors": {str(n): each for n, each in enumerate(self._tensors.saved())},
            "random_states": captured_random_states(self._layout),
        }
        return save(state, str(saving), async_sharded_save=True, **chosen)

    def _complete(
        self,
        pending: "_Pending",
        files: Mapping[str, "_WrittenFile"],
        last_writes: Sequence[Callable[[], None]],
    ) -> None:
        """Write the last files and the manifest, rename the directory, and remove older
        checkpoints, on rank 0. Raise RrfpError if files of other ranks are missing, and OSError."""
        for write in last_writes:
            write()
        manifest = Manifest(
            step=pending.step,
            settings=self._settings.described(),
            run=str(self._session.run.path.resolve()),
            versions=versions(),
            files={name: written.size for name, written in files.items()},
            contents=self._session.contents,
            digests={name: written.digest for name, written in files.items()},
        )
        self._directory.finish(pending.saving, manifest)
        self._directory.remove_older(self._settings.run.keep)

    def _problem_of(self, pending: "_Pending", thread: "_Thread | None") -> str:
        """Describe the error that ended this rank's thread or, without one, kept it from copying
        the metrics; empty if nothing failed."""
        if thread is None or thread.error is None:
            return pending.problem
        if _is_permanent(thread):
            return str(thread.error)
        return self._describe_failure(pending.step, thread.error)

    def _describe_failure(self, step: int, error: BaseException) -> str:
        """Describe why the checkpoint of a step could not be written, with advice about the
        disk."""
        reason = _reason_of_disk(error) or reason_of(error)
        advice = "make room there" if _is_full(error) else "see whether it has room and is writable"
        return (
            f"the checkpoint of step {step} could not be written to {self._directory.path} "
            f"({reason}); {advice}"
        )


class _Thread(threading.Thread):
    """Works on files in the background. The main thread exchanges flags with other ranks even while
    it waits."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="rrfp-checkpoint")
        self._work = work
        self.error: BaseException | None = None
        """The exception that ended it."""
        self.start()

    def run(self) -> None:
        """Do the work, and keep the exception that ends it, even SystemExit, in `error` instead of
        raising it."""
        try:
            self._work()
        except BaseException as error:  # including SystemExit
            self.error = error


class _WrittenFile(NamedTuple):
    """A file that a rank has written."""

    size: int
    digest: str
    """The SHA-256; empty if it was not computed."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint that is being written."""

    step: int
    saving: Path
    files: Mapping[str, _WrittenFile]
    """This rank's files by name; filled when they are written."""
    finalize: list[Callable[[], None]]
    """Functions that all ranks call when all have written."""
    writing: _Thread
    problem: str
    """Why this rank could not copy the metrics; empty if it could."""


def _start_writing(
    step: int, saving: Path, request: Any, problem: str, *, is_staged: bool
) -> _Pending:
    """Start a thread that writes the files of Megatron's AsyncRequest, and return the pending
    checkpoint. If staged, the tensors are copied first, so that training may change them
    meanwhile."""
    arguments = [*request.async_fn_args]
    names = [str(name) for _, name, _ in arguments[1]] if arguments else []
    files: dict[str, _WrittenFile] = {}
    if is_staged and request.preload_fn is not None:
        arguments[1] = request.preload_fn()

    def write() -> None:
        with digested_writes() as digests:
            if request.async_fn is not None:
                request.async_fn(*arguments, **request.async_fn_kwargs)
        for name in names:
            digest = digests[name]() if name in digests else ""
            files[name] = _WrittenFile((saving / name).stat().st_size, digest)

    return _Pending(step, saving, files, request.finalize_fns, _Thread(write), problem)


def _is_permanent(thread: "_Thread | None") -> bool:
    """True if the thread failed with an RrfpError, so that later checkpoints would fail too: files
    are not in the directory of rank 0."""
    return thread is not None and isinstance(thread.error, RrfpError)


def _decode_problem(value: object) -> tuple[str, bool]:
    """Read a problem, and True if it is permanent. Raise ValueError for anything else."""
    sentence, is_permanent = items(value, 2)
    return text(sentence), bool(integer(is_permanent))


def _decode_written(value: object) -> tuple[str, list[tuple[str, _WrittenFile]]]:
    """Read the problem of a rank and its files by name. Raise ValueError for anything else."""
    sentence, files = items(value, 2)
    found = (items(each, 3) for each in items(files))
    return text(sentence), [
        (text(name), _WrittenFile(integer(size), text(digest))) for name, size, digest in found
    ]


def _reason_of_disk(error: BaseException) -> str | None:
    """Return why a file could not be written; None for an error of another kind. torch raises a
    RuntimeError, sometimes with the system's error as its cause and sometimes without it."""
    os_error = _find_os_error(error)
    if os_error is not None:
        return os_error.strerror or str(os_error)
    frames = traceback.extract_tb(error.__traceback__)
    is_from_writing = any(frame.filename == torch.serialization.__file__ for frame in frames)
    return f"torch says: {first_line(str(error))}" if is_from_writing else None


def _is_full(error: BaseException) -> bool:
    """True if the disk, or the user's quota, is full."""
    os_error = _find_os_error(error)
    return os_error is not None and os_error.errno in (errno.ENOSPC, errno.EDQUOT)


def _find_os_error(error: BaseException | None) -> OSError | None:
    """Return the first OSError in the chain of causes of an error, itself included, or None."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


class RunCheckpoints:
    """Decides when a session saves and when it ends early. Every rank calls its methods at the same
    steps."""

    def __init__(
        self,
        session: Session,
        settings: TrainSettings,
        layout: Layout,
        model: ModelChunks,
        copy_metrics: Callable[[Path], None],
    ) -> None:
        """Load the checkpoint from which the session resumes, if any. `copy_metrics` writes the
        current metrics into a file, on rank 0."""
        assert settings.run.save is not None
        self._settings = settings
        tensors = TrainedTensors(model, settings, layout)
        if session.checkpoint is not None:
            load(session.checkpoint, settings, layout, tensors)
        directory = CheckpointDir(settings.run.save)
        self._saver = Saver(directory, session, settings, layout, tensors, copy_metrics)

    def finish_step(self, step: int) -> bool:
        """Finish a background checkpoint that all ranks have written, and save if one is due: every
        `save_every` steps, after the last step, or after SIGTERM at any rank, for which it returns
        True and the run ends here. A write that the disk refuses is only warned of; raises as
        `Saver.save` does."""
        is_asked, is_busy = agree_on_stop(is_busy=self._saver.is_writing)
        if self._saver.is_pending and not is_busy:
            self._saver.finish()
        finished = step + 1
        every = self._settings.run.save_every
        is_due = every is not None and finished % every == 0
        if is_asked or is_due or finished == self._settings.num_steps:
            self._saver.save(finished)
        return is_asked

    def close(self) -> None:
        """Finish the last checkpoint. Raise RrfpError if it could not be written; earlier failures
        do not count."""
        self._saver.finish()
        if self._saver.failure:
            raise RrfpError(self._saver.failure + GO_ON)

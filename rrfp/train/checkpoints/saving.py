"""Saves a run's checkpoints, at once or beside the training.

All ranks plan a checkpoint together and write their own files. It counts when every rank has
written: rank 0 sees that all their files are where it looks, describes it and gives it its name.

A disk that is full now may have room at the next checkpoint, so a checkpoint that cannot be written
does not end the training. All ranks learn of it and go on together, and those that are there stay.
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
from rrfp.train.checkpoints import tensors as random_states
from rrfp.train.checkpoints.directory import METRICS, Checkpoint, CheckpointDir, Manifest
from rrfp.train.checkpoints.plans import plans_exchanged, reason_of
from rrfp.train.checkpoints.run_start import check_continues, check_unused
from rrfp.train.checkpoints.tensors import TrainedTensors, load
from rrfp.train.data.sources import data_contents
from rrfp.train.launch.collectives import all_gather_json, broadcast_json
from rrfp.train.launch.process_groups import Layout
from rrfp.train.launch.stopping import agree
from rrfp.train.models.model import ModelChunks
from rrfp.train.settings import TrainSettings

# A session: what one call of `rrfp train` adds to a run that saves checkpoints.


_AGREE_S = 10.0
"""How often ranks hear from rank 0 while it reads a checkpoint: collectives give a rank up after
some minutes."""


@dataclass(frozen=True, slots=True)
class Session:
    """Where a session begins, and where it writes."""

    run: RunDir
    checkpoint: Checkpoint | None = None
    """What it goes on from; None for a start from the seed."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """What the data are, for the description of the checkpoints."""

    @property
    def first_step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


@contextmanager
def session_of(run: RunDir, settings: TrainSettings, layout: Layout) -> Iterator[Session]:
    """Begin a session of the run in this directory; every rank calls this. Until the block ends no
    other run saves to the same checkpoints.

    Rank 0 decides for all which checkpoint to go on from, because only the holder of the
    directory's lock can be sure that no other is being finished.
    """
    if settings.run.save is None:
        yield Session(run)
        return
    # Only rank 0 needs them. But reading may take long, and if rank 0 read alone, the others would
    # give it up in their collective.
    contents = data_contents(settings)
    directory = CheckpointDir(settings.run.save)
    leads = layout.rank == 0
    with directory.locked() if leads else nullcontext():
        told: dict[str, object] = {}
        found = _newest(directory, leads=leads) if settings.run.resume else None
        if leads:
            if not settings.run.resume:
                check_unused(directory.path, directory.newest(with_content=False))
            elif found is not None:
                check_continues(settings, contents, found)
            for file in (run.run_json, run.metrics):
                remove_unfinished(file)
            run = next_session(run.path)
            restore_metrics(run, found)
            told = {"session": run.session, "name": "" if found is None else found.path.name}

        def decode(value: object) -> tuple[int, Path | None]:
            name = text(member(value, "name"))
            return integer(member(value, "session")), directory.path_of(name) if name else None

        number, path = broadcast_json(told, decode)
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


def _newest(directory: CheckpointDir, *, leads: bool) -> Checkpoint | None:
    """The newest whole checkpoint, on rank 0, for which the other ranks wait."""
    with ThreadPoolExecutor(1, thread_name_prefix="rrfp-checkpoint") as pool:
        looking = [pool.submit(directory.newest)] if leads else []
        is_busy = True
        while is_busy:
            _, is_busy = agree(is_busy=bool(wait(looking, _AGREE_S).not_done))
        return looking[0].result() if leads else None


def restore_metrics(run: RunDir, checkpoint: Checkpoint | None) -> None:
    """Give a run the metrics of the steps that a checkpoint has, and no others.

    May raise OSError.
    """
    if checkpoint is None:
        if run.metrics.exists():
            with open_whole(run.metrics):
                pass
        return
    with (checkpoint.path / METRICS).open("rb") as saved, open_whole(run.metrics) as file:
        shutil.copyfileobj(saved, file)


_log = logging.getLogger(__name__)

GO_ON = ", then go on from the last one with --resume"
"""What to do when a run has ended on a disk's failure, behind what to do about that."""

"""How often ranks that wait for writers hear from each other. Collectives give a rank up after some
minutes, and files may take longer than that."""
_WRITING_S = 3600.0
"""How long a rank may take to write its files."""


class Saver:
    """Saves one rank's part of the checkpoints. Every rank calls its methods, at the same steps."""

    def __init__(
        self,
        directory: CheckpointDir,
        session: Session,
        settings: TrainSettings,
        layout: Layout,
        tensors: TrainedTensors,
        copy_metrics: Callable[[Path], None],
    ) -> None:
        """`copy_metrics` writes the run's metrics so far into a file, on rank 0."""
        self._copy_metrics = copy_metrics
        self.failure = ""
        """Why the last checkpoint could not be written, the same on every rank; empty if it
        could."""
        self._directory = directory
        self._session = session
        self._settings = settings
        self._layout = layout
        self._tensors = tensors
        self._pending: _Pending | None = None
        prepare_checkpoints()

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes a checkpoint beside the training."""
        return self._pending is not None and self._pending.writing.is_alive()

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint was begun that is not finished; the same on every rank."""
        return self._pending is not None

    def save(self, step: int) -> None:
        """Begin the checkpoint after `step` steps, and finish it unless the run saves
        asynchronously. `failure` says whether it could be written."""
        self.finish()
        self.failure = ""
        saving = self._begin(step)
        if saving is None:
            return
        with plans_exchanged():
            try:
                request = self._request(saving)
            except (OSError, RuntimeError, CheckpointException) as error:
                if isinstance(error, RuntimeError) and _reason_of_disk(error) is None:
                    raise
                # The other ranks are amid their plans and cannot go on from there.
                self._directory.discard(saving)
                raise RrfpError(self._failed(step, error) + GO_ON) from error
        # Files are written from the CPU's memory.
        staged = self._is_async or self._layout.device.type != "cpu"
        problem = ""
        if self._layout.rank == 0:
            try:
                # Now, because steps that are trained meanwhile add to them.
                self._copy_metrics(saving / METRICS)
            except OSError as error:
                problem = self._failed(step, error)
        self._pending = _begun(step, saving, request, problem, staged=staged)
        if not self._is_async:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and give it its name."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._await(pending, pending.writing)
        sentence, files = self._told(pending)
        if sentence:
            self._fail(sentence, pending.saving)
            return
        with plans_exchanged(), deferred_writes() as last_writes:
            for finalize in pending.finalize:
                finalize()
        naming = None
        if self._layout.rank == 0:
            # Putting many files on the disk may take long, too.
            naming = _Thread(partial(self._name, pending, files, last_writes))
        self._await(pending, naming)
        sentence = self._sentence(pending, naming)
        # No rank goes on, or ends, before the checkpoint counts.
        told = all_gather_json([sentence, int(_is_lasting(naming))], _decode_problem)
        sentence, is_lasting = next((each for each in told if each[0]), ("", False))
        if is_lasting:
            self._directory.discard(pending.saving)
            raise RrfpError(sentence)
        if sentence:
            self._fail(sentence, pending.saving)

    def _fail(self, sentence: str, saving: Path | None) -> None:
        """All ranks go on without this checkpoint."""
        if saving is not None:
            self._directory.discard(saving)
        self.failure = sentence
        if self._layout.rank == 0:
            _log.warning(
                "%s: the training goes on, and the checkpoints before this one stay", sentence
            )

    def _await(self, pending: "_Pending", own: "_Thread | None") -> None:
        """Wait until a thread of this rank, and those of all others, have ended. Raises RrfpError
        if this rank's takes too long."""
        deadline_s = time.monotonic() + _WRITING_S
        is_busy = True
        while is_busy:
            if own is not None:
                own.join(_AGREE_S)
            _, is_busy = agree(is_busy=own is not None and own.is_alive())
            if own is not None and own.is_alive() and time.monotonic() > deadline_s:
                raise RrfpError(
                    f"rank {self._layout.rank} has been writing the checkpoint of step "
                    f"{pending.step} to {self._directory.path} for {_WRITING_S:.0f} s; see what "
                    "holds up that disk, then go on from the last one with --resume"
                )

    def _told(self, pending: "_Pending") -> tuple[str, dict[str, "_Written"]]:
        """What a rank says failed, if any does, and all ranks' files."""
        sentence = self._sentence(pending, pending.writing)
        own = [[name, *written] for name, written in pending.files.items()]
        told = all_gather_json([sentence, own], _decode_told)
        sentences = [each for each, _ in told if each]
        return next(iter(sentences), ""), {name: n for _, of_rank in told for name, n in of_rank}

    @property
    def _is_async(self) -> bool:
        return self._settings.run.save_async

    def _begin(self, step: int) -> Path | None:
        """The directory that all ranks write into, which rank 0 makes; None if it cannot."""
        name = sentence = ""
        if self._layout.rank == 0:
            try:
                name = self._directory.begin(step).name
            except OSError as error:
                sentence = self._failed(step, error)

        def decode(value: object) -> tuple[str, Path | None]:
            name, sentence = map(text, items(value, 2))
            return sentence, None if sentence else self._directory.path_of(name)

        sentence, saving = broadcast_json([name, sentence], decode)
        if sentence:
            self._fail(sentence, None)
        return saving

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

    def _name(
        self,
        pending: "_Pending",
        files: Mapping[str, "_Written"],
        last_writes: Sequence[Callable[[], None]],
    ) -> None:
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

    def _sentence(self, pending: "_Pending", thread: "_Thread | None") -> str:
        """Why what this rank, or a thread of it, did for a checkpoint failed; empty if it did
        not."""
        if thread is None or thread.error is None:
            return pending.problem
        if _is_lasting(thread):
            return str(thread.error)
        return self._failed(pending.step, thread.error)

    def _failed(self, step: int, error: BaseException) -> str:
        reason = _reason_of_disk(error) or reason_of(error)
        advice = "make room there" if _is_full(error) else "see whether it has room and is writable"
        return (
            f"the checkpoint of step {step} could not be written to {self._directory.path} "
            f"({reason}); {advice}"
        )


class _Thread(threading.Thread):
    """Does something with files beside the main thread, also where that waits for it: it can then
    talk to other ranks meanwhile, and there is one way."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="rrfp-checkpoint")
        self._work = work
        self.error: BaseException | None = None
        """Why it failed."""
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # a thread that calls sys.exit() has written nothing either
            self.error = error


class _Written(NamedTuple):
    """A file as its rank has written it."""

    size: int
    digest: str
    """Its SHA-256; empty if it was not computed."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint that is being written."""

    step: int
    saving: Path
    files: Mapping[str, _Written]
    """This rank's files by name, when it has written them."""
    finalize: list[Callable[[], None]]
    """What all ranks do when all have written."""
    writing: _Thread
    problem: str
    """What this rank could not add to its files; empty if it could."""


def _begun(step: int, saving: Path, request: Any, problem: str, *, staged: bool) -> _Pending:
    """Start writing what Megatron's AsyncRequest asks for; staged, training may change the tensors
    meanwhile."""
    arguments = [*request.async_fn_args]
    names = [str(name) for _, name, _ in arguments[1]] if arguments else []
    files: dict[str, _Written] = {}
    if staged and request.preload_fn is not None:
        arguments[1] = request.preload_fn()

    def write() -> None:
        with digested_writes() as digests:
            if request.async_fn is not None:
                request.async_fn(*arguments, **request.async_fn_kwargs)
        for name in names:
            digest = digests[name]() if name in digests else ""
            files[name] = _Written((saving / name).stat().st_size, digest)

    return _Pending(step, saving, files, request.finalize_fns, _Thread(write), problem)


def _is_lasting(thread: "_Thread | None") -> bool:
    """Whether no other checkpoint does better than that of this thread: its files are not where
    they should be."""
    return thread is not None and isinstance(thread.error, RrfpError)


def _decode_problem(value: object) -> tuple[str, bool]:
    sentence, is_lasting = items(value, 2)
    return text(sentence), bool(integer(is_lasting))


def _decode_told(value: object) -> tuple[str, list[tuple[str, _Written]]]:
    sentence, files = items(value, 2)
    found = (items(each, 3) for each in items(files))
    return text(sentence), [
        (text(name), _Written(integer(size), text(digest))) for name, size, digest in found
    ]


def _reason_of_disk(error: BaseException) -> str | None:
    """Why a file could not be written; None for an error of another kind. torch's writer of files
    raises a RuntimeError, sometimes on top of the system's own error and sometimes without it."""
    of_system = _of_system(error)
    if of_system is not None:
        return of_system.strerror or str(of_system)
    frames = traceback.extract_tb(error.__traceback__)
    is_of_writing = any(frame.filename == torch.serialization.__file__ for frame in frames)
    return f"torch says: {first_line(str(error))}" if is_of_writing else None


def _is_full(error: BaseException) -> bool:
    of_system = _of_system(error)
    return of_system is not None and of_system.errno in (errno.ENOSPC, errno.EDQUOT)


def _of_system(error: BaseException | None) -> OSError | None:
    """The system's own error that this one is, or that it came of."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


# When a run saves, and when it ends early.


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

"""The directory of a run's checkpoints: which of them are whole, and which may go.

`step-00000012/` holds the state after 12 steps. It is written under another name and gets this one
when every file is on the disk, so a save that was cut short never has it. One that was damaged
later is recognised by its manifest, which lists every file with its size.

Imports no torch: the launcher looks before it starts any process.
"""

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rrfp.errors import RrfpError, UsageError
from rrfp.train.checkpoints.manifest import FILE, Manifest, missing_part

_WHOLE = re.compile(r"step-(\d{8,})")
_SAVING = ".saving-"
_REMOVING = ".removing-"
_SAVED = re.compile(rf"{_WHOLE.pattern}|{re.escape(_SAVING)}\d+-[0-9a-f]{{32}}")
"""The names of checkpoints that are whole, or being written."""
LOCK = ".lock"

_LOCK_S = 30.0
"""How long a run waits for another that saves to the same directory. One whose launcher was killed
ends within a second."""
_LOOK_S = 0.1
_PROBE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


class CheckpointDir:
    """The directory that `--save` names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Make the directory, and see whether files can be written there. Raises UsageError."""
        probe = self.path / f"{_SAVING}probe-{uuid.uuid4().hex}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.mkdir()
            (probe / FILE).write_text("probe\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"checkpoints cannot be written to {self.path} ({error.strerror}); choose another "
                "directory with --save"
            ) from None
        finally:
            shutil.rmtree(probe, ignore_errors=True)

    def path_of(self, name: str) -> Path:
        """The checkpoint of this name, whole or being written. Raises ValueError for a name that
        none has: one that another rank tells could lead out of this directory."""
        if not _SAVED.fullmatch(name):
            raise ValueError(f"'{name[:100]}' is not the name of a checkpoint")
        return self.path / name

    def newest(self, tell: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
        """The newest whole checkpoint, or None. `tell` receives a sentence about each newer one
        that is not whole."""
        return next(self._whole(tell), None)

    def _whole(self, tell: Callable[[str], None] = lambda _: None) -> Iterator[Checkpoint]:
        """The whole checkpoints, the newest first."""
        for step, path in sorted(self._named(), reverse=True):
            try:
                manifest = Manifest.read(path)
                lacking = missing_part(path, manifest)
                if lacking is None and manifest.step != step:
                    lacking = f"{FILE} is that of step {manifest.step}"
            except FileNotFoundError:
                lacking = f"{FILE} is missing"
            except OSError as error:
                lacking = f"{FILE} cannot be read: {error.strerror}"
            except ValueError as error:
                lacking = str(error)
            if lacking is None:
                yield Checkpoint(path, manifest)
            else:
                tell(f"the checkpoint {path} is not whole ({lacking}) and is passed over")

    def begin(self, step: int) -> Path:
        """A new directory to write the checkpoint of `step` into. Raises OSError if there is not
        even room for the files that describe one."""
        path = self.path / f"{_SAVING}{step}-{uuid.uuid4().hex}"
        path.mkdir()
        probe = path / f"{_SAVING}probe"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
            probe.unlink()
        except OSError:
            self.discard(path)
            raise
        return path

    def is_saving(self, step: int) -> bool:
        """Whether the checkpoint of `step` is being written, or was when its run died."""
        return any(self.path.glob(f"{_SAVING}{step}-*"))

    def finish(self, saving: Path, manifest: Manifest) -> Path:
        """Give a checkpoint whose files are all written its name. The manifest lists those that
        must be there; it gets the others, too. Raises RrfpError if one is not, and may raise
        OSError."""
        lacking = missing_part(saving, manifest)
        if lacking is not None:
            raise RrfpError(
                f"the checkpoint of step {manifest.step} is not whole in {self.path} although all "
                f"ranks have written ({lacking}); choose a directory with --save that all hosts "
                "share"
            )
        files = {
            str(file.relative_to(saving)): file.stat().st_size
            for file in sorted(saving.rglob("*"))
            if file.is_file()
        }
        for name in files:
            _sync(saving / name)
        manifest = replace(manifest, files=files)
        (saving / FILE).write_text(manifest.to_json(), encoding="utf-8")
        _sync(saving / FILE)
        _sync(saving)
        path = self.path / f"step-{manifest.step:08d}"
        if path.exists():  # a damaged one that this run was resumed before
            self._remove(path)
        saving.rename(path)
        _sync(self.path)
        return path

    def remove_older(self, keep: int) -> None:
        """Remove all whole checkpoints except the newest `keep`. A run goes on even if that
        fails."""
        for checkpoint in [*self._whole()][keep:]:
            with suppress(OSError):
                self._remove(checkpoint.path)

    def discard(self, saving: Path) -> None:
        """Remove a checkpoint that will not be finished."""
        shutil.rmtree(saving, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only run that saves here, and remove what others left unfinished. Raises
        UsageError naming the process of another run that does not end in time."""
        with (self.path / LOCK).open("a+", encoding="utf-8") as file:
            deadline_s = time.monotonic() + _LOCK_S
            while not _is_locked_by_us(file.fileno()):
                if time.monotonic() > deadline_s:
                    file.seek(0)
                    holder = file.read().strip() or "unknown"
                    raise UsageError(
                        f"{self.path} has been in use by another run ({holder}) for "
                        f"{_LOCK_S:.0f} s; wait until that ends or choose another directory with "
                        "--save"
                    )
                time.sleep(_LOOK_S)
            file.truncate(0)
            file.write(f"process {os.getpid()} of {os.uname().nodename}\n")
            file.flush()
            for entry in [*self.path.iterdir()]:
                if entry.name.startswith((_SAVING, _REMOVING)):
                    shutil.rmtree(entry, ignore_errors=True)
            yield

    def _named(self) -> list[tuple[int, Path]]:
        """Everything that has the name of a whole checkpoint, with its step."""
        try:
            entries = [*self.path.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RrfpError(
                f"the checkpoints in {self.path} cannot be listed: {error.strerror}"
            ) from None
        return [
            (int(match[1]), entry)
            for entry in entries
            if (match := _WHOLE.fullmatch(entry.name)) and entry.is_dir()
        ]

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint; a removal that is cut short does not leave half of one behind."""
        doomed = self.path / f"{_REMOVING}{uuid.uuid4().hex}"
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _is_locked_by_us(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # This file system has no locks, so nothing shows another run.
        return True
    return True


def _sync(path: Path) -> None:
    """Wait until a file, or a directory's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

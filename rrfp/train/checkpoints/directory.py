"""The directory of a run's checkpoints: finds complete ones, and creates and removes them.

`step-00000012/` holds the state after 12 steps. It is written under another name and renamed when
every file is on the disk, so an interrupted save never has this name. Later damage shows by the
manifest, which lists the size and the digest of every file.

Imports no torch: the launcher checks checkpoints before it starts any process.
"""

import errno
import fcntl
import grp
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from threading import Event
from typing import IO, Any, Self

from rrfp.errors import RrfpError, UsageError
from rrfp.strict_json import parsed
from rrfp.system import num_cores

# The manifest of a checkpoint: `checkpoint.json`, which is written last.


FILE = "checkpoint.json"
METRICS = "metrics.jsonl"
"""A copy of the run's metrics up to the checkpoint's step, for a resumed run."""

_FORMAT = "rrfp checkpoint"
_VERSION = 2
_WITHOUT_DIGESTS = 1
"""The version without digests of files."""

_SEAL = b',\n  "sha256": "%s"\n}\n'
"""The end of the file: the SHA-256 of all bytes before it."""
_MOST_BYTES = 64 << 20
"""The largest manifest that is read; some 100,000 ranks need this much."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a checkpoint."""

    step: int
    """Number of finished steps, which is also the index of the next step."""
    settings: Mapping[str, Any]
    """The settings of the run that saved it, by flag."""
    run: str
    """The run's directory, as an absolute path."""
    versions: Mapping[str, str]
    """The versions of Python and of the packages that saved it."""
    files: Mapping[str, int]
    """The size in bytes of every other file of the checkpoint."""
    contents: Mapping[str, str]
    """The digests of the training data (`data_contents` of `rrfp.train.data.sources`). If empty, no
    run can resume from the checkpoint."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of each file, in hexadecimal; empty if an older version saved it."""

    def to_json(self) -> str:
        """Return the JSON text of the file, which ends with its own SHA-256."""
        values = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return _sealed(json.dumps(values, indent=2).encode().removesuffix(b"\n}")).decode()

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read a checkpoint's manifest and check its format, its version, its own SHA-256 (absent
        in version 1) and its fields, but no other file. Raise OSError, or ValueError with the
        problem."""
        data = _read_small_file(directory / FILE)
        try:
            found = parsed(data)
        except ValueError as error:
            raise ValueError(f"{FILE} is not JSON") from error
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"{FILE} does not describe a checkpoint of rrfp")
        version = found.get("version")
        if version == _WITHOUT_DIGESTS and not found.keys() & {"digests", "sha256"}:
            found["digests"] = {}
        elif version != _VERSION:
            raise ValueError(f"{FILE} has version {version} and not {_VERSION}")
        elif _sealed(data[: -len(_sealed(b""))]) != data:
            raise ValueError(f"{FILE} does not have the SHA-256 that it ends with")
        # Refused when a run resumes from it, and not skipped: it may be complete otherwise.
        found.setdefault("contents", {})
        kinds = {
            "step": int,
            "settings": dict,
            "run": str,
            "versions": dict,
            "files": dict,
            "contents": dict,
            "digests": dict,
        }
        for name, kind in kinds.items():
            if not isinstance(found.get(name), kind):
                raise ValueError(f"{FILE} has no valid '{name}'")
        if version == _VERSION and found["files"].keys() != found["digests"].keys():
            raise ValueError(f"{FILE} does not have a digest of each file")
        return cls(**{name: found[name] for name in kinds})


def _sealed(body: bytes) -> bytes:
    """Append its own digest and the closing brace to the text of an open JSON object."""
    return body + _SEAL % hashlib.sha256(body).hexdigest().encode()


def _read_small_file(path: Path) -> bytes:
    """Read a regular file of at most 64 MiB, without following a link. Raise OSError, and
    ValueError for another kind or one too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"{path.name} has {status.st_size} bytes, more than {_MOST_BYTES}")
        return file.read()


# Integrity: a checkpoint is whole if its files are the ones that were saved, and no other user can
# have changed them.


_PIECE_BYTES = 1 << 20
_THREADS_PER_CORE = 2
"""One thread computes a digest while the other reads."""


def problem_of(directory: Path, *, with_content: bool) -> tuple[Manifest | None, str]:
    """Check a checkpoint's owner and permissions, its manifest, and the names and sizes of its
    files; with `with_content` also their SHA-256 (if version 2 saved it), which reads all of them.
    Return the manifest (None if that cannot be read, the files cannot be listed, or others can
    change the directory) and the problem, empty if the checkpoint is whole."""
    try:
        # The owner of the directory of the checkpoints can replace everything in it.
        owners = {os.geteuid(), 0, directory.parent.stat().st_uid}
        foreign = why_foreign(directory.lstat(), owners)
        if foreign is not None:
            return None, f"it {foreign}"
        manifest = Manifest.read(directory)
        problem = _problem_of_files(directory, manifest, owners)
        if not problem and with_content:
            problem = _problem_of_content(directory, manifest.digests)
    except FileNotFoundError:
        return None, f"{FILE} is missing"
    except OSError as error:
        return None, f"{FILE} cannot be read: {error.strerror}"
    except ValueError as error:
        return None, str(error)
    return manifest, problem


def missing_part(found: Mapping[str, int], manifest: Manifest) -> str:
    """Describe the first file of a manifest that is missing in `found` (sizes by name) or has
    another size; empty if none. Other files in `found` are ignored."""
    for name, size in manifest.files.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} bytes and not {size}"
    return ""


def _problem_of_files(directory: Path, manifest: Manifest, owners: Collection[int]) -> str:
    """Describe the first file or directory below a checkpoint that others can change, or else the
    first file that is missing, of another size, or not listed by the manifest; empty if none."""
    found = {}
    for name, status in files_in(directory):
        foreign = why_foreign(status, owners)
        if foreign is not None:
            return f"{name} {foreign}"
        if not stat.S_ISDIR(status.st_mode):
            found[name] = status.st_size
    missing = missing_part(found, manifest)
    extra = sorted(found.keys() - manifest.files.keys() - {FILE})
    return missing or (f"{extra[0]} is not one of its files" if extra else "")


def files_in(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and status of every file and directory below a directory. Links are
    not followed. May raise OSError."""

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(directory, onerror=fail):
        for name in sorted([*folders, *files]):
            path = Path(folder, name)
            yield str(path.relative_to(directory)), path.lstat()


def why_foreign(status: os.stat_result, owners: Collection[int]) -> str | None:
    """Return the clause that says why users other than `owners` can change a file or directory, or
    that it is neither; None if they cannot. As in Debian's ssh, a group whose only member is the
    owner does not count."""
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}"
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return "is neither a file nor a directory"
    by_group = bool(status.st_mode & stat.S_IWGRP) and not _is_only_member(
        status.st_uid, status.st_gid
    )
    if by_group or status.st_mode & stat.S_IWOTH:
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


@cache
def _is_only_member(user: int, group: int) -> bool:
    """True if a user is the only member of a group, counting users whose primary group it is; False
    if either is unknown."""
    try:
        name, members = pwd.getpwuid(user).pw_name, {*grp.getgrgid(group).gr_mem}
    except KeyError:
        return False
    return members | {each.pw_name for each in pwd.getpwall() if each.pw_gid == group} == {name}


def digest_of(path: Path, stop: Event | None = None) -> str:
    """Compute the SHA-256 of a file, in hexadecimal. Stop early, with a useless result, once `stop`
    is set. May raise OSError."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while (stop is None or not stop.is_set()) and (size := file.readinto(piece)):
            digest.update(piece[:size])
    return digest.hexdigest()


def _problem_of_content(directory: Path, digests: Mapping[str, str]) -> str:
    """Describe the first file found that cannot be read or differs from its digest; empty if none.
    Reads the files with a digest, in several threads, until one fails."""
    stop = Event()
    num_threads = max(1, min(len(digests), _THREADS_PER_CORE * num_cores()))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="rrfp-digest") as pool:
        names = {pool.submit(digest_of, directory / name, stop): name for name in digests}
        try:
            for future in as_completed(names):
                name = names[future]
                try:
                    if future.result() != digests[name]:
                        return f"{name} does not have the SHA-256 that {FILE} gives it"
                except OSError as error:
                    return f"{name} cannot be read: {error.strerror}"
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return ""


_WHOLE = re.compile(r"step-(\d{8,})")
_SAVING = ".saving-"
_REMOVING = ".removing-"
_SAVED = re.compile(rf"{_WHOLE.pattern}|{re.escape(_SAVING)}\d+-[0-9a-f]{{32}}")
"""Names of checkpoints that are complete, or being written."""
LOCK = ".lock"

_LOCK_S = 30.0
"""How long a run waits for another one that saves to the same directory. A run whose launcher was
killed ends within a second."""
_POLL_S = 0.1
_PROBE_BYTES = 1 << 18
_MAX_HOLDER_CHARS = 200
"""Characters of the lock file that are read."""
_MODE = 0o755
"""The mode of directories, before the umask: no other user may write there."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Number of finished steps, which is also the index of the next step."""
        return self.manifest.step


class CheckpointDir:
    """The directory of a run's checkpoints, which `--save` names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Create the directory and check that this user, and no other, can write there. Raise
        UsageError if not, or if the path is itself a checkpoint."""
        try:
            if (self.path / FILE).exists():
                parent = self.path.resolve().parent
                found = CheckpointDir(parent).newest()
                newest = "none" if found is None else f"{found.path.name} is the newest that"
                raise UsageError(
                    f"{self.path} is a checkpoint, and --save names the directory that holds them; "
                    f"give --save {parent}, in which {newest} is whole"
                )
            self.path.mkdir(_MODE, parents=True, exist_ok=True)
            self._check_is_own()
        except OSError as error:
            raise UsageError(
                f"checkpoints cannot be written to {self.path} ({error.strerror}); choose another "
                "directory with --save"
            ) from None

    def _check_is_own(self) -> None:
        """Raise UsageError if other users can replace its entries, and OSError if this user cannot
        write there. Creates a directory for the trial and removes it."""
        probe = self.path / f"{_SAVING}probe-{uuid.uuid4().hex}"
        probe.mkdir(_MODE)
        try:
            # A file system may assign this user's files to another user, as NFS does with root's.
            owners = {os.geteuid(), 0, probe.lstat().st_uid}
            link, status = self.path.lstat(), self.path.stat()
            foreign = why_foreign(status, owners)
            if stat.S_ISLNK(link.st_mode) and link.st_uid not in owners:
                foreign = f"is a link of user {link.st_uid}"
            if foreign is not None:
                raise UsageError(
                    f"{self.path} {foreign}, who could replace its checkpoints; choose a directory "
                    f"with --save that only user {os.geteuid()} owns and may write to"
                )
            (probe / FILE).write_text("probe\n", encoding="utf-8")
        finally:
            shutil.rmtree(probe, ignore_errors=True)

    def owns(self, name: str) -> bool:
        """True if saving may create or remove an entry of this name: a checkpoint, complete or not,
        or the lock file."""
        return bool(_WHOLE.fullmatch(name)) or name.startswith((_SAVING, _REMOVING, LOCK))

    def path_of(self, name: str) -> Path:
        """Return the path of a checkpoint, complete or being written, which need not exist. Raise
        ValueError for any other name: a name from another rank could lead out of this directory."""
        if not _SAVED.fullmatch(name):
            raise ValueError(f"'{name[:100]}' is not the name of a checkpoint")
        return self.path / name

    def newest(
        self, report: Callable[[str], None] = lambda _: None, *, with_content: bool = True
    ) -> Checkpoint | None:
        """Find the newest whole checkpoint, or return None. `report` receives a sentence about each
        newer one that is not whole, and a warning if the result has no digests. The result may be
        loaded only if checked `with_content`, which reads all of it. Raise UsageError if the
        directory exists and cannot be listed."""
        found = next(self._whole(report, with_content=with_content), None)
        if found is not None and not found.manifest.digests:
            report(no_digests_warning(found.path))
        return found

    def _whole(
        self, report: Callable[[str], None] = lambda _: None, *, with_content: bool
    ) -> Iterator[Checkpoint]:
        """Yield the whole checkpoints, newest first; `report` receives a sentence about each that
        is not whole and is skipped. Raise UsageError if the directory cannot be listed; a missing
        one has none."""
        for _, path in sorted(self._named(), reverse=True):
            found = _check(path, with_content=with_content)
            if isinstance(found, Checkpoint):
                yield found
            else:
                report(f"the checkpoint {path} is not whole ({found}) and is passed over")

    def begin(self, step: int) -> Path:
        """Create and return a directory to write the checkpoint of `step` into, under the name of
        an unfinished one. Raise OSError, and leave nothing, if 256 KiB cannot be written there."""
        path = self.path / f"{_SAVING}{step}-{uuid.uuid4().hex}"
        path.mkdir(_MODE)
        probe = path / f"{_SAVING}probe"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
            probe.unlink()
        except OSError:
            self.discard(path)
            raise
        return path

    def is_saving(self, step: int) -> bool:
        """True if an unfinished checkpoint of `step` exists: it is being written, or its run
        died."""
        return any(self.path.glob(f"{_SAVING}{step}-*"))

    def finish(self, saving: Path, manifest: Manifest) -> Path:
        """Complete a checkpoint whose files are written: sync them, write the manifest, and rename
        the directory, replacing one of the same step; return its new path. `manifest` lists the
        files of all ranks; other files, and missing digests, are added. Raise RrfpError if a listed
        file is missing, and OSError."""
        files = {
            name: status.st_size
            for name, status in files_in(saving)
            if stat.S_ISREG(status.st_mode)
        }
        lacking = missing_part(files, manifest)
        if lacking:
            raise RrfpError(
                f"the checkpoint of step {manifest.step} is not whole in {self.path} although all "
                f"ranks have written ({lacking}); choose a directory with --save that all hosts "
                "share"
            )
        digests = {name: manifest.digests.get(name) or digest_of(saving / name) for name in files}
        for name in files:
            _deny_others_writing(saving / name)
            _sync(saving / name)
        manifest = replace(manifest, files=files, digests=digests)
        with (saving / FILE).open("x", encoding="utf-8") as file:
            file.write(manifest.to_json())
        _deny_others_writing(saving / FILE)
        _sync(saving / FILE)
        _sync(saving)
        path = self.path / f"step-{manifest.step:08d}"
        if path.exists():  # a damaged one, later than the step from which this run resumed
            self._remove(path)
        saving.rename(path)
        _sync(self.path)
        return path

    def remove_older(self, keep: int) -> None:
        """Remove all whole checkpoints except the newest `keep`. Damaged ones stay, as far as
        permissions, names and sizes show damage. Failures to list and to remove are ignored."""
        with suppress(UsageError):
            for checkpoint in [*self._whole(with_content=False)][keep:]:
                with suppress(OSError):
                    self._remove(checkpoint.path)

    def discard(self, saving: Path) -> None:
        """Remove the directory of a checkpoint that will not be finished; errors are ignored."""
        shutil.rmtree(saving, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock in the block, with this process named in the lock file, after
        removing unfinished checkpoints of earlier runs. Raise UsageError if another run does not
        release it within 30 s, if other users can write here, or if the lock file cannot be opened.
        A file system without locks counts as locked."""
        try:
            self._check_is_own()
            lock = self._open_lock()
        except OSError as error:
            raise UsageError(
                f"{self.path / LOCK} cannot be locked ({error.strerror}); remove it if no run "
                "saves there, or choose another directory with --save"
            ) from None
        with lock as file:
            deadline_s = time.monotonic() + _LOCK_S
            while _try_lock(file.fileno()) is False:
                if time.monotonic() > deadline_s:
                    file.seek(0)
                    holder = _describe_holder(file.read(_MAX_HOLDER_CHARS))
                    raise UsageError(
                        f"{self.path} has been in use by {holder} for {_LOCK_S:.0f} s; wait until "
                        "that ends or choose another directory with --save"
                    )
                time.sleep(_POLL_S)
            file.truncate(0)
            file.write(f"process {os.getpid()} of {os.uname().nodename}\n")
            file.flush()
            self._remove_unfinished()
            try:
                yield
            finally:
                file.truncate(0)

    def remove_abandoned(self) -> None:
        """Remove unfinished checkpoints of earlier runs, unless a run holds the lock or the file
        system has no locks. Errors are ignored."""
        with suppress(OSError), self._open_lock() as file:
            if _try_lock(file.fileno()):
                self._remove_unfinished()

    def _open_lock(self) -> IO[str]:
        """Open the lock file, creating it if it is missing, for this user only: every reader could
        lock it. May raise OSError, also for a link."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.open(self.path / LOCK, flags, 0o600)
        status = os.fstat(lock)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            os.close(lock)
            raise OSError(errno.EINVAL, "it is not a file of its own")
        if stat.S_IMODE(status.st_mode) != 0o600:
            with suppress(OSError):
                os.fchmod(lock, 0o600)
        return os.fdopen(lock, "a+", encoding="utf-8", errors="replace")

    def _remove_unfinished(self) -> None:
        """Remove what interrupted saves and removals have left; errors of single entries are
        ignored. The caller holds the lock."""
        for entry in [*self.path.iterdir()]:
            if entry.name.startswith((_SAVING, _REMOVING)):
                shutil.rmtree(entry, ignore_errors=True)

    def _named(self) -> list[tuple[int, Path]]:
        """List the directories with the name of a complete checkpoint, with their steps, in any
        order; none if this directory is missing. Raise UsageError if it cannot be listed."""
        try:
            entries = [*self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UsageError(
                f"the checkpoints in {self.path} cannot be listed ({error.strerror}); choose "
                "another directory with --save"
            ) from None
        return [
            (int(match[1]), entry)
            for entry in entries
            if (match := _WHOLE.fullmatch(entry.name)) and entry.is_dir()
        ]

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint, renamed first so that an interrupted removal leaves no half of it.
        Only the renaming may raise OSError."""
        doomed = self.path / f"{_REMOVING}{uuid.uuid4().hex}"
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def whole_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a directory, after reading and checking all of it. If it is not
    whole, raise RrfpError naming the damage and the newest whole checkpoint beside it, if any."""
    found = _check(path, with_content=True)
    if isinstance(found, Checkpoint):
        return found
    other = CheckpointDir(path.resolve().parent).newest()
    advice = "there is none beside it" if other is None else f"choose {other.path}, the newest one"
    raise RrfpError(f"the checkpoint {path} is not whole ({found}); {advice} that is whole")


def no_digests_warning(path: Path) -> str:
    """Format the warning that a checkpoint of an older version has no digests, so that damage would
    not be noticed."""
    return (
        f"the checkpoint {path} has no digests, as an older rrfp saved it: damage to its files "
        "would not be noticed"
    )


def _check(path: Path, *, with_content: bool) -> Checkpoint | str:
    """Return the checkpoint in a directory, or the reason why it is not whole, such as a name with
    another step than its manifest."""
    manifest, problem = problem_of(path, with_content=with_content)
    if manifest is None or problem:
        return problem
    match = _WHOLE.fullmatch(path.name)
    if match is not None and int(match[1]) != manifest.step:
        return f"{FILE} is that of step {manifest.step}"
    return Checkpoint(path, manifest)


def _try_lock(descriptor: int) -> bool | None:
    """Try to lock a file without waiting: True if locked, False if another process holds the lock,
    None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _describe_holder(content: str) -> str:
    """Describe the process that holds a lock, from the content of the lock file. If that is
    unreadable, or its process of this host has ended, the holder is described as unknown."""
    match = re.fullmatch(r"process (\d+) of (.+)\n", content)
    if match is None:
        return "a process that does not say which it is"
    if match[2] == os.uname().nodename and not Path("/proc", match[1]).exists():
        return f"a process other than the last run, {match[1]}, which has ended"
    return f"another run ({content.strip()})"


def _deny_others_writing(path: Path) -> None:
    """Remove the write permission of group and others from a file, which the umask may have
    left."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS_WRITE:
        path.chmod(mode & ~_OTHERS_WRITE)


def _sync(path: Path) -> None:
    """Wait until a file, or the list of files of a directory, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

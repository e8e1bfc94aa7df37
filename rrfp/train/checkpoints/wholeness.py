"""Decides whether a checkpoint is whole: its files are those that were saved, and nobody but their
owner can have changed them.

Imports no torch: the launcher looks before it starts any process.
"""

import grp
import hashlib
import os
import pwd
import stat
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from threading import Event

from rrfp.cores import num_cores
from rrfp.train.checkpoints.manifest import FILE, Manifest

_PIECE_BYTES = 1 << 20
_THREADS_PER_CORE = 2
"""One thread computes while the other reads."""


def problem_of(directory: Path, *, with_content: bool) -> tuple[Manifest | None, str]:
    """A checkpoint's manifest, and what keeps the checkpoint from being whole; empty if it is.

    Without `with_content` the digests of the files are not compared, which reads all of them.
    """
    try:
        # Whoever owns the directory of the checkpoints can replace everything in it.
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
    """What files, with their sizes, lack of what a manifest lists; empty if nothing."""
    for name, size in manifest.files.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} bytes and not {size}"
    return ""


def _problem_of_files(directory: Path, manifest: Manifest, owners: Collection[int]) -> str:
    """How the files differ from what the manifest lists, but for their content."""
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
    """Everything below a directory, by its path from there; links are not followed. May raise
    OSError."""

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(directory, onerror=fail):
        for name in sorted([*folders, *files]):
            path = Path(folder, name)
            yield str(path.relative_to(directory)), path.lstat()


def why_foreign(status: os.stat_result, owners: Collection[int]) -> str | None:
    """How others than these users can change a file or a directory, behind its name; None if they
    cannot. A group of which its owner is the only member is no other, as in Debian's ssh."""
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}"
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return "is neither a file nor a directory"
    by_group = bool(status.st_mode & stat.S_IWGRP) and not _has_alone(status.st_uid, status.st_gid)
    if by_group or status.st_mode & stat.S_IWOTH:
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


@cache
def _has_alone(user: int, group: int) -> bool:
    """Whether a user is the only member of a group."""
    try:
        name, members = pwd.getpwuid(user).pw_name, {*grp.getgrgid(group).gr_mem}
    except KeyError:
        return False
    return members | {each.pw_name for each in pwd.getpwall() if each.pw_gid == group} == {name}


def digest_of(path: Path, stop: Event | None = None) -> str:
    """The SHA-256 of a file; of its beginning once `stop` is set. May raise OSError."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while (stop is None or not stop.is_set()) and (size := file.readinto(piece)):
            digest.update(piece[:size])
    return digest.hexdigest()


def _problem_of_content(directory: Path, digests: Mapping[str, str]) -> str:
    """The first file found to differ from its digest, in words; empty if none does."""
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

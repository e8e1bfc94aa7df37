"""Seals on files that keep what can be made anew: a damaged one is as good as none.

A seal holds digests, not secrets. It shows that a disk, a copy or an editor has changed a file, and
that a file was moved to another place. It does not show who wrote the file.
"""

import hashlib
import json
from pathlib import Path

from rrfp.json_text import parsed
from rrfp.trace.files.reading import open_regular, read_small
from rrfp.trace.files.whole_file import write_whole

_SEAL = "seal.json"


def seal(folder: Path, place: str) -> None:
    """Seal the files that are in a folder now; `place` says what they belong to. May raise
    OSError."""
    digests = {file.name: _digest(file) for file in folder.iterdir()}
    write_whole(folder / _SEAL, sealed(place, json.dumps(digests).encode()))


def is_sealed(folder: Path, place: str, pattern: str) -> bool:
    """Whether the files that match the pattern are those that were sealed for this place, and as
    they were then."""
    try:
        digests = parsed(unsealed(place, read_small(folder / _SEAL)))
        found = {file.name: _digest(file) for file in folder.glob(pattern)}
    except (OSError, ValueError):
        return False
    return bool(found == digests)


def sealed(place: str, content: bytes) -> bytes:
    """Content under its seal."""
    return f"{_digest_of(place, content)}\n".encode() + content


def unsealed(place: str, data: bytes) -> bytes:
    """Content without its seal. Raises ValueError if either has changed, or the place has."""
    digest, _, content = data.partition(b"\n")
    if digest != _digest_of(place, content).encode():
        raise ValueError("the seal does not fit")
    return content


def _digest(file: Path) -> str:
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(place: str, content: bytes) -> str:
    return hashlib.sha256(f"{place}\n".encode() + content).hexdigest()

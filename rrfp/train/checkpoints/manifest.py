"""What a checkpoint says about itself: `checkpoint.json`, which is written last.

Imports no torch: the launcher reads it before it starts any process.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rrfp.json_text import parsed

FILE = "checkpoint.json"
METRICS = "metrics.jsonl"
"""The run's metrics up to the checkpoint's step, so that a run that goes on has every line once."""

_FORMAT = "rrfp checkpoint"
_VERSION = 2
_WITHOUT_DIGESTS = 1
"""The version before digests."""

_SEAL = b',\n  "sha256": "%s"\n}\n'
"""The end of the file: the SHA-256 of all bytes before it."""
_MOST_BYTES = 64 << 20
"""A larger file is no manifest; some 100,000 ranks fill that much."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's description."""

    step: int
    """Finished steps, which is also the number of the next one."""
    settings: Mapping[str, Any]
    """The settings of the run that saved it, by flag."""
    run: str
    """The run's directory, as an absolute path."""
    versions: Mapping[str, str]
    """Those of Python and of the packages that saved it."""
    files: Mapping[str, int]
    """Every other file of the checkpoint with its size in bytes."""
    contents: Mapping[str, str]
    """What the data were (`rrfp.train.data.contents`); empty if the file does not say, and then no
    run goes on from here."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of each of the files, in hexadecimal; empty if an older version saved it."""

    def to_json(self) -> str:
        """The text of the file, which ends with its own digest."""
        told = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return _sealed(json.dumps(told, indent=2).encode().removesuffix(b"\n}")).decode()

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read a checkpoint's manifest. Raises OSError, or ValueError saying what is wrong."""
        data = _read(directory / FILE)
        try:
            told = parsed(data)
        except ValueError as error:
            raise ValueError(f"{FILE} is not JSON") from error
        if not isinstance(told, dict) or told.get("format") != _FORMAT:
            raise ValueError(f"{FILE} does not describe a checkpoint of rrfp")
        version = told.get("version")
        if version == _WITHOUT_DIGESTS and not told.keys() & {"digests", "sha256"}:
            told["digests"] = {}
        elif version != _VERSION:
            raise ValueError(f"{FILE} has version {version} and not {_VERSION}")
        elif _sealed(data[: -len(_sealed(b""))]) != data:
            raise ValueError(f"{FILE} does not have the SHA-256 that it ends with")
        # Refused when a run is to go on from it, and not passed over: it may be whole otherwise.
        told.setdefault("contents", {})
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
            if not isinstance(told.get(name), kind):
                raise ValueError(f"{FILE} has no valid '{name}'")
        if version == _VERSION and told["files"].keys() != told["digests"].keys():
            raise ValueError(f"{FILE} does not have a digest of each file")
        return cls(**{name: told[name] for name in kinds})


def _sealed(body: bytes) -> bytes:
    """The text of an open JSON object, closed behind its digest."""
    return body + _SEAL % hashlib.sha256(body).hexdigest().encode()


def _read(path: Path) -> bytes:
    """A small regular file. Raises OSError, or ValueError for another one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"{path.name} has {status.st_size} bytes, more than {_MOST_BYTES}")
        return file.read()

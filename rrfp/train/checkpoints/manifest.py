"""What a checkpoint says about itself: `checkpoint.json`, which is written last.

Imports no torch: the launcher reads it before it starts any process.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rrfp.json_text import parsed

FILE = "checkpoint.json"
METRICS = "metrics.jsonl"
"""The run's metrics up to the checkpoint's step, so that a run that goes on has every line once."""

_FORMAT = "rrfp checkpoint"
_VERSION = 1


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

    def to_json(self) -> str:
        told = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return f"{json.dumps(told, indent=2)}\n"

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read a checkpoint's manifest. Raises OSError, or ValueError saying what is wrong."""
        try:
            told = parsed((directory / FILE).read_bytes())
        except ValueError as error:
            raise ValueError(f"{FILE} is not JSON") from error
        if not isinstance(told, dict) or told.get("format") != _FORMAT:
            raise ValueError(f"{FILE} does not describe a checkpoint of rrfp")
        if told.get("version") != _VERSION:
            raise ValueError(f"{FILE} has version {told.get('version')} and not {_VERSION}")
        # Refused when a run is to go on from it, and not passed over: it may be whole otherwise.
        told.setdefault("contents", {})
        kinds = {
            "step": int,
            "settings": dict,
            "run": str,
            "versions": dict,
            "files": dict,
            "contents": dict,
        }
        for name, kind in kinds.items():
            if not isinstance(told.get(name), kind):
                raise ValueError(f"{FILE} has no valid '{name}'")
        return cls(**{name: told[name] for name in kinds})


def missing_part(directory: Path, manifest: Manifest) -> str | None:
    """What a checkpoint lacks of what its manifest lists; None if it is whole."""
    for name, size in manifest.files.items():
        try:
            found = (directory / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes and not {size}"
    return None

"""Whether the core runs compiled: `rrfp.schedule`, and the simulator's engine.

`make setup` and wheels compile these modules with mypyc where a C compiler is there. The same
sources run interpreted elsewhere, with `RRFP_COMPILED=0`, and when they have changed since they
were compiled.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

VARIABLE = "RRFP_COMPILED"
DIGEST_FILE = f"compiled.{sys.implementation.cache_tag}.sha256"
"""The file beside this one with the digest of the sources of the extensions."""

_SIMULATOR = ("engine", "transfers")


class Core(StrEnum):
    """How the core runs."""

    COMPILED = "compiled"
    INTERPRETED = "interpreted"
    STALE = "interpreted, because its sources have changed since it was compiled"


_INTERPRETED = ("__init__.py", "policy.py")
"""The modules of `rrfp.schedule` that are not compiled. A policy must reject a value of a wrong
type with a sentence; compiled code would raise TypeError by itself."""


def sources(package: Path) -> list[Path]:
    """Return the source files of the compiled core, given the directory of `rrfp`: all modules of
    `rrfp.schedule` except `__init__.py` and `policy.py`, sorted by path, then the simulator's
    `engine.py` and `transfers.py`."""
    schedule = [
        path for path in (package / "schedule").rglob("*.py") if path.name not in _INTERPRETED
    ]
    return sorted(schedule) + [package / "simulate" / f"{name}.py" for name in _SIMULATOR]


def digest(package: Path) -> str:
    """Return the SHA-256, in hexadecimal, of the contents of all `sources`; names do not count."""
    whole = hashlib.sha256()
    for path in sources(package):
        whole.update(path.read_bytes())
    return whole.hexdigest()


def core() -> Core:
    """Return how the core of this process runs, as determined when this module was imported."""
    return _CORE


class _Sources:
    """Import finder that prefers the core's .py files to their compiled extensions."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the .py file of a module in `rrfp.schedule` or `rrfp.simulate`. None
        for any other module and without such a file; Python's own finders follow then."""
        if path is None or not name.startswith(("rrfp.schedule.", "rrfp.simulate.")):
            return None
        for directory in path:
            spec = FileFinder(directory, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(name)
            if spec is not None:
                return spec
        return None


def _found() -> Core:
    """Determine how the core is to run: interpreted without a digest file or with RRFP_COMPILED=0,
    else compiled if the digest in that file equals that of the sources now, and stale if not."""
    package = Path(__file__).parent
    try:
        compiled_from = (package / DIGEST_FILE).read_text().strip()
    except OSError:
        return Core.INTERPRETED
    if os.environ.get(VARIABLE) == "0":
        return Core.INTERPRETED
    return Core.COMPILED if compiled_from == digest(package) else Core.STALE


_CORE = _found()
if _CORE is not Core.COMPILED:
    sys.meta_path.insert(0, _Sources())

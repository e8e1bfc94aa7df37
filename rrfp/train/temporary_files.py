"""Where a run keeps what only it uses while it lasts."""

import tempfile
from pathlib import Path

from rrfp.errors import UsageError


def temporary_directory() -> Path:
    """The directory for temporary files. Raises UsageError where none can be written to."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise UsageError(
            "no directory for temporary files can be written to; set TMPDIR to one that can"
        ) from None

"""Whether a run finds room for temporary files."""

import shutil

from rrfp.doctor.check import EVERY_RUN, Check, State, fails
from rrfp.errors import UsageError
from rrfp.train.temporary_files import temporary_directory


def temporary_files() -> Check:
    """What is free where they go."""
    try:
        where = temporary_directory()
    except UsageError as error:
        return fails("temp-dir", str(error), EVERY_RUN)
    try:
        free_gb = shutil.disk_usage(where).free / 1e9
    except OSError as error:
        return fails("temp-dir", f"{where} cannot be used ({error}); set TMPDIR", EVERY_RUN)
    return Check("temp-dir", State.OK, round(free_gb, 2), "GB", f"free in {where}", EVERY_RUN)

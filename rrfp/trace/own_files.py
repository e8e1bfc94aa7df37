"""The files of a run are its user's own, unless the user asks for something else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_OTHERS = 0o077


@contextmanager
def own_files(*, shared: bool = False) -> Iterator[None]:
    """Files and directories that this process makes in the block, and processes that it starts
    there, are for its user alone (modes 0600 and 0700); with `shared` the umask decides."""
    if shared:
        yield
        return
    before = os.umask(_OTHERS)
    try:
        yield
    finally:
        os.umask(before)

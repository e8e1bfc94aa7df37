"""Runs a function as another user of the host, as only root can."""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest

USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_other_user(function: Callable[[], Any]) -> Any:
    """What a function returns in a process of another user. That user may not be able to read this
    installation, so whatever the function imports has to be imported before."""
    with tempfile.TemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(USER)
                os.setuid(USER)
                # This user's own may not be open to that one.
                os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
                pickle.dump(function(), answer)
                answer.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        answer.seek(0)
        return pickle.load(answer)

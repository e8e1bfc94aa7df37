"""Calls of the C library for which Python has no function."""

import ctypes
import os


def call(name: str, *arguments: object) -> None:
    """Call a function that returns 0 if all is well. Raises OSError if not, and AttributeError if
    this system's library has none of that name."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")

"""Simulates a container or kernel that refuses system calls.

`python sandbox.py CALL... -- COMMAND` runs a command in which calls of these names fail with EPERM,
also in its children. It needs no privilege.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterator

_NUMBERS = {
    "x86_64": {"setsockopt": 54, "unshare": 272, "setns": 308, "memfd_create": 319, "prctl": 157},
    "aarch64": {"setsockopt": 208, "unshare": 97, "setns": 268, "memfd_create": 279, "prctl": 167},
}
_SO_ATTACH_FILTER = 26
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001
_NUMBER, _THIRD_ARGUMENT = 0, 32
"""Places in the kernel's description of a call."""


def refusing(*calls: str) -> list[str]:
    """A prefix of a command that refuses these calls. Of setsockopt, only socket filters are
    refused."""
    import pytest  # not there for the command itself

    if platform.machine() not in _NUMBERS:
        pytest.skip(f"the numbers of the calls of {platform.machine()} are not known here")
    return [sys.executable, "-S", __file__, *calls, "--"]


def _program(calls: list[str]) -> Iterator[tuple[int, int, int, int]]:
    refused = _RETURN, 0, 0, _EPERM
    for call in calls:
        yield _LOAD, 0, 0, _NUMBER
        number = _NUMBERS[platform.machine()][call]
        if call == "setsockopt":
            yield _IF_EQUAL, 0, 3, number
            yield _LOAD, 0, 0, _THIRD_ARGUMENT
            yield _IF_EQUAL, 0, 1, _SO_ATTACH_FILTER
        else:
            yield _IF_EQUAL, 0, 1, number
        yield refused
    yield _RETURN, 0, 0, _ALLOW


def _refuse(calls: list[str]) -> None:
    program = [*_program(calls)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    told = struct.pack("HP", len(program), ctypes.addressof(code))
    library = ctypes.CDLL(None, use_errno=True)
    for arguments in (_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, told, 0, 0):
        if library.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    end = sys.argv.index("--")
    _refuse(sys.argv[1:end])
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])

"""A script that creates a network namespace with only loopback, and keeps it until stdin ends.

It is run by its path and imports nothing of rrfp, so it starts in a few milliseconds; only a
process with a single thread may create a user namespace. It writes a line when the network is up;
otherwise it exits with the call that the kernel refused on stderr. With the paths of namespaces as
arguments it only tries to enter these, as a rank will: a system may permit unshare but not setns.
"""

import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_REQUEST = "16sh14x"
"""An interface's name and flags (netdevice(7))."""


def main() -> None:
    """Create a network, write `ready`, and keep it until stdin ends; with arguments only enter
    these namespaces. If the kernel refuses, exit with the refused call on stderr."""
    try:
        if paths := sys.argv[1:]:
            enter(paths)
            return
        _enter_new_network()
        _raise_loopback()
    except OSError as error:
        sys.exit(": ".join(filter(None, (error.filename, error.strerror))))
    os.write(1, b"ready\n")
    os.read(0, 1)


def enter(paths: Sequence[str]) -> None:
    """Move this process into the namespaces at these paths. If there are two, the first is a user
    namespace, whose capabilities are dropped. Raise OSError, which names the refused call or the
    path that cannot be opened."""
    with ExitStack() as opened:
        # All opened first: inside a user namespace the launcher's files cannot be opened.
        for namespace in [opened.enter_context(Path(path).open("rb")) for path in paths]:
            _call("setns", namespace.fileno(), 0)
    if len(paths) > 1:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        _call("capset", header, (ctypes.c_uint32 * 6)())


def _enter_new_network() -> None:
    """Move this process to a new network namespace; users other than root get a new user namespace
    too. Raise OSError."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        # In a user namespace root would lose its access to other users' files.
        _call("unshare", _CLONE_NEWNET)
        return
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raise OSError with its name if it returns anything but
    0."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        reason = os.strerror(code)
        if name == "unshare" and code == errno.ENOSPC:
            reason = "the limit user.max_user_namespaces or user.max_net_namespaces is reached"
        raise OSError(code, f"{name}: {reason}")


def _raise_loopback() -> None:
    """Bring the loopback interface up. Raise OSError, which names the call if setting the flags is
    refused."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack(_REQUEST, b"lo", 0))
        name, flags = struct.unpack(_REQUEST, answer)
        try:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack(_REQUEST, name, flags | _IFF_UP))
        except OSError as error:
            raise OSError(error.errno, f"ioctl(SIOCSIFFLAGS): {error.strerror}") from None


if __name__ == "__main__":
    main()

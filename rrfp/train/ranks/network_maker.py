"""Makes a network namespace with nothing in it but loopback, and holds it until stdin ends.

Run as a script, by its path, so it imports nothing of rrfp: it starts in a few milliseconds, and
only a process with a single thread may make a namespace of users. Writes a line when the network is
up; otherwise it exits with the kernel's word on stderr.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_REQUEST = "16sh14x"
"""An interface's name and flags (netdevice(7))."""


def main() -> None:
    try:
        _enter_network()
        _raise_loopback()
    except OSError as error:
        sys.exit(error.strerror)
    os.write(1, b"ready\n")
    os.read(0, 1)


def _enter_network() -> None:
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        # Root would lose its access to other users' files in a namespace of users.
        _unshare(_CLONE_NEWNET)
        return
    _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        told = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack(_REQUEST, b"lo", 0))
        name, flags = struct.unpack(_REQUEST, told)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack(_REQUEST, name, flags | _IFF_UP))


if __name__ == "__main__":
    main()

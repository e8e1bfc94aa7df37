"""A wire between two network namespaces: each packet arrives late, some never, and the wire can be
cut. Run as a script it carries the packets, from one TUN device to the other, because few kernels
of containers have netem."""

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_SETIFF, _TUN, _NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 9000
_MOST_PACKET_BYTES = 65536


class Wire:
    """Two network namespaces, 10.213.78.1 and 10.213.78.2, and the wire between them."""

    ADDRESS = "10.213.78.1"

    def __init__(self, name: str, delay_s: float, loss: float) -> None:
        """Raises OSError where this process may not make any."""
        self._names = f"{name}-0", f"{name}-1"
        self._carrier: subprocess.Popen[str] | None = None
        try:
            for namespace in self._names:
                _ip(f"netns add {namespace}")
            self._carrier = subprocess.Popen(
                [sys.executable, __file__, *self._names, str(delay_s), str(loss)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._carrier.stdout is not None
            if self._carrier.stdout.readline() != "ready\n":
                raise OSError("no TUN device can be made")
            for number, namespace in enumerate(self._names):
                _ip(f"-n {namespace} addr add 10.213.78.{number + 1}/24 dev wire")
                _ip(f"-n {namespace} link set wire mtu {_MTU} up")
                _ip(f"-n {namespace} link set lo up")
        except OSError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.communicate()
        for namespace in self._names:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)

    def cut(self) -> None:
        """Drop every packet silently, until `restore`."""
        self._send("cut")

    def restore(self) -> None:
        self._send("mend")

    def add_address(self, number: int, last: int) -> str:
        """Another address at one end, as if another host were there."""
        address = f"10.213.78.{last}"
        _ip(f"-n {self._names[number]} addr add {address}/24 dev wire")
        return address

    def within(self, number: int, own: Path | None = None) -> list[str]:
        """A prefix that runs a command at one end, with separate mounts, among them an empty disk
        at `own`."""
        # `ip netns exec` makes a namespace of mounts, too.
        mounts = "" if own is None else f"mount -t tmpfs tmpfs '{own}' && "
        return ["ip", "netns", "exec", self._names[number], "sh", "-c", f'{mounts}exec "$@"', "sh"]

    def _send(self, word: str) -> None:
        assert self._carrier is not None
        assert self._carrier.stdin is not None
        self._carrier.stdin.write(f"{word}\n")
        self._carrier.stdin.flush()


def _ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {command}: {done.stderr.strip()}")


def _carry(namespaces: tuple[str, str], delay_s: float, loss: float) -> None:
    """Carry packets until stdin ends."""
    chance = random.Random(1)
    ends = [_tun_in(namespace) for namespace in namespaces]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    under_way: deque[tuple[float, int, bytes]] = deque()
    is_cut = False
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([*ends, 0], [], [], wait_s)
        if 0 in readable:
            words = os.read(0, 100).split()
            if not words:
                return
            is_cut = words[-1] == b"cut"
        for end in ends:
            if end in readable:
                packet = os.read(end, _MOST_PACKET_BYTES)
                if not is_cut and chance.random() >= loss:
                    other = ends[1 - ends.index(end)]
                    under_way.append((time.monotonic() + delay_s, other, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            if not is_cut:
                with suppress(OSError):  # nobody has set up that end yet
                    os.write(end, packet)


def _tun_in(namespace: str) -> int:
    """A TUN device named `wire` in a network namespace, into which this process goes."""
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _SETIFF, struct.pack("16sH22x", b"wire", _TUN | _NO_PI))
    return device


if __name__ == "__main__":
    _carry((sys.argv[1], sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))

"""Faults of links, made on purpose by `rrfp chaos`; without its variable sockets stay as they are.

The variable names a directory of the user's own. A socket shows its link there by a file
`RANK-PEER` of no content. A file `RANK-PEER.drop` (or `.delay`, `.corrupt`) is an order to it, with
one number in it, and is removed as soon as it is obeyed: by the first socket of these two ranks
that has something to read or write, which the links' heartbeats bring about within a second.
"""

import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from rrfp.runtime import launchers as variables
from rrfp.runtime.link.wire import MAGIC
from rrfp.trace.safe_files import open_own, write_whole


class LinkFault(StrEnum):
    """What a link can be ordered to do."""

    DROP = "drop"
    """Close its connection."""
    DELAY = "delay"
    """Take in nothing for so many seconds."""
    CORRUPT = "corrupt"
    """Flip this bit, counted round, in the header of the next frame that it sends."""


def wrapped(connection: socket.socket, rank: int, peer: int) -> socket.socket:
    """What a link of `rank` with `peer` is to use instead of this connected socket."""
    directory = os.environ.get(variables.FAULTS)
    return connection if directory is None else _Faulty(connection, Path(directory), rank, peer)


def shown_links(directory: Path) -> list[str]:
    """The links that can be given orders."""
    return sorted(path.name for path in directory.iterdir() if "." not in path.name)


def order(directory: Path, link: str, fault: LinkFault, number: float) -> Path:
    """Order a fault; the file that is given is removed when the link obeys."""
    path = directory / f"{link}.{fault}"
    write_whole(path, f"{number}".encode())
    return path


class _Faulty(socket.socket):
    """A link's socket, which obeys orders."""

    def __init__(self, connection: socket.socket, directory: Path, rank: int, peer: int) -> None:
        super().__init__(
            connection.family, connection.type, connection.proto, fileno=connection.detach()
        )
        self._orders = {fault: directory / f"{rank}-{peer}.{fault}" for fault in LinkFault}
        open_own(directory / f"{rank}-{peer}").close()

    def sendmsg(self, buffers: Iterable[Any], *rest: Any) -> int:
        self._drop()
        return super().sendmsg(self._corrupted([*buffers]), *rest)

    def recv_into(self, *arguments: Any) -> int:
        self._drop()
        delay_s = self._ordered(LinkFault.DELAY)
        if delay_s is not None:
            # Only the link's own thread reads.
            time.sleep(delay_s)
        return super().recv_into(*arguments)

    def _drop(self) -> None:
        if self._ordered(LinkFault.DROP) is not None:
            with suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)

    def _corrupted(self, buffers: Sequence[Any]) -> Sequence[Any]:
        """The same, with a bit flipped if that is ordered and a frame begins here."""
        begins = bool(buffers) and bytes(buffers[0][: len(MAGIC)]) == MAGIC
        number = self._ordered(LinkFault.CORRUPT) if begins else None
        if number is None:
            return buffers
        first = bytearray(buffers[0])
        byte, bit = divmod(int(number) % (8 * len(first)), 8)
        first[byte] ^= 1 << bit
        return [first, *buffers[1:]]

    def _ordered(self, fault: LinkFault) -> float | None:
        """The number in an order, which is hereby obeyed; None without one."""
        path = self._orders[fault]
        try:
            number = float(path.read_text(encoding="utf-8"))
            # Whoever sends and whoever reads may see it at once; one of them removes it.
            path.unlink()
        except FileNotFoundError:
            return None
        return number

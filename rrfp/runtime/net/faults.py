"""Faults of links that `rrfp chaos` injects; without its variable sockets are left unchanged.

RRFP_FAULTS names a directory of the user's own. A socket announces its link there by an empty file
`RANK-PEER`. A file `RANK-PEER.drop` (or `.delay`, `.corrupt`) that contains one number orders a
fault. The first socket of these two ranks that reads or writes carries it out and removes the file;
because of the links' heartbeats that is within a second.
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
    """Faults that can be ordered; each has a number."""

    DROP = "drop"
    """Close the connection; the number is ignored."""
    DELAY = "delay"
    """Read nothing for this many seconds."""
    CORRUPT = "corrupt"
    """Flip this bit, modulo its length, in the header of the next frame that it sends."""


def with_faults(connection: socket.socket, rank: int, peer: int) -> socket.socket:
    """Return the socket for the link of `rank` with `peer`: one in its place that carries out
    ordered faults and announces its link, or the same one if RRFP_FAULTS is not set."""
    directory = os.environ.get(variables.FAULTS)
    return connection if directory is None else _Faulty(connection, Path(directory), rank, peer)


def list_links(directory: Path) -> list[str]:
    """Return the links, as `RANK-PEER`, that are announced in the directory, sorted."""
    return sorted(path.name for path in directory.iterdir() if "." not in path.name)


def order_fault(directory: Path, link: str, fault: LinkFault, number: float) -> Path:
    """Order a fault on a link by a file, in place of an earlier order of it; return the file, which
    disappears when the fault is carried out."""
    path = directory / f"{link}.{fault}"
    write_whole(path, f"{number}".encode())
    return path


class _Faulty(socket.socket):
    """A link's socket that carries out ordered faults."""

    def __init__(self, connection: socket.socket, directory: Path, rank: int, peer: int) -> None:
        super().__init__(
            connection.family, connection.type, connection.proto, fileno=connection.detach()
        )
        self._orders = {fault: directory / f"{rank}-{peer}.{fault}" for fault in LinkFault}
        open_own(directory / f"{rank}-{peer}").close()

    def sendmsg(self, buffers: Iterable[Any], *rest: Any) -> int:
        """Send the buffers, with one bit flipped if that is ordered; before, shut the connection
        down if a drop is ordered."""
        self._drop_if_ordered()
        return super().sendmsg(self._corrupt_if_ordered([*buffers]), *rest)

    def recv_into(self, *arguments: Any) -> int:
        """Receive bytes; before, shut the connection down if a drop is ordered, and sleep if a
        delay is."""
        self._drop_if_ordered()
        delay_s = self._pop_order(LinkFault.DELAY)
        if delay_s is not None:
            # Only the link's own thread reads.
            time.sleep(delay_s)
        return super().recv_into(*arguments)

    def _drop_if_ordered(self) -> None:
        """Shut the connection down in both directions if that is ordered."""
        if self._pop_order(LinkFault.DROP) is not None:
            with suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)

    def _corrupt_if_ordered(self, buffers: Sequence[Any]) -> Sequence[Any]:
        """Return the buffers, with one bit of the first one flipped if that is ordered and a frame
        begins here."""
        begins = bool(buffers) and bytes(buffers[0][: len(MAGIC)]) == MAGIC
        number = self._pop_order(LinkFault.CORRUPT) if begins else None
        if number is None:
            return buffers
        first = bytearray(buffers[0])
        byte, bit = divmod(int(number) % (8 * len(first)), 8)
        first[byte] ^= 1 << bit
        return [first, *buffers[1:]]

    def _pop_order(self, fault: LinkFault) -> float | None:
        """Remove an order's file, and return its number; None without one. Raises ValueError for
        another text."""
        path = self._orders[fault]
        try:
            number = float(path.read_text(encoding="utf-8"))
            # Two threads may read it at once; only one of them can remove it.
            path.unlink()
        except FileNotFoundError:
            return None
        return number

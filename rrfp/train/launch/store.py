"""A run's store: where the launcher puts it, and how a rank finds it.

On one host it is a file in a directory that only the user may enter, so nothing needs to listen.
Between hosts it is a port of host 0, at one address (`rrfp.train.launch.hosts.joining`).
"""

import os
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp.errors import RrfpError, first_line
from rrfp.runtime import launchers as variables

if TYPE_CHECKING:
    from torch.distributed import Store


def file_store(directory: Path) -> dict[str, str]:
    """The variables that tell the ranks of a single host that their store is in this directory and
    that they listen at loopback."""
    return {
        variables.STORE: f"file:{directory / 'store'}",
        variables.ADDRESS: variables.LOOPBACK,
    }


def port_store(
    host: str, port: int, own_address: str, sources: Collection[str] | None
) -> dict[str, str]:
    """The variables that tell a host's ranks that their store is at a port of host 0, at which
    address of their own host they listen, and whom they let in there (None: anybody)."""
    return {
        variables.STORE: f"tcp:{host}:{port}",
        variables.ADDRESS: own_address,
        **({} if sources is None else {variables.SOURCES: ",".join(sources)}),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def open_store(timeout_s: float) -> "Store | None":
    """The store that our launcher has named; None if torch is to find its own by the variables that
    torchrun sets."""
    where = os.environ.get(variables.STORE)
    return None if where is None else store_at(where, timeout_s)


def store_at(where: str, timeout_s: float) -> "Store":
    """The store at such a place: `file:PATH` or `tcp:HOST:PORT`. Raises RrfpError if nobody answers
    there."""
    from torch.distributed import FileStore, TCPStore

    kind, _, place = where.partition(":")
    store: Store
    if kind == "file":
        store = FileStore(place)
    elif kind == "tcp":
        host, _, port = place.rpartition(":")
        try:
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        except RuntimeError as error:
            raise RrfpError(
                f"the run's store at {place} cannot be reached ({first_line(str(error))}); see how "
                "rrfp train ended on host 0"
            ) from None
    else:
        raise RrfpError(
            f"{variables.STORE} is '{where}', which is neither file:PATH nor tcp:HOST:PORT; let "
            "'rrfp train' set it"
        )
    store.set_timeout(timedelta(seconds=timeout_s))
    return store

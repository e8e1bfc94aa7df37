"""Where the processes of a torchrun meet: it serves a store itself at the port that it names, so
the run's own store, which listens at one address only, takes another, and torchrun's has that."""

import json
import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from rrfp.errors import RrfpError
from rrfp.runtime import variables
from rrfp.runtime.decoding import integer, items, parsed, text
from rrfp.runtime.launchers.started import Started
from rrfp.runtime.rendezvous import reachable_address

_ANSWER_S = 30.0


class TorchrunStore:
    """torchrun's store, as one of its processes sees it. Every method may raise torch's
    DistError."""

    def __init__(self, place: Started) -> None:
        self._place = place
        self._store = TCPStore(
            place.host,
            place.port,
            is_master=False,
            timeout=timedelta(seconds=_ANSWER_S),
            wait_for_workers=False,
        )
        # torchrun keeps its store when it starts its processes again.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"rrfp/endpoint/{start}"

    def listen(self) -> socket.socket:
        """A socket for the run's store, at a port that is free; the others are told."""
        address = variables.LOOPBACK if self._place.is_one_host else reachable_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
        self._store.set(self._key, json.dumps(listening.getsockname()[:2]))
        return listening

    def told(self) -> tuple[str, int] | None:
        """Where the first process listens; None if it has not said so yet."""
        if not self._store.check([self._key]):
            return None
        try:
            host, port = items(parsed(self._store.get(self._key)), 2)
            return text(host), integer(port)
        except ValueError as error:
            raise RrfpError(
                f"the value of '{self._key}' in torchrun's store is not where ranks meet "
                f"({error}); see who else can reach its port"
            ) from None

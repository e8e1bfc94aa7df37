"""How the hosts of a run meet before any of them starts its ranks, and part when all are done.

Host 0 serves the store at the one address that the endpoint names; all ranks use it too. Every wait
polls, so that Ctrl-C ends it, and names the host that is missing.
"""

import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError, Store, TCPStore

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.inputs.admission_files import admission_file
from rrfp.inputs.hint_files import order_file
from rrfp.inputs.text_files import sha256_of
from rrfp.replay.cost_files import costs_file
from rrfp.runtime.decoding import items, mapping, parsed, text
from rrfp.runtime.rendezvous import own_address_towards
from rrfp.runtime.transport.doorman import let_in
from rrfp.train.data.tokenizer import tokenizer_file
from rrfp.train.ranks.place import place_of
from rrfp.train.ranks.stores import port_store
from rrfp.train.ranks.torchrun_store import TorchrunStore
from rrfp.train.setting_groups import Network
from rrfp.train.settings import TrainSettings

T = TypeVar("T")

_LOOK_S = 0.2
_ANSWER_S = 30.0
_TELL_S = 5.0
_PARTING_S = 60.0
"""How long hosts whose ranks have ended wait for the others."""

_MAY_DIFFER = frozenset({"node_rank", "rdzv_endpoint", "out", "data", "force", "save"})
"""Settings that may differ between hosts."""

_DIGITS = 12
"""Digits of a digest that identify a file in messages."""


@contextmanager
def meeting(
    settings: TrainSettings,
    timeout_s: float,
    within: Callable[[Store], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> Iterator[dict[str, str]]:
    """Wait until all hosts of the run are there, check that their settings agree, and keep the
    store open. Yields the variables that tell this host's ranks where the store is. `within` is
    entered before, and left while the store is still there; nothing is to keep the store longer.

    If the block succeeds, the hosts wait for each other to finish, for a while. Raises RrfpError
    naming a host that did not come in time, and UsageError if the endpoint is not an address of
    host 0 or settings differ.
    """
    try:
        part = _Meeting(settings, timeout_s)
        store = part.hold()
    except (DistError, OSError) as error:
        raise UsageError(
            f"the hosts cannot meet at {settings.run.rdzv_endpoint} ({first_line(str(error))}); "
            "give --rdzv-endpoint a free port of host 0 that the others can reach"
        ) from None
    try:
        with within(store):
            yield port_store(part.host, part.port, part.own_address, part.sources)
    finally:
        part.leave(store)
    part.await_parting(store)


class _Meeting:
    """One host's part in the meeting, with one deadline for everything."""

    def __init__(self, settings: TrainSettings, timeout_s: float) -> None:
        assert settings.run.rdzv_endpoint is not None
        host, _, port = settings.run.rdzv_endpoint.rpartition(":")
        self.host = host.removeprefix("[").removesuffix("]")
        self.port = int(port)
        self._settings = settings
        self._endpoint = settings.run.rdzv_endpoint
        place = place_of(settings)
        self._torchruns = None
        if place is not None and place.serves_store and place.port == self.port:
            self._torchruns = TorchrunStore(place)
        self._called = "host" if place is None else f"{place.by}'s process"
        self._watched: socket.socket | None = None
        """A connection to the store that ends with it."""
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._common = {
            name: value for name, value in settings.described().items() if name not in _MAY_DIFFER
        } | _contents(settings)
        self.own_address = ""
        """This host's address towards host 0; known after `hold`."""
        self.sources: list[str] | None = None
        """The addresses from which the hosts connect to each other; None to let in anybody."""
        self._listening: int | None = None
        """The descriptor at which the store listens, on host 0."""

    def hold(self) -> Store:
        own_rank = self._settings.run.node_rank
        store = self._serve() if own_rank == 0 else self._join()
        # If settings differ, host 0 ends, and the store with it. So the others read its settings
        # before they publish their own.
        first = self._common if own_rank == 0 else self._settings_of(0, store)
        store.set(_key(own_rank), json.dumps(self._common))
        _compare(first, own_rank, self._common)
        for node_rank in range(1, self._settings.run.nnodes):
            _compare(first, node_rank, self._settings_of(node_rank, store))
        if self._settings.run.network is not Network.HOST:
            self._let_in_hosts_alone(store)
        return store

    def _settings_of(self, node_rank: int, store: Store) -> Mapping[str, object]:
        return self._told_by(node_rank, store, _key(node_rank), mapping)

    def _let_in_hosts_alone(self, store: Store) -> None:
        """A host may take another of its addresses on its way to each of the others."""
        addresses = self._all_tell(store, "address", self.own_address, text)
        towards = {own_address_towards(address) for address in addresses} - {""}
        told = self._all_tell(store, "sources", sorted(towards), _addresses)
        self.sources = sorted({source for of_host in told for source in of_host})
        if self._listening is not None:
            with socket.socket(fileno=os.dup(self._listening)) as listening:
                let_in(listening, self.sources)

    def _all_tell(
        self, store: Store, name: str, own: object, decode: Callable[[object], T]
    ) -> list[T]:
        """What all hosts tell under a name, by host."""
        own_rank = self._settings.run.node_rank

        def told_by(node_rank: int) -> T:
            if node_rank == own_rank:
                return decode(own)
            return self._told_by(node_rank, store, f"rrfp/{name}/{node_rank}", decode)

        # As in `hold`: host 0, whose store it is, may end as soon as all have told.
        first = [told_by(0)]
        store.set(f"rrfp/{name}/{own_rank}", json.dumps(own))
        return first + [told_by(node_rank) for node_rank in range(1, self._settings.run.nnodes)]

    def leave(self, store: Store) -> None:
        """Tell host 0 that this host's ranks have ended, if it can still be told."""
        # A daemon: a store behind a dead link never answers, nor whoever waits for an answer of it.
        telling = threading.Thread(target=self._tell, args=(store,), name="rrfp-leave", daemon=True)
        telling.start()
        telling.join(_TELL_S)

    def _tell(self, store: Store) -> None:
        if self._settings.run.node_rank > 0:
            # Before host 0 may close its store, and open that of the next meeting at the same port.
            with suppress(OSError):
                self._watched = socket.create_connection((self.host, self.port), _ANSWER_S)
        with suppress(RuntimeError):
            store.set(_parting_key(self._settings.run.node_rank), "")

    def await_parting(self, store: Store) -> None:
        """Wait until all have left, for a while. Host 0 keeps the store until then, because ranks
        of other hosts may still be in their last step. The others wait for the store to close, or
        they might mistake it for that of the next meeting (a race launches ranks several times)."""
        if self._settings.run.node_rank > 0:
            # Not by the store: torch would show its own stack, asked for one that has just closed.
            if self._watched is not None:
                self._watched.settimeout(_PARTING_S)
                with self._watched, suppress(OSError):
                    self._watched.recv(1)
            return
        others = [_parting_key(node_rank) for node_rank in range(1, self._settings.run.nnodes)]
        deadline_s = time.monotonic() + _PARTING_S
        with suppress(RuntimeError):
            while not store.check(others) and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)

    def _is_served(self) -> bool:
        """Whether somebody listens where the store is to be."""
        try:
            socket.create_connection((self.host, self.port), timeout=_ANSWER_S).close()
        except OSError:
            return False
        return True

    def _serve(self) -> Store:
        """The store, listening only at the address that the endpoint names."""
        if self._torchruns is not None:
            listening = self._torchruns.listen()
            address, self.port = listening.getsockname()[:2]
            self.host = address
        else:
            family, address = _address_of(self.host, self._endpoint)
            listening = socket.create_server((address, self.port), family=family)
        self.own_address = address
        self._listening = listening.detach()
        return self._store(address, self._listening)

    def _join(self) -> Store:
        if self._torchruns is not None:
            while (told := self._torchruns.told()) is None:
                self._wait_for(0)
            self.host, self.port = told
        self._await_server()
        self.own_address = own_address_towards(self.host)
        return self._store(self.host)

    def _store(self, host: str, listening: int | None = None) -> Store:
        return TCPStore(
            host,
            self.port,
            is_master=listening is not None,
            timeout=timedelta(seconds=_ANSWER_S),
            wait_for_workers=False,
            master_listen_fd=listening,
        )

    def _await_server(self) -> None:
        while not self._is_served():
            self._wait_for(0)

    def _told_by(self, node_rank: int, store: Store, key: str, decode: Callable[[object], T]) -> T:
        """What a host has published under its key."""
        while not store.check([key]):
            self._wait_for(node_rank)
        try:
            return decode(parsed(store.get(key)))
        except ValueError:
            raise RrfpError(
                f"the value of '{key}' at {self._endpoint} cannot be read as that of host "
                f"{node_rank}; see whether it runs the same rrfp, and who else can reach that port"
            ) from None

    def _wait_for(self, node_rank: int) -> None:
        if time.monotonic() > self._deadline_s:
            advice = (
                f"run the same command there with --node-rank {node_rank}"
                if self._called == "host"
                else "see whether it has started, and what it says"
            )
            raise RrfpError(
                f"{self._called} {node_rank} did not come to {self._endpoint} within "
                f"{self._timeout_s:g} s; {advice}"
            )
        time.sleep(_LOOK_S)


def _address_of(host: str, endpoint: str) -> tuple[socket.AddressFamily, str]:
    """The one address of the endpoint's host to listen at."""
    found = [
        (family, str(address[0]))
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    ]
    is_name = host not in ("localhost", *(address for _, address in found))
    reachable = [each for each in found if not ipaddress.ip_address(each[1]).is_loopback]
    family, address = (reachable or found)[0] if is_name else found[0]
    if ipaddress.ip_address(address).is_unspecified:
        raise UsageError(
            f"--rdzv-endpoint is '{endpoint}', which stands for every address of host 0; name the "
            "one at which the other hosts reach it"
        )
    if is_name and not reachable:
        raise UsageError(
            f"--rdzv-endpoint is '{endpoint}', and on host 0 itself that name means {address}, "
            "where no other host reaches it; give the address instead of the name"
        )
    return family, address


def _contents(settings: TrainSettings) -> dict[str, object]:
    """Digests of the files that the settings name, as each host reads its own."""
    paths = {
        "hint": order_file(settings.hint.name),
        "admit": admission_file(settings.policy.admit),
        "pace": None if settings.run.pace is None else costs_file(settings.run.pace),
        "tokenizer": None
        if settings.data.tokenizer is None
        else tokenizer_file(settings.data.tokenizer),
    }
    return {
        f"the content of --{name} {path}": f"{sha256_of(path)[:_DIGITS]}..."
        for name, path in paths.items()
        if path is not None
    }


def _compare(first: Mapping[str, object], node_rank: int, other: Mapping[str, object]) -> None:
    for name, value in first.items():
        if other.get(name) != value:
            raise UsageError(
                f"{name} is {value} on host 0 and {other.get(name)} on host {node_rank}; run the "
                "same command with the same files on both"
            )


def _addresses(value: object) -> list[str]:
    """Of hosts, as JSON tells them. Raises ValueError for anything else."""
    return [str(ipaddress.ip_address(text(each))) for each in items(value)]


def _key(node_rank: int) -> str:
    return f"rrfp/meeting/{node_rank}"


def _parting_key(node_rank: int) -> str:
    return f"rrfp/parting/{node_rank}"

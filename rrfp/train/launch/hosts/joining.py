"""How the hosts of a run meet before any of them starts its ranks, and part when all are done.

Host 0 serves the store at the one address that the endpoint names; all ranks use it too. Every wait
polls, so that Ctrl-C ends it, and names the host that is missing.
"""

import errno
import ipaddress
import json
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Self, TypeVar

from torch.distributed import DistError, Store, TCPStore

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.inputs import admission_file, order_file, sha256_of
from rrfp.replay.cost_sources import costs_file
from rrfp.runtime import launchers as variables
from rrfp.runtime.launchers import LaunchPlace
from rrfp.runtime.net.source_filter import accept_only
from rrfp.runtime.rendezvous import host_identity, own_address_for_reaching, reachable_address
from rrfp.strict_json import integer, items, mapping, parsed, text
from rrfp.train.checks import gpus_here, index_of_gpu, too_few_gpus
from rrfp.train.data.tokens import tokenizer_file
from rrfp.train.launch.hosts.endpoint import Endpoint, local_ranks, obstacle_at, place_of
from rrfp.train.launch.hosts.host_status import Pulse, printable
from rrfp.train.launch.stopping import failing_for_good
from rrfp.train.launch.store import AnsweringStore, answer_of, port_store
from rrfp.train.settings import DECLARED, DeviceKind, Network, TrainSettings

# Where the processes of a torchrun meet: it serves a store itself at the port that it names, so
# the run's own store, which listens at one address only, takes another, and torchrun's has that.


_STORE_ANSWER_S = 30.0


class TorchrunStore:
    """torchrun's store, as one of its processes sees it. Every method may raise torch's
    DistError."""

    def __init__(self, place: LaunchPlace) -> None:
        self._place = place
        self._store = TCPStore(
            place.host,
            place.port,
            is_master=False,
            timeout=timedelta(seconds=_STORE_ANSWER_S),
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


# What all hosts of a run must have in common: the settings, and what is in the files they name.


_MAY_DIFFER = frozenset({"node_rank", "rdzv_endpoint", "out", "data", "force", "save"})
"""Settings that may differ between hosts."""
_DIGITS = 12
"""Digits of a digest that identify a file in messages."""


def in_common(settings: TrainSettings, data: str) -> dict[str, object]:
    """One host's account of it, as it reads its own files; `data` is the digest of what it trains
    on."""
    paths = {
        "hint": order_file(settings.hint.name),
        "admit": admission_file(settings.step.admit),
        "pace": None if settings.run.pace is None else costs_file(settings.run.pace),
        "tokenizer": None
        if settings.data.tokenizer is None
        else tokenizer_file(settings.data.tokenizer),
    }
    files = {
        f"the content of --{name} {path}": _short(sha256_of(path))
        for name, path in paths.items()
        if path is not None
    }
    named = {name: value for name, value in settings.described().items() if name not in _MAY_DIFFER}
    return named | files | {"the content of --data": _short(data)}


def check_common(first: Mapping[str, object], node_rank: int, own: Mapping[str, object]) -> None:
    """Raise UsageError if a host's account differs from that of host 0, which is the first."""
    for name, value in first.items():
        if own.get(name) != value:
            flag = f"--{DECLARED[name].spelled}" if name in DECLARED else name
            raise UsageError(
                f"{flag} is {value} on host 0 and {own.get(name)} on host {node_rank}; run the "
                "same command with the same files on both"
            )


def _short(digest: str) -> str:
    return f"{digest[:_DIGITS]}..."


# Which GPUs the ranks of all launchers take, compared before any of them starts a rank.
#
# A launcher that torchrun or srun has started is one of several on its host, and these may all see
# the same GPUs, or each its own. NCCL takes no two ranks on one, and would say so only in the
# middle of a run's start.


@dataclass(frozen=True, slots=True)
class Taken:
    """The GPUs of one launcher, by their UUIDs."""

    host: str
    """Its identity."""
    seen: tuple[str, ...]
    taken: tuple[str, ...]
    """By rank."""

    @classmethod
    def by(cls, settings: TrainSettings) -> Self:
        """Those of this process."""
        seen = tuple(gpu.uuid for gpu in gpus_here())
        taken = (seen[index_of_gpu(each, len(seen))] for each in local_ranks(settings))
        return cls(host_identity(), seen, tuple(taken))

    @classmethod
    def decoded(cls, value: object) -> Self:
        """Raises ValueError for what no launcher tells."""
        host, seen, taken = items(value, 3)
        return cls(text(host), tuple(map(text, items(seen))), tuple(map(text, items(taken))))

    def told(self) -> tuple[object, ...]:
        """As JSON takes it."""
        return astuple(self)


def check_apart(told: Sequence[Taken], own: int) -> None:
    """Raise UsageError if two ranks of the run take the same GPU. `told` is by launcher, in the
    order of their ranks, and `own` the number of this one."""
    takers: dict[str, int] = {}
    for rank, (gpu, host) in enumerate((gpu, each.host) for each in told for gpu in each.taken):
        other = takers.setdefault(gpu, rank)
        if other == rank:
            continue
        beside = [each for each in told if each.host == host]
        num_ranks = sum(len(each.taken) for each in beside)
        num_gpus = len({seen for each in beside for seen in each.seen})
        if num_ranks > num_gpus:
            where = "this host" if host == told[own].host else printable(host.partition("/")[0])
            raise too_few_gpus(num_ranks, num_gpus, where)
        raise UsageError(
            f"ranks {other} and {rank} take the same GPU, {printable(gpu)}, and NCCL takes no two "
            "on one; show each a GPU of its own with CUDA_VISIBLE_DEVICES, or start them with a "
            "launcher that sets LOCAL_RANK"
        )


T = TypeVar("T")

_LOOK_S = 0.2
_ANSWER_S = 10.0
"""How long a store that is there may take to be opened, and to have host 0's first word."""
_TELL_AFTER_S = 10.0
_CLOSING_S = 5.0
_FIRST, _REFUSED, _MET = "rrfp/meeting/first", "rrfp/meeting/refused", "rrfp/meeting/met"
"""Keys: what host 0 says first, why a host was refused, and whether all are there."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Met:
    """What a host has of the others once all have met."""

    environment: Mapping[str, str]
    """Tells this host's ranks where the store is."""
    pulse: Pulse
    connect: Callable[[float], AnsweringStore]
    """Opens a connection to the store, whose calls end within so many seconds."""


@contextmanager
def meeting(settings: TrainSettings, timeout_s: float, data: str = "") -> Iterator[Met]:
    """Wait until all hosts of the run are there, check that their settings agree, and keep the
    store open. `data` is the digest of this host's training data.

    If the block succeeds, the hosts wait for each other to finish, for a while; if it fails, they
    are told. Raises RrfpError naming a host that did not come in time or was lost, and UsageError
    if the endpoint is not an address of host 0, settings differ, two hosts come as one, or two
    ranks would take the same GPU.
    """
    part = _Meeting(settings, timeout_s, data)
    try:
        with failing_for_good(), part.pulse.telling():
            part.meet()
            environment = port_store(part.host, part.port, part.own_address, part.sources)
            yield Met(environment, part.pulse, part.connect)
            closing = part.closing()
            part.pulse.part()
    finally:
        part.leave()
    part.await_closing(closing)


class _Meeting:
    """One host's part in the meeting, with one deadline for everything."""

    def __init__(self, settings: TrainSettings, timeout_s: float, data: str) -> None:
        assert settings.run.rdzv_endpoint is not None
        self._endpoint = Endpoint(settings.run.rdzv_endpoint)
        self.host, self.port = self._endpoint.host, self._endpoint.port
        """Where the store is: torchrun's processes learn it only when they meet."""
        self.own_address = ""
        """This host's address towards host 0."""
        self.sources: list[str] | None = None
        """The addresses from which the hosts connect to each other; None to let in anybody."""
        self._lets_in_anybody = settings.run.network is Network.HOST
        self._listening: int | None = None
        """The descriptor at which the store listens, on host 0."""
        self._node_rank, self._num_hosts = settings.run.node_rank, settings.run.nnodes
        self._place = place_of(settings)
        self._silence_s = settings.run.silence
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._next_word_s = time.monotonic() + _TELL_AFTER_S
        self._common = in_common(settings, data)
        takes_gpus = settings.run.device is DeviceKind.CUDA and not settings.run.share_gpu
        self._own_gpus = Taken.by(settings) if takes_gpus else None
        self._token = secrets.token_hex(8)
        """Host 0's identifies the run, another one's the host."""
        self._store: AnsweringStore | None = None
        self.pulse = Pulse(
            lambda: self.connect(self._silence_s / 5),
            self._node_rank,
            self._num_hosts,
            self._silence_s,
        )

    def meet(self) -> None:
        if self._node_rank == 0:
            self._lead()
        else:
            self._follow()
        if self._own_gpus is not None:
            told = self._all_tell("gpus", self._own_gpus.told(), Taken.decoded)
            check_apart(told, self._node_rank)
        if not self._lets_in_anybody:
            self._let_in_hosts_alone()

    def connect(self, within_s: float) -> AnsweringStore:
        """A connection of its own: on one that several share, a call waits for those before."""
        if obstacle := obstacle_at(self.host, self.port, self._silence_s):
            raise RrfpError(obstacle.fact)
        store = self._answering(within_s)
        if self._first(store)[0] != self._token:
            raise RrfpError("another run meets there by now")
        return store

    def leave(self) -> None:
        """Let the others know how this host has ended, and go."""
        self.pulse.await_heard()
        self.pulse.close()
        if self._store is not None:
            self._store.close()

    def closing(self) -> socket.socket | None:
        """A connection to the store that ends with it, on another host than 0."""
        if self._node_rank == 0:
            return None
        with suppress(OSError):
            return socket.create_connection((self.host, self.port), _CLOSING_S)
        return None

    def await_closing(self, connection: socket.socket | None) -> None:
        """Wait until host 0 has closed its store, or this host might take it for that of the next
        meeting: a race launches ranks several times. It does so as soon as all have parted."""
        # Not by the store: torch would show its own stack, asked for one that has just closed.
        if connection is not None:
            with connection, suppress(OSError):
                connection.recv(1)

    def _lead(self) -> None:
        try:
            listening = self._listen()
            self.own_address, self.port = listening.getsockname()[:2]
            self.host = self.own_address
            self._listening = listening.detach()
            store = self._store = self._answering(self._silence_s, self._listening)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise UsageError(
                    f"{self._endpoint.host} is no address of this host, which is host 0; start "
                    "host 0 there, or give this one another --node-rank"
                ) from None
            raise UsageError(
                f"the hosts cannot meet at {self._endpoint.given} ({first_line(str(error))}); give "
                "--rdzv-endpoint a free port of host 0 that the others can reach"
            ) from None
        store.set(_FIRST, json.dumps([self._token, self._common]))
        self.pulse.start()
        for host in range(1, self._num_hosts):
            while not self.pulse.has_come(host):
                self._wait(host)
        store.set(_MET, "")

    def _follow(self) -> None:
        self._find_store()
        self.own_address = own_address_for_reaching(self.host)
        store = self._store = self._answering(self._silence_s)
        run_token, first = self._first(store)
        with self._refusing(store):
            check_common(first, self._node_rank, self._common)
            self._claim(store)
        self._token = run_token
        self.pulse.start()
        while store.find(_MET) is None:
            self._wait()

    def _let_in_hosts_alone(self) -> None:
        """A host may take another of its addresses on its way to each of the others."""
        addresses = self._all_tell("address", self.own_address, text)
        towards = {own_address_for_reaching(address) for address in addresses} - {""}
        told = self._all_tell("sources", sorted(towards), _addresses)
        self.sources = sorted({source for of_host in told for source in of_host})
        if self._listening is not None:
            with socket.socket(fileno=os.dup(self._listening)) as listening:
                accept_only(listening, self.sources)

    def _all_tell(self, name: str, own: object, decode: Callable[[object], T]) -> list[T]:
        """What all hosts tell under a name, by host."""
        store = self._store
        assert store is not None
        store.set(f"rrfp/{name}/{self._node_rank}", json.dumps(own))
        return [self._told_by(host, store, name, decode) for host in range(self._num_hosts)]

    def _told_by(
        self, host: int, store: AnsweringStore, name: str, decode: Callable[[object], T]
    ) -> T:
        while (told := store.read(f"rrfp/{name}/{host}", decode, f"host {host}")) is None:
            self._wait(host)
        return told

    def _claim(self, store: AnsweringStore) -> None:
        """Take this host's place, which only one can have."""
        own = f"{socket.gethostname()} (process {os.getpid()})"
        claimed = store.claim(f"rrfp/meeting/{self._node_rank}", f"{own} {self._token}")
        holder = printable(claimed.decode(errors="replace"))
        if holder != f"{own} {self._token}":
            raise UsageError(
                f"--node-rank {self._node_rank} is taken: {holder.rpartition(' ')[0]} came to "
                f"{self._endpoint.given} with it before {own}; give each host one of its own"
            )

    @contextmanager
    def _refusing(self, store: AnsweringStore) -> Iterator[None]:
        """Tell the hosts that still wait why this one cannot come."""
        try:
            yield
        except UsageError as error:
            with suppress(RrfpError):  # then nobody waits any more
                store.set(_REFUSED, str(error))
            raise

    def _listen(self) -> socket.socket:
        torchruns = self._torchruns()
        return self._endpoint.listen() if torchruns is None else self._ask(torchruns.listen)

    def _torchruns(self) -> TorchrunStore | None:
        place = self._place
        if place is None or not place.serves_store or place.port != self.port:
            return None
        return self._ask(lambda: TorchrunStore(place))

    def _find_store(self) -> None:
        """Wait until host 0 serves its store."""
        torchruns = self._torchruns()
        if torchruns is not None:
            while (told := self._ask(torchruns.told)) is None:
                self._wait(0)
            self.host, self.port = told
        since_s = time.monotonic()
        while obstacle := obstacle_at(self.host, self.port, self._silence_s):
            now_s = time.monotonic()
            if obstacle.timeout_s == math.inf:
                since_s = now_s
            elif now_s - since_s >= obstacle.timeout_s:
                raise UsageError(
                    f"the hosts cannot meet at {self._endpoint.given}: {obstacle.fact}; see "
                    "--rdzv-endpoint, and whether host 0 can be reached there"
                )
            self._wait(0)

    def _answering(self, within_s: float, listening: int | None = None) -> AnsweringStore:
        def opened() -> Store:
            return TCPStore(
                self.host,
                self.port,
                is_master=listening is not None,
                timeout=timedelta(seconds=_ANSWER_S),
                wait_for_workers=False,
                master_listen_fd=listening,
            )

        return AnsweringStore(self._ask(opened), f"{self.host}:{self.port}", within_s)

    def _first(self, store: AnsweringStore) -> tuple[str, dict[str, object]]:
        """What host 0 says first: which run this is, and what its hosts have in common."""
        deadline_s = time.monotonic() + _ANSWER_S
        while (told := store.read(_FIRST, _decode_first, "host 0")) is None:
            if time.monotonic() > deadline_s:
                raise UsageError(
                    f"a store listens at {self._endpoint.given}, and no host 0 of rrfp's has come "
                    "to it; give --rdzv-endpoint a port that no other job uses"
                )
            time.sleep(_LOOK_S)
        return told

    def _ask(self, ask: Callable[[], T]) -> T:
        """The answer of torch, which is at hand where one is expected."""
        try:
            return answer_of(ask, _ANSWER_S, f"the store for {self._endpoint.given}")
        except DistError as error:
            raise RrfpError(
                f"the hosts cannot meet at {self._endpoint.given} ({first_line(str(error))}); see "
                "what host 0 says"
            ) from None

    def _wait(self, host: int | None = None) -> None:
        """Wait a little for a host, or for any."""
        if error := self.pulse.lost():
            raise error
        if self._store is not None and (refused := self._store.find(_REFUSED)) is not None:
            raise UsageError(printable(refused.decode(errors="replace")))
        now_s = time.monotonic()
        missing = self._called(host)
        if now_s > self._deadline_s:
            raise RrfpError(
                f"{missing} did not come to {self._endpoint.given} within {self._timeout_s:g} s; "
                f"{self._advice(host)}"
            )
        if now_s > self._next_word_s:
            self._next_word_s = math.inf
            _log.warning(
                "%s has not come to %s yet; this host waits for it up to %g s",
                missing,
                self._endpoint.given,
                self._timeout_s,
            )
        time.sleep(_LOOK_S)

    def _called(self, host: int | None) -> str:
        kind = "host" if self._place is None else f"{self._place.by}'s process"
        return f"{kind} {host}" if host is not None else f"another {kind}"

    def _advice(self, host: int | None) -> str:
        if self._place is None and host is not None:
            return f"run the same command there with --node-rank {host}"
        return "see whether it has started, and what it says"


def _decode_first(value: object) -> tuple[str, dict[str, object]]:
    token, common = items(value, 2)
    return text(token), mapping(common)


def _addresses(value: object) -> list[str]:
    """Of hosts, as JSON tells them. Raises ValueError for anything else."""
    return [str(ipaddress.ip_address(text(each))) for each in items(value)]

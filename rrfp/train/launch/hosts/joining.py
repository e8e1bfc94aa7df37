"""Rendezvous of the hosts of a run before they start ranks, and their joint end.

Host 0 serves the run's store at the address of the endpoint; all ranks use it too. Every wait
polls, so that Ctrl-C ends it, and its error names the host that is missing.
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
from rrfp.train.checks import gpu_index, too_few_gpus, visible_gpus
from rrfp.train.data.tokens import tokenizer_file
from rrfp.train.launch.hosts.endpoint import Endpoint, launcher_place, local_ranks, obstacle_at
from rrfp.train.launch.hosts.host_status import HostHeartbeat, printable
from rrfp.train.launch.stopping import ignoring_sigterm_on_failure
from rrfp.train.launch.store import StoreClient, call_with_timeout, port_store
from rrfp.train.settings import DECLARED, DeviceKind, Network, TrainSettings

# torchrun serves a store of its own at the port that it names. The run's store, which listens at a
# single address, takes another port and publishes it in torchrun's store.


_TORCHRUN_TIMEOUT_S = 30.0


class TorchrunStore:
    """A client of torchrun's store. Every method may raise torch's DistError."""

    def __init__(self, place: LaunchPlace) -> None:
        self._place = place
        self._store = TCPStore(
            place.host,
            place.port,
            is_master=False,
            timeout=timedelta(seconds=_TORCHRUN_TIMEOUT_S),
            wait_for_workers=False,
        )
        # torchrun reuses its store when it restarts its processes.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"rrfp/endpoint/{start}"

    def listen_and_publish(self) -> socket.socket:
        """Listen at a free port for the run's store, publish the address to the others in
        torchrun's store, and return the socket."""
        address = variables.LOOPBACK if self._place.is_one_host else reachable_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
        self._store.set(self._key, json.dumps(listening.getsockname()[:2]))
        return listening

    def published_address(self) -> tuple[str, int] | None:
        """Return host and port of the run's store; None, without waiting, if not published yet.
        Raise RrfpError if the value is anything else."""
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


# All hosts must have the same settings, and the same content in the files that they name.


_MAY_DIFFER = frozenset({"node_rank", "rdzv_endpoint", "out", "data", "force", "save"})
"""Settings that may differ between hosts."""
_SHOWN_DIGITS = 12
"""Hexadecimal digits of a digest in messages."""


def common_settings(settings: TrainSettings, data: str) -> dict[str, object]:
    """Collect the settings and file digests of this host that must equal those of host 0, which
    leaves out a few such as --out and paths of data. `data` is the digest of its training data."""
    paths = {
        "hint": order_file(settings.hint.name),
        "admit": admission_file(settings.step.admit),
        "pace": None if settings.run.pace is None else costs_file(settings.run.pace),
        "tokenizer": None
        if settings.data.tokenizer is None
        else tokenizer_file(settings.data.tokenizer),
    }
    files = {
        f"the content of --{name} {path}": _shorten(sha256_of(path))
        for name, path in paths.items()
        if path is not None
    }
    named = {name: value for name, value in settings.described().items() if name not in _MAY_DIFFER}
    return named | files | {"the content of --data": _shorten(data)}


def check_common(host_0: Mapping[str, object], node_rank: int, own: Mapping[str, object]) -> None:
    """Raise UsageError, naming both values, for the first common setting of host 0 that differs on
    this host."""
    for name, value in host_0.items():
        if own.get(name) != value:
            flag = f"--{DECLARED[name].spelled}" if name in DECLARED else name
            raise UsageError(
                f"{flag} is {value} on host 0 and {own.get(name)} on host {node_rank}; run the "
                "same command with the same files on both"
            )


def _shorten(digest: str) -> str:
    """Shorten a digest to 12 digits for messages and for the comparison."""
    return f"{digest[:_SHOWN_DIGITS]}..."


# Launchers compare the GPUs of their ranks before any rank starts. torchrun or srun may start
# several launchers on a host, which see the same GPUs or one each. NCCL refuses two ranks on one
# GPU, but only in the middle of the start.


@dataclass(frozen=True, slots=True)
class LauncherGpus:
    """The GPUs of one launcher, by UUID."""

    host: str
    """The identity of its host."""
    visible: tuple[str, ...]
    used: tuple[str, ...]
    """The GPU of each of its ranks."""

    @classmethod
    def of_this_process(cls, settings: TrainSettings) -> Self:
        """Look up the GPUs that this launcher sees and those that its ranks use. Raise UsageError
        if CUDA cannot be used."""
        visible = tuple(gpu.uuid for gpu in visible_gpus())
        used = (visible[gpu_index(rank, len(visible))] for rank in local_ranks(settings))
        return cls(host_identity(), visible, tuple(used))

    @classmethod
    def decode(cls, value: object) -> Self:
        """Read the JSON form, an array of the fields. Raises ValueError for anything else."""
        host, visible, used = items(value, 3)
        return cls(text(host), tuple(map(text, items(visible))), tuple(map(text, items(used))))


def check_gpus_distinct(launchers: Sequence[LauncherGpus], own: int) -> None:
    """Raise UsageError if two ranks of the run use the same GPU; if their host has more ranks than
    GPUs, the error says so. `launchers` are in the order of their ranks, and `own` is the index of
    this one."""
    users: dict[str, int] = {}
    for rank, (gpu, host) in enumerate((gpu, each.host) for each in launchers for gpu in each.used):
        other = users.setdefault(gpu, rank)
        if other == rank:
            continue
        on_host = [each for each in launchers if each.host == host]
        num_ranks = sum(len(each.used) for each in on_host)
        num_gpus = len({gpu for each in on_host for gpu in each.visible})
        if num_ranks > num_gpus:
            where = (
                "this host" if host == launchers[own].host else printable(host.partition("/")[0])
            )
            raise too_few_gpus(num_ranks, num_gpus, where)
        raise UsageError(
            f"ranks {other} and {rank} take the same GPU, {printable(gpu)}, and NCCL takes no two "
            "on one; show each a GPU of its own with CUDA_VISIBLE_DEVICES, or start them with a "
            "launcher that sets LOCAL_RANK"
        )


T = TypeVar("T")

_POLL_S = 0.2
_ANSWER_S = 10.0
"""How long opening a store, or waiting for host 0's announcement in it, may take."""
_WARN_AFTER_S = 10.0
_CLOSING_S = 5.0
_FIRST, _REFUSED, _ALL_JOINED = "rrfp/meeting/first", "rrfp/meeting/refused", "rrfp/meeting/met"
"""Keys of host 0's announcement, of the reason why a host was refused, and of the note that all
hosts have joined."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoinedHosts:
    """The connection of a host to the others once all have joined."""

    environment: Mapping[str, str]
    """Variables that name the store to this host's ranks."""
    heartbeat: HostHeartbeat
    connect: Callable[[float], StoreClient]
    """Opens a connection to the store with this timeout in seconds for each call."""


@contextmanager
def joined_hosts(
    settings: TrainSettings, timeout_s: float, data: str = ""
) -> Iterator[JoinedHosts]:
    """Wait until all hosts of the run have joined, check that their settings agree, and keep the
    store open. `data` is the digest of this host's training data.

    If the block succeeds, the hosts wait for each other to finish, for a limited time; if it fails,
    the others are notified. Raise RrfpError naming a host that did not join or end in time or was
    lost, and UsageError if the endpoint is not an address of host 0, settings differ, two hosts
    have the same node rank, or two ranks would use the same GPU.
    """
    rendezvous = _Rendezvous(settings, timeout_s, data)
    try:
        with ignoring_sigterm_on_failure(), rendezvous.heartbeat.reporting_failure():
            rendezvous.join()
            environment = port_store(
                rendezvous.host, rendezvous.port, rendezvous.own_address, rendezvous.sources
            )
            yield JoinedHosts(environment, rendezvous.heartbeat, rendezvous.connect)
            connection = rendezvous.connect_until_closed()
            rendezvous.heartbeat.await_all_ended()
    finally:
        rendezvous.close()
    rendezvous.await_closed(connection)


class _Rendezvous:
    """One host's part in the rendezvous, with one deadline for everything."""

    def __init__(self, settings: TrainSettings, timeout_s: float, data: str) -> None:
        assert settings.run.rdzv_endpoint is not None
        self._endpoint = Endpoint(settings.run.rdzv_endpoint)
        self.host, self.port = self._endpoint.host, self._endpoint.port
        """The address of the store; processes of torchrun find it during the rendezvous."""
        self.own_address = ""
        """This host's address towards host 0."""
        self.sources: list[str] | None = None
        """The addresses from which hosts connect to each other; None admits any."""
        self._filters_sources = settings.run.network is not Network.HOST
        self._listening: int | None = None
        """The descriptor at which the store listens, on host 0."""
        self._node_rank, self._num_hosts = settings.run.node_rank, settings.run.nnodes
        self._place = launcher_place(settings)
        self._silence_s = settings.run.silence
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._warn_at_s = time.monotonic() + _WARN_AFTER_S
        self._common = common_settings(settings, data)
        needs_gpus = settings.run.device is DeviceKind.CUDA and not settings.run.share_gpu
        self._own_gpus = LauncherGpus.of_this_process(settings) if needs_gpus else None
        self._token = secrets.token_hex(8)
        """On host 0 it identifies the run, elsewhere the host until it has joined."""
        self._store: StoreClient | None = None
        self.heartbeat = HostHeartbeat(
            lambda: self.connect(self._silence_s / 5),
            self._node_rank,
            self._num_hosts,
            self._silence_s,
        )

    def join(self) -> None:
        """Wait for all hosts, start the heartbeat, and compare settings and GPUs with them; unless
        --network is host, then limit connections to the run's hosts."""
        if self._node_rank == 0:
            self._serve_store()
        else:
            self._join_host_0()
        if self._own_gpus is not None:
            launchers = self._exchange("gpus", astuple(self._own_gpus), LauncherGpus.decode)
            check_gpus_distinct(launchers, self._node_rank)
        if self._filters_sources:
            self._admit_hosts_only()

    def connect(self, within_s: float) -> StoreClient:
        """Open a separate connection to the store, because calls on a shared one wait for each
        other. Raise RrfpError if the store cannot be reached or is that of another run."""
        if obstacle := obstacle_at(self.host, self.port, self._silence_s):
            raise RrfpError(obstacle.fact)
        store = self._open_store(within_s)
        if self._announcement(store)[0] != self._token:
            raise RrfpError("another run meets there by now")
        return store

    def close(self) -> None:
        """Wait a limited time until the others can know how this host has ended, then stop the
        heartbeat and close the connection. On host 0 this ends the store."""
        self.heartbeat.await_delivery()
        self.heartbeat.close()
        if self._store is not None:
            self._store.close()

    def connect_until_closed(self) -> socket.socket | None:
        """Open a connection that ends when host 0 closes the store; None on host 0 or if that
        fails."""
        if self._node_rank == 0:
            return None
        with suppress(OSError):
            return socket.create_connection((self.host, self.port), _CLOSING_S)
        return None

    def await_closed(self, connection: socket.socket | None) -> None:
        """Wait until host 0 has closed its store, up to 5 s, so that this host does not take it for
        the store of the next run: a race launches ranks several times. None: do not wait."""
        # Not by a call of the store: torch would print its own stack when the store has closed.
        if connection is not None:
            with connection, suppress(OSError):
                connection.recv(1)

    def _serve_store(self) -> None:
        """On host 0: serve the store, announce the run in it, and wait until all other hosts have
        joined. Raise UsageError if the endpoint is not an address of this host or cannot be
        listened at."""
        try:
            listening = self._listen()
            self.own_address, self.port = listening.getsockname()[:2]
            self.host = self.own_address
            self._listening = listening.detach()
            store = self._store = self._open_store(self._silence_s, self._listening)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise UsageError(
                    f"{self._endpoint.host} is no address of this host, which is host 0; start "
                    "host 0 there, or give this one another --node-rank"
                ) from None
            raise UsageError(
                f"the hosts cannot connect at {self._endpoint.given} ({first_line(str(error))}); "
                "give --rdzv-endpoint a free port of host 0 that the others can reach"
            ) from None
        store.set(_FIRST, json.dumps([self._token, self._common]))
        self.heartbeat.start()
        for host in range(1, self._num_hosts):
            while not self.heartbeat.has_joined(host):
                self._wait(host)
        store.set(_ALL_JOINED, "")

    def _join_host_0(self) -> None:
        """On another host: find the store, compare settings, claim the node rank, and wait until
        all have joined. Raise UsageError, which host 0 raises too, if the settings differ or the
        rank is taken."""
        self._find_store()
        self.own_address = own_address_for_reaching(self.host)
        store = self._store = self._open_store(self._silence_s)
        run_token, host_0 = self._announcement(store)
        try:
            check_common(host_0, self._node_rank, self._common)
            self._claim_node_rank(store)
        except UsageError as error:
            with suppress(RrfpError):  # nobody waits any more
                store.set(_REFUSED, str(error))
            raise
        self._token = run_token
        self.heartbeat.start()
        while store.find(_ALL_JOINED) is None:
            self._wait()

    def _admit_hosts_only(self) -> None:
        """Collect the addresses from which all hosts connect in `sources`; host 0 limits its
        store's port to them. A host may use a different address of its own towards each of the
        others."""
        addresses = self._exchange("address", self.own_address, text)
        own_sources = {own_address_for_reaching(address) for address in addresses} - {""}
        by_host = self._exchange("sources", sorted(own_sources), _decode_addresses)
        self.sources = sorted({source for of_host in by_host for source in of_host})
        if self._listening is not None:
            with socket.socket(fileno=os.dup(self._listening)) as listening:
                accept_only(listening, self.sources)

    def _exchange(self, name: str, own: object, decode: Callable[[object], T]) -> list[T]:
        """Publish a value under a name, wait for those of all hosts, and return them decoded, by
        host."""
        store = self._store
        assert store is not None
        store.set(f"rrfp/{name}/{self._node_rank}", json.dumps(own))
        values = []
        for host in range(self._num_hosts):
            key = f"rrfp/{name}/{host}"
            while (value := store.read(key, decode, f"host {host}")) is None:
                self._wait(host)
            values.append(value)
        return values

    def _claim_node_rank(self, store: StoreClient) -> None:
        """Claim this host's number in the store. Raise UsageError if another host has claimed it
        before."""
        own = f"{socket.gethostname()} (process {os.getpid()})"
        claimed = store.claim(f"rrfp/meeting/{self._node_rank}", f"{own} {self._token}")
        holder = printable(claimed.decode(errors="replace"))
        if holder != f"{own} {self._token}":
            raise UsageError(
                f"--node-rank {self._node_rank} is taken: {holder.rpartition(' ')[0]} came to "
                f"{self._endpoint.given} with it before {own}; give each host one of its own"
            )

    def _listen(self) -> socket.socket:
        """Open the listening socket of the run's store, on host 0: at the endpoint or, if
        torchrun's store occupies that, at a free port that is published there."""
        torchrun_store = self._torchrun_store()
        if torchrun_store is None:
            return self._endpoint.listen()
        return self._call_torch(torchrun_store.listen_and_publish)

    def _torchrun_store(self) -> TorchrunStore | None:
        """Connect to torchrun's store if it occupies the endpoint, else return None."""
        place = self._place
        if place is None or not place.serves_store or place.port != self.port:
            return None
        return self._call_torch(lambda: TorchrunStore(place))

    def _find_store(self) -> None:
        """Wait until host 0 serves its store, and set its address if torchrun's store has it. Raise
        UsageError if something else is there or the obstacle stays too long, and RrfpError at the
        deadline."""
        torchrun_store = self._torchrun_store()
        if torchrun_store is not None:
            while (address := self._call_torch(torchrun_store.published_address)) is None:
                self._wait(0)
            self.host, self.port = address
        since_s = time.monotonic()
        while obstacle := obstacle_at(self.host, self.port, self._silence_s):
            now_s = time.monotonic()
            if obstacle.timeout_s == math.inf:
                since_s = now_s
            elif now_s - since_s >= obstacle.timeout_s:
                raise UsageError(
                    f"the hosts cannot connect at {self._endpoint.given}: {obstacle.fact}; see "
                    "--rdzv-endpoint, and whether host 0 can be reached there"
                )
            self._wait(0)

    def _open_store(self, within_s: float, listening: int | None = None) -> StoreClient:
        """Connect to the run's store, or serve it if a listening descriptor is given. `within_s` is
        the timeout of later calls."""

        def open_tcp_store() -> Store:
            return TCPStore(
                self.host,
                self.port,
                is_master=listening is not None,
                timeout=timedelta(seconds=_ANSWER_S),
                wait_for_workers=False,
                master_listen_fd=listening,
            )

        return StoreClient(self._call_torch(open_tcp_store), f"{self.host}:{self.port}", within_s)

    def _announcement(self, store: StoreClient) -> tuple[str, dict[str, object]]:
        """Wait for host 0's announcement and return it: the run's token and the common settings.
        Raise UsageError if it does not come within 10 s."""
        deadline_s = time.monotonic() + _ANSWER_S
        while (found := store.read(_FIRST, _decode_announcement, "host 0")) is None:
            if time.monotonic() > deadline_s:
                raise UsageError(
                    f"a store listens at {self._endpoint.given}, and no host 0 of rrfp's has come "
                    "to it; give --rdzv-endpoint a port that no other job uses"
                )
            time.sleep(_POLL_S)
        return found

    def _call_torch(self, call: Callable[[], T]) -> T:
        """Call torch's store with a timeout of 10 s (NoAnswerError), and turn its DistErrors into
        RrfpError; other errors pass."""
        try:
            return call_with_timeout(call, _ANSWER_S, f"the store for {self._endpoint.given}")
        except DistError as error:
            raise RrfpError(
                f"the hosts cannot connect at {self._endpoint.given} ({first_line(str(error))}); "
                "see what host 0 says"
            ) from None

    def _wait(self, host: int | None = None) -> None:
        """Wait one polling interval for a host (None: any). Raise RrfpError at the deadline or if a
        host is lost, and UsageError if a host was refused. Warns once, after 10 s."""
        if error := self.heartbeat.lost():
            raise error
        if self._store is not None and (refused := self._store.find(_REFUSED)) is not None:
            raise UsageError(printable(refused.decode(errors="replace")))
        now_s = time.monotonic()
        kind = "host" if self._place is None else f"{self._place.by}'s process"
        missing = f"{kind} {host}" if host is not None else f"another {kind}"
        if now_s > self._deadline_s:
            advice = "see whether it has started, and what it says"
            if self._place is None and host is not None:
                advice = f"run the same command there with --node-rank {host}"
            raise RrfpError(
                f"{missing} did not come to {self._endpoint.given} within {self._timeout_s:g} s; "
                f"{advice}"
            )
        if now_s > self._warn_at_s:
            self._warn_at_s = math.inf
            _log.warning(
                "%s has not come to %s yet; this host waits for it up to %g s",
                missing,
                self._endpoint.given,
                self._timeout_s,
            )
        time.sleep(_POLL_S)


def _decode_announcement(value: object) -> tuple[str, dict[str, object]]:
    """Read host 0's announcement. Raise ValueError for anything else."""
    token, common = items(value, 2)
    return text(token), mapping(common)


def _decode_addresses(value: object) -> list[str]:
    """Read a list of IP addresses. Raise ValueError for anything else."""
    return [str(ipaddress.ip_address(text(each))) for each in items(value)]

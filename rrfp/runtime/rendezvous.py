"""The rendezvous of ranks: small values published in torch's store, and every wait bounded.

Any process that can write to the store can publish in any rank's name. So values are text or JSON
of one expected structure, never pickled objects, and anything else ends the run with an error.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import Store

from rrfp.errors import RrfpError, numbered
from rrfp.runtime import launchers as variables
from rrfp.runtime.device.interface import Device
from rrfp.runtime.protocols import Clock, PeerLostError, monotonic
from rrfp.strict_json import instance, integer, integers, items, member, parsed, text
from rrfp.trace.outcome import FaultOrigin, FoundBy
from rrfp.trace.records import RankInfo

T = TypeVar("T")

_EAGER_S = 0.002
_SHORTEST_SLEEP_S = 0.001
_LONGEST_SLEEP_S = 0.05
_NUM_ROUND_TRIPS = 20
_FAILED = "failed"
_NOTICE_S = 30.0
_ENDED = "rrfp/ended"
"""Prefix, in the job's store, of the ranks whose processes ended before their first step."""
_has_published = False
"""True once this process has published anything in a rendezvous."""

_log = logging.getLogger(__name__)


class Rendezvous:
    """One rank's view of the store, below a key prefix and with one deadline for all waits.

    A second rendezvous in the same job needs another prefix. A rank that fails before the
    rendezvous is over calls `fail`, so that no other rank waits for it.
    """

    def __init__(self, store: Store, prefix: str, rank: int, timeout_s: float) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + timeout_s
        self._num_notices = 0
        self.awaited: Sequence[int] = ()
        """All ranks that this one waits for, so that a log message can name all missing ones."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline_s - time.monotonic())

    def publish(self, name: str, value: str | bytes) -> None:
        """Publish a value to every rank, in place of an earlier one; after any of these
        `publish_early_end` does nothing. Raises RrfpError if the store fails."""
        global _has_published
        _has_published = True
        try:
            # torch declares str, but also takes bytes and returns them unchanged.
            self._store.set(self._key(name), value)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise _store_failed(error) from error

    def has(self, name: str) -> bool:
        """Return whether any rank has published a value under this name. Raises RrfpError if the
        store fails."""
        try:
            return bool(self._store.check([self._key(name)]))
        except RuntimeError as error:
            raise _store_failed(error) from error

    def wait(self, name: str, peer: int) -> bytes:
        """Wait for the value that rank `peer` publishes under this name, and return it. Raises
        PeerLostError at the deadline, or as soon as a rank has called `fail` or `peer` has ended
        without the value, and RrfpError if the store fails. A long wait is logged every 30 s, by
        one of the ranks that wait for the same peers.

        Polls, because Ctrl-C could not interrupt a call that blocks inside the store.
        """
        key = self._key(name)
        began_s = time.monotonic()
        sleep_s = _SHORTEST_SLEEP_S
        try:
            while not self._store.check([key]):
                self.raise_if_failed()
                self._raise_if_ended(peer, key)
                self._log_wait(name, peer)
                now_s = time.monotonic()
                if now_s >= self._deadline_s:
                    raise PeerLostError(
                        f"rank {self._rank} waited {_format_s(self._timeout_s)} for rank {peer},"
                        f" which has not published '{key}'; see whether rank {peer} has started",
                        FaultOrigin(FoundBy.LINK, rank=peer),
                    )
                if now_s - began_s > _EAGER_S:
                    time.sleep(min(sleep_s, self.remaining_s))
                    sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise _store_failed(error) from error

    def log_missing(self, missing: Sequence[int]) -> None:
        """Log a warning with the missing ranks if another 30 s since this rendezvous began have
        passed, unless another rank that misses the same ones has logged it."""
        waited_s = time.monotonic() - self._began_s
        if waited_s < _NOTICE_S * (self._num_notices + 1):
            return
        self._num_notices += 1
        key = self._key(f"notices/{missing}/{self._num_notices}")
        with suppress(RuntimeError):
            if self._store.compare_set(key, "", str(self._rank)) != str(self._rank).encode():
                return
        _log.warning(
            "%s %s not come to the first step after %s; it is given up after %s (--connect-s)",
            numbered("rank", missing),
            "has" if len(missing) == 1 else "have",
            _format_s(waited_s),
            _format_s(self._timeout_s),
        )

    def _log_wait(self, name: str, peer: int) -> None:
        """Log `peer` every 30 s, and, if the name is one that each rank publishes, the `awaited`
        ranks that have not published theirs either."""
        stem = name.removesuffix(f"/{peer}")
        if stem == name:
            self.log_missing([peer])
        elif time.monotonic() >= self._began_s + _NOTICE_S * (self._num_notices + 1):
            others = {rank for rank in self.awaited if not self.has(f"{stem}/{rank}")}
            self.log_missing(sorted(others | {peer}))

    def _raise_if_ended(self, peer: int, key: str) -> None:
        """Raise PeerLostError if a peer's process has published that it ended before its first step
        (`publish_early_end`), and has not published this key."""
        ended = f"{_ENDED}/{peer}"
        # What it published before it ended is still there.
        if self._store.check([ended]) and not self._store.check([key]):
            raise PeerLostError(
                f"rank {peer} has ended before its first step; see its own output for the cause",
                FaultOrigin(FoundBy.RANK, peer),
            )

    def wait_text(self, name: str, peer: int) -> str:
        """Wait for text that rank `peer` publishes under this name, and return it. Raises the
        errors of `wait`, and RrfpError if the value is not UTF-8."""
        return self._read(name, peer, self.wait(name, peer), bytes.decode)

    def wait_json(self, name: str, peer: int, decode: Callable[[object], T]) -> T:
        """Wait for JSON that rank `peer` publishes under this name, and return `decode` of it.

        `decode` raises ValueError for JSON of the wrong structure. Raises the errors of `wait`, and
        RrfpError naming the rank if the value cannot be read.
        """
        return self._read(name, peer, self.wait(name, peer), lambda data: decode(parsed(data)))

    def fail(self, sentence: str) -> None:
        """Publish that this rank has failed, and why, to every rank that waits below this prefix.
        Only the first rank to fail is kept. Never raises, so as not to mask this rank's own
        error."""
        with suppress(RuntimeError):
            failure = json.dumps({"rank": self._rank, "sentence": sentence})
            self._store.compare_set(self._key(_FAILED), "", failure)

    def raise_if_failed(self) -> None:
        """Raise PeerLostError, with the rank and its reason, if a rank has called `fail`, and
        RrfpError if the store fails or holds a report that cannot be read."""
        try:
            if not self._store.check([self._key(_FAILED)]):
                return
            data = bytes(self._store.get(self._key(_FAILED)))
        except RuntimeError as error:
            raise _store_failed(error) from error
        rank, sentence = self._read(_FAILED, None, data, _decode_failure)
        raise PeerLostError(
            f"rank {rank} failed while the ranks met: {sentence}", FaultOrigin(FoundBy.RANK, rank)
        )

    def _key(self, name: str) -> str:
        """Return the store's key for a name: the prefix and the name."""
        return f"{self._prefix}/{name}"

    def _read(self, name: str, peer: int | None, data: bytes, read: Callable[[bytes], T]) -> T:
        """Decode a published value by `read`. Raises RrfpError, with its key and rank, on
        ValueError."""
        try:
            return read(data)
        except ValueError as error:
            whose = "a rank" if peer is None else f"rank {peer}"
            raise RrfpError(
                f"what {whose} published as '{self._key(name)}' cannot be read ({error}); see"
                " whether every rank runs the same rrfp, and who else can write to the run's store"
            ) from None


def _decode_failure(data: bytes) -> tuple[int, str]:
    """Decode the rank and the sentence that `Rendezvous.fail` has published. Raises ValueError."""
    value = parsed(data)
    return integer(member(value, "rank")), text(member(value, "sentence"))


def default_store() -> Store:
    """Return the store that the ranks of this job share: that of torch's default process group.
    After a restart by torchrun on one node, keys get a prefix, because torchrun keeps the old
    values."""
    store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    # torchrun keeps its store when it restarts a job, with the values of the last start. Its
    # restart count may differ between nodes.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if start != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1":
        return dist.PrefixStore(f"start-{start}", store)
    return store


def publish_early_end() -> None:
    """Publish in the job's store that this process ends before its first step, so that no rank
    waits for it. Does nothing if it has published anything in a rendezvous, or torch.distributed is
    not initialized. Never raises."""
    with suppress(RuntimeError, ValueError):
        if not _has_published and dist.is_initialized():
            default_store().set(f"{_ENDED}/{dist.get_rank()}", "")


def count_rank(name: str) -> None:
    """Add this rank, once, to the ranks of this job that are counted under a name. Raises RrfpError
    if the store fails."""
    store, own = default_store(), f"{name}/{dist.get_rank()}"
    try:
        if not store.check([own]):
            store.set(own, "counted")
            store.add(name, 1)
    except RuntimeError as error:
        raise _store_failed(error) from error


def num_ranks_counted(name: str) -> int:
    """Return the number of ranks that `count_rank` has counted under a name so far. Raises
    RrfpError if the store fails."""
    try:
        return default_store().add(name, 0)
    except RuntimeError as error:
        raise _store_failed(error) from error


def _format_s(seconds: float) -> str:
    """Format a timeout with up to two significant digits below 10 s, else in whole seconds: the
    rest of a longer timeout is rarely a round number."""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _store_failed(error: RuntimeError) -> RrfpError:
    """Make, but not raise, the error for a store that does not answer."""
    lines = str(error).splitlines() or ["no reason given"]
    return RrfpError(
        f"the rendezvous store failed ({lines[0]}); see whether the process that hosts it, on the"
        " first node, still runs"
    )


def host_identity() -> str:
    """Return an identity of this host: its name and its boot ID (empty if it cannot be read), in
    case two hosts share a name. Processes with the same identity share one monotonic clock."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}"


def files_identity() -> str:
    """Return an identity of this process' view of the file system, from its host and mount
    namespace: only processes with equal views can connect by a Unix socket. Containers may share a
    host's name and network, but not its files."""
    mounts = ""
    with suppress(OSError):
        mounts = str(Path("/proc/self/ns/mnt").readlink())
    return f"{host_identity()}/{mounts}"


def exchange_hosts(
    store: Store, prefix: str, rank: int, num_ranks: int, *, timeout_s: float = 60.0
) -> tuple[str, ...]:
    """Publish this host's identity, and return that of every rank's host, by rank; all ranks call
    it. Raises PeerLostError for a rank that does not appear in time, or that fails before."""
    rendezvous = Rendezvous(store, prefix, rank, timeout_s)
    rendezvous.publish(f"host/{rank}", host_identity())
    rendezvous.awaited = range(num_ranks)
    return tuple(rendezvous.wait_text(f"host/{peer}", peer) for peer in range(num_ranks))


def reachable_address() -> str:
    """Return the address of this host that other hosts of the run can connect to.

    It is RRFP_ADDRESS if that is set. Otherwise it is the first of these that is not a loopback
    address: the one used to reach MASTER_ADDR, the one of the host's name, the one on the default
    route. Without any, it is a loopback address.
    """
    named = os.environ.get(variables.ADDRESS)
    if named:
        return named
    found = [
        own_address_for_reaching(os.environ.get("MASTER_ADDR", "")),
        _resolve(socket.gethostname()),
        # TEST-NET-1, never assigned: only the route is looked up, no packet is sent.
        own_address_for_reaching("192.0.2.1"),
    ]
    addresses = [address for address in found if address]
    for address in addresses:
        if not address.startswith("127.") and address != "::1":
            return address
    return addresses[0] if addresses else "127.0.0.1"


def _resolve(name: str) -> str:
    """Return the first address of a host name; empty if the name does not resolve."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def own_address_for_reaching(name: str) -> str:
    """Return the address that this host would use to reach `name`, without sending a packet to it;
    empty for an empty name, one that does not resolve, or without a route."""
    if not name:
        return ""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


class ClockOffset(NamedTuple):
    """Difference between two hosts' clocks: this host's monotonic time plus `offset_ns` is that of
    rank 0's host."""

    offset_ns: int
    error_ns: int
    """The largest possible error: half the shortest round trip; 0 on rank 0's host."""


def measure_clock_offset(
    store: Store,
    prefix: str,
    rank: int,
    hosts: Sequence[str],
    *,
    timeout_s: float = 60.0,
    clock: Clock = monotonic,
) -> ClockOffset:
    """Measure this host's monotonic clock against that of rank 0's host; all ranks call it.

    `hosts` is the host identity of every rank, by rank. On rank 0's host the result is 0. The first
    rank of each other host exchanges 20 pings with rank 0 through the store, of which the shortest
    round trip counts, and publishes the result to the other ranks of its host. Raises
    PeerLostError, naming the rank it waited for, at the time-out.
    """
    rendezvous = Rendezvous(store, prefix, rank, timeout_s)
    first_ranks = {host: hosts.index(host) for host in hosts if host != hosts[0]}
    if rank == 0:
        for peer in sorted(first_ranks.values()):
            for index in range(_NUM_ROUND_TRIPS):
                rendezvous.wait(f"ping/{peer}/{index}", peer)
                rendezvous.publish(f"pong/{peer}/{index}", str(clock()))
    if hosts[rank] == hosts[0]:
        return ClockOffset(0, 0)
    first_rank = first_ranks[hosts[rank]]
    if rank == first_rank:
        measured = _measure_round_trips(rendezvous, rank, clock)
        rendezvous.publish(f"offset/{rank}", json.dumps(measured))
        return measured
    return rendezvous.wait_json(
        f"offset/{first_rank}", first_rank, lambda value: ClockOffset(*integers(items(value, 2)))
    )


def _measure_round_trips(rendezvous: Rendezvous, rank: int, clock: Clock) -> ClockOffset:
    """Exchange 20 pings with rank 0, and return the offset by the shortest round trip."""
    best: ClockOffset | None = None
    for index in range(_NUM_ROUND_TRIPS):
        sent_ns = clock()
        rendezvous.publish(f"ping/{rank}/{index}", "")
        reference_ns = rendezvous.wait_json(f"pong/{rank}/{index}", 0, integer)
        received_ns = clock()
        # Rounded up, so that an odd round trip does not understate the error.
        error_ns = (received_ns - sent_ns + 1) // 2
        if best is None or error_ns < best.error_ns:
            best = ClockOffset(reference_ns - (sent_ns + received_ns) // 2, error_ns)
    assert best is not None
    return best


# Ranks publish who they are, with their clocks compared.


def publish_rank_info(
    store: Store, prefix: str, own: RankInfo, num_ranks: int, device: Device, *, timeout_s: float
) -> RankInfo:
    """Publish `own` with its clock's offset to rank 0's host and the largest error of its times,
    and return it; all ranks call it. Synchronizes the device's clock. Raises PeerLostError naming a
    rank that does not appear by the deadline, or that reports below the prefix that it has
    failed."""
    rank = own.rank
    rendezvous = Rendezvous(store, prefix, rank, timeout_s)
    hosts = exchange_hosts(store, prefix, rank, num_ranks, timeout_s=timeout_s)
    offset = measure_clock_offset(store, prefix, rank, hosts, timeout_s=rendezvous.remaining_s)
    device.synchronize_clocks()
    error_ns = offset.error_ns + device.clock_error_ns
    own = replace(own, clock_offset_ns=offset.offset_ns, clock_error_ns=error_ns)
    rendezvous.publish(f"info/{rank}", json.dumps(asdict(own)))
    return own


def wait_for_rank_infos(
    store: Store, prefix: str, rank: int, num_ranks: int, *, timeout_s: float
) -> list[RankInfo]:
    """Return the published information of all ranks, by rank. Raises PeerLostError naming a rank
    that has published none in time, and RrfpError naming one whose information cannot be read."""
    rendezvous = Rendezvous(store, prefix, rank, timeout_s)
    rendezvous.awaited = range(num_ranks)
    return [
        rendezvous.wait_json(f"info/{peer}", peer, partial(_decode_info, peer))
        for peer in range(num_ranks)
    ]


def _decode_info(rank: int, value: object) -> RankInfo:
    """Decode the information that this rank has published. Raises ValueError for another structure
    or another rank's."""
    info = instance(RankInfo, value)
    if info.rank != rank:
        raise ValueError(f"it belongs to rank {info.rank}")
    return info

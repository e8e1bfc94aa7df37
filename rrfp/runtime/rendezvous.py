"""How ranks find each other: small facts published in torch's store, and every wait bounded."""

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch.distributed import Store

from rrfp.errors import RrfpError
from rrfp.runtime.protocols import Clock, PeerLostError, monotonic

_EAGER_S = 0.002
_SHORTEST_SLEEP_S = 0.001
_LONGEST_SLEEP_S = 0.05
_NUM_ROUND_TRIPS = 20


class Rendezvous:
    """One rank's view of the store, below a key prefix of its own and with one deadline for all.

    A prefix serves one meeting: a second one in the same job takes another prefix.
    """

    def __init__(self, store: Store, prefix: str, rank: int, timeout_s: float) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline_s - time.monotonic())

    def publish(self, name: str, value: str | bytes) -> None:
        """Make a value known to every rank."""
        try:
            # torch declares str; bytes are taken too and come back unchanged.
            self._store.set(f"{self._prefix}/{name}", value)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise _store_failed(error) from error

    def wait(self, name: str, peer: int) -> bytes:
        """The value that rank `peer` publishes under this name; raises PeerLostError when it has
        not done so by the deadline.

        Asks instead of blocking inside the store, which could not be interrupted by Ctrl-C.
        """
        key = f"{self._prefix}/{name}"
        began_s = time.monotonic()
        sleep_s = _SHORTEST_SLEEP_S
        try:
            while not self._store.check([key]):
                now_s = time.monotonic()
                if now_s >= self._deadline_s:
                    raise PeerLostError(
                        f"rank {self._rank} waited {self._timeout_s:g} s for rank {peer}, which"
                        f" has not published '{key}'; see whether rank {peer} has started"
                    )
                if now_s - began_s > _EAGER_S:
                    time.sleep(min(sleep_s, self.remaining_s))
                    sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise _store_failed(error) from error


def _store_failed(error: RuntimeError) -> RrfpError:
    lines = str(error).splitlines() or ["no reason given"]
    return RrfpError(
        f"the rendezvous store failed ({lines[0]}); see whether the process that hosts it, on the"
        " first node, still runs"
    )


def host_identity() -> str:
    """Which host this is: its name and the identity of its boot, so that equal names do not fool.

    Processes with the same identity share one monotonic clock.
    """
    return f"{socket.gethostname()}/{_boot_identity()}"


def _boot_identity() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def files_identity() -> str:
    """Which file system view this process has: only equal ones can meet at a Unix socket.

    Containers may share a host's name and network and still not see each other's files.
    """
    mounts = ""
    with suppress(OSError):
        mounts = str(Path("/proc/self/ns/mnt").readlink())
    return f"{host_identity()}/{mounts}"


def exchange_hosts(
    store: Store, prefix: str, rank: int, num_ranks: int, *, timeout_s: float = 60.0
) -> tuple[str, ...]:
    """The host identity of every rank, by rank; all ranks call it."""
    rendezvous = Rendezvous(store, prefix, rank, timeout_s)
    rendezvous.publish(f"host/{rank}", host_identity())
    return tuple(rendezvous.wait(f"host/{peer}", peer).decode() for peer in range(num_ranks))


def reachable_address() -> str:
    """An address of this host that other hosts can connect to.

    The first that is not a loopback address of: the one used on the way to MASTER_ADDR, that of
    the host's name, the one used on the default route; a loopback address when there is no other.
    """
    found = [
        _own_address_towards(os.environ.get("MASTER_ADDR", "")),
        _resolve(socket.gethostname()),
        # TEST-NET-1: never assigned; only the route is looked up, no packet leaves.
        _own_address_towards("192.0.2.1"),
    ]
    addresses = [address for address in found if address]
    for address in addresses:
        if not address.startswith("127.") and address != "::1":
            return address
    return addresses[0] if addresses else "127.0.0.1"


def _resolve(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _own_address_towards(name: str) -> str:
    """The address this host would use to reach `name`; empty when there is no way."""
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
    """Add `offset_ns` to this host's monotonic time to get that of rank 0's host."""

    offset_ns: int
    error_ns: int
    """At most so far off: half the shortest round trip; 0 on rank 0's host."""


def clock_offset(
    store: Store,
    prefix: str,
    rank: int,
    hosts: Sequence[str],
    *,
    timeout_s: float = 60.0,
    clock: Clock = monotonic,
) -> ClockOffset:
    """Measure this host's monotonic clock against that of rank 0's host; all ranks call it.

    `hosts` is the host identity of every rank, by rank. The first rank of each other host plays
    ping-pong with rank 0 through the store; the shortest round trip counts. Raises PeerLostError
    naming the rank waited for when the time-out passes.
    """
    rendezvous = Rendezvous(store, prefix, rank, timeout_s)
    speakers = {host: hosts.index(host) for host in hosts if host != hosts[0]}
    if rank == 0:
        for speaker in sorted(speakers.values()):
            for index in range(_NUM_ROUND_TRIPS):
                rendezvous.wait(f"ping/{speaker}/{index}", speaker)
                rendezvous.publish(f"pong/{speaker}/{index}", str(clock()))
    if hosts[rank] == hosts[0]:
        return ClockOffset(0, 0)
    speaker = speakers[hosts[rank]]
    if rank == speaker:
        measured = _play_ping_pong(rendezvous, speaker, clock)
        rendezvous.publish(f"offset/{speaker}", json.dumps(measured))
        return measured
    return ClockOffset(*json.loads(rendezvous.wait(f"offset/{speaker}", speaker)))


def _play_ping_pong(rendezvous: Rendezvous, speaker: int, clock: Clock) -> ClockOffset:
    best: ClockOffset | None = None
    for index in range(_NUM_ROUND_TRIPS):
        sent_ns = clock()
        rendezvous.publish(f"ping/{speaker}/{index}", "")
        reference_ns = int(rendezvous.wait(f"pong/{speaker}/{index}", 0))
        received_ns = clock()
        # Rounded up, so that an odd round trip does not state too small an error.
        error_ns = (received_ns - sent_ns + 1) // 2
        if best is None or error_ns < best.error_ns:
            best = ClockOffset(reference_ns - (sent_ns + received_ns) // 2, error_ns)
    assert best is not None
    return best

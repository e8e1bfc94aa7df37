"""The rendezvous address: host 0 listens there, and the other hosts probe it.

torch's own client waits indefinitely for the answer of a server that is no store, and prints a C++
stack if nobody answers. So Python probes first, with the first two messages of torch's client.
"""

import ipaddress
import math
import secrets
import socket
from dataclasses import dataclass

from rrfp.errors import UsageError
from rrfp.runtime import launchers as variables
from rrfp.runtime.launchers import LaunchPlace, find_place
from rrfp.train.launch.store import NoAnswerError, call_with_timeout
from rrfp.train.settings import TrainSettings

# Several `rrfp train` processes started by torchrun or srun count as the hosts of one run. Each
# launches its share of the ranks (one, if there are as many processes as ranks), so a rank keeps
# the cores and GPUs that its process was given.


def with_launcher_hosts(settings: TrainSettings) -> TrainSettings:
    """Return these settings with `nnodes`, `node_rank` and, unless given, `rdzv_endpoint` from the
    environment of torchrun or srun, so that each of their processes counts as a host; unchanged if
    the settings name hosts or there is at most one process. Raise UsageError if the processes do
    not divide the ranks."""
    place = None if settings.run.nnodes > 1 else find_place()
    if place is None or place.count == 1:
        return settings
    num_ranks = settings.layout.world_size
    if num_ranks % place.count:
        raise UsageError(
            f"{place.by} has started {place.count} processes, which cannot share {num_ranks} ranks "
            "evenly; start one a rank, or one a host"
        )
    host = variables.LOOPBACK if place.is_one_host else place.host
    shown = f"[{host}]" if ":" in host else host
    return settings.changed(
        nnodes=place.count,
        node_rank=place.index,
        rdzv_endpoint=settings.run.rdzv_endpoint or f"{shown}:{place.port}",
    )


def host_ranks(settings: TrainSettings, node_rank: int) -> range:
    """Return the global ranks that the launcher with this number starts."""
    num_own = settings.layout.world_size // settings.run.nnodes
    return range(node_rank * num_own, (node_rank + 1) * num_own)


def local_ranks(settings: TrainSettings) -> range:
    """Return the local numbers of this process' ranks, which begin above 0 if other processes on
    this host come first."""
    num_own = len(host_ranks(settings, settings.run.node_rank))
    place = launcher_place(settings)
    first = 0 if place is None else place.local_index * num_own
    return range(first, first + num_own)


def launcher_place(settings: TrainSettings) -> LaunchPlace | None:
    """Return this process' place in the torchrun or srun job that `with_launcher_hosts` used; None
    if the user named the hosts or there is one."""
    place = None if settings.run.nnodes == 1 else find_place()
    if place is None or (place.count, place.index) != (settings.run.nnodes, settings.run.node_rank):
        return None
    return place


_HELLO = b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\x0d"
"""The first bytes of torch's client: its magic number, and a request to echo the next 4 bytes."""
_NONCE_BYTES = 4
_PROBE_S = 5.0
_SHOWN_BYTES = 40


@dataclass(frozen=True, slots=True)
class Endpoint:
    """HOST:PORT as the user gave it, with an IPv6 address in brackets."""

    given: str

    @property
    def host(self) -> str:
        """The part before the port, without the brackets of an IPv6 address."""
        return self.given.rpartition(":")[0].removeprefix("[").removesuffix("]")

    @property
    def port(self) -> int:
        """The port, as a number."""
        return int(self.given.rpartition(":")[2])

    def listen(self) -> socket.socket:
        """Listen at the endpoint, on host 0, and return the socket. Raise OSError, and UsageError
        for a wildcard address and a name that means only loopback."""
        family, address = self._resolve()
        return socket.create_server((address, self.port), family=family)

    def _resolve(self) -> tuple[socket.AddressFamily, str]:
        """Resolve the host to an address of this host to listen at; for a name except localhost,
        prefer one that is not loopback. Raise UsageError for a wildcard such as 0.0.0.0 and for
        such a name that means only loopback, and OSError for an unknown name."""
        found = [
            (family, str(address[0]))
            for family, _, _, _, address in socket.getaddrinfo(
                self.host, None, type=socket.SOCK_STREAM
            )
        ]
        is_name = self.host not in ("localhost", *(address for _, address in found))
        reachable = [each for each in found if not ipaddress.ip_address(each[1]).is_loopback]
        family, address = (reachable or found)[0] if is_name else found[0]
        if ipaddress.ip_address(address).is_unspecified:
            raise UsageError(
                f"--rdzv-endpoint is '{self.given}', which stands for every address of host 0; "
                "name the one at which the other hosts reach it"
            )
        if is_name and not reachable:
            raise UsageError(
                f"--rdzv-endpoint is '{self.given}', and on host 0 itself that name means "
                f"{address}, where no other host reaches it; give the address instead of the name"
            )
        return family, address


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why a probe found no store."""

    fact: str
    timeout_s: float
    """How long to wait for it to go away."""


def obstacle_at(host: str, port: int, silence_s: float) -> Obstacle | None:
    """Probe for a torch store at this address, on all addresses of a name; None if one answers,
    else the obstacle that may be waited for the longest. A broken network or an unknown name may
    recover within `silence_s` seconds, and host 0 may still start where nobody listens."""
    try:
        found = call_with_timeout(
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), _PROBE_S, "DNS"
        )
    except (OSError, NoAnswerError):
        return Obstacle(f"the name '{host}' is not known here", silence_s)
    obstacles = []
    for family, _, _, _, address in found:
        obstacle = _obstacle_at_address(family, address, silence_s)
        if obstacle is None:
            return None
        obstacles.append(obstacle)
    # Where nobody listens, host 0 may still start.
    return max(obstacles, key=lambda obstacle: obstacle.timeout_s)


def _obstacle_at_address(
    family: socket.AddressFamily, address: tuple[object, ...], silence_s: float
) -> Obstacle | None:
    """Probe for a torch store at one address, with the first messages of torch's client; None if it
    answers as a store does. Waits up to 5 s for each answer."""
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PROBE_S)
        try:
            connection.connect(address)
        except ConnectionRefusedError:
            return Obstacle("nobody listens there yet", math.inf)
        except OSError as error:
            return Obstacle(f"nothing answers at {address[0]} ({error})", silence_s)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            connection.sendall(_HELLO + nonce)
            answer = connection.recv(_SHOWN_BYTES)
        except TimeoutError:
            return Obstacle("something listens there and says nothing", silence_s)
        except OSError:
            answer = b""
    if answer == nonce:
        return None
    if not answer:
        # A store that is just closing does this too, and a port forwarder without a target.
        return Obstacle("something listens there and closes every connection", silence_s)
    return Obstacle(f"something else listens there, which answers {answer!r}", 0)

"""The one address where hosts meet: where host 0 listens, and what others find there.

torch's own client waits for ever for the answer of a server that is no store, and shows a stack of
C++ where nobody answers. So Python looks first, with the two messages that torch's client begins
with.
"""

import ipaddress
import math
import secrets
import socket
from dataclasses import dataclass

from rrfp.errors import UsageError
from rrfp.runtime import launchers as variables
from rrfp.runtime.launchers import LaunchPlace, find_place
from rrfp.train.launch.store import NoAnswerError, answer_of
from rrfp.train.settings import TrainSettings

# The hosts of a run, where `rrfp train` itself is one of several processes of torchrun or srun.
#
# Each of them launches its share of the ranks: one, if there are as many processes as ranks. So a
# rank keeps the cores and the GPUs that its process was given, whatever has started that.


def among_started(settings: TrainSettings) -> TrainSettings:
    """The settings with the hosts that this process' environment tells; unchanged if they name
    their hosts themselves. Raises UsageError for an environment that does not fit."""
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


def local_ranks(settings: TrainSettings) -> range:
    """This process' ranks by their numbers on the host, on which others may have started some,
    too."""
    num_own = settings.layout.world_size // settings.run.nnodes
    place = place_of(settings)
    first = 0 if place is None else place.local_index * num_own
    return range(first, first + num_own)


def place_of(settings: TrainSettings) -> LaunchPlace | None:
    """What `among_started` took the hosts from; None if they stand for themselves."""
    place = None if settings.run.nnodes == 1 else find_place()
    is_it = place is not None and (place.count, place.index) == (
        settings.run.nnodes,
        settings.run.node_rank,
    )
    return place if is_it else None


_HELLO = b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\x0d"
"""What torch's client says first: that it is one, and that it wants the next four bytes back."""
_NONCE_BYTES = 4
_TRY_S = 5.0
_SHOWN_BYTES = 40


@dataclass(frozen=True, slots=True)
class Endpoint:
    """HOST:PORT as the user gives it; an IPv6 address stands in brackets."""

    given: str

    @property
    def host(self) -> str:
        return self.given.rpartition(":")[0].removeprefix("[").removesuffix("]")

    @property
    def port(self) -> int:
        return int(self.given.rpartition(":")[2])

    def listen(self) -> socket.socket:
        """A socket at the endpoint's one address, on host 0. Raises OSError, and UsageError for an
        address where the others cannot reach it."""
        family, address = self._own_address()
        return socket.create_server((address, self.port), family=family)

    def _own_address(self) -> tuple[socket.AddressFamily, str]:
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
    """Why no store is found somewhere."""

    fact: str
    timeout_s: float
    """How long it may stay before there is no use in waiting."""


def obstacle_at(host: str, port: int, silence_s: float) -> Obstacle | None:
    """What keeps this host from a store at that place; None if there is one. A name may become
    known, and a network come back, within `silence_s`."""
    try:
        found = answer_of(
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), _TRY_S, "DNS"
        )
    except (OSError, NoAnswerError):
        return Obstacle(f"the name '{host}' is not known here", silence_s)
    obstacles = []
    for family, _, _, _, address in found:
        obstacle = _obstacle_at_address(family, address, silence_s)
        if obstacle is None:
            return None
        obstacles.append(obstacle)
    # Host 0 may still come to listen at the one where nobody does.
    return max(obstacles, key=lambda obstacle: obstacle.timeout_s)


def _obstacle_at_address(
    family: socket.AddressFamily, address: tuple[object, ...], silence_s: float
) -> Obstacle | None:
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TRY_S)
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
        # A store that is just closing does so, too, and whoever forwards a port to nobody.
        return Obstacle("something listens there and closes every connection", silence_s)
    return Obstacle(f"something else listens there, which answers {answer!r}", 0)

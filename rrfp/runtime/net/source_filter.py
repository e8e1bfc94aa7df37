"""Filters of a listening socket, by the source address of each packet, in the kernel.

A filter (socket(7), SO_ATTACH_FILTER) drops packets of other hosts before a connection exists. Such
a host takes neither a file descriptor nor memory, and does not even learn that a process listens.
Existing connections are not affected; later ones inherit the filter.

Some kernels demand CAP_NET_ADMIN for a filter on a TCP socket. Where this process may not attach
one, these functions do nothing, and `filter_refusal` returns the reason.
"""

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator
from functools import cache
from typing import TypeVar

from rrfp.errors import UsageError
from rrfp.runtime import launchers as variables

_ATTACH = 26
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _AND = 0x30, 0x20, 0x74, 0x54
_JUMP, _IF_EQUAL, _RETURN = 0x05, 0x15, 0x06
_IP_HEADER = 0xFFF00000
"""Address of the packet's IP header in a filter program."""
_SOURCE_OFFSET = {4: 12, 6: 8}
"""Offset of the source's address in the header, by IP version."""
_MAX_NETWORKS = 64
"""Old kernels give a socket's filters 20 KiB."""
_PASS, _DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)

Instruction = tuple[int, int, int, int]
N = TypeVar("N", ipaddress.IPv4Network, ipaddress.IPv6Network)


@cache
def filter_refusal() -> str:
    """Return why the kernel refuses this process filters on TCP sockets; empty if it permits them.
    Tries it on a new socket, once for each process."""
    with socket.socket() as tried:
        try:
            _attach(tried, [_PASS])
        except OSError as error:
            return f"setsockopt(SO_ATTACH_FILTER): {error.strerror}"
    return ""


def accept_only(listening: socket.socket, sources: Collection[str] | None) -> None:
    """Accept connections only from these addresses or networks, and beyond 64 of them also from
    wider networks around them; None: from any. Replaces an earlier filter; does nothing where the
    kernel refuses filters. Raises ValueError for anything else, and OSError."""
    if not filter_refusal():
        _attach(listening, [_PASS] if sources is None else [*_program(sources)])


def accept_nobody(listening: socket.socket) -> None:
    """Accept no connection until `accept_only`; does nothing where the kernel refuses filters. May
    raise OSError."""
    if not filter_refusal():
        _attach(listening, [_DROP])


def run_host_addresses() -> tuple[str, ...] | None:
    """Return the addresses of the run's hosts, from RRFP_SOURCES; None if the launcher did not set
    it. Raises UsageError if it is empty or contains anything else."""
    value = os.environ.get(variables.SOURCES)
    if value is None:
        return None
    sources = tuple(value.split(","))
    try:
        _networks(sources)
    except ValueError:
        raise UsageError(
            f"{variables.SOURCES} is '{value[:40]}', and rrfp sets it to addresses of hosts, "
            "separated by commas; unset it, or see who else has set it"
        ) from None
    return sources


def _program(sources: Collection[str]) -> Iterator[Instruction]:
    """Yield the instructions of a filter that passes packets from these addresses or networks
    (widened beyond 64 of an IP version), and drops all others. A zone, such as `%eth0`, is ignored.
    Raises ValueError for anything else."""
    addresses = _networks(sources)
    old = _summarize([each for each in addresses if isinstance(each, ipaddress.IPv4Network)])
    new = _summarize([each for each in addresses if isinstance(each, ipaddress.IPv6Network)])
    for version, networks in ((4, old), (6, new)):
        tests = [*_tests(networks), _DROP]
        yield _LOAD_BYTE, 0, 0, _IP_HEADER
        yield _SHIFT_RIGHT, 0, 0, 4
        yield _IF_EQUAL, 1, 0, version
        yield _JUMP, 0, 0, len(tests)
        yield from tests
    yield _DROP


def _networks(sources: Collection[str]) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Decode these addresses or networks, without zones. Raises ValueError for anything else."""
    return [ipaddress.ip_network(each.partition("%")[0]) for each in sources]


def _summarize(networks: Collection[N]) -> list[N]:
    """Return at most 64 networks that contain all of these, which are of one IP version: the same
    addresses, or more of them where that is too many networks."""
    few: list[N] = list(ipaddress.collapse_addresses(networks))
    while len(few) > _MAX_NETWORKS:
        few = list(ipaddress.collapse_addresses([each.supernet() for each in few]))
    return few


def _tests(
    networks: Collection[ipaddress.IPv4Network] | Collection[ipaddress.IPv6Network],
) -> Iterator[Instruction]:
    """Yield instructions that pass a packet whose source is in one of these networks, all of one IP
    version; for other packets the next instruction follows."""
    for network in networks:
        addresses, masks = _words(network.network_address), _words(network.netmask)
        for place, (address, mask) in enumerate(zip(addresses, masks, strict=True)):
            # If a word differs, jump over the remaining words and the verdict.
            skipped = 3 * (len(masks) - 1 - place) + 1
            yield _LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE_OFFSET[network.version] + 4 * place
            yield _AND, 0, 0, mask
            yield _IF_EQUAL, 0, skipped, address
        yield _PASS


def _words(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, ...]:
    """Return an address as 32-bit words: one for IPv4, four for IPv6."""
    return struct.unpack(f">{len(address.packed) // 4}I", address.packed)


def _attach(listening: socket.socket, program: Collection[Instruction]) -> None:
    """Attach a filter program to the socket, in place of an earlier one. Raises OSError if the
    kernel refuses."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    option = struct.pack("HP", len(program), ctypes.addressof(code))
    listening.setsockopt(socket.SOL_SOCKET, _ATTACH, option)

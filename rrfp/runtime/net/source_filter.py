"""Who may connect to a port: asked of each packet by the kernel, before a connection exists.

A filter on a listening socket (socket(7), SO_ATTACH_FILTER) drops what a stranger sends, so that he
takes neither a file descriptor nor memory, and learns not even that somebody listens. Connections
that were made before stay as they are; later ones inherit the filter that let them in.

Some kernels demand CAP_NET_ADMIN for a filter on a TCP socket. Where this process may not attach
one, these functions do nothing, and `filter_refusal` says why.
"""

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator
from functools import cache
from typing import TypeVar

from rrfp.runtime import launchers as variables

_ATTACH = 26
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _AND = 0x30, 0x20, 0x74, 0x54
_JUMP, _IF_EQUAL, _RETURN = 0x05, 0x15, 0x06
_IP_HEADER = 0xFFF00000
"""Where a filter finds the header of the packet's IP."""
_SOURCE_IN = {4: 12, 6: 8}
"""The place of the source's address in the header of either version."""
_MOST_NETWORKS = 64
"""Old kernels give a socket's filters 20 KiB."""
_PASS, _DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)

Instruction = tuple[int, int, int, int]
N = TypeVar("N", ipaddress.IPv4Network, ipaddress.IPv6Network)


@cache
def filter_refusal() -> str:
    """Say why the kernel refuses this process filters on TCP sockets; empty if it permits them."""
    with socket.socket() as tried:
        try:
            _attach(tried, [_PASS])
        except OSError as error:
            return f"setsockopt(SO_ATTACH_FILTER): {error.strerror}"
    return ""


def let_in(listening: socket.socket, sources: Collection[str] | None) -> None:
    """Let in who comes from one of these addresses, or anybody. May raise OSError."""
    if not filter_refusal():
        _attach(listening, [_PASS] if sources is None else [*_program(sources)])


def let_in_nobody(listening: socket.socket) -> None:
    """Let in nobody, until `let_in`. May raise OSError."""
    if not filter_refusal():
        _attach(listening, [_DROP])


def named_sources() -> tuple[str, ...] | None:
    """The addresses of the run's hosts, if the launcher has named them."""
    named = os.environ.get(variables.SOURCES)
    return None if named is None else tuple(named.split(","))


def _program(sources: Collection[str]) -> Iterator[Instruction]:
    addresses = [ipaddress.ip_network(each.partition("%")[0]) for each in sources]
    old = _few([each for each in addresses if isinstance(each, ipaddress.IPv4Network)])
    new = _few([each for each in addresses if isinstance(each, ipaddress.IPv6Network)])
    for version, networks in ((4, old), (6, new)):
        tests = [*_tests(networks), _DROP]
        yield _LOAD_BYTE, 0, 0, _IP_HEADER
        yield _SHIFT_RIGHT, 0, 0, 4
        yield _IF_EQUAL, 1, 0, version
        yield _JUMP, 0, 0, len(tests)
        yield from tests
    yield _DROP


def _few(networks: Collection[N]) -> list[N]:
    """As few networks of one version as hold these: the same addresses, or some more where these
    are too many for a filter."""
    few: list[N] = list(ipaddress.collapse_addresses(networks))
    while len(few) > _MOST_NETWORKS:
        few = list(ipaddress.collapse_addresses([each.supernet() for each in few]))
    return few


def _tests(
    networks: Collection[ipaddress.IPv4Network] | Collection[ipaddress.IPv6Network],
) -> Iterator[Instruction]:
    for network in networks:
        addresses, masks = _words(network.network_address), _words(network.netmask)
        for place, (address, mask) in enumerate(zip(addresses, masks, strict=True)):
            # On to the next network, behind the words that are left and the verdict.
            behind = 3 * (len(masks) - 1 - place) + 1
            yield _LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE_IN[network.version] + 4 * place
            yield _AND, 0, 0, mask
            yield _IF_EQUAL, 0, behind, address
        yield _PASS


def _words(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, ...]:
    return struct.unpack(f">{len(address.packed) // 4}I", address.packed)


def _attach(listening: socket.socket, program: Collection[Instruction]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    told = struct.pack("HP", len(program), ctypes.addressof(code))
    listening.setsockopt(socket.SOL_SOCKET, _ATTACH, told)

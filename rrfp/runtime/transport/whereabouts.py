"""Where a rank listens, as it tells its sources."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from rrfp.runtime.decoding import integer, member, text
from rrfp.runtime.planes.names import TransportName
from rrfp.runtime.transport.handshake import SECRET_BYTES
from rrfp.runtime.transport.tls import FINGERPRINT_BYTES


@dataclass(frozen=True, slots=True)
class Port:
    """A TCP port that a rank listens at."""

    host: str
    port: int
    secret: bytes
    fingerprint: bytes | None = None
    """Of the certificate that it shows; None: it speaks no TLS."""

    @property
    def shown(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Where:
    """What a peer must know to dial a rank, or to knock."""

    directory: str | None
    """Where its Unix socket is, with the secret; None: it has none."""
    tcp: Port | None
    transport: TransportName = TransportName.INLINE
    """What is to carry tensors, as this rank was asked."""

    def to_json(self) -> str:
        values = asdict(self)
        if self.tcp is not None:
            values["tcp"]["secret"] = self.tcp.secret.hex()
            shown = self.tcp.fingerprint
            values["tcp"]["fingerprint"] = None if shown is None else shown.hex()
        return json.dumps(values)

    @classmethod
    def decode(cls, value: object) -> Self:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        directory, tcp = member(value, "directory"), member(value, "tcp")
        return cls(
            None if directory is None else _plain_path(text(directory)),
            None if tcp is None else _port(tcp),
            TransportName(text(member(value, "transport"))),
        )


def _plain_path(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError("its directory is not an absolute path")
    return path


def _port(value: object) -> Port:
    port = integer(member(value, "port"))
    secret = bytes.fromhex(text(member(value, "secret")))
    shown = member(value, "fingerprint")
    fingerprint = None if shown is None else bytes.fromhex(text(shown))
    if not 0 < port < 2**16 or len(secret) != SECRET_BYTES:
        raise ValueError("its port or its secret is invalid")
    if fingerprint is not None and len(fingerprint) != FINGERPRINT_BYTES:
        raise ValueError("its fingerprint is invalid")
    return Port(text(member(value, "host")), port, secret, fingerprint)

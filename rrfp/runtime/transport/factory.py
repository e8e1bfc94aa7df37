"""Which transport carries a rank's messages: the one place where a transport is registered."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch
from torch.distributed import Store

from rrfp.errors import UsageError
from rrfp.runtime.delays import Delays
from rrfp.runtime.device.cpu import CPU
from rrfp.runtime.device.cuda import CudaDevice
from rrfp.runtime.device.device import Device
from rrfp.runtime.planes.names import TransportName
from rrfp.runtime.planes.rank_planes import RankPlanes
from rrfp.runtime.protocols import Inbox, Transport
from rrfp.runtime.transport.socket_transport import SocketTransport
from rrfp.trace.records import Record


class TransportMaker(Protocol):
    """Makes a transport that is not open yet. `SocketTransport` says what the arguments mean."""

    def __call__(
        self,
        rank: int,
        store: Store,
        sends_to: Collection[int],
        receives_from: Collection[int],
        inbox: Inbox,
        *,
        num_credits: int,
        prefix: str,
        record: Callable[[Record], None] | None,
        connect_s: float,
        silence_s: float,
        delays: Delays | None,
        planes: RankPlanes | None,
        tls: bool,
    ) -> Transport: ...


TRANSPORTS: Mapping[str, TransportMaker] = {
    "cpu": SocketTransport,
    "cuda": SocketTransport,
}
"""By the type of the device on which a message's tensors lie; a GPU's go by a data plane. Where a
peer is, each transport asks when it opens, link by link, for a rank can have peers on its own host
and on others: the sockets take a Unix socket or a TCP port."""


DEVICES: Mapping[str, Callable[[torch.device], Device]] = {
    "cpu": lambda _: CPU,
    "cuda": CudaDevice,
}
"""What stands for a device of this type, whatever lies on it."""


def device_at(device: torch.device) -> Device:
    """The runtime's device where tensors lie on this one of torch's. Raises UsageError for one that
    is not there, or of a type that nothing serves."""
    if device.type not in DEVICES:
        raise _unserved(device)
    return DEVICES[device.type](device)


def data_planes(device: torch.device, asked: TransportName, outbox_mb: int) -> RankPlanes:
    """What carries large messages, and those of a device, as a user asked for it. Raises UsageError
    for what does not go together, or is not there."""
    return RankPlanes(device_at(device), asked, outbox_mb * 2**20)


def transport_maker(device: torch.device) -> TransportMaker:
    """What makes transports for tensors on this device. Raises UsageError for a device that none
    serves."""
    if device.type not in TRANSPORTS:
        raise _unserved(device)
    return TRANSPORTS[device.type]


def _unserved(device: torch.device) -> UsageError:
    served = " and ".join(name.upper() for name in TRANSPORTS)
    return UsageError(
        f"the model is on {device} and messages carry {served} tensors only; there is no"
        " transport for other devices in this version"
    )

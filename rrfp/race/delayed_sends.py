"""Sends of torch.distributed that leave only when their modelled time has passed.

A directed link carries one message at a time, in the order in which they were issued, while the
rank goes on. Each link has a thread that sleeps for a message's time and then sends it; `close`
joins it. Waiting for a send includes waiting for its delay.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from rrfp.runtime.pace import sleep_until
from rrfp.runtime.protocols import monotonic

Batch = Callable[..., list[Any]]
"""Starts sends and receives, and returns their handles to wait on."""


class DelayedSends:
    """The outgoing links of one rank."""

    def __init__(self) -> None:
        self._times_ns: dict[int, int] = {}
        """How long a message takes, by the id of its send, which has not begun."""
        self._links: dict[int, ThreadPoolExecutor] = {}

    def hold_back(self, sends: Sequence[dist.P2POp], message_ns: int) -> None:
        """Delay these sends by `message_ns`, once a `batch` of this object starts them."""
        if message_ns:
            self._times_ns.update((id(send), message_ns) for send in sends)

    def batch(self, original: Batch) -> Batch:
        """A replacement for torch's `_batch_p2p` that delays the sends that were held back."""

        def batch(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:
            if not self._times_ns and not self._links:
                return original(p2p_ops, desc=desc)
            return [self._start(op, original) for op in p2p_ops]

        return batch

    def close(self) -> None:
        """Wait for all sends, and end the links' threads."""
        for link in self._links.values():
            link.shutdown()
        self._links.clear()

    def _start(self, op: dist.P2POp, original: Batch) -> Any:
        message_ns = self._times_ns.pop(id(op), 0)
        if op.op is not dist.isend or not (message_ns or op.peer in self._links):
            (work,) = original([op])
            return work
        if op.peer not in self._links:
            self._links[op.peer] = ThreadPoolExecutor(1, f"rrfp-delayed-sends-{op.peer}")

        def send() -> Any:
            sleep_until(monotonic() + message_ns)
            (work,) = original([op])
            return work

        return _Delayed(self._links[op.peer].submit(send))


class _Delayed:
    """A handle of a send that may not have begun."""

    def __init__(self, send: Future[Any]) -> None:
        self._send = send

    def wait(self) -> None:
        """Wait for the send. Raises what it raises, such as a time-out."""
        self._send.result().wait()

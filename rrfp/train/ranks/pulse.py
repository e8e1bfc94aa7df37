"""Whether the hosts of a run still reach each other, heard through the run's store.

Ranks notice a silent peer themselves, except in a collective of gloo's, which waits for minutes. If
all ranks of a host wait there, only their launcher can end them.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store

_BEAT_S = 1.0
_SILENT_S = 30.0
"""Longer than ranks wait for each other's heartbeats, since they can say more about it."""
_LEFT = 2**40
"""More beats than a run has: the host has ended."""


class Pulse:
    """One host's pulse, on another host than host 0; or those that host 0 listens to. They beat in
    a thread of their own, from `start` to `close`."""

    def __init__(self, store: Store, node_rank: int, num_hosts: int) -> None:
        self._store = store
        self._beat = 1 if node_rank > 0 else 0
        self._hosts = [node_rank] if node_rank > 0 else [*range(1, num_hosts)]
        self._heard_s = dict.fromkeys(self._hosts, 0.0)
        self._ended = threading.Event()
        # A daemon: a store behind a dead link never answers.
        self._thread = threading.Thread(target=self._run, name="rrfp-pulse", daemon=True)

    def start(self) -> None:
        self._heard_s = dict.fromkeys(self._hosts, time.monotonic())
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(_BEAT_S)

    def lost(self) -> str:
        """A sentence about a host that was silent for too long; empty if there is none."""
        now_s = time.monotonic()
        for node_rank, heard_s in self._heard_s.items():
            if now_s - heard_s > _SILENT_S:
                other = 0 if self._beat else node_rank
                return (
                    f"host {other} was silent for {_SILENT_S:g} s; see whether it still runs and "
                    "can be reached, and what its rrfp train says"
                )
        return ""

    def _run(self) -> None:
        num_beats = dict.fromkeys(self._hosts, 0)
        with suppress(RuntimeError):  # the store has gone, and with it host 0
            while not self._ended.wait(_BEAT_S):
                for node_rank in self._hosts:
                    now = self._store.add(_key(node_rank), self._beat)
                    if now != num_beats[node_rank] or now >= _LEFT:
                        num_beats[node_rank] = now
                        self._heard_s[node_rank] = time.monotonic()
            if self._beat:
                self._store.add(_key(self._hosts[0]), _LEFT)


@contextmanager
def beating(store: Store, node_rank: int, num_hosts: int) -> Iterator[Pulse]:
    """A pulse for the time of the block."""
    pulse = Pulse(store, node_rank, num_hosts)
    pulse.start()
    try:
        yield pulse
    finally:
        pulse.close()


def _key(node_rank: int) -> str:
    return f"rrfp/pulse/{node_rank}"

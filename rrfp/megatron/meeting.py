"""Where the hosts of a run meet before any of them starts its ranks.

The elastic launcher would do it too, but waits inside the store, where Ctrl-C does not reach it,
and cannot say which host is missing.
"""

import json
import socket
import time
from datetime import timedelta

from torch.distributed import DistError, Store, TCPStore

from rrfp.admission_files import admission_file
from rrfp.errors import RrfpError, UsageError
from rrfp.hint_files import order_file
from rrfp.megatron.failure import first_line
from rrfp.megatron.settings import TrainSettings
from rrfp.simulate.cost_files import costs_file
from rrfp.text_files import sha256_of

_LOOK_S = 0.2
_ANSWER_S = 30.0

_MAY_DIFFER = frozenset({"node_rank", "rdzv_endpoint", "out", "data", "force"})
"""Settings that hosts may spell each in its own way."""

_DIGITS = 12
"""Of a digest, to tell files apart."""


def meet(settings: TrainSettings, timeout_s: float) -> Store:
    """Wait until every host of the run is there, and see that they were asked for the same.

    Give the store they met in; on host 0 it must live as long as the run. Raises RrfpError naming
    the host that did not come in time, and UsageError when the port is taken or settings differ.
    """
    meeting = _Meeting(settings, timeout_s)
    try:
        return meeting.hold()
    except DistError as error:
        raise UsageError(
            f"the hosts cannot meet at {settings.rdzv_endpoint} ({first_line(str(error))}); give "
            "--rdzv-endpoint a free port of host 0 that the others can reach"
        ) from None


class _Meeting:
    """One host's part in the meeting, with one deadline for all of it."""

    def __init__(self, settings: TrainSettings, timeout_s: float) -> None:
        assert settings.rdzv_endpoint is not None
        self._settings = settings
        self._endpoint = settings.rdzv_endpoint
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._common = {
            name: value for name, value in settings.described().items() if name not in _MAY_DIFFER
        } | _contents(settings)

    def hold(self) -> Store:
        host, _, port = self._endpoint.rpartition(":")
        own_rank = self._settings.node_rank
        if own_rank > 0:
            self._await_server(host, int(port))
        store = TCPStore(
            host,
            int(port),
            is_master=own_rank == 0,
            timeout=timedelta(seconds=_ANSWER_S),
            wait_for_workers=False,
            # The elastic launcher of this process serves its own store at the same port.
            multi_tenant=True,
        )
        # Host 0 ends the store with itself when settings differ. So the others read what it was
        # asked for before they tell it what they were.
        first = self._common if own_rank == 0 else self._told_by(0, store)
        store.set(_key(own_rank), json.dumps(self._common))
        _compare(first, own_rank, self._common)
        for node_rank in range(1, self._settings.nnodes):
            _compare(first, node_rank, self._told_by(node_rank, store))
        return store

    def _await_server(self, host: str, port: int) -> None:
        while True:
            try:
                socket.create_connection((host, port), timeout=_ANSWER_S).close()
            except OSError:
                self._wait_for(0)
            else:
                return

    def _told_by(self, node_rank: int, store: Store) -> dict[str, object]:
        """What a host was asked for."""
        while not store.check([_key(node_rank)]):
            self._wait_for(node_rank)
        told: dict[str, object] = json.loads(store.get(_key(node_rank)))
        return told

    def _wait_for(self, node_rank: int) -> None:
        if time.monotonic() > self._deadline_s:
            raise RrfpError(
                f"host {node_rank} did not come to {self._endpoint} within {self._timeout_s:g} s; "
                f"run the same command there with --node-rank {node_rank}"
            )
        time.sleep(_LOOK_S)


def _contents(settings: TrainSettings) -> dict[str, object]:
    """What the files hold that the settings name, in short: each host reads its own."""
    paths = {
        "hint": order_file(settings.resolved_hint),
        "admit": admission_file(settings.admit),
        "pace": None if settings.pace is None else costs_file(settings.pace),
    }
    return {
        f"the content of --{name} {path}": f"{sha256_of(path)[:_DIGITS]}..."
        for name, path in paths.items()
        if path is not None
    }


def _compare(first: dict[str, object], node_rank: int, other: dict[str, object]) -> None:
    for name, value in first.items():
        if other.get(name) != value:
            raise UsageError(
                f"{name} is {value} on host 0 and {other.get(name)} on host {node_rank}; run the "
                "same command with the same files on both"
            )


def _key(node_rank: int) -> str:
    return f"rrfp/meeting/{node_rank}"

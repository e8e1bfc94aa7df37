"""A stranger who can write to a run's store can end the run, and no more: nothing is executed."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore

from rrfp.errors import RrfpError
from rrfp.megatron.step_groups import Place, coupled_pipelines
from rrfp.runtime.device.interface import CPU
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.protocols import Inbox
from rrfp.runtime.rendezvous import Rendezvous, clock_offset, introduce, introduced
from rrfp.runtime.stall import StallRow, StoreStallBoard
from rrfp.trace.records import RankInfo
from tests.trained import TINY
from tests.watch import descendants, read_store, store_of

pytestmark = pytest.mark.timeout(400)


class Command:
    """Pickled, it leaves a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


class PlantedStore(HashStore):
    """A store whose every reader of one key finds what a stranger left there."""

    def __init__(self, key: str | None = None, planted: bytes = b"") -> None:
        super().__init__()
        self._key = key
        self._planted = planted
        self.keys: set[str] = set()

    def set(self, key: str, value: str) -> None:
        self.keys.add(key)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        return self._planted if key == self._key else super().get(key)

    def add(self, key: str, number: int) -> int:
        self.keys.add(key)
        return super().add(key, number)


def take_part(store: Any, rank: int) -> None:
    """All that a rank of two reads from its store."""
    own = RankInfo(rank, rank, 0, 0, (rank,), "host", 1)
    introduce(store, "rrfp/ranks", own, 2, CPU, timeout_s=2)
    introduced(store, "rrfp/ranks", rank, 2, timeout_s=2)
    clock_offset(store, "rrfp/clock", rank, ("a", "b"), timeout_s=2)
    coupled_pipelines(Place(rank, (0, 1), (rank,)), Rendezvous(store, "rrfp/p", rank, 2))
    board = StoreStallBoard(store, "rrfp/p", (0, 1))
    call = board.call(3)
    board.publish(3, call, StallRow(rank, rank, 1.0, "a", "b", "c", "d"))
    assert board.num_calls(3) >= 1
    board.rows(3, 1)
    for allow_unix in (True, False):
        transport = SocketTransport(
            rank,
            store,
            [1 - rank],
            [1 - rank],
            Inbox(),
            num_credits=1,
            prefix=f"rrfp/{allow_unix}",
            connect_s=2,
            allow_unix=allow_unix,
            address="127.0.0.1",
        )
        transport.open()
        transport.close(farewell=False)


def both_take_part(store: Any) -> list[RrfpError | None]:
    def one(rank: int) -> RrfpError | None:
        try:
            take_part(store, rank)
        except RrfpError as error:
            return error
        return None

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(one, (0, 1)))


def used_keys() -> list[str]:
    """One of each kind that ranks use, and that in which a failed one leaves word."""
    store = PlantedStore()
    assert both_take_part(store) == [None, None]
    later_rounds = {key for key in store.keys if "/ping/" in key or "/pong/" in key}
    return [*sorted(store.keys - later_rounds), "rrfp/clock/pong/1/7", "rrfp/p/failed"]


def test_what_is_planted_in_any_key_is_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    planted = (pickle.dumps(Command(marker)), b'{"rank": "x"}', b"\xff\xfe")
    keys = used_keys()
    assert {"rrfp/ranks/info/1", "rrfp/True/address/0", "rrfp/p/stall/3/row/1"} <= set(keys)

    def plant(key: str, value: bytes) -> tuple[str, list[RrfpError | None]]:
        return key, both_take_part(PlantedStore(key, value))

    with ThreadPoolExecutor(8) as runs:
        found = list(
            runs.map(plant, [key for key in keys for _ in planted], list(planted) * len(keys))
        )
    assert not marker.exists()
    for _key, errors in found:
        for error in errors:
            assert error is None or "\n" not in str(error)
    ended = {key for key, errors in found if any(errors)}
    # A row of a stall that cannot be read is passed over.
    assert {"rrfp/ranks/info/1", "rrfp/True/address/0", "rrfp/p/place-in-groups/1"} <= ended
    assert "rrfp/p/stall/3/row/1" not in ended
    said = [str(error) for _, errors in found for error in errors if error is not None]
    assert any(
        "what rank 1 published as 'rrfp/ranks/info/1' cannot be read" in each for each in said
    )


class Planter:
    """Overwrites what ranks tell each other, as fast as they tell it."""

    def __init__(self, is_target: Callable[[str], bool], value: bytes) -> None:
        self._is_target = is_target
        self._value = value
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._plant)
        self.planted: set[str] = set()

    def __enter__(self) -> "Planter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _plant(self) -> None:
        while (path := self._store()) is None or not path.exists():
            if self._is_over.wait(0.01):
                return
        store = FileStore(str(path))
        while not self._is_over.wait(0.002) and path.exists():
            for key, value in read_store(path.read_bytes()).items():
                if self._is_target(key) and value != self._value:
                    store.set(key, self._value)  # type: ignore[arg-type]
                    self.planted.add(key)

    @staticmethod
    def _store() -> Path | None:
        found = (store_of(pid) for pid in descendants(os.getpid()))
        return next((path for path in found if path is not None), None)


@pytest.mark.parametrize(
    "part",
    ["/rrfp/", pytest.param("", marks=pytest.mark.slow)],
    ids=["ours", "torch's and gloo's too"],
)
def test_a_run_whose_store_is_full_of_pickles_executes_nothing(part: str, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    command = [sys.executable, "-m", "rrfp", "train", *TINY, "--pp=2", "--steps=2"]
    with Planter(lambda key: part in key, pickle.dumps(Command(marker))) as planter:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert planter.planted
    assert not marker.exists()
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)
    if done.returncode == 1:  # else every rank had read what it needs before it was overwritten
        assert done.stderr.splitlines()[-1].startswith("rrfp: rank ")
        assert not part or "cannot be read" in done.stderr

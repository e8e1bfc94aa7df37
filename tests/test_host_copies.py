"""Copies that two threads share: whole, whoever takes which part."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from rrfp.runtime.device import host_memory as host_copies
from rrfp.runtime.device.host_memory import HELPER, HostCopies

PART = host_copies._PART_BYTES
LEAST = host_copies._LEAST_SHARED_BYTES
GUARD = 64


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> HostCopies:
    """Also on a machine of one core."""
    monkeypatch.setattr(host_copies, "num_cores", lambda: 2)
    return HostCopies()


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def check(copies: HostCopies, num_bytes: int, seed: int = 0) -> None:
    """A copy is the same, and nothing beside it changes."""
    source = noise(num_bytes, seed)
    target = torch.full((num_bytes + 2 * GUARD,), 7, dtype=torch.uint8)
    copies.copy(target.data_ptr() + GUARD, source.data_ptr(), num_bytes)
    assert torch.equal(target[GUARD:-GUARD], source)
    assert bool((target[:GUARD] == 7).all())
    assert bool((target[-GUARD:] == 7).all())


@pytest.mark.parametrize(
    "num_bytes", [0, 1, LEAST - 1, LEAST, LEAST + 1, 5 * PART - 1, 5 * PART, 16_000_000]
)
def test_a_copy_of_any_size_is_whole(copies: HostCopies, num_bytes: int) -> None:
    for seed in range(3):
        check(copies, num_bytes, seed)


def test_copies_of_many_threads_do_not_mix(copies: HostCopies) -> None:
    with ThreadPoolExecutor(6) as pool:
        for _ in pool.map(lambda seed: check(copies, LEAST + 1000 * seed, seed), range(60)):
            pass


Move = Callable[[int, int, int], None]


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Callable[[Move], None]:
    """Have each part moved by this."""

    def replace(move: Move) -> None:
        monkeypatch.setattr(host_copies, "ctypes", SimpleNamespace(memmove=move))

    return replace


def is_helper() -> bool:
    return threading.current_thread().name == HELPER


def test_both_take_parts_and_none_is_taken_twice(
    copies: HostCopies, moving: Callable[[Move], None]
) -> None:
    taken: list[tuple[int, bool]] = []

    def move(target: int, source: int, num_bytes: int) -> None:
        time.sleep(0.02)
        taken.append((target, is_helper()))

    moving(move)
    copies.copy(0, 0, 8 * PART)
    assert sorted(begin for begin, _ in taken) == [part * PART for part in range(8)]
    assert {by_helper for _, by_helper in taken} == {True, False}


def test_the_part_of_the_helper_is_waited_for(
    copies: HostCopies, moving: Callable[[Move], None]
) -> None:
    has_begun = threading.Event()
    ended: list[bool] = []

    def move(target: int, source: int, num_bytes: int) -> None:
        if is_helper():
            has_begun.set()
            time.sleep(0.2)
        else:
            has_begun.wait(10)
        ended.append(is_helper())

    moving(move)
    copies.copy(0, 0, LEAST)
    assert has_begun.is_set()
    assert ended.count(True) == 1
    assert len(ended) == LEAST // PART


def test_a_helper_that_is_busy_elsewhere_is_not_waited_for(
    copies: HostCopies, moving: Callable[[Move], None]
) -> None:
    first, may_end, helping = 10**9, threading.Event(), threading.Event()
    moved: list[int] = []

    def move(target: int, source: int, num_bytes: int) -> None:
        if target >= first:
            if is_helper():
                helping.set()
                may_end.wait(10)
            else:
                helping.wait(10)
        else:
            assert not is_helper()
            moved.append(target)

    moving(move)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(copies.copy, first, first, LEAST)
        assert helping.wait(10)
        copies.copy(0, 0, LEAST)
        assert len(moved) == LEAST // PART
        assert not held.done()
        may_end.set()
        held.result(10)


def test_on_one_core_nobody_helps(
    monkeypatch: pytest.MonkeyPatch, moving: Callable[[Move], None]
) -> None:
    monkeypatch.setattr(host_copies, "num_cores", lambda: 1)
    sizes: list[int] = []
    moving(lambda target, source, num_bytes: sizes.append(num_bytes))
    HostCopies().copy(0, 0, 4 * LEAST)
    assert sizes == [4 * LEAST]

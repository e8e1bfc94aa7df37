"""Hosts that meet, that do not come, and that were asked for different things."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rrfp.errors import RrfpError, UsageError
from rrfp.megatron.meeting import meet
from rrfp.megatron.settings import TrainSettings
from tests.trained import free_port


def settings(port: int, node_rank: int, **values: Any) -> TrainSettings:
    return TrainSettings(nnodes=2, node_rank=node_rank, rdzv_endpoint=f"127.0.0.1:{port}", **values)


def test_hosts_meet_in_any_order() -> None:
    port = free_port()
    with ThreadPoolExecutor() as hosts:
        later = hosts.submit(meet, settings(port, 1), 20.0)
        store = meet(settings(port, 0), 20.0)
        later.result(timeout=20).set("word", "heard")
        assert store.get("word") == b"heard"


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_host_that_does_not_come_is_named(node_rank: int) -> None:
    with pytest.raises(RrfpError) as refused:
        meet(settings(free_port(), node_rank), 0.3)
    assert f"host {1 - node_rank} did not come to 127.0.0.1:" in str(refused.value)
    assert f"--node-rank {1 - node_rank}" in str(refused.value)


def test_hosts_with_other_files_are_refused_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    port, digests = free_port(), iter(["a" * 64, "b" * 64])
    monkeypatch.setattr("rrfp.megatron.meeting.sha256_of", lambda path: next(digests))
    words = r"content of --admit order.txt is \w+... on host 0 and \w+... on host 1"
    with ThreadPoolExecutor() as hosts:
        other = hosts.submit(meet, settings(port, 1, admit="order.txt"), 20.0)
        with pytest.raises(UsageError, match=words):
            meet(settings(port, 0, admit="order.txt"), 20.0)
        with pytest.raises(UsageError, match=words):
            other.result(timeout=20)


def test_hosts_that_differ_are_refused_on_both() -> None:
    port = free_port()
    with ThreadPoolExecutor() as hosts:
        other = hosts.submit(meet, settings(port, 1, hint="fb"), 20.0)
        with pytest.raises(UsageError, match="hint is bf on host 0 and fb on host 1"):
            meet(settings(port, 0), 20.0)
        with pytest.raises(UsageError, match="hint is bf on host 0 and fb on host 1"):
            other.result(timeout=20)

"""The schedules of other projects as peers: their layouts, their tasks, what each
takes; late sends; the comparison of gradients. The schedules run in test_peer_schedules.py."""

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from rrfp.errors import RrfpError, UsageError
from rrfp.race.peer_schedules import DelayedSends
from rrfp.race.rank import relative_difference
from rrfp.race.systems import PEERS, Peer, Project, check_peer
from rrfp.schedule.tasks import Kind, parse_task
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings


def of_torch(peer: Peer, num_ranks: int, num_microbatches: int) -> Any:
    """torch's own schedule, on stages without work."""
    shape = peer.shape(num_ranks, num_microbatches)
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=shape.num_stages,
            group_rank=0,
            group_size=num_ranks,
            is_last=stage == shape.num_stages - 1,
            submod=None,
        )
        for stage in shape.stages_of(0)
    ]
    kind = getattr(pipelining, peer.schedule)
    is_multi = issubclass(kind, schedules.PipelineScheduleMulti)
    return kind(stages if is_multi else stages[0], num_microbatches, loss_fn=lambda loss, _: loss)


# Not of 1f1b: torch's own account of it is not the order that it runs (test_peer_schedules.py).
@pytest.mark.parametrize(
    "name", ["torch-interleaved", "torch-interleaved-zb", "torch-zbv", "torch-dualpipev"]
)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (3, 6), (4, 8), (8, 16)])
def test_a_peer_runs_the_tasks_of_its_shape(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    peer = PEERS[name]
    shape = peer.shape(num_ranks, num_microbatches)
    order = of_torch(peer, num_ranks, num_microbatches).pipeline_order
    for rank, row in order.items():
        actions = [each for action in row if action for each in action.sub_actions or (action,)]
        tasks = [parse_task(str(each)) for each in actions if "REDUCE" not in str(each)]
        whole = [task for task, is_split in tasks if task.kind == Kind.B and not is_split]
        split = [task for task, is_split in tasks if task.kind != Kind.F and is_split]
        # A whole backward of a peer that splits is a B with its W at once.
        run = [task for task, _ in tasks]
        run += [task._replace(kind=Kind.W) for task in whole if peer.splits]
        assert sorted(run) == sorted(shape.tasks_of(rank))
        assert bool(split) == peer.splits
        assert bool(whole) == (not peer.splits or name == "torch-dualpipev")


def settings_of(name: str, num_ranks: int, num_microbatches: int) -> TrainSettings:
    peer = PEERS[name]
    return TrainSettings(
        pp=num_ranks,
        chunks=peer.chunks,
        placement=peer.placement,
        layers=2 * num_ranks,
        microbatches=num_microbatches,
    )


def takes(function: Callable[..., Any], *args: object) -> bool:
    try:
        function(*args)
    except (ValueError, UsageError):
        return False
    return True


@pytest.mark.parametrize(
    "name", [name for name, peer in PEERS.items() if peer.project is Project.TORCH]
)
def test_what_is_refused_is_what_torch_refuses(name: str) -> None:
    for num_ranks in (2, 4):
        for number in range(1, 12):
            settings = settings_of(name, num_ranks, number)
            check_settings(settings)
            torch_takes = takes(of_torch, PEERS[name], num_ranks, number)
            assert takes(check_peer, name, settings) == torch_takes, (num_ranks, number)


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("gpipe", {}, "'gpipe' is not a peer .*torch-1f1b, torch-interleaved, "),
        ("torch-1f1b", {"pp": 1}, "nothing to schedule on --pp 1; use 2 ranks or more"),
        ("torch-1f1b", {"chunks": 2}, "1 chunk.* in a loop, not 2 in a loop; give --chunks 1"),
        ("torch-zbv", {"placement": "loop"}, "2 chunk.* in a v, not 2 in a loop; .* --placement v"),
        (
            "torch-zbv",
            {"variable_lengths": True},
            "messages of one shape; leave --var",
        ),
        ("torch-1f1b", {"model": "vlm"}, "messages of one shape; .* --model vlm"),
        ("torch-1f1b", {"microbatches": 3}, "at least one microbatch per rank, 4, not 3"),
        (
            "torch-interleaved",
            {"microbatches": 9},
            "9 microbatches on 4 ranks in 2 rounds.* another",
        ),
        (
            "torch-interleaved-zb",
            {"microbatches": 9},
            "9 microbatches on 4 ranks in 2 rounds.* another",
        ),
        ("torch-dualpipev", {"microbatches": 7}, "at least one microbatch per stage, 8, not 7"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(
    name: str, changed: dict[str, Any], told: str
) -> None:
    settings = settings_of(name if name in PEERS else "torch-1f1b", 4, 8).changed(**changed)
    with pytest.raises(UsageError, match=told):
        check_peer(name, settings)


@pytest.mark.parametrize("changed", [{"tp": 2}, {"dp": 2}, {"dtype": "bf16"}])
def test_deepspeed_has_the_pipeline_ranks_alone(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Project, "is_installed", True)
    settings = settings_of("deepspeed-1f1b", 4, 8)
    check_peer("deepspeed-1f1b", settings)
    with pytest.raises(UsageError, match="on pipeline ranks alone, in fp32"):
        check_peer("deepspeed-1f1b", settings.changed(**changed))


def test_a_project_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Project, "is_installed", False)
    with pytest.raises(UsageError, match=r"needs deepspeed, .* run pip install deepspeed"):
        check_peer("deepspeed-1f1b", settings_of("deepspeed-1f1b", 4, 8))


# Late sends.

PATIENCE_S = 20.0


class Work:
    """What waits for a transfer."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.has_waited = False

    def wait(self) -> None:
        self.has_waited = True


class Transfers:
    """In place of torch's `_batch_p2p`."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def __call__(self, ops: list[Any], desc: str | None = None) -> list[Work]:
        works = [Work(op) for op in ops]
        self.works += works
        return works


def op(function: Callable[..., Any], peer: int, name: str = "") -> Any:
    return SimpleNamespace(op=function, peer=peer, name=name)


def test_sends_leave_late_one_after_another_and_nobody_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time_passes = threading.Event()
    slept_ns: list[int] = []

    def sleep_until(end_ns: int) -> None:
        slept_ns.append(end_ns)
        assert time_passes.wait(PATIENCE_S)

    monkeypatch.setattr("rrfp.race.peer_schedules.sleep_until", sleep_until)
    monkeypatch.setattr("rrfp.race.peer_schedules.monotonic", lambda: 0)
    late, transfers = DelayedSends(), Transfers()
    batch = late.batch(transfers)
    first, second, last = (op(dist.isend, 1, name) for name in ("first", "second", "last"))
    other, receive = op(dist.isend, 2, "other"), op(dist.irecv, 1, "receive")
    late.hold_back([first], 60)
    late.hold_back([second], 30)
    late.hold_back([other], 10)
    late.hold_back([last], 0)
    handles = batch([first, receive, other]) + batch([second]) + batch([last])
    # No time has passed for the sends, and all this came back nevertheless.
    assert [work.op.name for work in transfers.works] == ["receive"]
    time_passes.set()
    for handle in handles:
        handle.wait()
    late.close()
    began = [work.op.name for work in transfers.works]
    # The last is not put off itself, but stands behind the others on their link.
    assert [name for name in began if name != "other"] == ["receive", "first", "second", "last"]
    assert sorted(began) == ["first", "last", "other", "receive", "second"]
    assert [ns for ns in slept_ns if ns != 10] == [60, 30, 0]
    assert sorted(slept_ns) == [0, 10, 30, 60]
    assert all(work.has_waited for work in transfers.works)


def test_without_modelled_times_torch_batches_as_it_does() -> None:
    late, transfers = DelayedSends(), Transfers()
    ops = [op(dist.isend, 1), op(dist.irecv, 1)]
    late.hold_back(ops[:1], 0)
    assert late.batch(transfers)(ops) == transfers.works
    assert [work.op for work in transfers.works] == ops


def test_what_a_late_send_raises_is_raised_where_it_is_waited_for() -> None:
    def fail(_: list[Any], desc: str | None = None) -> list[Any]:
        raise RuntimeError("connection closed by peer")

    late, send = DelayedSends(), op(dist.isend, 1)
    late.hold_back([send], 1)
    (handle,) = late.batch(fail)([send])
    with pytest.raises(RuntimeError, match="closed by peer"):
        handle.wait()
    late.close()
    assert not any("delayed-sends" in thread.name for thread in threading.enumerate())


# The comparison of gradients.


def test_gradients_differ_by_the_worst_parameter() -> None:
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1000.0])}
    assert relative_difference(reference, reference) == 0
    own = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1001.0])}
    assert relative_difference(own, reference) == pytest.approx(0.1)
    assert relative_difference(reference, {**reference, "b": torch.zeros(1)}) == math.inf
    assert relative_difference({"c": torch.zeros(2)}, {"c": torch.zeros(2)}) == 0


def test_a_gradient_that_is_not_a_number_never_agrees() -> None:
    nan, one = {"a": torch.tensor([math.nan])}, {"a": torch.tensor([1.0])}
    assert not relative_difference(nan, one) <= 1e-5


def test_gradients_of_other_parameters_are_not_compared() -> None:
    with pytest.raises(RrfpError, match="2 parameters have a gradient on one side only, such as a"):
        relative_difference({"a": torch.zeros(1)}, {"b": torch.zeros(1)})

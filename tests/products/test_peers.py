"""The schedules of other projects as peers: their layouts, their tasks, what each
takes; late sends; the comparison of gradients. The schedules run in products/test_peers.py."""

import math
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from rrfp.errors import RrfpError, UsageError
from rrfp.race.peer_schedules import DelayedSends
from rrfp.race.rank import relative_difference
from rrfp.race.systems import PEERS, Peer, Project, check_peer, peer_problem
from rrfp.runtime.protocols import StepSummary
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement
from rrfp.schedule.tasks import Cause, Kind, Task, parse_task
from rrfp.trace.records import Phase, PhaseRecord, Record, TaskRecord, WaitRecord
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks
from tests.megatron.training import SMALL

pytestmark = pytest.mark.timeout(400)


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


# Not of 1f1b: torch's own account of it is not the order that it runs (products/test_peers.py).
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
    """A handle of a transfer."""

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


# The schedules of other projects on our stages: gradients, pace and records.


STEPS = 2
INSTALLED = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not peer.project.is_installed, reason=f"{peer.project} is not installed"
        ),
    )
    for name, peer in PEERS.items()
]
NAMES = [name for name, peer in PEERS.items() if peer.project.is_installed]
TORCHS = [name for name in NAMES if PEERS[name].project is Project.TORCH]
MICROBATCHES = 4


class Run(NamedTuple):
    """One peer on one rank, beside our own schedule on the same chunks."""

    difference: float
    """Relative differences of the last step's gradients; gradients are cleared after each step."""
    norms: dict[str, float]
    """Norms of rrfp's own gradients, by parameter."""
    losses: list[float]
    own_losses: list[float]
    summaries: list[StepSummary]
    records: list[Record]


def run_peers(
    settings: dict[str, Any], names: list[str], pace: tuple[str, str] | None = None
) -> dict[str, Run]:
    """Run each peer on this rank, on chunks of its own, after our schedule on the same chunks; in a
    process of its own. `pace` has costs and jitter."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    torch.set_num_threads(1)
    chosen = [
        TrainSettings(
            **{
                **SMALL,
                **settings,
                "chunks": PEERS[name].chunks,
                "placement": PEERS[name].placement,
            }
        )
        for name in names
    ]
    with parallel_groups(chosen[0]) as layout:
        return {
            name: _run_peer(name, each, layout, pace)
            for name, each in zip(names, chosen, strict=True)
        }


def _run_peer(
    name: str, settings: TrainSettings, first_layout: Any, pace: tuple[str, str] | None
) -> Run:
    from dataclasses import replace

    from rrfp.race.rank import gradients, relative_difference, schedule_class_of
    from rrfp.race.systems import check_peer
    from rrfp.replay.cost_sources import resolve_costs
    from rrfp.schedule.admission import Admit
    from rrfp.simulate.jitter import parse_jitter
    from rrfp.train.data.batches import open_data
    from rrfp.train.loop import schedule_of
    from rrfp.train.models.model import build_model
    from rrfp.train.pacing import make_pace

    check_peer(name, settings)
    placement = Placement(settings.layout.placement)
    layout = replace(first_layout, chunks=settings.layout.chunks, placement=placement)
    data = open_data(settings)
    model = build_model(settings, layout, data)
    source = data.batches(layout.dp_rank)
    batches: list[Any] = [source.batch(0, index) for index in range(settings.data.microbatches)]

    own = schedule_of(settings, layout.pp_rank, lambda _: None)
    own_losses = own(
        forward_step_func=model.forward_step,
        data_iterator=[iter(batches) for _ in model.chunks],
        model=model.chunks,
        num_microbatches=len(batches),
        seq_length=settings.data.seq_length,
        micro_batch_size=settings.data.micro_batch_size,
    )
    own.close()
    expected = gradients(model.chunks, settings, layout)

    pacer = None
    if pace is not None:
        costs, jitter = resolve_costs(pace[0]), parse_jitter(pace[1])
        shape = PEERS[name].shape(settings.layout.pp, settings.data.microbatches)
        pacer = make_pace(
            costs, jitter, Admit.GIVEN, settings.run.seed, shape, layout.pp_rank, layout.dp_rank
        )
    records: list[Record] = []
    schedule = schedule_class_of(name)(name, model, layout, records.append, pacer)
    summaries, losses = [], []
    for step in range(STEPS):
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        losses = schedule.run(step, batches)
        assert schedule.report is not None
        summaries.append(schedule.report.summary)
    schedule.close()
    return Run(
        relative_difference(gradients(model.chunks, settings, layout), expected),
        {name: float(gradient.norm()) for name, gradient in expected.items()},
        [item["loss"].item() for item in losses],
        [item["loss"].item() for item in own_losses],
        summaries,
        records,
    )


@cache
def on_two_ranks() -> list[dict[str, Run]]:
    """Every peer, in one launch."""
    settings = {"pp": 2, "microbatches": MICROBATCHES}
    return run_ranks(2, run_peers, settings, NAMES, timeout_s=200)


def assert_agreement(ranks: list[dict[str, Run]]) -> None:
    for rank, runs in enumerate(ranks):
        for name, run in runs.items():
            assert run.difference <= 1e-5, (rank, name)
            assert run.losses == run.own_losses, (rank, name)
    for name in ranks[0]:
        norms: defaultdict[str, float] = defaultdict(float)
        for runs in ranks:
            for parameter, norm in runs[name].norms.items():
                norms[parameter] += norm
        # Over all slices of a parameter: one of the embedding has rows that no token chose.
        assert min(norms.values()) > 0, name
        assert sum(bool(runs[name].losses) for runs in ranks) >= 1


def test_gradients_and_losses_are_those_of_our_own_run() -> None:
    assert_agreement(on_two_ranks())


@pytest.mark.parametrize("name", INSTALLED)
def test_every_task_is_recorded_once_in_an_order_that_can_be(name: str) -> None:
    shape = PEERS[name].shape(2, MICROBATCHES)
    for pp_rank, runs in enumerate(on_two_ranks()):
        run = runs[name]
        for step in range(STEPS):
            of_step = [record for record in run.records if record.step == step]
            tasks = [record for record in of_step if isinstance(record, TaskRecord)]
            ran = [Task(task.stage, Kind(task.kind), task.microbatch) for task in tasks]
            assert sorted(ran) == sorted(shape.tasks_of(pp_rank))
            assert [task.hint_position for task in tasks] == list(range(len(tasks)))
            assert all(task.chunk == shape.chunk_of(task.stage) for task in tasks)
            for place, task in enumerate(ran):
                for needed in shape.prerequisites(task):
                    if shape.holds(pp_rank, needed):
                        assert needed in ran[:place]


@pytest.mark.parametrize("name", INSTALLED)
def test_a_step_is_tasks_and_waits_within_one_phase(name: str) -> None:
    for runs in on_two_ranks():
        run = runs[name]
        for step, summary in enumerate(run.summaries):
            of_step = [record for record in run.records if record.step == step]
            *inside, phase = of_step
            assert isinstance(phase, PhaseRecord)
            assert phase.phase is Phase.SCHEDULE
            assert (phase.start_ns, phase.end_ns) == (summary.start_ns, summary.end_ns)
            cursor = phase.start_ns
            for record in inside:
                assert isinstance(record, TaskRecord | WaitRecord)
                assert cursor <= record.start_ns <= record.end_ns
                cursor = record.end_ns
            assert cursor <= phase.end_ns
            tasks = [record for record in inside if isinstance(record, TaskRecord)]
            assert summary.busy_ns == sum(task.end_ns - task.start_ns for task in tasks)
            causes = {record.cause for record in inside if isinstance(record, WaitRecord)}
            known = {Cause.WARMUP, Cause.TRANSFER, Cause.DRAIN, Cause.GRADIENT_SYNC}
            assert {Cause.GRADIENT_SYNC} <= causes <= known


@pytest.mark.parametrize("name", INSTALLED)
def test_activations_are_held_until_their_last_task(name: str) -> None:
    peer = PEERS[name]
    shape = peer.shape(2, MICROBATCHES)
    last = Kind.W if shape.kinds == SPLIT_BACKWARD else Kind.B
    for runs in on_two_ranks():
        run = runs[name]
        for step, summary in enumerate(run.summaries):
            held = depth = peak = 0
            for record in run.records:
                if record.step != step or not isinstance(record, TaskRecord):
                    continue
                held += (record.kind == Kind.F) - (record.kind == last)
                depth += (record.kind == Kind.F) - (record.kind == Kind.B)
                assert (record.held, record.depth) == (held, depth)
                peak = max(peak, held)
            assert held == 0
            assert summary.peak_held == peak / peer.chunks
    if name in ("torch-1f1b", "deepspeed-1f1b"):
        assert [runs[name].summaries[0].peak_held for runs in on_two_ranks()] == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 2, "sequence_parallel": True},
        {"dp": 2},
        {"dp": 2, "ep": 2, "experts": 4},
    ],
    ids=["tp2", "dp2", "ep2"],
)
def test_groups_beside_the_pipeline_agree(settings: dict[str, Any]) -> None:
    chosen = {"pp": 2, "microbatches": MICROBATCHES, **settings}
    assert_agreement(run_ranks(4, run_peers, chosen, TORCHS, timeout_s=300))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bf16"}, {"tie_embeddings": True}, {"recompute": "full"}],
    ids=["bf16", "tied", "recompute"],
)
def test_models_agree(settings: dict[str, Any]) -> None:
    names = [
        name
        for name in (TORCHS if "dtype" in settings else NAMES)
        if PEERS[name].placement is Placement.LOOP or "tie_embeddings" not in settings
    ]
    chosen = {"pp": 2, "microbatches": MICROBATCHES, **settings}
    assert_agreement(run_ranks(2, run_peers, chosen, names, timeout_s=200))


def run_peers_per_edge(settings: dict[str, Any]) -> dict[str, Run]:
    """`run_peers` of torch's, with a communicator for each direction of a link."""
    config: Any = torch.distributed.config  # type: ignore[attr-defined,unused-ignore]
    config.pipeline_per_edge_p2p = True
    return run_peers(settings, TORCHS)


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(getattr(torch.distributed, "config", None), "pipeline_per_edge_p2p"),
    reason="this torch has no communicator per edge",
)
def test_a_communicator_per_edge_changes_nothing() -> None:
    settings = {"pp": 2, "microbatches": MICROBATCHES}
    assert_agreement(run_ranks(2, run_peers_per_edge, settings, timeout_s=200))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "number"), [(3, 6), (4, 2), (4, 12), (8, 2), (8, 16)])
def test_pipelines_of_any_depth_come_to_their_end(num_ranks: int, number: int) -> None:
    names = [name for name in NAMES if peer_problem(name, num_ranks, number) is None]
    settings = {"pp": num_ranks, "layers": 2 * num_ranks, "microbatches": number, "hidden": 16}
    assert_agreement(run_ranks(num_ranks, run_peers, settings, names, timeout_s=350))


TASK_NS = 10_000_000
LATENCY_NS = 5_000_000


@pytest.mark.slow
def test_tasks_and_messages_take_their_modelled_times(tmp_path: Any) -> None:
    """Chunks share a rank's time; a message from one rank to the next takes its latency."""
    costs = tmp_path / "costs.toml"
    costs.write_text(
        f"seconds = {{ F = {TASK_NS / 1e9}, B = {TASK_NS / 1e9}, W = {TASK_NS / 1e9} }}\n"
        f"[links]\nlatency_s = {LATENCY_NS / 1e9}\n"
    )
    settings = {"pp": 2, "microbatches": MICROBATCHES}
    ranks = run_ranks(2, run_peers, settings, NAMES, (str(costs), "none"), timeout_s=200)
    assert_agreement(ranks)
    for name in NAMES:
        peer = PEERS[name]
        started: dict[Task, int] = {}
        ended: dict[Task, int] = {}
        shape = peer.shape(2, MICROBATCHES)
        for runs in ranks:
            for record in runs[name].records:
                if isinstance(record, TaskRecord) and record.step == 1:
                    task = Task(record.stage, Kind(record.kind), record.microbatch)
                    started[task], ended[task] = record.start_ns, record.end_ns
        for task, end_ns in ended.items():
            whole = 1 if peer.splits or task.kind is Kind.F else 2
            modeled_ns = math.floor(whole * TASK_NS / peer.chunks)
            assert end_ns - started[task] >= modeled_ns - 1
            sender = shape.sender(task)
            if sender is not None and shape.rank_of(sender.stage) != shape.rank_of(task.stage):
                # One host, one clock.
                assert started[task] >= ended[sender] + LATENCY_NS

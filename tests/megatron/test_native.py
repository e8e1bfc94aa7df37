"""Megatron's own schedule on the CPU host: the training it does, and the records it leaves."""

from functools import cache
from itertools import accumulate, pairwise
from struct import pack, unpack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rrfp.megatron.native.schedule import CudaTimer, HostTimer
from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Cause, Kind, Task
from rrfp.trace.records import Phase, PhaseRecord, TaskRecord, WaitRecord
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks
from tests.megatron.training import SMALL, RankRun, train_natively, train_variants

pytestmark = pytest.mark.timeout(400)


STEPS = 12


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": "bf16"},
    "experts": {"experts": 4},
    "tied": {"tie_embeddings": True},
    "six layers": {"layers": 6, "microbatches": 6},
}
"""Settings that change the trained function."""


def train_all(settings: dict[str, Any], variants: list[dict[str, Any]]) -> list[RankRun]:
    return train_variants({"dispatch": "megatron", **settings}, variants)


def by_rank(layout: dict[str, Any], *variants: dict[str, Any]) -> list[list[RankRun]]:
    """Each rank's runs of the variants in one layout, which all ranks agree on."""
    settings = {**SMALL, **layout}
    num_ranks = TrainSettings(**settings).layout.world_size
    ranks = run_ranks(num_ranks, train_all, settings, list(variants), timeout_s=200)
    for runs in ranks:
        for run, first in zip(runs, ranks[0], strict=True):
            assert run.losses == first.losses
            assert run.grad_norms == first.grad_norms
    return ranks


@cache
def alone() -> dict[str, RankRun]:
    """The references: one process, all microbatches of the global batch."""
    (runs,) = by_rank({"pp": 1}, *MODELS.values())
    return dict(zip(MODELS, runs, strict=True))


@cache
def pipeline() -> list[list[RankRun]]:
    """By rank, two runs from the same seed."""
    return run_ranks(4, train_natively, {**SMALL, "pp": 4, "steps": STEPS}, 2, timeout_s=100)


@pytest.mark.slow
def test_four_stages_train_and_the_loss_falls() -> None:
    losses = pipeline()[0][0].losses
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_two_runs_are_equal_to_the_bit() -> None:
    for first, second in pipeline():
        assert first.losses == second.losses
        assert first.grad_norms == second.grad_norms


def test_every_rank_knows_the_same_numbers() -> None:
    runs = [first for first, _ in pipeline()]
    for run in runs:
        assert run.losses == runs[0].losses
        assert run.grad_norms == runs[0].grad_norms
        assert run.tokens == [SMALL["microbatches"] * SMALL["seq_length"]] * STEPS


def test_four_stages_agree_with_one_process() -> None:
    reference = alone()["plain"].losses
    assert pipeline()[0][0].losses[: len(reference)] == pytest.approx(reference, rel=1e-5)


@pytest.mark.slow
def test_losses_fall_whatever_is_trained() -> None:
    for model, run in alone().items():
        assert run.losses[-1] < run.losses[0] - 0.02, model


TP2 = {"pp": 2, "tp": 2, "sequence_parallel": True}
# Two replicas see the microbatches that one process saw.
HALF = SMALL["microbatches"] // 2
DP2 = {"pp": 2, "dp": 2, "microbatches": HALF}
EP2 = {"pp": 2, "ep": 2, "microbatches": HALF, "experts": 4}
SHARED_OUT = {"distributed_optimizer": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "variants"),
    [
        (TP2, [("plain", {"sequence_parallel": False}), ("plain", {}), ("experts", {})]),
        (DP2, [("plain", {}), ("plain", SHARED_OUT), ("bf16", {}), ("bf16", SHARED_OUT)]),
        (EP2, [("experts", {}), ("experts", SHARED_OUT)]),
        ({"pp": 3, "chunks": 2}, [("six layers", {})]),
        # Megatron has no V: ours trains it.
        (
            {"pp": 2, "chunks": 2, "placement": "v", "dispatch": "ready"},
            [("plain", {}), ("bf16", {})],
        ),
    ],
    ids=["tp2", "dp2", "ep2", "pp3-c2", "pp2-v"],
)
def test_layouts_agree_with_one_process(
    layout: dict[str, Any], variants: list[tuple[str, dict[str, Any]]]
) -> None:
    flags = [
        {**MODELS[model], **extra, **{n: layout[n] for n in ("microbatches",) if n in layout}}
        for model, extra in variants
    ]
    runs = by_rank(layout, *flags)[0]
    for (model, extra), run in zip(variants, runs, strict=True):
        reference = alone()[model]
        assert run.losses == pytest.approx(reference.losses, rel=1e-5), (model, extra)
        assert run.grad_norms == pytest.approx(reference.grad_norms, rel=1e-4), (model, extra)


@pytest.mark.slow
def test_a_pipeline_recomputes_drops_and_ties() -> None:
    """Variants of one layout, one launch: what is recomputed changes nothing, dropout does."""
    names = ("none", "selective", "full")
    drop = {"dropout": 0.1}
    runs = by_rank(
        {"pp": 2},
        MODELS["tied"],
        *({"recompute": name} for name in names),
        *({"recompute": name, **drop} for name in names),
    )[0]
    tied, plain, *recomputed = runs[:4]
    dropped, *dropped_recomputed = runs[4:]
    assert tied.losses == pytest.approx(alone()["tied"].losses, rel=1e-5)
    assert plain.losses == pytest.approx(alone()["plain"].losses, rel=1e-5)
    for run in recomputed:
        assert (run.losses, run.parameters_sha256) == (plain.losses, plain.parameters_sha256)
    for run in dropped_recomputed:
        assert (run.losses, run.parameters_sha256) == (dropped.losses, dropped.parameters_sha256)
    assert dropped.losses != plain.losses
    assert dropped.losses == pytest.approx(plain.losses, rel=0.05)


@pytest.mark.slow
def test_variable_lengths_train_on_a_tensor_parallel_pipeline() -> None:
    settings = {**SMALL, "pp": 2, "tp": 2, "seq_length": 256, "variable_lengths": True}
    runs = run_ranks(4, train_natively, settings, timeout_s=100)
    assert all(run.losses == runs[0][0].losses for (run,) in runs)
    full = SMALL["microbatches"] * 256
    assert all(0 < tokens < full for tokens in runs[0][0].tokens)


@pytest.mark.parametrize("pp_rank", range(4))
def test_tasks_are_recorded_in_the_order_of_1f1b(pp_rank: int) -> None:
    run = pipeline()[pp_rank][0]
    shape = Shape(4, SMALL["microbatches"])
    expected = ORDERS["1f1b"].for_shape(shape).rows[pp_rank]
    for step in range(STEPS):
        tasks = [r for r in run.records if isinstance(r, TaskRecord) and r.step == step]
        assert tuple(Task(r.stage, Kind(r.kind), r.microbatch) for r in tasks) == expected
        assert [r.hint_position for r in tasks] == list(range(len(expected)))
        summary = run.summaries[step]
        assert summary is not None
        assert summary.peak_held == max(r.held for r in tasks) == 4 - pp_rank
        assert summary.busy_ns == sum(r.end_ns - r.start_ns for r in tasks)


@cache
def interleaved() -> list[RankRun]:
    settings = {"pp": 3, "chunks": 2, "layers": 6, "microbatches": 6, "steps": 2}
    return [runs[0] for runs in by_rank(settings, {})]


@pytest.mark.slow
@pytest.mark.parametrize("pp_rank", range(3))
def test_chunks_are_recorded_in_the_order_of_interleaving(pp_rank: int) -> None:
    run = interleaved()[pp_rank]
    shape = Shape(3, 6, 2)
    expected = ORDERS["interleaved"].for_shape(shape).rows[pp_rank]
    for step in range(2):
        tasks = [r for r in run.records if isinstance(r, TaskRecord) and r.step == step]
        assert tuple(Task(r.stage, Kind(r.kind), r.microbatch) for r in tasks) == expected
        assert [r.chunk for r in tasks] == [shape.chunk_of(r.stage) for r in tasks]
        depths = [r.depth for r in tasks]
        steps = [1 if r.kind is Kind.F else -1 for r in tasks]
        assert depths == list(accumulate(steps))
        assert [r.held for r in tasks] == depths
        summary = run.summaries[step]
        assert summary is not None
        assert summary.peak_held == max(depths) / 2


def test_what_runs_is_what_the_order_says() -> None:
    """The records come by counting; here the functions that run say which chunk they are."""
    for pp_rank, found in enumerate(run_ranks(3, chunks_and_microbatches, timeout_s=100)):
        tasks = ORDERS["interleaved"].for_shape(Shape(3, 6, 2)).rows[pp_rank]
        expected = [(task.stage // 3, task.microbatch) for task in tasks if task.kind is Kind.F]
        assert found == expected


def chunks_and_microbatches() -> list[tuple[int, int]]:
    """The chunk and microbatch of every forward, as the model and the data tell."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.megatron.native.schedule import NativeSchedule
    from rrfp.train.data.batches import open_data
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.loop import Trainer
    from rrfp.train.models.gpt import forward_step
    from rrfp.train.models.model import build_model
    from rrfp.train.ordered_batches import OrderedBatches

    settings = TrainSettings(
        **{**SMALL, "pp": 3, "chunks": 2, "layers": 6, "microbatches": 6, "dispatch": "megatron"}
    )
    found: list[tuple[int, int]] = []
    with parallel_groups(settings) as layout:
        data = open_data(settings)
        gpt = build_model(settings, layout, data)
        batches = data.batches(layout.dp_rank)
        firsts = [batches.batch(0, index)["tokens"].tolist() for index in range(6)]

        class Spied:
            def __call__(self, **arguments: Any) -> list[Any]:
                def spy(iterator: Any, model: Any) -> Any:
                    batch = next(iterator)
                    chunk = gpt.chunks.index(model)
                    found.append((chunk, firsts.index(batch["tokens"].tolist())))
                    return forward_step(iter((batch,)), model)

                return NativeSchedule(layout.pp_rank, lambda _: None)(
                    **{**arguments, "forward_step_func": spy}
                )

        ordered = OrderedBatches(settings, layout, data)
        trainer = Trainer(settings, layout, gpt, ordered, Spied(), lambda _: None)
        trainer.train_step(0)
    return found


@pytest.mark.parametrize("pp_rank", range(4))
def test_waits_fill_the_gaps_between_tasks_inside_the_step(pp_rank: int) -> None:
    records = pipeline()[pp_rank][0].records
    for step in range(STEPS):
        (window,) = (
            r
            for r in records
            if isinstance(r, PhaseRecord) and r.step == step and r.phase == Phase.SCHEDULE
        )
        spans = sorted(
            (r for r in records if isinstance(r, TaskRecord | WaitRecord) and r.step == step),
            key=lambda r: r.start_ns,
        )
        assert window.start_ns <= spans[0].start_ns
        assert spans[-1].end_ns <= window.end_ns
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
        tasks = [index for index, span in enumerate(spans) if isinstance(span, TaskRecord)]
        for index, span in enumerate(spans):
            if isinstance(span, WaitRecord):
                before_first, after_last = index < tasks[0], index > tasks[-1]
                allowed = {Cause.TRANSFER}
                if before_first:
                    allowed = {Cause.WARMUP}
                elif after_last:
                    allowed = {Cause.DRAIN, Cause.GRADIENT_SYNC}
                assert span.cause in allowed
        assert spans[-1] == next(
            r
            for r in records
            if isinstance(r, WaitRecord) and r.step == step and r.cause == Cause.GRADIENT_SYNC
        )


def test_it_is_megatrons_own_after_ours_is_installed() -> None:
    # Nothing has made Megatron ready for the CPU before install().
    runs = run_ranks(2, train_after_install, timeout_s=100, fresh=True)
    assert runs[0].losses == pytest.approx(alone()["plain"].losses, rel=1e-5)


def train_after_install() -> RankRun:
    from rrfp.megatron import install

    install()
    (run,) = train_natively({**SMALL, "pp": 2})
    # Ours waits for a link or the other rank, never in a blocking transfer.
    assert any(r.cause == Cause.TRANSFER for r in run.records if isinstance(r, WaitRecord))
    return run


def test_the_functions_are_put_back_when_a_step_fails() -> None:
    assert run_ranks(1, fail_in_a_step, timeout_s=100) == [True]


def fail_in_a_step() -> bool:
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from rrfp.megatron.native.schedule import NativeSchedule
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.models.model import build_model

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    def functions() -> tuple[object, ...]:
        return schedules.forward_step, schedules.backward_step, P2PCommunicator._communicate

    settings = TrainSettings(**{**SMALL, "pp": 1})
    before = functions()
    with parallel_groups(settings) as layout:
        gpt = build_model(settings, layout, SimpleNamespace(vocab_size=257))  # pyright: ignore[reportArgumentType]
        finalize = gpt.config.finalize_model_grads_func
        with pytest.raises(ZeroDivisionError):
            NativeSchedule(0, lambda _: None)(
                model=gpt.chunks,
                num_microbatches=1,
                forward_step_func=fails,
                data_iterator=iter(()),
                seq_length=8,
                micro_batch_size=1,
            )
        return functions() == before and gpt.config.finalize_model_grads_func is finalize


# When work began and ended, on a GPU that is made up: one that is late, and whose clock drifts.


class Gpu:
    """Passes an event `latency_ns` after it was recorded; its clock runs 1% fast."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.latency_ns = 50_000

    def clock(self) -> int:
        self.now_ns += 100
        return self.now_ns

    def query(self) -> bool:
        return self.latency_ns < 1_000_000

    def current_stream(self) -> "Gpu":
        return self


class Event:
    gpu: Gpu

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.passes_ns = self.gpu.now_ns + self.gpu.latency_ns

    def query(self) -> bool:
        return self.gpu.clock() >= self.passes_ns

    def synchronize(self) -> None:
        self.gpu.now_ns = max(self.gpu.now_ns, self.passes_ns)

    def elapsed_time(self, end: "Event") -> float:
        return (end.passes_ns - self.passes_ns) * 1.01 / 1e6


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    event = type("OfGpu", (Event,), {"gpu": gpu})
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    return gpu


def mark_after(timer: CudaTimer, gpu: Gpu, time_ns: int) -> Any:
    gpu.now_ns += time_ns
    return timer.mark()


def test_times_are_known_once_the_gpu_has_passed_the_marks(gpu: Gpu) -> None:
    timer = CudaTimer(gpu.clock)
    begin_ns = gpu.now_ns
    marks = [mark_after(timer, gpu, 1_000_000) for _ in range(3)]
    assert timer.times_ns(marks, wait=False) is None
    times_ns = timer.times_ns(marks, wait=True)
    assert times_ns is not None
    # When the GPU passed them, and not when the host recorded them.
    expected = [begin_ns + count * 1_000_000 + 50_000 for count in (1, 2, 3)]
    assert times_ns == pytest.approx(expected, abs=0.011 * 3_000_000 + 10_000)
    assert times_ns[0] < times_ns[1] < times_ns[2]


def test_the_clocks_are_compared_anew_while_the_gpu_is_idle(gpu: Gpu) -> None:
    timer = CudaTimer(gpu.clock)
    gpu.now_ns += 60_000_000_000

    def error_ns() -> int:
        mark = mark_after(timer, gpu, 1_000)
        (time_ns,) = timer.times_ns([mark], wait=True) or [0]
        return int(abs(time_ns - mark.passes_ns))

    assert error_ns() > 500_000_000
    timer.compare_clocks()
    assert error_ns() < 50_000


def test_a_busy_gpu_is_not_waited_for(gpu: Gpu) -> None:
    timer = CudaTimer(gpu.clock)
    gpu.latency_ns = 900_000
    before_ns = gpu.now_ns
    timer.compare_clocks()
    assert gpu.now_ns - before_ns < 200_000
    gpu.latency_ns = 5_000_000
    before_ns = gpu.now_ns
    timer.compare_clocks()
    assert gpu.now_ns == before_ns


def test_events_are_used_again(gpu: Gpu) -> None:
    timer = CudaTimer(gpu.clock)
    first, second = timer.mark(), timer.mark()
    assert timer.times_ns([first, second], wait=True) is not None
    # The last one is what the next ones are counted from.
    assert timer.mark() is first
    assert timer.mark() is not second


def test_times_of_long_runs_are_as_precise(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells the time between two events in single precision."""

    def elapsed_ms(start: Event, end: Event) -> float:
        (told,) = unpack("f", pack("f", (end.passes_ns - start.passes_ns) / 1e6))
        return float(told)

    monkeypatch.setattr(Event, "elapsed_time", elapsed_ms)
    timer = CudaTimer(gpu.clock)
    errors_ns = []
    for step in range(1000):
        mark = mark_after(timer, gpu, 10_000_000_000 + 137_003 * step)
        (time_ns,) = timer.times_ns([mark], wait=True) or [0]
        errors_ns.append(time_ns - mark.passes_ns)
    assert max(errors_ns) - min(errors_ns) < 100_000 < 10_000 * 10**9 * 2**-24 / 2


def test_the_host_needs_no_waiting() -> None:
    times = iter(range(5, 8))
    timer = HostTimer(lambda: next(times))
    assert timer.times_ns([timer.mark(), timer.mark()], wait=False) == [5, 6]

"""The bytes that microbatches keep: as counted on real models, and as predicted for other data."""

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from rrfp.errors import RrfpError, UsageError
from rrfp.megatron.memory import bound as bound_file
from rrfp.megatron.memory.activation_bytes import ActivationBytes, ActivationCounter
from rrfp.megatron.step.gradients import CanonicalGradients
from rrfp.planning.forecast import Bound, SizeModel, nonnegative_least_squares
from rrfp.planning.item_costs import Features, features_of, with_group
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.policy import Auto, Bytes
from rrfp.trace.records import Phase, PhaseRecord
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks
from tests.megatron.one_chunk import num_tensors
from tests.megatron.training import RankRun, train_variant, train_variants

# What autograd saves, counted by hooks of the tests' own, and trainings to count it on.


GLOO_S = 0.02
"""gloo's own thread drops what it has carried a moment after it says that this is done."""


class Packed:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


class Watched:
    """A count of this test's own, by hooks on what autograd saves."""

    def __init__(self, model: Any) -> None:
        own = [*model.parameters(), *torch.nn.Module.buffers(model)]
        own += [weight.main_grad for weight in model.parameters() if hasattr(weight, "main_grad")]
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._found: dict[int, dict[int, tuple[Any, int]]] = {}
        self._messages: dict[int, set[int]] = {}

    def add(self, microbatch: int, saved: Sequence[Any], messages: Sequence[Any]) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        found = self._found[microbatch] = {}
        for tensor in (*saved, *messages):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own:
                reference: Any = StorageWeakRef
                found[storage._cdata] = reference(storage), storage.nbytes()
        self._messages[microbatch] = {each.untyped_storage()._cdata for each in messages}

    def bytes_of(self) -> list[int]:
        """By microbatch. What is still there belongs to the loader, or to a cache."""
        return [
            sum(
                size
                for address, (storage, size) in found.items()
                if address in self._messages[microbatch] or storage.expired()
            )
            for microbatch, found in sorted(self._found.items())
        ]


@contextmanager
def watched_memory(found_bytes: list[list[list[int]]]) -> Iterator[None]:
    """Fills the list with what the hooks see, by step, chunk and microbatch."""
    from rrfp.megatron.step.stage import ChunkStep, RankStep

    original: Any = ChunkStep.forward
    original_finish: Any = RankStep.finish

    def finish(self: Any) -> None:
        original_finish(self)
        watched = [each.watched for each in self._chunks if hasattr(each, "watched")]
        if watched:
            time.sleep(GLOO_S)
            found_bytes.append([each.bytes_of() for each in watched])

    def forward(self: Any, microbatch: int, inputs: Any, data: Any) -> Any:
        if self._arguments.forward_only:
            return original(self, microbatch, inputs, data)
        if not hasattr(self, "watched"):
            self.watched = Watched(self.model)
        holders: list[weakref.ref[Packed]] = []

        def pack(tensor: torch.Tensor) -> Packed:
            holder = Packed(tensor)
            holders.append(weakref.ref(holder))
            return holder

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
            found = original(self, microbatch, inputs, data)
        alive = [holder for each in holders if (holder := each()) is not None]
        kept = [
            each for each in itertools.chain(*self._activations[microbatch]) if each is not None
        ]
        self.watched.add(microbatch, [holder.tensor for holder in alive], kept)
        return found

    with patch.object(ChunkStep, "forward", forward), patch.object(RankStep, "finish", finish):
        yield


GPT = {
    "pp": 2,
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "seq_length": 64,
    "microbatches": 4,
    "steps": 4,
    "variable_lengths": True,
}
ZB_V = {"hint": "zb-v", "placement": "v", "chunks": 2}
VLM = {**GPT, "model": "vlm", "variable_lengths": False}
MOE = {**GPT, "model": "moe", "experts": 4}


@pytest.fixture
def documents(tmp_path: Path) -> dict[str, Any]:
    """Texts of many lengths, as a setting."""
    lengths = np.random.default_rng(0).integers(10, 80, size=400)
    for number, length in enumerate(lengths):
        (tmp_path / f"{number}.txt").write_text("x" * int(length), encoding="utf-8")
    return {"data": str(tmp_path)}


__all__ = ["documents"]

CPU = torch.device("cpu")

# Counting on a graph made by hand.


class Doubled(torch.autograd.Function):
    """Saves one tensor as it should, and leaves another on its context."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given)
        ctx.more = (given * 3.0,)
        return given * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2.0


def twice_squared(given: torch.Tensor) -> torch.Tensor:
    return (given * given).exp().sin()


WIDTH = 64
SIZE = 4 * WIDTH
"""Bytes of a vector."""


def offloaded(given: torch.Tensor) -> torch.Tensor:
    """Moves saved tensors to another memory and back for the backward only."""
    stored: list[bytes] = []

    def pack(tensor: torch.Tensor) -> int:
        stored.append(tensor.detach().numpy().tobytes())
        return len(stored) - 1

    def unpack(index: int) -> torch.Tensor:
        raise AssertionError("counting must not fetch what is stored elsewhere")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return given.exp().sin()


def packed(given: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.tensor):
        return given.exp().sin()


GRAPHS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "exp keeps its result, sin its input, which is the same": (lambda x: x.exp().sin(), 2),
    "views count once": (lambda x: x.view(8, -1).sin() * x.view(-1, 8).T, 2),
    "a Python function": (Doubled.apply, 2),
    "a checkpoint keeps its input": (
        lambda x: checkpoint(twice_squared, x, use_reentrant=False),
        1,
    ),
    "a checkpoint of an older kind": (
        lambda x: checkpoint(twice_squared, x, use_reentrant=True),
        1,
    ),
    "offloaded": (offloaded, 1),
    "packed by hooks": (packed, 2),
    "dropped by hand": (lambda x: _emptied(x.exp()), 1),
    "a graph that a backward has freed": (lambda x: _freed(x), 2),
}
"""With the vectors that are kept, the input among them, but not the output."""


def _emptied(kept: torch.Tensor) -> torch.Tensor:
    """As recomputation does with outputs that it can make again."""
    result = kept + 0.0
    kept.untyped_storage().resize_(0)
    return result


def _freed(given: torch.Tensor) -> torch.Tensor:
    inner = given.exp()
    (slope,) = torch.autograd.grad(inner.sin().sum(), given)
    return given * slope


@pytest.mark.parametrize("name", GRAPHS)
def test_what_a_graph_keeps(name: str) -> None:
    function, expected = GRAPHS[name]
    given = torch.randn(WIDTH, requires_grad=True)
    kept = ActivationCounter(torch.nn.Identity(), frozenset(), CPU)
    with kept.forward():
        output = function(given)
    kept.count_forward(0, [given], [output])
    own = output.untyped_storage().nbytes()
    del output
    gc.collect()
    (found,) = kept.results()
    if name == "a checkpoint of an older kind":
        own += torch.get_rng_state().nbytes
    assert found.until_b == own + expected * SIZE


def test_what_outlives_the_step_and_parameters_do_not_count() -> None:
    model = torch.nn.Linear(WIDTH, WIDTH)
    cached = torch.randn(WIDTH)
    kept = ActivationCounter(model, frozenset(), CPU)
    given = torch.randn(WIDTH, requires_grad=True)
    with kept.forward():
        output = given * cached
    kept.count_forward(0, [given], [output])
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert kept.results() == [ActivationBytes(2 * SIZE, 0)]


def test_compiled_layers_are_seen() -> None:
    compiled = torch.compile(twice_squared, backend="aot_eager")
    given = torch.randn(WIDTH, requires_grad=True)
    kept = ActivationCounter(torch.nn.Identity(), frozenset(), CPU)
    with kept.forward():
        output = compiled(given)
    kept.count_forward(0, [given], [output])
    output.sum().backward()  # type: ignore[no-untyped-call]
    del output
    # The input, the output and what it took from there, whatever the compiler chose to keep.
    assert kept.results()[0].until_b >= 3 * SIZE


def test_waiting_gradients_are_counted() -> None:
    weight = torch.nn.Parameter(torch.zeros(WIDTH))
    gradients = CanonicalGradients([weight], 3)
    waiting = []
    for microbatch in (2, 1, 0):
        with gradients.adding(microbatch):
            (weight * (microbatch + 1.0)).sum().backward()  # type: ignore[no-untyped-call]
        waiting.append(gradients.waiting_bytes)
    assert waiting == [SIZE, 2 * SIZE, 0]


# Counting on ranks that train.


@dataclass(slots=True)
class Measured:
    """The results on one rank of a training with measured memory."""

    run: RankRun
    features: list[list[Features]] = field(default_factory=list)
    """By step and microbatch."""
    kept: list[list[list[ActivationBytes]]] = field(default_factory=list)
    """By step, chunk and microbatch, as are the others."""
    independent: list[list[list[int]]] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    num_left: int = 0
    """Tensors that measuring has left behind, above what the same training leaves without it."""


def measured(settings: dict[str, Any], *, watches: bool = False) -> Measured:
    """Train on this rank with memory measured; with `watches`, by hooks of this test as well."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.megatron import dropin
    from rrfp.megatron.step.stage import RankStep
    from rrfp.train.data.batches import open_data
    from rrfp.train.launch.process_groups import parallel_groups

    chosen = TrainSettings(**settings)
    steps: list[Any] = []
    watched: list[list[list[int]]] = []

    class Step(RankStep):
        def __init__(self, *arguments: Any, **others: Any) -> None:
            super().__init__(*arguments, **{**others, "measures_memory": True})

        def finish(self) -> None:
            super().finish()
            time.sleep(GLOO_S)
            # An evaluation is not measured.
            assert bool(self.activation_bytes()) == bool(self._counters)
            if self._counters:
                steps.append((self.activation_bytes(), self.peak_waiting_gradient_bytes))
                assert not any(counter.opaque_nodes for counter in self._counters)

    with parallel_groups(chosen) as layout:
        plain = train_variant(chosen, layout)
        nums_left = [_num_tensors_left()]
        train_variant(chosen, layout)
        nums_left.append(_num_tensors_left())
        with patch.object(dropin, "RankStep", Step):
            found = Measured(train_variant(chosen, layout))
        nums_left.append(_num_tensors_left())
        found.num_left = np.diff(nums_left, n=2).item()
        if watches:
            # By itself: under hooks the graph has what they made of the tensors.
            with watched_memory(watched):
                train_variant(chosen, layout)
            found.independent = watched
        data = [open_data(chosen).batches(replica) for replica in range(layout.dp)]
        for step, (kept, waiting) in enumerate(steps):
            found.features.append([])
            for microbatch in range(chosen.data.microbatches):
                replicas = [features_of(each.batch(step, microbatch)) for each in data]
                own = replicas[layout.dp_rank]
                found.features[-1].append(with_group(own, replicas) if layout.ep > 1 else own)
            found.kept.append(kept)
            found.waiting.append(waiting)
        same = ("losses", "heldout_losses", "grad_norms", "parameters_sha256")
        assert [getattr(plain, name) for name in same] == [
            getattr(found.run, name) for name in same
        ]
    return found


def _num_tensors_left() -> int:
    gc.collect()
    return num_tensors()


WRAPPED_BYTES = 64
"""Numbers that autograd keeps as tensors, which no hook sees."""

RNG_BYTES = 4 * 5056
"""The states of random generators that a layer's recomputation restores; no hook sees them."""


def check_counts(found: Measured, *, unseen: int = 0) -> None:
    """The counts are those of this test's own hooks; `unseen` bytes cannot be seen by them."""
    assert found.kept
    for kept, independent in zip(found.kept, found.independent, strict=True):
        for counted, watched in zip(kept, independent, strict=True):
            for each, expected in zip(counted, watched, strict=True):
                assert expected <= each.until_b <= expected + unseen + WRAPPED_BYTES


@dataclass(frozen=True, slots=True)
class Judged:
    """How the sizes of later steps compare with what was known before."""

    errors: list[float]
    """Shares by which they differ from predictions."""
    fullness: list[float]
    """Sizes over their bounds."""


def judged(found: Measured, num_fitted: int) -> Judged:
    """By the first steps, the errors of predictions; and, by all steps before each, the bounds."""
    errors, fullness = [], []
    for chunk in range(len(found.kept[0])):
        fixed, growing = SizeModel(), SizeModel()
        for step, kept in enumerate(found.kept):
            sizes = [*zip(found.features[step], kept[chunk], strict=True)]
            for features, each in sizes if step >= num_fitted else ():
                size, bound = max(each.until_b, each.until_w), growing.bound(features)
                errors.append(abs(fixed.predict(features).kept - size) / size)
                assert bound is not None
                assert bound.owed <= bound.kept
                fullness += [size / bound.kept, each.until_w / max(bound.owed, 1)]
            for features, each in sizes:
                growing.take(features, each.until_b, each.until_w)
                if step < num_fitted:
                    fixed.take(features, each.until_b, each.until_w)
    return Judged(errors, fullness)


@pytest.mark.timeout(200)
def test_gpt_with_split_backwards(documents: dict[str, Any]) -> None:
    settings = {**GPT, **documents, **ZB_V, "steps": 8}
    for found in run_ranks(2, _counted, settings, timeout_s=180):
        assert len(found.kept) == settings["steps"]
        check_counts(found)
        assert all(each.until_w > 0 for kept in found.kept for row in kept for each in row)
        seen = judged(found, 5)
        assert max(seen.errors) < 0.015
        assert max(seen.fullness) <= 1
        assert found.num_left <= 0


def _counted(settings: dict[str, Any]) -> Measured:
    return measured(settings, watches=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_ranks", "settings", "unseen"),
    [
        (2, VLM, 0),
        (2, {**VLM, **ZB_V}, 0),
        (2, MOE, 0),
        (4, {**MOE, "ep": 2, "dp": 2}, 0),
        (4, {**GPT, **ZB_V, "tp": 2}, 0),
        (4, {**GPT, "tp": 2, "sequence_parallel": True}, 0),
        (2, {**GPT, "recompute": "full"}, 2 * RNG_BYTES),
        (2, {**GPT, "recompute": "selective"}, 2 * RNG_BYTES),
    ],
    ids=str,
)
def test_counts_of_models_and_layouts(
    num_ranks: int, settings: dict[str, Any], unseen: int
) -> None:
    for found in run_ranks(num_ranks, _counted, settings, timeout_s=500):
        check_counts(found, unseen=unseen)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [GPT, {**VLM, "layers": 8}, MOE], ids=str)
def test_steps_not_used_for_the_fit_are_predicted(
    settings: dict[str, Any], documents: dict[str, Any]
) -> None:
    settings = {**settings, "microbatches": 8, "steps": 30}
    if settings.get("model") != "vlm":
        settings |= documents
    for found in run_ranks(2, measured, settings, timeout_s=500):
        seen = judged(found, 10)
        assert max(seen.errors) < 0.015
        assert max(seen.fullness) <= 1
        assert found.num_left <= 0


# Predicting.


def text(length: int, num_rows: int = 1) -> Features:
    return features_of({"tokens": np.zeros((num_rows, length))})


def size_of(features: Features) -> int:
    return round(5_000 + 70_000 * features[1] + 48 * features[2])


def test_least_squares_are_the_best_of_all_sets_of_columns() -> None:
    rng = np.random.default_rng(0)
    for trial in range(300):
        num_rows, num_columns = rng.integers(1, 12), rng.integers(1, 7)
        matrix = rng.random((num_rows, num_columns))
        if trial % 3 == 0:
            matrix[:, 0] = matrix[:, -1]
        matrix /= np.linalg.norm(matrix, axis=0)
        values = matrix @ rng.normal(size=num_columns).clip(0) + 0.1 * rng.normal(size=num_rows)
        found = nonnegative_least_squares(matrix, values)
        assert (found >= 0).all()
        best = min(_residuals(matrix, values))
        assert np.linalg.norm(matrix @ found - values) <= best + 1e-7


def _residuals(matrix: Any, values: Any) -> Iterator[float]:
    yield float(np.linalg.norm(values))
    columns = range(matrix.shape[1])
    for number in columns:
        for chosen in itertools.combinations(columns, number + 1):
            part = matrix[:, chosen]
            solved = np.linalg.lstsq(part, values, rcond=None)[0]
            if (solved >= 0).all():
                yield float(np.linalg.norm(part @ solved - values))


def test_nothing_measured_bounds_nothing_and_one_bounds_by_ratio() -> None:
    model = SizeModel()
    assert model.bound(text(100)) is None
    model.take(text(100), size_of(text(100)), 1000)
    assert not model.is_fitted
    assert model.bound(text(100)) == (size_of(text(100)), 1000)
    assert model.bound(text(50)) == (size_of(text(100)), 1000)
    assert model.bound(text(200)) == (4 * size_of(text(100)), 4000)
    assert model.bound(features_of(_with_images(100, [4]))) is None


def _with_images(length: int, patches: list[int]) -> dict[str, Any]:
    return {
        "tokens": np.zeros((1, length)),
        "patches": np.zeros((sum(patches), 3)),
        "patch_counts": np.array(patches),
    }


def test_bytes_that_w_needs_beyond_those_of_f_count_from_f_on() -> None:
    model = SizeModel()
    model.take(text(8), 100, 130)
    assert model.bound(text(8)) == Bound(130, 130)


def test_a_law_is_found_and_holds_far_beyond_what_was_measured() -> None:
    model = SizeModel()
    for length in (16, 40, 72, 96, 120, 33, 47, 60):
        model.take(text(length), size_of(text(length)))
    assert model.is_fitted
    for features in (text(1024), text(8), text(64, 4)):
        bound = model.bound(features)
        assert bound is not None
        assert size_of(features) <= bound.kept + 1
        assert bound.kept <= 1.001 * size_of(features)


def test_features_that_always_occur_together_are_not_separated() -> None:
    model = SizeModel()
    for count in range(1, 12):
        # As many places as there are images, so that either may be what is paid for.
        model.take((1.0, float(count), float(count)), 1000 * count)
    bound = model.bound((1.0, 20.0, 20.0))
    assert bound is not None
    assert abs(bound.kept - 20_000) <= 2
    bound = model.bound((1.0, 20.0, 1.0))
    assert bound is not None
    assert bound.kept >= 20_000


@pytest.mark.parametrize("seed", range(3))
def test_bounds_hold_where_experts_are_chosen(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = SizeModel()
    exceeded, over = [], []
    for _ in range(500):
        lengths = rng.integers(16, 512, size=8)
        bounds = [model.bound(text(int(length))) for length in lengths]
        for length, bound in zip(lengths, bounds, strict=True):
            mean = size_of(text(int(length)))
            size = round(mean * (1.0 + 0.05 * rng.normal()))
            if bound is not None:
                exceeded.append(size / bound.kept)
                over.append(bound.kept / mean)
            model.take(text(int(length)), size)
    assert sum(each > 1 for each in exceeded) <= 4
    assert max(exceeded) < 1.05
    assert np.mean(over) < 1.35


def test_features_of_items() -> None:
    assert text(6, 2) == (1, 12, 72, 72, 1, 1, 1, 0)
    packed = {"tokens": np.zeros((1, 10)), "cu_seqlens": np.array([[0, 3, 10, 10, -1]])}
    assert features_of(packed)[:4] == (1, 10, 100, 58)
    assert features_of(_with_images(10, [2, 3])) == (1, 10, 100, 100, 5, 25, 13, 2)
    assert with_group((1, 2), [(1, 2), (1, 5)]) == (1, 2, 7)
    assert features_of(7, lambda item: [item, 2.5]) == (1, 7, 2.5)
    assert features_of(7, lambda item: np.float64(item)) == (1, 7)


@pytest.mark.parametrize(
    ("item", "function", "message"),
    [
        ((1, 2), None, "a tuple, has no tensor named tokens, input_ids or text"),
        ({"tokens": [1, 2]}, None, "a dict, has no tensor named"),
        (0, lambda _: "many", "gave 'many'; give finite numbers of 0 or more"),
        (0, lambda _: -1, "gave -1; give finite numbers"),
        (0, lambda _: [1.0, 10**400], "give finite numbers"),
        (0, lambda _: 1 / 0, "raised ZeroDivisionError: division by zero; correct the function"),
    ],
)
def test_items_without_a_size(item: Any, function: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        features_of(item, function)


def test_as_many_features_for_each() -> None:
    model = SizeModel()
    model.take((1.0, 2.0), 10)
    with pytest.raises(
        UsageError, match="has 2 numbers that its size depends on, and another had 1"
    ):
        model.take((1.0, 2.0, 3.0), 10)


# The hold in bytes on ranks that train: never a byte over it, by an independent count.


MIB = 2**20


def trained(settings: dict[str, Any], hold: str) -> tuple[RankRun, RankRun, list[list[list[int]]]]:
    """A run under the hold, the same run without one, and what its microbatches kept from F to B,
    by step, chunk and microbatch, as hooks on autograd see it."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    chosen = TrainSettings(**settings)
    kept: list[list[list[int]]] = []
    with parallel_groups(chosen) as layout:
        bound = train_variant(chosen.changed(hold=hold), layout)
        with watched_memory(kept):
            free = train_variant(chosen, layout)
    return bound, free, kept


def peaks_of(run: RankRun, kept: list[list[list[int]]]) -> Iterator[int]:
    """By step that trains: the most bytes at once, in the order in which the tasks ran."""
    for step, sizes in enumerate(kept):
        held = peak = 0
        for task in sorted(task for task in run.tasks() if task.step == step):
            size = sizes[task.chunk][task.microbatch]
            held += size if task.kind == "F" else -size
            peak = max(peak, held)
        assert held == 0
        yield peak


def check(settings: dict[str, Any], hold: str, *, steps: int) -> None:
    settings = {**settings, "steps": steps}
    runs = run_ranks(settings["pp"], trained, settings, hold, timeout_s=10 + 3 * steps)
    budget = TrainSettings(**settings, hold=hold).policy.hold
    assert isinstance(budget, Bytes)
    num_overlapping = 0
    for bound, free, kept in runs:
        peaks = [*peaks_of(bound, kept)]
        assert len(peaks) == steps
        assert max(peaks) <= budget.num
        heaviest = max(max(map(max, step)) for step in kept)
        num_overlapping += sum(peak > heaviest for peak in peaks)
        # The same training, to the last bit.
        assert (bound.losses, bound.grad_norms) == (free.losses, free.grad_norms)
        assert bound.parameters_sha256 == free.parameters_sha256
    # The bound lets in more than one microbatch at a time.
    assert num_overlapping > steps / 4


@pytest.mark.timeout(200)
def test_a_few_steps_stay_within_the_hold(documents: dict[str, Any]) -> None:
    check({**GPT, **documents, "microbatches": 6}, "3MiB", steps=6)


def test_gradients_that_wait_take_room_from_later_steps(tmp_path: Path) -> None:
    order = tmp_path / "backwards-last-first.csv"
    rows = ("0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0", "1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0")
    order.write_text("\n".join(rows))
    settings = {**GPT, "variable_lengths": False, "hint": str(order), "steps": 8}
    [run] = run_ranks(2, train_variants, settings, [{"hold": "64MiB"}], timeout_s=90)[1]
    waiting = [
        max(task.waiting_bytes for task in run.tasks() if task.step == step) for step in range(8)
    ]
    budgets = [
        record.budget_bytes
        for record in run.records
        if isinstance(record, PhaseRecord) and record.phase == Phase.SCHEDULE and record.step >= 0
    ]
    # The first step lets one microbatch through at a time, in their order.
    assert waiting[0] == 0 < max(waiting)
    assert budgets == [64 * MIB - max(waiting[:step], default=0) for step in range(8)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("settings", "hold"),
    [(GPT, "4MiB"), ({**VLM, "layers": 8}, "10MiB"), (MOE, "4MiB")],
    ids=["gpt", "vlm", "moe"],
)
def test_500_steps_stay_within_the_hold(
    settings: dict[str, Any], hold: str, documents: dict[str, Any]
) -> None:
    own = documents if settings.get("model") != "vlm" else {}
    check({**settings, **own}, hold, steps=500)


def plan_with_a_rank_without_memory() -> str:
    """Plan the steps of two ranks of a group; the second rank has no memory in the second step."""
    dist.init_process_group("gloo")
    rank, features = dist.get_rank(), [(1.0, 8.0)] * 2
    memory = bound_file.MemoryBound(Auto.AUTO, 1, torch.device("cpu"))
    memory.plan(features, [dist.group.WORLD])
    memory.learn([[ActivationBytes(1000, 100)] * 2])
    free = -1 if rank == 1 else 10_000
    with (
        patch.object(bound_file, "_host_headroom", lambda: free),
        pytest.raises(RrfpError if rank == 1 else PeerLostError) as failed,
    ):
        memory.plan(features, [dist.group.WORLD])
    with patch.object(bound_file, "_host_headroom", lambda: 10_000 + rank):
        assert memory.plan(features, [dist.group.WORLD]).budget == 10_000
    dist.destroy_process_group()
    return str(failed.value)


def test_all_ranks_of_a_group_raise_if_one_has_no_memory() -> None:
    first, second = run_ranks(2, plan_with_a_rank_without_memory)
    assert first.startswith("rank 1 could not measure the memory that activations may use; its own")
    assert second.startswith("cpu has no memory left for activations after a margin of 10%")

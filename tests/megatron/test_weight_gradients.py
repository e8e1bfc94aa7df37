"""Weight gradients that come later, in any order, are those of a fused backward to the bit."""

import gc
import inspect
import queue
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rrfp.megatron.settings import GradOrder
from rrfp.megatron.step.gradients import GradientSum, gradient_sum
from tests.e2e.ranks import run_ranks
from tests.megatron.one_chunk import (
    MICROBATCHES,
    TIMEOUT_S,
    Chunk,
    Task,
    are_left,
    digests,
    in_groups,
    num_tensors,
    some_order,
)

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)


MOE = {"experts": 4}
TP2 = {"tp": 2}
SP = {**TP2, "sequence_parallel": True}

IN_ORDER = [(kind, microbatch) for microbatch in range(MICROBATCHES) for kind in "FBW"]
W_LAST = [(kind, microbatch) for kind in "FBW" for microbatch in reversed(range(MICROBATCHES))]
ORDERS = [IN_ORDER, W_LAST, *(some_order(seed, "FBW") for seed in range(2))]


class Split:
    """The tasks of one step on a chunk, with its weight gradients split off."""

    def __init__(self, model: Any) -> None:
        from rrfp.megatron.settings import GradOrder
        from rrfp.megatron.step.gradients import CanonicalGradients
        from rrfp.megatron.step.weight_gradients import DeferredWeightGradients, deferrable_weights

        self.weights = set(deferrable_weights(model))
        others = [parameter for parameter in model.parameters() if parameter not in self.weights]
        self.with_backwards = CanonicalGradients(others, MICROBATCHES)
        self.deferred = DeferredWeightGradients(model, GradOrder.CANONICAL, MICROBATCHES)
        self.split: set[Any] = set()
        """The weights whose gradients W has computed."""

    def run(self, chunk: Any, order: list[Task]) -> None:
        for kind, microbatch in order:
            if kind == "F":
                with self.deferred.task(microbatch):
                    chunk.forward(microbatch)
            elif kind == "B":
                with self.deferred.task(microbatch), self.with_backwards.adding(microbatch):
                    chunk.backward(microbatch)
            else:
                products = self.deferred._microbatches[microbatch].products
                self.split |= {weight for product in products for weight in product.weights}
                self.deferred.run(microbatch)


def names_that_differ(layout: Any, cases: list[dict[str, Any]]) -> list[list[str]]:
    """By case, the parameters whose gradients any order changes; and a word when W does nothing or
    a step leaves tensors behind."""
    return [_names_that_differ(Chunk(layout, case)) for case in cases]


def _names_that_differ(chunk: Chunk) -> list[str]:
    expected = chunk.gradients_in_order()
    differing = set()
    gc.collect()  # What earlier cases left must not go away in between.
    num_before = num_tensors()
    for order in ORDERS:
        chunk.model.zero_grad_buffer()
        split = Split(chunk.model)
        split.run(chunk, order)
        found = digests(chunk.model)
        differing |= {name for name in expected if found[name] != expected[name]}
        names = {id(parameter): name for name, parameter in chunk.model.named_parameters()}
        linear = {names[id(weight)] for weight in split.split}
        if not {name for name in expected if "linear_" in name and "weight" in name} <= linear:
            differing.add("a linear layer is not deferred")
        if are_left(num_before):
            differing.add("a step leaves tensors behind")
    return sorted(differing)


@pytest.mark.parametrize(
    "cases",
    [
        [{}, {"dtype": "bf16"}, {"tie_embeddings": True}],
        [{"recompute": "full"}, {"recompute": "selective"}],
        [MOE, {**MOE, "dtype": "bf16"}, {**MOE, "recompute": "full"}],
    ],
)
def test_one_rank(cases: list[dict[str, Any]]) -> None:
    (found,) = run_ranks(1, in_groups, {}, names_that_differ, cases, timeout_s=TIMEOUT_S)
    assert dict(zip(map(str, cases), found, strict=True)) == {str(case): [] for case in cases}


@pytest.mark.slow
def test_tensor_parallel_ranks() -> None:
    cases = [TP2, {**TP2, "dtype": "bf16"}, {**TP2, "recompute": "full"}]
    for found in run_ranks(2, in_groups, TP2, names_that_differ, cases, timeout_s=TIMEOUT_S):
        assert found == [[] for _ in cases]


@pytest.mark.slow
def test_sequence_parallel_ranks() -> None:
    cases = [SP, {**SP, "dtype": "bf16"}, {**SP, **MOE}, {**SP, "recompute": "full"}]
    for found in run_ranks(2, in_groups, SP, names_that_differ, cases, timeout_s=TIMEOUT_S):
        assert found == [[] for _ in cases]


@pytest.mark.slow
def test_expert_parallel_ranks() -> None:
    settings = {**MOE, "ep": 2}
    for found in run_ranks(
        2, in_groups, settings, names_that_differ, [settings], timeout_s=TIMEOUT_S
    ):
        assert found == [[]]


# In DistributedDataParallel.


def test_buckets_are_ready_only_with_their_weights() -> None:
    (found,) = run_ranks(1, in_groups, {}, reductions, timeout_s=TIMEOUT_S)
    assert found == [[], []]


def reductions(layout: Any) -> list[list[str]]:
    """Differences from Megatron's reduced gradients, with each of two kinds of optimizer."""
    return [
        _reduction(Chunk(layout, {}, overlap_grad_reduce=True, bucket_size=1000, **ddp))
        for ddp in ({}, {"use_distributed_optimizer": True})
    ]


def _reduction(chunk: Chunk) -> list[str]:
    model = chunk.model
    groups = model.bucket_groups
    assert len(groups) > 2
    model.zero_grad_buffer()
    for microbatch in range(MICROBATCHES):
        chunk.forward(microbatch)
        chunk.backward(microbatch)
    model.finish_grad_sync()
    expected = digests(model)

    # From the second step on, the hooks start a bucket's reduction once all of it is ready.
    model.zero_grad_buffer()
    split = Split(model)
    split.run(chunk, [(kind, microbatch) for microbatch in (1, 0, 2, 3) for kind in "FB"])
    ready = {parameter for group in groups for parameter in group.per_param_grad_ready_counts}
    assert ready == set(model.parameters()) - split.weights
    with_weights = [group for group in groups if split.weights & group.params]
    assert not any(group.grad_reduce_handle for group in with_weights)
    split.run(chunk, [("W", microbatch) for microbatch in (2, 0, 3, 1)])
    for group in with_weights:
        group.start_grad_sync()
    model.finish_grad_sync()
    found = digests(model)
    return [name for name in expected if found[name] != expected[name]]


class FusedKernel:
    """Stands for Apex' kernels: the product is added to the sum in fp32."""

    def wgrad_gemm_accum_fp32(
        self, input_: torch.Tensor, output_gradient: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        main_grad.add_(output_gradient.float().t() @ input_.float())


def test_fused_accumulation() -> None:
    (found,) = run_ranks(1, in_groups, {}, fused_differences, timeout_s=TIMEOUT_S)
    assert found == {"split": [], "whole": []}


def fused_differences(layout: Any) -> dict[str, list[str]]:
    from megatron.core.tensor_parallel import layers

    from rrfp.megatron.step.gradients import CanonicalGradients

    layers.fused_weight_gradient_mlp_cuda = FusedKernel()
    chunk = Chunk(layout, {"dtype": "bf16"})
    unfused = chunk.gradients_in_order()
    for module in chunk.model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = True
    split = _names_that_differ(chunk)

    expected = chunk.gradients_in_order()
    assert expected != unfused
    chunk.model.zero_grad_buffer()
    whole = CanonicalGradients(chunk.model.parameters(), MICROBATCHES)
    for kind, microbatch in some_order(0, "FB"):
        if kind == "F":
            chunk.forward(microbatch)
        else:
            with whole.adding(microbatch):
                chunk.backward(microbatch)
    found = digests(chunk.model)
    return {"split": split, "whole": [name for name in expected if found[name] != expected[name]]}


# Layers by themselves.


def test_layers_by_themselves() -> None:
    run_ranks(1, in_groups, {}, layers_by_themselves, timeout_s=TIMEOUT_S)


def layers_by_themselves(_layout: Any) -> None:
    from megatron.core.tensor_parallel import layers

    native = layers.LinearWithGradAccumulationAndAsyncCommunication
    an_input_that_needs_no_gradient()
    a_weight_used_twice()
    a_setting_that_only_megatron_follows()
    weights_that_stay_with_the_backward()
    a_graph_that_leads_back_to_its_products()
    assert layers.LinearWithGradAccumulationAndAsyncCommunication is native


def column(**options: Any) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **{name: options.pop(name) for name in list(options) if name.startswith("defer")},
    )
    torch.manual_seed(3)
    given = {"bias": True, "init_method": torch.nn.init.normal_, **options}
    return ColumnParallelLinear(8, 8, config=config, **given)


def fused_and_split(make: Callable[[], Any], run: Callable[[Any], torch.Tensor]) -> list[Any]:
    """`.grad` of each parameter, from Megatron's backward and from ours, which also says what came
    with the backward."""
    native = make()
    run(native).backward()  # type: ignore[no-untyped-call]
    ours = make()
    split = Split(ours)
    with split.deferred.task(0):
        output = run(ours)
    with split.deferred.task(0), split.with_backwards.adding(0):
        output.backward()  # type: ignore[no-untyped-call]
    with_backward = [name for name, p in ours.named_parameters() if p.grad is not None]
    split.deferred.run(0)
    same = [
        a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
        for a, b in zip(native.parameters(), ours.parameters(), strict=True)
    ]
    return [same, with_backward]


def an_input_that_needs_no_gradient() -> None:
    data = torch.randn(5, 2, 8)
    same, with_backward = fused_and_split(column, lambda layer: layer(data)[0].square().sum())
    assert same == [True, True]
    assert with_backward == ["bias"]


def a_weight_used_twice() -> None:
    data = torch.randn(3, 5, 2, 8, requires_grad=True)

    def run(layer: Any) -> torch.Tensor:
        return torch.stack([layer(part)[0].square().sum() for part in data]).sum()

    assert fused_and_split(column, run)[0] == [True, True]


def a_setting_that_only_megatron_follows() -> None:
    from megatron.core.tensor_parallel import layers

    own = layers.LinearWithGradAccumulationAndAsyncCommunication

    class Newer(torch.autograd.Function):
        """As from 0.20 on, where a layer may ask for an output in another dtype."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any, output_dtype: Any = None) -> Any:
            raise NotImplementedError

        @staticmethod
        def apply(*arguments: Any) -> Any:
            *oldest, output_dtype = arguments
            found = own.apply(*oldest, *plain)
            return found if output_dtype is None else found.to(output_dtype)

    parameters = inspect.signature(own.forward).parameters.values()
    oldest, newer = [*parameters][:10], [*parameters][10:]
    plain = [{"gtp_remat_size": 1}.get(parameter.name) for parameter in newer]
    newest = inspect.Parameter("output_dtype", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Newer.forward.__signature__ = inspect.Signature([*oldest, newest])  # type: ignore[attr-defined]
    data = torch.randn(5, 2, 8)
    with patch.object(layers, own.__name__, Newer):
        for output_dtype, is_split in ((None, True), (torch.float32, True), (torch.float64, False)):
            layer = column()
            split = Split(layer)
            for kind in "FB":
                with split.deferred.task(0):
                    if kind == "F":
                        function = getattr(layers, own.__name__)
                        arguments = (data, layer.weight, layer.bias, False, False, False)
                        output = function.apply(*arguments, None, None, None, output_dtype)
                        assert output.dtype is (output_dtype or torch.float32)
                    else:
                        output.sum().backward()
            assert (layer.weight.grad is None) is is_split
            split.deferred.run(0)
            product = torch.ones(10, 8).t() @ data.reshape(10, 8)
            torch.testing.assert_close(layer.weight.grad, product)


def a_graph_that_leads_back_to_its_products() -> None:
    linear, te = column(), TeLinear(fuse_wgrad_accumulation=False)
    data = torch.randn(5, 8)
    kept = []
    for _ in range(2):
        split = Split(torch.nn.ModuleList([linear, te]))
        with split.deferred.task(0):
            output = te(linear(data)[0]).square().sum()
        with split.deferred.task(0), split.with_backwards.adding(0):
            output.backward()
        split.deferred.run(0)
        kept.append(num_tensors())
    assert kept[0] == kept[1]


def weights_that_stay_with_the_backward() -> None:
    from rrfp.megatron.step.weight_gradients import deferrable_weights

    layer = column()
    assert deferrable_weights(layer) == [layer.weight]
    layer.weight.requires_grad_(False)
    assert deferrable_weights(layer) == []
    # Megatron defers the output layer's gradient itself, through these buffers.
    buffered = column(grad_output_buffer=[], embedding_activation_buffer=[])
    assert deferrable_weights(buffered) == []
    shared = torch.nn.ModuleDict({"linear": column(), "embedding": torch.nn.Embedding(8, 8)})
    shared["embedding"].weight = shared["linear"].weight
    assert deferrable_weights(shared) == []


# Layers of Transformer Engine, of which these lines keep what concerns weight gradients.


class WeightGradStore:
    """As in transformer_engine.pytorch.module._common."""

    def __init__(self) -> None:
        self.context: queue.Queue[Any] = queue.Queue()

    def delay_wgrad_compute(self) -> bool:
        return True

    def put(self, tensors: list[torch.Tensor], function: Callable[..., Any]) -> None:
        self.context.put([tensors, function])

    def pop(self) -> tuple[Any, list[torch.Tensor]]:
        tensors, function = self.context.get_nowait()
        return function(*tensors), tensors


class _TeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, input_: torch.Tensor, bias: torch.Tensor, module: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(input_)
        ctx.module = module
        return input_ @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, output_gradient: torch.Tensor) -> Any:
        (input_,) = ctx.saved_tensors
        module, weight = ctx.module, ctx.module.weight

        def product(input_: torch.Tensor, output_gradient: torch.Tensor) -> Any:
            bias_gradient = output_gradient.sum(dim=0)
            gradient = output_gradient.t() @ input_
            if module.fuse_wgrad_accumulation:
                weight.main_grad.add_(gradient)
                return None, bias_gradient
            return gradient, bias_gradient

        module.wgrad_store.put([input_, output_gradient], product)
        stands_in = None
        if module.fuse_wgrad_accumulation:
            weight.grad_added_to_main_grad = True
            stands_in = torch.full_like(weight, torch.nan)
        return stands_in, output_gradient @ weight, None, None


class TeLinear(torch.nn.Module):
    """As transformer_engine.pytorch.Linear with `delay_wgrad_compute`."""

    def __init__(self, *, fuse_wgrad_accumulation: bool) -> None:
        super().__init__()
        self.weight: Any = torch.nn.Parameter(torch.randn(8, 8))
        self.bias: Any = torch.nn.Parameter(torch.randn(8))
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.wgrad_store = WeightGradStore()
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        for parameter in self.parameters():
            parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _TeFunction.apply(  # type: ignore[no-untyped-call]
            self.weight, input_, self.bias, self
        )
        return output

    @torch.no_grad()
    def backward_dw(self) -> None:
        (gradient, bias_gradient), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = gradient
        if self.bias.grad is None:
            self.bias.grad = bias_gradient
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


@pytest.mark.parametrize("fuses", [False, True])
def test_transformer_engine_layers(fuses: bool) -> None:
    run_ranks(1, in_groups, {}, transformer_engine, fuses, timeout_s=TIMEOUT_S)


def transformer_engine(_layout: Any, fuses: bool) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from rrfp.megatron.step.weight_gradients import unreachable_hook

    torch.manual_seed(0)
    data = torch.randn(MICROBATCHES, 5, 8)
    model: Any = torch.nn.Sequential(
        TeLinear(fuse_wgrad_accumulation=fuses), TeLinear(fuse_wgrad_accumulation=fuses)
    )
    wrapped = DistributedDataParallel(
        column().config,
        DistributedDataParallelConfig(delay_wgrad_compute=True, overlap_grad_reduce=True),
        model,
    )
    for microbatch in range(MICROBATCHES):
        model(data[microbatch]).square().sum().backward()
        for layer in reversed(model):
            layer.backward_dw()
    expected = digests(model)

    class Runner:
        def __init__(self) -> None:
            self.losses: dict[int, torch.Tensor] = {}

        def forward(self, microbatch: int) -> None:
            self.losses[microbatch] = model(data[microbatch]).square().sum()

        def backward(self, microbatch: int) -> None:
            self.losses.pop(microbatch).backward()  # type: ignore[no-untyped-call]

    for order in ORDERS:
        wrapped.zero_grad_buffer()
        split = Split(wrapped)
        assert split.weights == set(model.parameters())
        split.run(Runner(), order)
        assert digests(model) == expected
        assert all(layer.wgrad_accumulation_and_reduce_hooks for layer in model)
        assert not any(group.per_param_grad_ready_counts for group in wrapped.bucket_groups)
    assert unreachable_hook(wrapped) is None
    model[1].weight.register_hook(print)
    assert unreachable_hook(wrapped) == ("module.1.weight", print)


# Sums of gradients: canonical order to the bit, and arrival order.


SUMMANDS = 5
ORDERS_OF_FIVE = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 0, 4, 2, 3], [2, 0, 1, 4, 3]]

GRADIENTS = torch.randn(SUMMANDS, 2, 64, generator=torch.Generator().manual_seed(0))
"""By microbatch and parameter; their sum depends on the order, as the first test shows."""


class Model:
    """Two parameters, of which the gradients are what we say."""

    def __init__(self, *, has_main_grads: bool) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(64)) for _ in range(2)]
        self._buffer = torch.zeros(2, 64)
        self._has_main_grads = has_main_grads
        if has_main_grads:
            for index, parameter in enumerate(self.parameters):
                self._add_main_grad(parameter, self._buffer[index])

    @staticmethod
    def _add_main_grad(parameter: Any, main_grad: torch.Tensor) -> None:
        parameter.main_grad = main_grad

        def empty_into_main_grad(parameter: Any) -> None:
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(empty_into_main_grad)

    def backward(self, microbatch: int) -> None:
        loss = (torch.stack([*self.parameters]) * GRADIENTS[microbatch]).sum()
        loss.backward()  # type: ignore[no-untyped-call]

    def total(self) -> torch.Tensor:
        if self._has_main_grads:
            return self._buffer.clone()
        return torch.stack([parameter.grad for parameter in self.parameters])  # type: ignore[misc]


def sum_of(order: GradOrder, model: Model) -> GradientSum:
    return gradient_sum(order, model.parameters, SUMMANDS)


def add_in_hand(total: GradientSum, model: Model, microbatch: int) -> None:
    gradients = [gradient.clone() for gradient in GRADIENTS[microbatch]]
    total.add(microbatch, zip(model.parameters, gradients, strict=True))


def add_by_backward(total: GradientSum, model: Model, microbatch: int) -> None:
    with total.adding(microbatch):
        model.backward(microbatch)


@pytest.mark.parametrize("has_main_grads", [False, True])
@pytest.mark.parametrize("add", [add_in_hand, add_by_backward])
def test_orders(has_main_grads: bool, add: Any) -> None:
    sums: dict[GradOrder, list[torch.Tensor]] = {order: [] for order in GradOrder}
    for grad_order in GradOrder:
        for microbatches in ORDERS_OF_FIVE:
            model = Model(has_main_grads=has_main_grads)
            total = sum_of(grad_order, model)
            for microbatch in microbatches:
                add(total, model, microbatch)
            sums[grad_order].append(model.total())
    in_order, *others = sums[GradOrder.CANONICAL]
    expected = torch.zeros(2, 64)
    for gradient in GRADIENTS:
        expected += gradient
    assert torch.equal(in_order, expected)
    assert all(torch.equal(other, expected) for other in others)
    assert torch.equal(sums[GradOrder.ARRIVAL][0], expected)
    assert not all(torch.equal(other, expected) for other in sums[GradOrder.ARRIVAL])
    for other in sums[GradOrder.ARRIVAL]:
        torch.testing.assert_close(other, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("add", [add_in_hand, add_by_backward])
def test_a_negative_zero_stays_one(add: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "GRADIENTS", torch.full_like(GRADIENTS, -0.0))
    model = Model(has_main_grads=False)
    total = sum_of(GradOrder.CANONICAL, model)
    for microbatch in reversed(range(SUMMANDS)):
        add(total, model, microbatch)
    assert bool(torch.signbit(model.total()).all())


def test_what_a_microbatch_completes() -> None:
    model = Model(has_main_grads=True)
    canonical, arrival = (sum_of(order, model) for order in GradOrder)
    for microbatch in [0, 2, 4, 3]:
        for total in (canonical, arrival):
            assert not total.completes(microbatch)
            add_in_hand(total, model, microbatch)
    # After the backward of 1, the sum still takes in 2 to 4: a hook inside it would be too early.
    assert not canonical.completes(1)
    assert arrival.completes(1)


def test_the_sum_stays_in_its_buffer() -> None:
    model = Model(has_main_grads=True)
    parameter: Any = model.parameters[0]
    main_grad, place = parameter.main_grad, parameter.main_grad.data_ptr()
    total = sum_of(GradOrder.CANONICAL, model)
    with total.adding(1):
        # A fused kernel remembers the tensor: it must be the temporary's then.
        assert parameter.main_grad is main_grad
        assert main_grad.data_ptr() != place
        main_grad.add_(1.0)
    assert main_grad.data_ptr() == place
    assert not main_grad.any()
    with total.adding(0):
        pass
    assert bool((main_grad == 1.0).all())


def test_a_backward_that_fails_leaves_the_sum_as_it_was() -> None:
    model = Model(has_main_grads=True)
    total = sum_of(GradOrder.CANONICAL, model)
    add_by_backward(total, model, 0)
    before = model.total()
    with pytest.raises(IndexError), total.adding(2):
        _backward_and_fail(model)
    assert torch.equal(model.total(), before)


def _backward_and_fail(model: Model) -> None:
    model.backward(2)
    model.backward(SUMMANDS)


def test_gradients_in_hand_are_drawn_one_by_one() -> None:
    """In order, a gradient is added before the next is computed, so that one at a time is there."""
    model = Model(has_main_grads=True)
    seen = []

    def gradients() -> Any:
        for index, parameter in enumerate(model.parameters):
            seen.append(float(model.total().sum()))
            yield parameter, torch.full_like(parameter, float(index + 1))

    sum_of(GradOrder.CANONICAL, model).add(0, gradients())
    assert seen == [0.0, 64.0]

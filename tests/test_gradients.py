"""Sums of gradients: canonical order to the bit, and arrival order."""

from typing import Any

import pytest
import torch

from rrfp.megatron.settings import GradOrder
from rrfp.megatron.step.gradients import GradientSum, gradient_sum

MICROBATCHES = 5
ORDERS = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 0, 4, 2, 3], [2, 0, 1, 4, 3]]

GRADIENTS = torch.randn(MICROBATCHES, 2, 64, generator=torch.Generator().manual_seed(0))
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
    return gradient_sum(order, model.parameters, MICROBATCHES)


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
        for microbatches in ORDERS:
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
    for microbatch in reversed(range(MICROBATCHES)):
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
    model.backward(MICROBATCHES)


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

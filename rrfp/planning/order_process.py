"""What the planner's process of a real run does: it learns what tasks take, and plans the step to
come, one request after the other.

Imports no torch.
"""

import time
from dataclasses import dataclass
from typing import Any

from rrfp.errors import RrfpError
from rrfp.planning.forecast import CostModel, Numbers
from rrfp.planning.order_search import Known, Plan, Search
from rrfp.planning.process_pool import Requests, answer
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.model import StepCosts

_LEAST_NOISE = 0.02
"""However well a model fits what it was made from, a step to come differs."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A step that has run."""

    features: Numbers
    """`[microbatch][feature]`, in the order in which they entered."""
    measured: Numbers
    """`[row][stage][microbatch]`, likewise (`rrfp.planning.forecast`)."""
    budgets: tuple[int, ...]
    """Bounds in bytes by pipeline rank; empty without any."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What steps have in common."""

    shape: Shape
    policy: Policy
    num_members: int


@dataclass(frozen=True, slots=True)
class Modelled:
    """What the tasks of a step are known to cost, as in `Known`."""

    costs: StepCosts
    noise: float
    key: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A step to plan."""

    step: int
    setting: Setting | None
    """None: that of the request before."""
    seconds: float
    """How much processor time to search for."""
    learned: Learned | None = None
    features: Numbers | None = None
    """Of the step's microbatches, in the order of the data."""
    modelled: Modelled | None = None
    """Where they are modelled; they are not predicted then."""
    num_simulations: int | None = None
    """As many instead of the time."""


def main() -> None:
    requests = Requests()
    planner = _Planner(requests)
    for request in requests:
        try:
            planner.plan(request)
        except (RrfpError, ValueError, ArithmeticError) as error:
            answer({"step": request.step, "last": True, "error": str(error)})


class _Planner:
    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._model = CostModel()
        self._budgets: tuple[int, ...] = ()
        self._setting: Setting | None = None

    def plan(self, request: PlanRequest) -> None:
        start_ns = time.monotonic_ns()
        if request.learned is not None:
            self._model.learn(request.learned.features, request.learned.measured)
            self._budgets = request.learned.budgets
        self._setting = request.setting or self._setting
        if self._requests.has_more:
            # That step has begun.
            return
        known = self._known(request)
        if known is None:
            answer({"step": request.step, "last": True})
            return
        search, start_s = Search(known), time.process_time()
        # Whoever cannot wait for more has this.
        answer(_told(request, start_ns, Plan(search.pyramid, 0, 0.0, 0.0)))
        while search.can_improve:
            checks = 2 * search.num_checks
            if request.num_simulations is not None:
                if search.num_simulations + checks >= request.num_simulations:
                    break
            elif search.num_simulations:
                # Processor time: on a busy machine it comes when the ranks wait.
                taken_s = time.process_time() - start_s
                if taken_s * (1 + checks / search.num_simulations) >= request.seconds:
                    break
            if self._requests.is_over() or self._requests.has_more:
                return
            if search.improve():
                answer(_told(request, start_ns, search.estimate))
        answer(_told(request, start_ns, search.plan()) | {"last": True})

    def _known(self, request: PlanRequest) -> Known | None:
        """The step, by its model or by what was learned; None before anything was."""
        setting, modelled = self._setting, request.modelled
        assert setting is not None
        if modelled is not None:
            return Known(
                shape=setting.shape,
                policy=setting.policy,
                costs=modelled.costs,
                noise=modelled.noise,
                key=modelled.key,
                num_members=setting.num_members,
            )
        features, model = request.features, self._model
        if features is None or not model.is_fitted:
            return None
        predicted = model.predict(features)
        return Known(
            shape=setting.shape,
            policy=setting.policy,
            costs=StepCosts(predicted.times, sizes=predicted.sizes),
            noise=max(_LEAST_NOISE, predicted.noise),
            key=(request.step,),
            num_members=setting.num_members,
            budgets=self._budgets,
        )


def _told(request: PlanRequest, start_ns: int, plan: Plan) -> dict[str, Any]:
    return {
        "step": request.step,
        "order": plan.order,
        "candidates": plan.num_candidates,
        "predicted_ns": plan.predicted_ns,
        "pyramid_ns": plan.pyramid_ns,
        "start_ns": start_ns,
        "end_ns": time.monotonic_ns(),
    }

"""The functions that planner processes run, and their requests.

They plan the steps of a real run, choose its hint, and plan steps of the simulator. Each works on
one request after the other. Imports no torch.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rrfp.errors import RrfpError
from rrfp.planning.candidates import (
    Candidate,
    MakeWorld,
    MeasuredSteps,
    candidates_of,
    choose,
    patient,
)
from rrfp.planning.forecast import Numbers, StepModel, sizes_of, times_of
from rrfp.planning.order_search import Plan, Search, StepForecast, plan_order
from rrfp.planning.planner_process import Requests, answer
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.model import StepCosts
from rrfp.simulate.engine import StepConditions

# Orders of entry of a real run. The process also learns how long tasks take.


_LEAST_NOISE = 0.02
"""However well a model fits the steps that it was made from, the next step differs."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that has run."""

    features: Numbers
    """`[microbatch][feature]`, in the order in which they entered."""
    measured: Numbers
    """`[row][stage][microbatch]`, with the rows of `MeasuredTasks.table`, in the same order."""
    budgets: tuple[int, ...]
    """Bounds in bytes by pipeline rank; empty without any."""


@dataclass(frozen=True, slots=True)
class PlanSetting:
    """The setting that steps have in common."""

    shape: Shape
    policy: Policy
    num_members: int


@dataclass(frozen=True, slots=True)
class ModeledStep:
    """The modeled costs of a step, as in `StepForecast`."""

    costs: StepCosts
    noise: float
    key: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request to plan the order of entry of a step."""

    step: int
    setting: PlanSetting | None
    """None: the setting of the request before."""
    seconds: float
    """The processor time of the search."""
    learned: MeasuredStep | None = None
    features: Numbers | None = None
    """The features of the step's microbatches, in the order of the data."""
    modeled: ModeledStep | None = None
    """Costs to plan by, in the place of predicted ones."""
    num_simulations: int | None = None
    """The length of the search in simulations, in the place of `seconds`."""


def plan_run_steps() -> None:
    """Answer each `PlanRequest` with better and better orders, and mark the final answer "last",
    until the parent is gone. An error is answered, too, and ends that request only."""
    requests = Requests()
    planner = _RunPlanner(requests)
    for request in requests:
        try:
            planner.plan(request)
        except (RrfpError, ValueError, ArithmeticError) as error:
            answer({"step": request.step, "last": True, "error": str(error)})


class _RunPlanner:
    """Answers the requests of one run."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._model = StepModel()
        self._budgets: tuple[int, ...] = ()
        self._setting: PlanSetting | None = None

    def plan(self, request: PlanRequest) -> None:
        """Learn from the request, then search, and answer with the pyramid, each better order and,
        after the time or number of simulations, the checked best one, marked "last". Without a
        forecast, "last" alone is answered. It stops without it if another request comes or the
        parent is gone."""
        start_ns = time.monotonic_ns()
        if request.learned is not None:
            self._model.learn(request.learned.features, request.learned.measured)
            self._budgets = request.learned.budgets
        self._setting = request.setting or self._setting
        if self._requests.has_more:
            # The requested step has begun.
            return
        forecast = self._forecast(request)
        if forecast is None:
            answer({"step": request.step, "last": True})
            return
        search, start_s = Search(forecast), time.process_time()
        # A step that begins now takes the pyramid.
        answer(_plan_fields(request, start_ns, Plan(search.pyramid, 0, 0.0, 0.0)))
        while search.can_improve:
            checks = 2 * search.num_checks
            if request.num_simulations is not None:
                if search.num_simulations + checks >= request.num_simulations:
                    break
            elif search.num_simulations:
                # Processor time: on a busy machine the process gets it when the ranks wait.
                used_s = time.process_time() - start_s
                if used_s * (1 + checks / search.num_simulations) >= request.seconds:
                    break
            if self._requests.is_over() or self._requests.has_more:
                return
            if search.improve():
                answer(_plan_fields(request, start_ns, search.estimate))
        answer(_plan_fields(request, start_ns, search.plan()) | {"last": True})

    def _forecast(self, request: PlanRequest) -> StepForecast | None:
        """Return the forecast of the requested step, by its modeled costs or by those predicted
        from its features; None without features or before anything was learned."""
        setting, step = self._setting, request.modeled
        assert setting is not None
        if step is None:
            if request.features is None or not self._model.is_fitted:
                return None
            predicted = self._model.predict(request.features)
            costs = StepCosts(predicted.times, sizes=predicted.sizes)
            step = ModeledStep(costs, max(_LEAST_NOISE, predicted.noise), (request.step,))
        return StepForecast(
            shape=setting.shape,
            policy=setting.policy,
            costs=step.costs,
            noise=step.noise,
            key=step.key,
            num_members=setting.num_members,
            # Empty for modeled costs, from which nothing is learned.
            budgets=self._budgets,
        )


def _plan_fields(request: PlanRequest, start_ns: int, plan: Plan) -> dict[str, object]:
    """Return the fields of an answer with a plan, and the time of its search until now."""
    return {
        "step": request.step,
        **plan.to_json(),
        "start_ns": start_ns,
        "end_ns": time.monotonic_ns(),
    }


# The hint of a real run: the measured steps are simulated under all candidates.


NUM_STEPS = 8
"""Steps that a choice is made by; where fewer were measured, others are mixed from them."""
_MOST_S = 60.0
"""Time in seconds after which the simulations so far decide."""


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """The rules for the candidates of a run. Equal rules give equal lists, in every process."""

    asked: Policy
    shape: Shape
    splits: bool | None
    """True: the backward must be split. False: it must not. None: both are possible."""
    may_bind: bool

    def as_asked(self) -> list[Candidate]:
        """The candidates that wait no longer than asked for, with the starting one first."""
        return candidates_of(self.asked, self.shape, splits=self.splits, may_bind=self.may_bind)

    def all(self) -> list[Candidate]:
        """The candidates of `as_asked`, followed by their patient variants."""
        found = self.as_asked()
        return [*found, *patient(found)]


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """A request to choose a candidate."""

    rules: ChoiceRules
    current: int
    """The index of the run's present candidate."""
    measured: Sequence[Numbers]
    """Steps, `[row][stage][microbatch]`, with the rows of `MeasuredTasks.table`. Unsplit backwards
    are divided into B and W."""
    budgets: tuple[int, ...]
    """Bounds in bytes by pipeline rank; empty without any."""
    num_members: int
    key: int
    """Key of the draws by which steps are mixed."""


def choose_hints() -> None:
    """Answer each `ChoiceRequest` with the index of the best candidate, or with an error, until the
    parent is gone."""
    requests = Requests()
    for request in requests:
        try:
            answer(_chosen(request, requests))
        except (RrfpError, ValueError, ArithmeticError) as error:
            answer({"error": str(error)})


def _chosen(request: ChoiceRequest, requests: Requests) -> dict[str, object]:
    """Simulate the candidates of a request, with no new round after 60 s or once the parent closes
    this process, and return the answer's fields with the best one. Raises RrfpError if no candidate
    fits into the memory."""
    until_s = time.monotonic() + _MOST_S
    candidates = request.rules.all()
    tables = [_table(request, number) for number in range(NUM_STEPS)]
    steps = MeasuredSteps([[_world_maker(table, request)] for table in tables], request.budgets)
    choice = choose(
        # `choose` adds the patient variants of those that are left after its first round.
        request.rules.as_asked(),
        steps.play,
        len(steps),
        candidates[request.current],
        lambda: requests.is_over() or time.monotonic() >= until_s,
    )
    if choice is None:
        raise RrfpError("no hint fits the memory of the steps that were measured")
    names = [each.name for each in candidates]
    return {
        "index": names.index(choice.chosen.candidate.name),
        "predicted_ns": choice.chosen.mean_ns,
        "kept_ns": choice.chosen.mean_ns if choice.kept is None else choice.kept.mean_ns,
        "candidates": choice.num_candidates,
    }


def _table(request: ChoiceRequest, number: int) -> Numbers:
    """Return a measured step or, after the last one, a mixture: at each place it has the microbatch
    that one of the measured steps had there, so that light and heavy ones enter in the same
    order."""
    measured = request.measured
    if number < len(measured):
        return measured[number]
    draw = random.Random(f"{request.key} {number}")
    num_microbatches = measured[0].shape[2]
    columns = [measured[int(draw.random() * len(measured))] for _ in range(num_microbatches)]
    return np.stack([table[:, :, place] for place, table in enumerate(columns)], axis=2)


def _world_maker(table: Numbers, request: ChoiceRequest) -> MakeWorld:
    """Return a function from a policy to new conditions for the simulator, with the times and sizes
    of this table. They do not depend on the policy."""
    rounded = np.rint(np.float64(table)).astype(np.int64)
    world = StepConditions(
        times_of(rounded),
        num_members=request.num_members,
        sizes=sizes_of(rounded) if rounded[3].any() else None,
        budgets=request.budgets,
    )
    # A world without jitter has no state.
    return lambda _: replace(world)


# Orders of entry of simulated steps, for `rrfp.planning.order_search.plan_all`.


def plan_simulated_steps() -> None:
    """Answer each pair of a `StepForecast` and a number of simulations with a plan or an error,
    until the parent is gone."""
    requests = Requests()
    for forecast, num_simulations in requests:
        try:
            answer(plan_order(forecast, num_simulations, requests.is_over).to_json())
        except RrfpError as error:
            answer({"error": str(error), "kind": type(error).__name__})

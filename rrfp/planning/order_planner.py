"""Plans the order of entry of a real run's steps, on all ranks of a replica.

A process of the first rank plans the next step while this one runs. As a step begins, the first
rank takes the best order that has come by then, without waiting, and broadcasts it. Before there is
one, or where the next items cannot be looked at, it takes the pyramid.

Task times reach the first rank while the next step runs: every rank of the pipeline sends its table
as the step begins, and the first rank reads them at the beginning of the step after that.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from rrfp.errors import RrfpError, UsageError
from rrfp.planning.collectives import TableGather, broadcast_decision, is_first_rank
from rrfp.planning.forecast import MeasuredTasks, Numbers
from rrfp.planning.item_costs import ItemCost, features_of, resolve_cost
from rrfp.planning.modeled_costs import ModeledSteps
from rrfp.planning.order_search import StepForecast
from rrfp.planning.planner_process import PlannerProcess
from rrfp.planning.process_tasks import MeasuredStep, ModeledStep, PlanRequest, PlanSetting
from rrfp.runtime.exit_hooks import at_end
from rrfp.schedule.admission import pyramid
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import Shape
from rrfp.trace.records import NS_PER_S, Phase, PhaseRecord, Record

_log = logging.getLogger(__name__)

_NICENESS = 10
_SHARE_OF_STEP = 10
"""By default a search takes the last step's time divided by this."""
_FIRST_S = 0.05
"""Time in seconds of the first search, when no step's time is known."""
_NUM_FIGURES = 3
_WAIT_S = 300.0
"""How long a step waits for a search of a number of simulations."""


class StepItems(Protocol):
    """The items that the data give to a replica. Called on its first rank."""

    def items(self) -> Sequence[Any]:
        """This step's items, one per microbatch. Raises UsageError without data."""

    def next_items(self) -> Sequence[Any] | None:
        """The next step's items; None if they cannot be looked at."""


class OrderPlanner:
    """Plans the steps of one pipeline on this rank. All ranks of a replica call `order`
    together."""

    def __init__(
        self,
        record: Callable[[Record], None],
        cost: ItemCost | None = None,
        *,
        plan_ms: float | None = None,
        num_simulations: int | None = None,
        features: Callable[[Any], Any] | None = None,
        modeled: ModeledSteps | None = None,
    ) -> None:
        """Plans by `modeled` steps or, without them, by the records that `self.record` measures
        and passes on to `record`.

        A search takes `plan_ms` of processor time (None: a tenth of the last step's time) or
        `num_simulations`; a step waits for the latter, so that its order does not depend on the
        machine. `cost` weighs items for the pyramid (None: `CostName.WORK`, where items have that);
        `features` replaces the items' own features.
        """
        self._measured = MeasuredTasks(record)
        self._record = record
        self._plan_ms = plan_ms
        self._num_simulations = num_simulations
        self._cost = cost
        self._feature_function = features
        self._modeled = modeled
        self._process: PlannerProcess | None = None
        self._is_off = False
        self._setting: PlanSetting | None = None
        """The setting that the planner's process has."""
        self._requested_step: int | None = None
        self._sent_features: tuple[int, Numbers] | None = None
        """The step and the features of the last request."""
        self._gather: TableGather | None = None
        self._entered: Numbers | None = None
        """The features of the last step, in the order in which they entered; on the first rank."""
        self._gathered_features: Numbers | None = None
        """The features of the step whose table `_gather` gathers."""
        self._began_s: float | None = None
        self._step_s: float | None = None
        self._warnings: set[str] = set()
        self.figures: dict[str, object] | None = None
        """The search for the order of the step that began last, for `metrics.jsonl`; None if the
        order was not planned."""
        at_end.register(self.close)

    @property
    def record(self) -> Callable[[Record], None]:
        """The function that takes the schedule's records: it measures them and passes them on."""
        return self._measured.record

    def order(
        self,
        step: int,
        shape: Shape,
        policy: Policy,
        items: StepItems,
        groups: Any,
        device: torch.device,
    ) -> list[int]:
        """Return the order in which the items of a step become its microbatches: the best plan so
        far, or else the pyramid, as the replica's first rank decides and broadcasts.

        It waits for a plan only if searches have a number of simulations. Sets `figures`, starts to
        gather the measured times of the last step (unless steps are modeled), and requests a plan
        of the next step under the same policy. Raises as `broadcast_decision` does.
        """
        now_s = time.monotonic()
        self._step_s = None if self._began_s is None else now_s - self._began_s
        self._began_s = now_s
        if policy.dispatch is Dispatch.READY:
            # Its order, of thousands of tasks, decides nothing.
            policy = replace(policy, order=None)
        setting = PlanSetting(shape, policy, groups.tp.size() * groups.cp.size())
        forecasts = self._forecasts(setting)
        learned = self._learned()

        def decide() -> torch.Tensor:
            if self._num_simulations is not None and self._requested_step != step:
                self._request(step, setting, items, None, forecasts)
            plan = self._plan_of(step)
            if plan is None:
                order = self._pyramid(step, items, forecasts)
                figures = [0.0] * _NUM_FIGURES
            else:
                order = plan["order"]
                figures = [
                    plan["candidates"],
                    plan["predicted_ns"] / NS_PER_S,
                    plan["pyramid_ns"] / NS_PER_S,
                ]
            return torch.tensor([*order, *figures], dtype=torch.float64)

        like = torch.empty(shape.num_microbatches + _NUM_FIGURES, dtype=torch.float64)
        decision = broadcast_decision(
            decide, like, groups, device, "order the step's microbatches"
        ).tolist()
        order = [int(place) for place in decision[:-_NUM_FIGURES]]
        candidates, predicted_s, pyramid_s = decision[-_NUM_FIGURES:]
        self.figures = None
        if candidates:
            self.figures = {
                "candidates": int(candidates),
                "predicted_s": predicted_s,
                "pyramid_s": pyramid_s,
            }
        if self._modeled is not None:
            self._modeled.admit_as(step, order)
        elif groups.tp.rank() == groups.cp.rank() == 0:
            features = self._features_of(step, items) if groups.pp.rank() == 0 else None
            self._gather = TableGather(self._measured.table(shape), shape, groups, device)
            self._gathered_features = self._entered
            self._entered = None if features is None else features[order]
        if is_first_rank(groups):
            self._request(step + 1, setting, items, learned, forecasts)
        return order

    def close(self) -> None:
        """End the planner's process, if there is one. Also called at exit."""
        if self._process is not None:
            self._process.close()
            self._process = self._setting = None

    def _forecasts(self, setting: PlanSetting) -> Callable[[int], StepForecast] | None:
        """Return a function from a step's number to its forecast, which is computed once; None if
        steps are not modeled."""
        modeled = self._modeled
        if modeled is None:
            return None
        return cache(lambda number: modeled.forecast(number, setting.policy, setting.num_members))

    def _learned(self) -> MeasuredStep | None:
        """Wait for the pending gather and return the step that it measured, for the planner to
        learn from. None without a gather or the step's features, on other ranks than the first, and
        if a rank has not measured the step."""
        gather, self._gather = self._gather, None
        result = None if gather is None else gather.result()
        if result is None or self._gathered_features is None:
            return None
        return MeasuredStep(self._gathered_features, *result)

    # The methods below are called on the first rank.

    def _pyramid(
        self, step: int, items: StepItems, forecasts: Callable[[int], StepForecast] | None
    ) -> Sequence[int]:
        """Return the order of a step without a plan: the pyramid of its modeled or weighed items.
        If items cannot be weighed, it is the order of the data, with one warning; with a cost that
        the user chose, the error is raised."""
        if forecasts is not None:
            return forecasts(step).pyramid
        found = items.items()
        try:
            return pyramid((self._cost or resolve_cost(None)).weigh(found))
        except UsageError as error:
            if self._cost is not None:
                raise
            self._warn_once(f"steps without a plan are admitted as given: {error}")
            return range(len(found))

    def _plan_of(self, step: int) -> dict[str, Any] | None:
        """Return the best plan for a step that has come so far, and record its search as a phase.
        None without one; an error that the process answers is only logged, once. Raises as
        `_answers_for` does."""
        if self._process is None:
            return None
        plan = None
        for fields in self._answers_for(step, self._process):
            if "error" in fields:
                self._warn_once(f"steps are admitted as a pyramid: {fields['error']}")
            elif "order" in fields:
                plan = fields
        if plan is not None:
            self._record(PhaseRecord(plan["start_ns"], plan["end_ns"], step, Phase.PLAN))
        return plan

    def _answers_for(self, step: int, process: PlannerProcess) -> list[dict[str, Any]]:
        """Return the process' new answers for a step; those for other steps are dropped. A search
        of a number of simulations is waited for until its last answer. Raises RrfpError if the
        process ends or gives no answer for 300 s: a pyramid in place of that plan would make the
        order depend on when the process ended."""
        found = [fields for fields in process.answers() if fields["step"] == step]
        if self._num_simulations is not None and self._requested_step == step:
            while not any("last" in fields for fields in found):
                found += [fields for fields in process.wait(_WAIT_S) if fields["step"] == step]
        return found

    def _request(
        self,
        step: int,
        setting: PlanSetting,
        items: StepItems,
        learned: MeasuredStep | None,
        forecasts: Callable[[int], StepForecast] | None,
    ) -> None:
        """Send the planner's process a request for a plan of a step, with the measurements of an
        earlier one. Starts the process first if necessary; if that or sending fails, nothing is
        planned from now on. Items that cannot be looked at cause one warning."""
        if self._is_off:
            return
        features = modeled = None
        if forecasts is not None:
            forecast = forecasts(step)
            modeled = ModeledStep(forecast.costs, forecast.noise, forecast.key)
        elif (next_items := items.next_items()) is not None:
            features = self._features(next_items)
        else:
            self._warn_once(
                "the next step's items cannot be looked at before it begins; where that is so, "
                "steps are admitted as a pyramid"
            )
        self._sent_features = None if features is None else (step, features)
        self._requested_step = step
        request = PlanRequest(
            step,
            # A policy that binds has an order of thousands of tasks.
            None if setting == self._setting else setting,
            self._seconds,
            learned,
            features,
            modeled,
            self._num_simulations,
        )
        self._setting = setting
        try:
            if self._process is None:
                self._process = PlannerProcess("plan_run_steps", _NICENESS)
            is_sent = self._process.send(request)
        except RrfpError as error:
            self._give_up(str(error))
            return
        if not is_sent:
            self._give_up("the planner's process takes no more requests")

    @property
    def _seconds(self) -> float:
        """The processor time of the next search, in seconds: `plan_ms`, or else a tenth of the last
        step's time, or 0.05 s if no step's time is known."""
        if self._plan_ms is not None:
            return self._plan_ms / 1e3
        return _FIRST_S if self._step_s is None else self._step_s / _SHARE_OF_STEP

    def _features_of(self, step: int, items: StepItems) -> Numbers | None:
        """Return the features of the step that begins, by item: those of its request, or else
        computed from its items; None if they have none."""
        if self._sent_features is not None and self._sent_features[0] == step:
            return self._sent_features[1]
        return self._features(items.items())

    def _features(self, items: Sequence[Any]) -> Numbers | None:
        """Return the features of these items, a row for each; None, with one warning, if they have
        none."""
        try:
            return np.array([features_of(item, self._feature_function) for item in items])
        except (UsageError, ValueError) as error:
            self._warn_once(f"steps are admitted as a pyramid: {error}")
            return None

    def _give_up(self, why: str) -> None:
        """Plan nothing from now on: end the process, and warn with the reason."""
        self._is_off = True
        self.close()
        self._warn_once(f"{why}; steps are admitted as a pyramid from now on")

    def _warn_once(self, sentence: str) -> None:
        """Log a warning, unless this planner has logged the same sentence before."""
        if sentence not in self._warnings:
            self._warnings.add(sentence)
            _log.warning("--admit plan: %s", sentence)

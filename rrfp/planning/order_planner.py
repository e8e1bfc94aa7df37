"""Plans the order of entry of a real run's steps, on all ranks of a replica.

The first rank of the replica has a process of its own plan the next step while this one runs. As
a step begins, it takes the best order that has come by then, without waiting, and tells the others.
Before there is one, or where the next items cannot be looked at, it takes the pyramid.

What tasks took reaches the first rank while the next step runs: every rank of its pipeline sends
its table as the step begins, and the first rank looks at them at the beginning after that.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from rrfp.errors import RrfpError, UsageError
from rrfp.planning.collectives import told_by_first
from rrfp.planning.forecast import NUM_ROWS, MeasuredTasks, Numbers
from rrfp.planning.item_costs import ItemCost, resolve_cost
from rrfp.planning.memory_model import features_of
from rrfp.planning.order_process import Learned, Modelled, PlanRequest, Setting
from rrfp.planning.order_search import Known
from rrfp.planning.process_pool import PlannerProcess
from rrfp.runtime.exit_hooks import at_end
from rrfp.schedule.admission import pyramid
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.trace.records import NS_PER_S, Phase, PhaseRecord, Record

_log = logging.getLogger(__name__)

_NICENESS = 10
_SHARE_OF_STEP = 10
"""By default a step is planned in this part of the last one's time."""
_FIRST_S = 0.05
"""For the first plan, as no step's time is known."""
_NUM_FIGURES = 3
_WAIT_S = 300.0
"""For a plan by a number of simulations."""


class StepItems(Protocol):
    """The items of a step, and those of the next."""

    def items(self) -> Sequence[Any]:
        """This step's, one per microbatch."""

    def next_items(self) -> Sequence[Any] | None:
        """The next step's; None if they cannot be looked at."""


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """How a step's order was chosen."""

    num_candidates: int
    predicted_s: float
    pyramid_s: float

    def described(self) -> dict[str, object]:
        """As a line of `metrics.jsonl` has it."""
        return {
            "candidates": self.num_candidates,
            "predicted_s": self.predicted_s,
            "pyramid_s": self.pyramid_s,
        }


class EntryPlanner:
    """Plans the steps of one run on this rank. All ranks of a replica call `order` together."""

    def __init__(
        self,
        measured: MeasuredTasks,
        record: Callable[[Record], None],
        cost: ItemCost | None = None,
        *,
        plan_ms: float | None = None,
        num_simulations: int | None = None,
        features: Callable[[Any], Any] | None = None,
    ) -> None:
        """`measured` sees this rank's records, and `record` takes the planner's own. A step is
        planned in `plan_ms` of processor time (None: a tenth of the last step's time), or by a
        number of simulations, which a step waits for: then its order does not depend on the
        machine.
        `cost` weighs items for the pyramid (None: `CostName.WORK`, where items have that);
        `features` are what times grow with, where items themselves do not tell."""
        self._measured = measured
        self._record = record
        self._plan_ms = plan_ms
        self._num_simulations = num_simulations
        self._cost = cost
        self._feature_function = features
        self._process: PlannerProcess | None = None
        self._is_off = False
        self._setting: Setting | None = None
        """What the planner's process knows."""
        self._asked: int | None = None
        """The step that a plan was asked for last."""
        self._sent_features: tuple[int, Numbers] | None = None
        """By step: what was sent to be planned last."""
        self._entered: Numbers | None = None
        """The features of the step before, in the order in which they entered."""
        self._gathering: Gathering | None = None
        self._began_s: float | None = None
        self._step_s: float | None = None
        self._told: set[str] = set()
        self.last: PlanFigures | None = None
        """How the order of the step that began last was chosen; None if it was not planned."""
        at_end.register(self.close)

    def order(
        self,
        step: int,
        shape: Shape,
        policy: Policy,
        items: StepItems,
        groups: Any,
        device: torch.device,
        known: Callable[[int], Known] | None = None,
    ) -> list[int]:
        """The order in which the items of a step become its microbatches, on all ranks alike.

        `known` gives a step whose costs are modelled. Raises as `told_by_first` does.
        """
        now_s = time.monotonic()
        self._step_s = None if self._began_s is None else now_s - self._began_s
        self._began_s = now_s
        learned = self._gathered()
        leads = all(group.rank() == 0 for group in (groups.tp, groups.cp, groups.pp))

        def decide() -> torch.Tensor:
            if self._num_simulations is not None and self._asked != step:
                self._ask(step, shape, policy, items, None, groups, known)
            told = self._answer(step)
            if told is None:
                found = self._pyramid(step, items, known)
                figures = [0.0] * _NUM_FIGURES
            else:
                found = told["order"]
                figures = [
                    told["candidates"],
                    told["predicted_ns"] / NS_PER_S,
                    told["pyramid_ns"] / NS_PER_S,
                ]
            return torch.tensor([*found, *figures], dtype=torch.float64)

        like = torch.empty(shape.num_microbatches + _NUM_FIGURES, dtype=torch.float64)
        told = told_by_first(decide, like, groups, device, "order the step's microbatches")
        *places, candidates, predicted_s, pyramid_s = told.tolist()
        order = [int(place) for place in places]
        self.last = PlanFigures(int(candidates), predicted_s, pyramid_s) if candidates else None
        features = self._features_of(step, items) if leads and known is None else None
        if known is None and groups.tp.rank() == groups.cp.rank() == 0:
            self._gathering = Gathering.begin(self._measured, shape, self._entered, groups, device)
        self._entered = None if features is None else features[order]
        if leads:
            self._ask(step + 1, shape, policy, items, learned, groups, known)
        return order

    @property
    def record(self) -> Callable[[Record], None]:
        """What the schedule's records go to."""
        return self._measured.record

    def close(self) -> None:
        """End the planner's process. Also done at exit."""
        if self._process is not None:
            self._process.close()
            self._process = self._setting = None

    # The first rank's part.

    def _pyramid(
        self, step: int, items: StepItems, known: Callable[[int], Known] | None
    ) -> Sequence[int]:
        if known is not None:
            return known(step).pyramid
        found = items.items()
        try:
            return pyramid((self._cost or resolve_cost(None)).weigh(found))
        except UsageError as error:
            if self._cost is not None:
                raise
            self._tell_once(f"steps without a plan are admitted as given: {error}")
            return range(len(found))

    def _answer(self, step: int) -> dict[str, Any] | None:
        """The best plan for a step that has come."""
        if self._process is None:
            return None
        found = None
        for told in self._answers_for(step, self._process):
            if "error" in told:
                self._tell_once(f"steps are admitted as a pyramid: {told['error']}")
            elif "order" in told:
                found = told
        if found is not None:
            times_ns = found["start_ns"], found["end_ns"]
            self._record(PhaseRecord(*times_ns, step, Phase.PLAN))
        return found

    def _answers_for(self, step: int, process: PlannerProcess) -> list[dict[str, Any]]:
        found = [told for told in process.answers() if told["step"] == step]
        if self._num_simulations is not None and self._asked == step:
            while not any("last" in told for told in found):
                found += [told for told in process.wait(_WAIT_S) if told["step"] == step]
        return found

    def _ask(
        self,
        step: int,
        shape: Shape,
        policy: Policy,
        items: StepItems,
        learned: Learned | None,
        groups: Any,
        known: Callable[[int], Known] | None,
    ) -> None:
        """Ask for a plan of the next step, with what was learned of an earlier one."""
        if self._is_off:
            return
        features = None
        if known is None and (found := items.next_items()) is not None:
            features = self._features(found)
        elif known is None:
            self._tell_once(
                "the next step's items cannot be looked at before it begins; where that is so, "
                "steps are admitted as a pyramid"
            )
        self._sent_features = None if features is None else (step, features)
        self._asked = step
        setting = Setting(shape, policy, groups.tp.size() * groups.cp.size())
        modelled = None
        if known is not None:
            of_step = known(step)
            modelled = Modelled(of_step.costs, of_step.noise, of_step.key)
        request = PlanRequest(
            step,
            # A policy may have an order of thousands of tasks.
            None if setting == self._setting else setting,
            self._seconds,
            learned,
            features,
            modelled,
            self._num_simulations,
        )
        self._setting = setting
        try:
            if self._process is None:
                self._process = PlannerProcess("rrfp.planning.order_process", _NICENESS)
            is_sent = self._process.send(request)
        except RrfpError as error:
            self._give_up(str(error))
            return
        if not is_sent:
            self._give_up("the planner's process takes no more requests")

    @property
    def _seconds(self) -> float:
        if self._plan_ms is not None:
            return self._plan_ms / 1e3
        return _FIRST_S if self._step_s is None else self._step_s / _SHARE_OF_STEP

    def _features_of(self, step: int, items: StepItems) -> Numbers | None:
        """The features of the step that begins, by item."""
        if self._sent_features is not None and self._sent_features[0] == step:
            return self._sent_features[1]
        return self._features(items.items())

    def _features(self, items: Sequence[Any]) -> Numbers | None:
        try:
            return np.array([features_of(item, self._feature_function) for item in items])
        except (UsageError, ValueError) as error:
            self._tell_once(f"steps are admitted as a pyramid: {error}")
            return None

    def _give_up(self, why: str) -> None:
        self._is_off = True
        self.close()
        self._tell_once(f"{why}; steps are admitted as a pyramid from now on")

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            _log.warning("--admit plan: %s", sentence)

    def _gathered(self) -> Learned | None:
        """What was gathered while the last step ran, on the first rank."""
        gathering, self._gathering = self._gathering, None
        return None if gathering is None else gathering.result()


class Gathering:
    """The tables of a pipeline's ranks, on their way to the first one."""

    def __init__(
        self, shape: Shape, features: Numbers | None, tables: list[torch.Tensor], work: Any
    ) -> None:
        self._shape = shape
        self._features = features
        self._tables = tables
        self._work = work

    @classmethod
    def begin(
        cls,
        measured: MeasuredTasks,
        shape: Shape,
        features: Numbers | None,
        groups: Any,
        device: torch.device,
    ) -> "Gathering":
        """Send this rank's table; all ranks of the pipeline call it together, and none waits.
        `features` are those of the step that was measured, on the first rank."""
        own = torch.from_numpy(measured.table(shape)).to(device)
        pipeline = groups.pp
        first = dist.get_global_rank(pipeline, 0)
        tables = [torch.empty_like(own) for _ in range(pipeline.size())]
        work = None
        if pipeline.size() == 1:
            tables = [own]
        elif pipeline.rank() == 0:
            work = dist.gather(own, tables, dst=first, group=pipeline, async_op=True)
        else:
            work = dist.gather(own, dst=first, group=pipeline, async_op=True)
        return cls(shape, features, tables if pipeline.rank() == 0 else [own], work)

    def result(self) -> Learned | None:
        """What the step before the last taught; None on other ranks, and where it was not measured
        everywhere."""
        if self._work is not None:
            self._work.wait()
        shape = self._shape
        if self._features is None or len(self._tables) != shape.num_ranks:
            return None
        rows = np.zeros((NUM_ROWS, shape.num_stages, shape.num_microbatches))
        budgets = []
        for rank, table in enumerate(self._tables):
            numbers = table.cpu().numpy()
            of_rank = numbers[:-1].reshape(NUM_ROWS, shape.num_chunks, shape.num_microbatches)
            if not of_rank[0].all():
                return None
            rows[:, list(shape.stages_of(rank))] = of_rank
            budgets.append(int(numbers[-1]))
        return Learned(self._features, rows, tuple(budgets) if all(budgets) else ())

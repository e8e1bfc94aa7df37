"""The admission order of a training run's steps. In a paced run every rank computes it from the
same costs, unless it is planned; otherwise the first rank of a replica decides."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rrfp.inputs import resolve_admission, resolve_dealing
from rrfp.megatron.batch_balancer import agreed_hands
from rrfp.megatron.step_groups import step_groups
from rrfp.planning.collectives import agreed_order
from rrfp.planning.forecast import MeasuredTasks
from rrfp.planning.item_costs import resolve_cost, resolve_features
from rrfp.planning.order_planner import EntryPlanner, StepItems
from rrfp.planning.order_search import Known
from rrfp.planning.step_files import AssignmentFile
from rrfp.planning.step_policy import StepPolicy
from rrfp.schedule.admission import Admit, admission_order, format_admission
from rrfp.schedule.balance import AdmitAcross, Hands
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.rehearsal import fitted
from rrfp.trace.records import Record
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import ReportFile, open_whole
from rrfp.train.data.batches import Batch, Batches, Data
from rrfp.train.launch.process_groups import Layout
from rrfp.train.pacing import StepPacer
from rrfp.train.settings import TrainSettings

_CPU = torch.device("cpu")


RunOrder = Callable[[int, Sequence[Any]], Sequence[int]]
"""Gives the admission order from a step's number and its batches."""


def run_order(settings: TrainSettings, pace: StepPacer | None = None, replica: int = 0) -> RunOrder:
    """The admission order of a run's steps that are not planned, by modelled costs if the pace has
    them.

    Raises UsageError for an unknown order or cost.
    """
    if pace is not None and pace.has_costs:
        return lambda step, _: pace.order(step)
    admission = resolve_admission(settings.step.admit, settings.data.microbatches)
    cost = resolve_cost(settings.step.admit_cost)

    def order(step: int, batches: Sequence[Any]) -> Sequence[int]:
        if admission is Admit.GIVEN:
            return range(len(batches))

        def decide() -> Sequence[int]:
            return admission_order(
                admission, step, len(batches), lambda: cost.weigh(batches), replica
            )

        return agreed_order(decide, len(batches), step_groups(None, None), _CPU)

    return order


class RunAdmission:
    """Gives the batches of a run's steps in admission order. All ranks of a replica call it
    together."""

    def __init__(
        self,
        settings: TrainSettings,
        layout: Layout,
        batches: Batches,
        pace: StepPacer | None = None,
        planner: "RunPlanner | None" = None,
    ) -> None:
        """Raises UsageError for an unknown order or cost."""
        self._num_microbatches = settings.data.microbatches
        self._batches = batches
        self._planner = planner
        self._order = run_order(settings, pace, layout.dp_rank)
        self._next: tuple[int, list[Batch]] | None = None

    def batches(self, step: int) -> list[Batch]:
        """The step's batches, in the order in which they enter."""
        given = self._given(step)
        if self._planner is None:
            order = self._order(step, given)
        else:
            order = self._planner.order(step, _StepBatches(self, step, given))
        return [given[index] for index in order]

    def look_at(self, step: int) -> list[Batch]:
        """The batches of a step to come, as given; they are loaded once."""
        self._next = step, self._load(step)
        return self._next[1]

    def _given(self, step: int) -> list[Batch]:
        known, self._next = self._next, None
        return known[1] if known is not None and known[0] == step else self._load(step)

    def _load(self, step: int) -> list[Batch]:
        return [self._batches.batch(step, index) for index in range(self._num_microbatches)]


class _StepBatches:
    """A `StepItems` of batches."""

    def __init__(self, admission: RunAdmission, step: int, given: Sequence[Batch]) -> None:
        self._admission = admission
        self._step = step
        self._given = given

    def items(self) -> Sequence[Batch]:
        return self._given

    def next_items(self) -> Sequence[Batch]:
        return self._admission.look_at(self._step + 1)


class RunPlanner:
    """The planner of a run with `--admit plan`."""

    def __init__(
        self,
        settings: TrainSettings,
        record: Callable[[Record], None],
        pace: StepPacer | None = None,
        num_simulations: int | None = None,
    ) -> None:
        """`record` receives this rank's records: the planner's own, and those of the schedule,
        which reach it through the planner's `record`. With a number of simulations, steps wait for
        their plans."""
        self._policy, self._shape = fitted(
            settings.effective_policy, settings.shape, counts_places=False
        )
        self._num_members = settings.layout.tp
        self._measured = MeasuredTasks(record)
        self._pace = pace if pace is not None and pace.has_costs else None
        self.order_of_step: Sequence[int] = ()
        """The order of the step that began last."""
        cost = settings.step.admit_cost
        self._planner = EntryPlanner(
            self._measured,
            record,
            None if cost is None else resolve_cost(cost),
            plan_ms=settings.step.plan_ms,
            num_simulations=num_simulations,
            features=resolve_features(settings.step.hold_features),
        )

    @property
    def record(self) -> Callable[[Record], None]:
        """What the schedule's records go to."""
        return self._measured.record

    def order(self, step: int, items: StepItems) -> Sequence[int]:
        """The order of a step, on all ranks of the replica alike."""
        pace = self._pace
        known = None if pace is None else cache(lambda number: self._known(pace, number))
        self.order_of_step = self._planner.order(
            step, self._shape, self._policy, items, step_groups(None, None), _CPU, known
        )
        if pace is not None:
            pace.admit_as(step, self.order_of_step)
        return self.order_of_step

    def follow(self, steering: StepPolicy) -> None:
        """Plan the steps to come under the policy of the step that has ended, on all ranks alike:
        the hint `auto` may have changed it."""
        policy = steering.policy
        if policy.dispatch is Dispatch.READY:
            policy = replace(policy, order=None)
        self._policy, self._shape = policy, steering.shape

    def described(self) -> dict[str, object] | None:
        """How the order of the step that began last was chosen, as `metrics.jsonl` has it."""
        return None if self._planner.last is None else self._planner.last.described()

    def close(self) -> None:
        self._planner.close()

    def _known(self, pace: StepPacer, step: int) -> Known:
        return pace.known(step, self._policy, self._num_members)


def run_planner(
    settings: TrainSettings,
    record: Callable[[Record], None],
    pace: StepPacer | None = None,
    num_simulations: int | None = None,
) -> RunPlanner | None:
    """The planner of a run; None if it plans nothing."""
    if settings.step.admit != Admit.PLAN:
        return None
    return RunPlanner(settings, record, pace, num_simulations)


class AdmissionFile:
    """The orders that a run has planned, a line a step: `--admit` with this file repeats the run.

    A step without a line of its own, before the one that a run goes on from, has the given order.
    """

    def __init__(self, path: Path, layout: Layout, num_microbatches: int, first_step: int) -> None:
        """Keep the lines of the steps before `first_step`, on rank 0."""
        self._layout = layout
        self._file = None
        if layout.rank == 0:
            kept = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
            # An interrupted write leaves half a line.
            whole = [line for line in kept if line.endswith("\n")][:first_step]
            given = format_admission([range(num_microbatches)] * layout.dp)
            with open_whole(path) as file:
                file.write(("".join(whole) + given * (first_step - len(whole))).encode())
            self._file = ReportFile(path)

    def write(self, order: Sequence[int]) -> None:
        """Write the order of a step that has ended; all ranks call this together."""
        from rrfp.megatron.adapters.groups import data_parallel_group

        orders = [torch.tensor(order)]
        layout = self._layout
        if layout.dp > 1 and layout.pp_rank == layout.tp_rank == 0:
            orders = [torch.empty_like(orders[0]) for _ in range(layout.dp)]
            replicas = data_parallel_group(None)
            dist.all_gather(orders, torch.tensor(order), group=replicas)
        if self._file is not None:
            self._file.write(format_admission([each.tolist() for each in orders]))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


# A training run whose global batches are dealt to the replicas. In a paced run every rank works it
# out from the same costs; otherwise the first replica decides.


class RunDealing:
    """Gives the batches that this replica is dealt, in the order in which they enter. All ranks of
    the run call it together."""

    def __init__(
        self,
        settings: TrainSettings,
        layout: Layout,
        batches: Batches,
        pace: StepPacer | None = None,
    ) -> None:
        """`batches` are those of the first replica: with numbers beyond its own, they are the
        batches of the others. Raises UsageError for what cannot be dealt."""
        self._layout = layout
        self._num_microbatches = settings.data.microbatches
        self._batches = batches
        self._pace = pace if pace is not None and pace.has_costs else None
        self._dealing = resolve_dealing(settings.step.admit_across)
        self._admission = resolve_admission(settings.step.admit, settings.data.microbatches)
        self._cost = resolve_cost(settings.step.admit_cost)
        self.hands: Hands = ()
        """What each replica was dealt in the step that began last, as it entered."""

    def batches(self, step: int) -> list[Batch]:
        """The batches of this replica's step."""
        self.hands = self._agreed(step) if self._pace is None else self._pace.hands(step)
        return [self._batches.batch(step, number) for number in self.hands[self._layout.dp_rank]]

    def _agreed(self, step: int) -> Hands:
        from rrfp.megatron.adapters.groups import data_parallel_group

        return agreed_hands(
            self._dealing,
            self._admission,
            step,
            lambda: self._weigh(step),
            self._num_microbatches,
            step_groups(None, None),
            data_parallel_group(None),
            _CPU,
        )

    def _weigh(self, step: int) -> Sequence[float]:
        """The weights of what the data give this replica."""
        num = self._num_microbatches
        first = self._layout.dp_rank * num
        return self._cost.weigh(
            [self._batches.batch(step, number) for number in range(first, first + num)]
        )


def run_dealing(
    settings: TrainSettings, layout: Layout, data: Data, pace: StepPacer | None
) -> RunDealing | None:
    """The dealing of a run; None if every replica keeps what the data give it."""
    if settings.step.admit_across == AdmitAcross.NONE:
        return None
    return RunDealing(settings, layout, data.batches(0), pace)


def dealing_file(
    run: RunDir, settings: TrainSettings, layout: Layout, first_step: int
) -> AssignmentFile | None:
    """The file of what a run deals, on rank 0."""
    if layout.rank > 0:
        return None
    return AssignmentFile(run.dealing, layout.dp, settings.data.microbatches, first_step)

"""The batches of a training run, step by step, in the order in which they enter.

The classes that decide are the drop-in's (`rrfp.planning`). A training run gives them its batches,
which every rank can load in any order, and the modeled costs of a paced run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rrfp.megatron.adapters.groups import data_parallel_group
from rrfp.megatron.pipeline import discard
from rrfp.megatron.step_groups import step_groups
from rrfp.planning.collectives import gather_orders
from rrfp.planning.step_admission import StepAdmission, StepFile
from rrfp.schedule.rehearsal import StepPolicy, fitted
from rrfp.trace.records import Record
from rrfp.trace.run_dir import RunDir
from rrfp.train.data.batches import Batch, Data
from rrfp.train.launch.process_groups import Layout
from rrfp.train.pacing import StepPacer
from rrfp.train.settings import TrainSettings

_CPU = torch.device("cpu")


class OrderedBatches:
    """Gives this replica's batches of each step in the order in which they enter. All ranks of a
    replica call it together; with `--admit-across`, all ranks of the run."""

    def __init__(
        self,
        settings: TrainSettings,
        layout: Layout,
        data: Data,
        record: Callable[[Record], None] = discard,
        pace: StepPacer | None = None,
        num_simulations: int | None = None,
    ) -> None:
        """`record` receives this rank's records: the planner's own, and those of the schedule,
        which must go through `self.record`. A `pace` with modeled costs decides by them.
        With `num_simulations`, steps wait for their plans.

        Raises UsageError for an unknown order, balancing or cost, an invalid file of these, and too
        little data.
        """
        self._layout = layout
        self._num_microbatches = settings.data.microbatches
        self._admission = StepAdmission(
            settings.step, self._num_microbatches, None if pace is None else pace.modeled
        )
        # Numbers beyond the first replica's own are the batches of the other replicas.
        self._batches = data.batches(0 if self._admission.balances else layout.dp_rank)
        self._next: tuple[int, list[Batch]] | None = None
        """A step to come, and its batches as given."""
        self._planner = None
        self.record = record
        if self._admission.plans:
            self._planner = self._admission.planner(record, num_simulations)
            self.record = self._planner.record
            self._policy, self._shape = fitted(
                settings.effective_policy, settings.shape, counts_places=False
            )
        self.order: Sequence[int] = ()
        """The order of the step that began last, unless it is balanced over the replicas."""
        self._file: StepFile | None = None

    def batches(self, step: int) -> list[Batch]:
        """Load and return this replica's batches of a step in the order in which they enter. With
        --admit-across they are its share of the balanced global batch; else those that the data
        give it, in the planned order or that of --admit, which is kept as `order`."""
        groups = step_groups(None, None)
        num = self._num_microbatches
        if self._admission.balances:
            first = self._layout.dp_rank * num
            assignment = self._admission.assign(
                step,
                lambda: [self._batches.batch(step, first + index) for index in range(num)],
                num,
                groups,
                data_parallel_group(None),
                _CPU,
            )
            own = assignment[self._layout.dp_rank]
            return [self._batches.batch(step, number) for number in own]
        given = self._given(step)
        items = _StepBatches(self, step, given)
        if self._planner is None:
            self.order = self._admission.order(
                step, items, num, groups, lambda: data_parallel_group(None), _CPU
            )
        else:
            self.order = self._planner.order(step, self._shape, self._policy, items, groups, _CPU)
        return [given[index] for index in self.order]

    def look_at(self, step: int) -> list[Batch]:
        """Load the batches of a step to come, in the data's order, and keep them for that step
        instead of any kept before."""
        self._next = step, self._load(step)
        return self._next[1]

    def follow(self, policy: StepPolicy) -> None:
        """Plan the next steps under the policy and shape of the step that has ended, on all ranks:
        the hint `auto` may have changed them."""
        self._policy, self._shape = policy.policy, policy.shape

    def plan_figures(self) -> dict[str, object] | None:
        """Return figures about the search for the last step's order, for `metrics.jsonl`; None if
        the order was not planned."""
        return None if self._planner is None else self._planner.figures

    def open_file(self, run: RunDir, first_step: int) -> None:
        """Open the run's file of orders or assignments on rank 0, if steps are planned or balanced;
        else do nothing. Lines of the steps before `first_step` stay, missing ones get the data's
        order, and later lines are removed."""
        if self._layout.rank > 0 or (self._planner is None and not self._admission.balances):
            return
        num, dp = self._num_microbatches, self._layout.dp
        if self._admission.balances:
            given = [range(first, first + num) for first in range(0, dp * num, num)]
            self._file = StepFile(run.assignments, given, first_step)
        else:
            self._file = StepFile(run.admission, [range(num)] * dp, first_step)

    def write_step(self) -> None:
        """Write the line of the step that has ended on rank 0, with the orders of all replicas, if
        `open_file` has opened a file. All ranks call this together."""
        layout, orders = self._layout, self._admission.assignment
        if self._planner is not None:
            orders = [self.order]
            if layout.dp > 1 and layout.pp_rank == layout.tp_rank == 0:
                orders = gather_orders(self.order, data_parallel_group(None))
        if self._file is not None and orders is not None:
            self._file.write(orders)

    def close(self) -> None:
        """End the planner's process and close the file, if they exist."""
        if self._planner is not None:
            self._planner.close()
        if self._file is not None:
            self._file.close()

    def _given(self, step: int) -> list[Batch]:
        """Return the step's batches in the data's order: those that `look_at` kept for it, or
        loaded now. Kept batches of another step are dropped."""
        ahead, self._next = self._next, None
        return ahead[1] if ahead is not None and ahead[0] == step else self._load(step)

    def _load(self, step: int) -> list[Batch]:
        """Load the batches of a step, in the data's order."""
        return [self._batches.batch(step, index) for index in range(self._num_microbatches)]


@dataclass(frozen=True, slots=True)
class _StepBatches:
    """The `StepItems` of a step's batches."""

    source: OrderedBatches
    step: int
    given: Sequence[Batch]

    def items(self) -> Sequence[Batch]:
        """Return the step's batches in the data's order."""
        return self.given

    def next_items(self) -> Sequence[Batch]:
        """Load the next step's batches, in the data's order; `source` keeps them for that step."""
        return self.source.look_at(self.step + 1)

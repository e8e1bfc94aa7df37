"""A training run whose global batches are dealt to the replicas. In a paced run every rank works it
out from the same costs; otherwise the first replica decides."""

from collections.abc import Sequence

import torch

from rrfp.inputs.admission_files import resolve_admission
from rrfp.inputs.dealing_files import resolve_dealing
from rrfp.megatron.dealing.agreed import agreed_hands
from rrfp.megatron.dealing.file import DealingFile
from rrfp.megatron.groups import step_groups
from rrfp.megatron.item_costs import resolve_cost
from rrfp.schedule.dealing import AdmitAcross, Hands
from rrfp.trace.rundir import RunDir
from rrfp.train.data.batches import Batch, Batches, Data
from rrfp.train.pacing import StepPacer
from rrfp.train.ranks.parallel import Layout
from rrfp.train.settings import TrainSettings

_CPU = torch.device("cpu")


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
        self._dealing = resolve_dealing(settings.policy.admit_across)
        self._admission = resolve_admission(settings.policy.admit, settings.data.microbatches)
        self._cost = resolve_cost(settings.policy.admit_cost)
        self.hands: Hands = ()
        """What each replica was dealt in the step that began last, as it entered."""

    def batches(self, step: int) -> list[Batch]:
        """The batches of this replica's step."""
        self.hands = self._agreed(step) if self._pace is None else self._pace.hands(step)
        return [self._batches.batch(step, number) for number in self.hands[self._layout.dp_rank]]

    def _agreed(self, step: int) -> Hands:
        from megatron.core import parallel_state

        return agreed_hands(
            self._dealing,
            self._admission,
            step,
            lambda: self._weigh(step),
            self._num_microbatches,
            step_groups(None, None),
            parallel_state.get_data_parallel_group(),
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
    if settings.policy.admit_across == AdmitAcross.NONE:
        return None
    return RunDealing(settings, layout, data.batches(0), pace)


def dealing_file(
    run: RunDir, settings: TrainSettings, layout: Layout, first_step: int
) -> DealingFile | None:
    """The file of what a run deals, on rank 0."""
    if layout.rank > 0:
        return None
    return DealingFile(run.dealing, layout.dp, settings.data.microbatches, first_step)

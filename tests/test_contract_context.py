"""Context parallelism: causal attention over a sequence that two ranks share, cut as Megatron cuts
it, is a collective in a task, on which these ranks must agree."""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

from rrfp.megatron.settings import DispatchSettings
from rrfp.runtime.pace import Delays
from rrfp.schedule.policy import AgreementRule
from rrfp.schedule.shape import Shape
from rrfp.train.data.batches import Batch
from tests.own_attention import VOCABULARY, OwnAttentionRig, places_of_ranks
from tests.ranks import run_ranks
from tests.rigs import MICROBATCHES, Outcome, backwards_in_reverse, native, three_value_step
from tests.training import SMALL

CP = 2
LENGTH = SMALL["seq_length"]


class Found(NamedTuple):
    """What one rank came to."""

    outcomes: list[list[Outcome]]
    """By schedule, Megatron's first: of the mean loss, and of the loss per token."""
    gradients: npt.NDArray[np.float32]
    """Under Megatron's own schedule, per token."""
    whole: Outcome
    """What Megatron's own schedule comes to, per token, where each rank has whole sequences."""
    whole_gradients: npt.NDArray[np.float32]


@pytest.mark.timeout(400)
def test_ranks_that_share_a_sequence_agree(tmp_path: Path) -> None:
    schedules = [
        DispatchSettings(),
        DispatchSettings("bfw"),
        DispatchSettings(backwards_in_reverse(tmp_path / "reverse.csv", Shape(2, MICROBATCHES))),
        DispatchSettings("f-first", limit=2),
        DispatchSettings("bfw", agreement=AgreementRule.UNANIMOUS),
    ]
    by_rank = run_ranks(2 * CP, compare_with_native, schedules, timeout_s=300)
    for rank in by_rank:
        expected, *found = rank.outcomes
        for settings, outcomes in zip(schedules, found, strict=True):
            assert outcomes == expected, settings
    # Each has seen its own part of the sequence, and all of them went into the gradients.
    first, second = by_rank[-2:]
    mean, per_token = second.outcomes[0]
    assert mean.losses != first.outcomes[0][0].losses
    assert mean.gradients_sha256 != per_token.gradients_sha256
    assert mean.gradients_sha256 == first.outcomes[0][0].gradients_sha256
    # The parts add up to what a rank finds that has the whole.
    parts = zip(first.outcomes[0][1].losses, per_token.losses, strict=True)
    assert [sum(each) for each in parts] == pytest.approx(second.whole.losses, rel=1e-5)
    for rank in by_rank:
        np.testing.assert_allclose(rank.gradients, rank.whole_gradients, rtol=1e-4, atol=1e-6)


def test_a_sequence_is_cut_as_megatron_cuts_it() -> None:
    places = [each.tolist() for each in places_of_ranks(4, 2)]
    assert places == [[0, 1, 6, 7], [2, 3, 4, 5]]


def compare_with_native(schedules: list[DispatchSettings]) -> Found:
    """Megatron's outcomes and then ours, with every task and message made late by chance; then
    those of two replicas that have the same whole sequences."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core import parallel_state

    from rrfp.megatron.dropin import get_forward_backward_func

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    join_groups(CP)
    rig = ContextRig(position_embedding="learned_absolute")
    own: list[Any] = [
        get_forward_backward_func(
            settings=settings, delays=Delays(index, dist.get_rank(), longest_s=5e-3)
        )
        for index, settings in enumerate(schedules)
    ]
    outcomes = [[rig.run(schedule), per_token(rig, schedule)] for schedule in own]
    expected = [rig.run(native()), per_token(rig, native())]
    gradients = rig.flat_gradients()
    for schedule in own:
        schedule.close()
    parallel_state.destroy_model_parallel()
    join_groups(1)
    rig = ContextRig(position_embedding="learned_absolute")
    found = Found([expected, *outcomes], gradients, per_token(rig, native()), rig.flat_gradients())
    dist.destroy_process_group()
    return found


def join_groups(num_ranks: int) -> None:
    """Two stages, whose sequences so many ranks share."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        context_parallel_size=num_ranks,
        create_gloo_process_groups=False,
    )


def per_token(rig: "ContextRig", schedule: Any) -> Outcome:
    rig.gpt.config.calculate_per_token_loss = True
    outcome = rig.run(schedule, three_value_step)
    rig.gpt.config.calculate_per_token_loss = False
    return outcome


class ContextRig(OwnAttentionRig):
    """A GPT whose ranks have a part of each sequence."""

    def data(self, num_microbatches: int) -> Iterator[Batch]:
        """This rank's part of each sequence, as Megatron cuts it; some labels do not count."""
        from megatron.core import parallel_state
        from megatron.core.utils import get_batch_on_this_cp_rank

        # From 0.18 on it cuts in several ways.
        several = "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters
        cut = partial(
            get_batch_on_this_cp_rank,
            cp_group=parallel_state.get_context_parallel_group(),
            **({"is_hybrid_cp": False} if several else {}),
        )
        generator = torch.Generator().manual_seed(7)
        for index in range(num_microbatches):
            tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=generator)
            mask = torch.ones(1, LENGTH)
            mask[:, : 5 * index] = 0
            yield cut(
                Batch(
                    tokens=tokens[:, :-1],
                    labels=tokens[:, 1:],
                    loss_mask=mask,
                    position_ids=torch.arange(LENGTH)[None],
                )
            )

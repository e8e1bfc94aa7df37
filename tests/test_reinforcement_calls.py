"""The calls that loops of reinforcement learning make: forwards alone with loss functions of their
own, whatever these return; as many microbatches as the data come to; actor, critic and reference in
turns in one process, and results told to all ranks in between.

The shapes of calls and returns are those of
- verl (volcengine/verl): `verl/workers/actor/megatron_actor.py`,
  `verl/workers/critic/megatron_critic.py`, `verl/workers/engine/megatron/transformer_impl.py` and
  `verl/utils/megatron/pipeline_parallel.py`;
- NeMo-RL (NVIDIA-NeMo/RL): `nemo_rl/models/megatron/train.py` and
  `nemo_rl/models/megatron/pipeline_parallel.py`;
- slime (THUDM/slime): `slime/backends/megatron_utils/model.py`.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rrfp.schedule.shape import Shape
from rrfp.train.data.batches import Batch
from tests.ranks import run_ranks
from tests.rigs import (
    MICROBATCHES,
    TIMEOUT_S,
    Rig,
    backwards_in_reverse,
    native,
    on_rigs,
    ours,
)
from tests.training import SMALL

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

COUNTS = (MICROBATCHES, 1, 2, 7)
"""How many microbatches the calls of a round have: fewer than ranks, and more."""

LossFunction = Callable[..., Any]


@pytest.mark.parametrize(
    ("pp", "chunks", "counts"),
    [
        pytest.param(3, 1, COUNTS, id="pp3"),
        # Megatron's own interleaving takes whole groups of as many microbatches as ranks.
        pytest.param(3, 2, (6, 3, 9), id="pp3-c2", marks=pytest.mark.slow),
    ],
)
def test_loops_of_reinforcement_learning(
    tmp_path: Path, pp: int, chunks: int, counts: tuple[int, ...]
) -> None:
    settings = {**SMALL, "pp": pp, "chunks": chunks, "layers": 6, "variable_lengths": True}
    shape = Shape(pp, counts[0], chunks)
    reverse = backwards_in_reverse(tmp_path / "reverse.csv", shape)
    found = run_ranks(pp, on_rigs, compare, settings, reverse, counts, timeout_s=TIMEOUT_S)
    for rank in found:
        for (hint, call), (expected, got) in rank.items():
            assert got == expected, f"{call} under {hint}"
    told = found[0]
    # All ranks were told what the last one found, and it depends on the model and the data.
    for call in ("log probabilities, 0", "values, 0", "lists of what is no loss, 0"):
        ((first, _), *_) = (outcomes for (_, name), outcomes in told.items() if name == call)
        assert len(first) == counts[0]
        assert len({str(each) for each in first}) == counts[0]


def compare(
    layout: Any, settings: dict[str, Any], reverse: str, counts: tuple[int, ...]
) -> dict[tuple[str, str], tuple[Any, Any]]:
    """By hint and call, what Megatron's own schedule gives on this rank, and what ours does."""
    loop = Loop(layout, settings)
    found: dict[tuple[str, str], tuple[Any, Any]] = {}
    for hint in ("bf", "bfw", reverse):
        # A file's order is of one number of microbatches.
        own_counts = counts[:1] * 2 if hint == reverse else counts
        expected = loop.rounds(native(), own_counts)
        schedule = ours(hint=hint)
        got = loop.rounds(schedule, own_counts)
        schedule.close()
        assert got.keys() == expected.keys()
        found |= {(hint, call): (expected[call], got[call]) for call in expected}
    return found


class Loop:
    """The models of a loop on this rank: each takes the parameters of its own seed."""

    def __init__(self, layout: Any, settings: dict[str, Any]) -> None:
        self._actor = Rig(settings, layout)
        self._critic = Rig({**settings, "seed": 7}, layout)
        # A reference is not trained, so nothing is wrapped around it.
        reference = Rig({**settings, "seed": 8}, layout)
        self._reference = [chunk.module for chunk in reference.gpt.chunks]

    def rounds(self, schedule: Callable[..., Any], counts: tuple[int, ...]) -> dict[str, Any]:
        """By call, what it came to."""
        found = {}
        for number, count in enumerate(counts):
            for name, outcome in self._round(schedule, number, count).items():
                found[f"{name}, {number}"] = outcome
        found |= self._one_iterator(schedule, counts)
        return found

    def _round(self, schedule: Callable[..., Any], number: int, count: int) -> dict[str, Any]:
        actor, critic = self._actor.gpt.chunks, self._critic.gpt.chunks
        batches, others = (
            [self._actor.batches.batch(step, index) for index in range(count)]
            for step in (number, 10 + number)
        )

        def look(model: list[Any], loss: LossFunction | None, **arguments: Any) -> Any:
            with torch.no_grad():
                return told_to_all(call(schedule, model, batches, loss, **arguments))

        def learn(rig: Rig, loss: LossFunction) -> Any:
            for chunk in rig.gpt.chunks:
                chunk.zero_grad_buffer()
            return call(schedule, rig.gpt.chunks, others, loss), gradients(rig)

        found = {
            "log probabilities": look(actor, log_probabilities),
            "of the reference": look(self._reference, log_probabilities),
            "values": look(critic, values),
            "critic": learn(self._critic, of_critic),
            "actor": learn(self._actor, partial(of_actor, scale=count)),
        }
        if number > 0:
            return found
        for chunk in actor:
            chunk.eval()
        found["in evaluation mode"] = look(actor, log_probabilities)
        for chunk in actor:
            chunk.train()
        return found | {
            "with entropy": look(actor, with_entropy),
            "lists of what is no loss": look(critic, lists, collect_non_loss_data=True),
            "nothing": look(actor, nothing),
            "nothing that is no loss": look(actor, no_data, collect_non_loss_data=True),
            "no loss function": look(actor, None),
            "with gradients on": plain(call(schedule, actor, batches, values, forward_only=True)),
        }

    def _one_iterator(
        self, schedule: Callable[..., Any], counts: tuple[int, ...]
    ) -> dict[str, Any]:
        """Several calls that go on with the same iterators."""
        batches = [self._actor.batches.batch(5, index) for index in range(sum(counts))]
        chunks = self._actor.gpt.chunks
        iterators = [iter(batches) for _ in chunks]
        found = {}
        for number, count in enumerate(counts):
            with torch.no_grad():
                outcome = call(
                    schedule,
                    chunks,
                    batches[:count],
                    log_probabilities,
                    data_iterator=iterators if len(chunks) > 1 else iterators[0],
                )
            found[f"one iterator, call {number}"] = plain(outcome)
        return found


def call(
    schedule: Callable[..., Any],
    model: list[Any],
    batches: list[Batch],
    loss: LossFunction | None,
    **arguments: Any,
) -> list[Any]:
    """As loops of reinforcement learning call: shapes that say nothing, because messages bring
    their own."""
    iterators = [iter(batches) for _ in model]
    given: dict[str, Any] = {
        "forward_step_func": partial(forward_step, loss=loss),
        "data_iterator": iterators if len(model) > 1 else iterators[0],
        "model": model,
        "num_microbatches": len(batches),
        "seq_length": 1,
        "micro_batch_size": 1,
        "forward_only": not torch.is_grad_enabled(),
    }
    found: list[Any] = schedule(**{**given, **arguments})
    return found


def forward_step(
    data_iterator: Iterator[Batch], model: Any, *, loss: LossFunction | None
) -> tuple[Any, Any]:
    """The last stage gives a dict of what its loss functions need, the others a tensor."""
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None)
    gpt = getattr(model, "module", model)
    if gpt.post_process:
        # In place, as for another temperature.
        logits = output.float().div_(2.0)
        every = logits.log_softmax(-1)
        chosen = every.gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)
        output = {
            "log_probs": chosen * batch["loss_mask"],
            "entropy": -(every.exp() * every).sum(-1),
            "values": logits[..., 0],
        }
    return output, None if loss is None else partial(loss, data=batch)


def log_probabilities(output: dict[str, torch.Tensor], data: Batch) -> Any:
    """A loss that stands for none, and a dict in which tensors, numbers and dicts mix."""
    told = {"model_output": {"log_probs": output["log_probs"]}, "loss": 1.0, "metrics": {}}
    return torch.tensor(1.0), told


def with_entropy(output: dict[str, torch.Tensor], data: Batch) -> Any:
    entropy = output["entropy"] if data["tokens"].shape[1] % 2 else None
    return torch.tensor(1.0), [{"kl": [0.5], "length": data["tokens"].shape[1]}, entropy]


def values(output: dict[str, torch.Tensor], data: Batch) -> Any:
    """A loss that is no tensor."""
    return 1.0, {"vpreds": output["values"]}


def lists(output: dict[str, torch.Tensor], data: Batch, *, non_loss_data: bool) -> Any:
    """What is collected comes alone, without a loss."""
    assert non_loss_data
    return {"values": [*output["values"]], "lengths": [len(row) for row in data["tokens"]]}


def nothing(output: dict[str, torch.Tensor], data: Batch) -> Any:
    return torch.tensor(0.0), None


def no_data(output: dict[str, torch.Tensor], data: Batch, *, non_loss_data: bool) -> None:
    assert non_loss_data


def of_critic(output: dict[str, torch.Tensor], data: Batch) -> Any:
    loss = (output["values"] - 1.0).square().mean()
    return loss, {"critic/vf_loss": loss.detach().item()}


def of_actor(output: dict[str, torch.Tensor], data: Batch, *, scale: int) -> Any:
    """Scaled, because Megatron divides by the number of microbatches."""
    loss = -(output["log_probs"].mean() + 0.1 * output["entropy"].mean()) * scale
    return loss, [{"actor/loss": [loss.detach().item()], "actor/steps": 1}, None]


def gradients(rig: Rig) -> str:
    digest = hashlib.sha256()
    for chunk in rig.gpt.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.main_grad.numpy().tobytes())
    return digest.hexdigest()


def told_to_all(found: list[Any]) -> Any:
    """What the last stage's rank found, told to its pipeline right after the call."""
    from megatron.core import parallel_state

    last = parallel_state.get_pipeline_model_parallel_last_rank()
    assert bool(found) == (dist.get_rank() == last)
    told = [plain(found)]
    dist.broadcast_object_list(told, last, group=parallel_state.get_pipeline_model_parallel_group())
    return told[0]


def plain(found: Any) -> Any:
    """Tensors as lists, so that == compares them to the bit."""
    if isinstance(found, torch.Tensor):
        return [tuple(found.shape), found.flatten().tolist()]
    if isinstance(found, dict):
        return {name: plain(each) for name, each in found.items()}
    if isinstance(found, list):
        return [plain(each) for each in found]
    return found

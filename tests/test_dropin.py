"""Megatron's contract, held against Megatron's own schedule on the same modules and data."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from rrfp.errors import UsageError
from rrfp.megatron.data import Batch
from rrfp.megatron.dispatching import DispatchSettings
from rrfp.megatron.settings import TrainSettings
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.dispatcher import Dispatch
from tests.ranks import run_ranks
from tests.training import SMALL

MICROBATCHES = 4
PP3 = {**SMALL, "layers": 3, "pp": 3, "microbatches": MICROBATCHES}
PP2_DP2 = {**SMALL, "pp": 2, "dp": 2, "microbatches": MICROBATCHES}


class Outcome(NamedTuple):
    """What a step came to on one rank."""

    losses: list[float]
    gradients_sha256: str


def backwards_in_reverse(path: Path, num_ranks: int) -> str:
    """An order file that takes the microbatches from the last to the first."""
    microbatches = range(MICROBATCHES - 1, -1, -1)
    rows = (
        ",".join(f"{rank}{kind}{microbatch}" for kind in "FB" for microbatch in microbatches)
        for rank in range(num_ranks)
    )
    path.write_text("\n".join(rows), encoding="utf-8")
    return str(path)


class Rig:
    """One rank's stage of a small GPT, its data, and its place."""

    def __init__(self, settings: dict[str, Any], layout: Any) -> None:
        from rrfp.megatron.corpus import open_corpus
        from rrfp.megatron.data import Batches
        from rrfp.megatron.model import build_gpt

        chosen = TrainSettings(**settings)
        corpus = open_corpus(chosen.data)
        self.layout = layout
        self.batches = Batches(corpus, chosen, layout.dp_rank)
        self.stage = build_gpt(chosen, layout, corpus.vocab_size)

    def run(
        self,
        schedule: Callable[..., list[Any]],
        forward_step: Callable[..., Any] | None = None,
        *,
        num_microbatches: int = MICROBATCHES,
        data: Iterator[Any] | None = None,
        **arguments: Any,
    ) -> Outcome:
        """One step from empty gradients; the parameters stay as they are."""
        from rrfp.megatron.training import forward_step as mean_loss_step

        self.stage.module.zero_grad_buffer()
        reduced = schedule(
            forward_step_func=forward_step or mean_loss_step,
            data_iterator=data or self.data(num_microbatches),
            model=[self.stage.module],
            num_microbatches=num_microbatches,
            seq_length=SMALL["seq_length"],
            micro_batch_size=1,
            **arguments,
        )
        digest = hashlib.sha256()
        for parameter in self.stage.module.parameters():
            digest.update(parameter.main_grad.numpy().tobytes())
        return Outcome([item["loss"].item() for item in reduced], digest.hexdigest())

    def data(self, num_microbatches: int) -> Iterator[Batch]:
        """Batches of which each masks a few more labels than the one before."""
        for index in range(num_microbatches):
            batch = self.batches.batch(0, index)
            batch["loss_mask"][:, : 3 * (index % 8)] = 0
            yield batch


def on_rigs(work: Callable[..., Any], settings: dict[str, Any], *args: object) -> Any:
    """Run `work(layout, *args)` on this rank, in Megatron's groups."""
    from rrfp.megatron.host import prepare_host

    prepare_host("cpu")
    from rrfp.megatron.parallel import parallel_groups

    with parallel_groups(TrainSettings(**settings), timeout_s=60.0) as layout:
        return work(layout, settings, *args)


def native() -> Callable[..., list[Any]]:
    from megatron.core.pipeline_parallel import schedules

    function: Callable[..., list[Any]] = schedules.get_forward_backward_func()
    return function


def ours(**settings: Any) -> Any:
    from rrfp.megatron.dropin import get_forward_backward_func

    return get_forward_backward_func(settings=DispatchSettings(**settings))


# What a step gives, on three stages: the middle one has neither data nor a loss.


def test_three_stages_keep_the_contract(tmp_path: Path) -> None:
    hint = backwards_in_reverse(tmp_path / "reverse.csv", 3)
    for found in run_ranks(3, on_rigs, compare_with_native, PP3, hint, timeout_s=110):
        for case, (expected, *outcomes) in found.items():
            for outcome in outcomes:
                assert outcome == expected, case
    last = found  # of the last stage, which has the losses
    assert len(set(last["evaluation"][0].losses)) == MICROBATCHES
    gradients = {case: outcomes[0].gradients_sha256 for case, outcomes in last.items()}
    assert gradients["three values"] != gradients["per token"] != gradients["mean"]


def compare_with_native(
    layout: Any, settings: dict[str, Any], hint: str
) -> dict[str, list[Outcome]]:
    """By case, Megatron's outcome and then ours."""
    rig = Rig(settings, layout)
    config = rig.stage.config
    schedules = [
        native(),
        ours(),
        ours(hint=hint),
        ours(hint=hint, dispatch=Dispatch.FIXED),
        ours(hint="f-first", limit=1),
    ]

    def outcomes(forward_step: Any = None, **arguments: Any) -> list[Outcome]:
        return [rig.run(schedule, forward_step, **arguments) for schedule in schedules]

    found = {"mean": outcomes(), "three values": outcomes(three_value_step)}
    with torch.no_grad():
        found["evaluation"] = outcomes(forward_only=True)
        found["first validation"] = outcomes(forward_only=True, first_val_step=True)
        found["other data"] = outcomes(non_loss_step, forward_only=True, collect_non_loss_data=True)
    config.calculate_per_token_loss = True
    found["per token"] = outcomes(three_value_step)
    config.calculate_per_token_loss = False
    config.deallocate_pipeline_outputs = False
    found["kept outputs"] = outcomes()
    config.deallocate_pipeline_outputs = True
    config.no_sync_func, no_sync_func = None, config.no_sync_func
    found["no no_sync"] = outcomes()
    config.no_sync_func = no_sync_func
    # On the middle stage: no iterator at all, and one that must not be pulled.
    if layout.pp_rank == 1:
        found["no iterator"] = [
            rig.run(partial(schedule, data_iterator=None), data_at_the_ends_step)
            for schedule in map(without_data, schedules)
        ]
        found["iterator not pulled"] = outcomes(data_at_the_ends_step, data=iter(()))
    else:
        found["no iterator"] = outcomes(data_at_the_ends_step)
        found["iterator not pulled"] = outcomes(data_at_the_ends_step)
    for schedule in schedules[1:]:
        schedule.close()
    return found


def without_data(schedule: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The schedule, called with no iterator whatever it is given."""

    def called(**arguments: Any) -> list[Any]:
        return schedule(**{**arguments, "data_iterator": None})

    return called


def three_value_step(data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total = (losses * batch["loss_mask"]).sum()
        return total, batch["loss_mask"].sum().int(), {"loss": total.detach().clone()}

    return output, loss


def non_loss_step(data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def largest(losses: torch.Tensor, *, non_loss_data: bool) -> dict[str, torch.Tensor]:
        assert non_loss_data
        return {"loss": losses.max()}

    return output, largest


def data_at_the_ends_step(
    data_iterator: Iterator[Batch] | None, model: Any
) -> tuple[torch.Tensor, Any]:
    gpt = model.module
    if not (gpt.pre_process or gpt.post_process):
        return model(None, None, None), None
    assert data_iterator is not None
    return three_value_step(data_iterator, model)


# How it is called: links, microbatches, refusals, failures.


def test_two_stages_are_called_in_many_ways() -> None:
    settings = {**SMALL, "pp": 2}
    for found in run_ranks(2, on_rigs, call_in_many_ways, settings, timeout_s=110):
        assert found == ["done"]


def call_in_many_ways(layout: Any, settings: dict[str, Any]) -> list[str]:
    rig = Rig(settings, layout)
    share_the_links(rig)
    change_the_number_of_microbatches(rig)
    refuse_before_the_first_task(rig)
    fail_and_go_on(rig)
    return ["done"]


def links() -> set[str]:
    """The names of the links' threads of this process."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("rrfp-")}


def share_the_links(rig: Rig) -> None:
    """All that ask for one function get it; closed, it opens its links anew."""
    training, evaluation = ours(), ours()
    assert training is evaluation
    first = rig.run(training)
    opened = links()
    assert len(opened) == 2
    evaluation(
        forward_step_func=three_value_step,
        data_iterator=[rig.data(MICROBATCHES)],
        model=rig.stage.module,
        num_microbatches=MICROBATCHES,
        seq_length=SMALL["seq_length"],
        micro_batch_size=1,
        forward_only=True,
    )
    assert links() == opened
    for _ in range(2):
        dist.barrier()
        training.close()
        assert not links()
        assert rig.run(training) == first
    training.close()


def change_the_number_of_microbatches(rig: Rig) -> None:
    """Links made for few microbatches serve many, also many more than the limit."""
    for settings in ({"limit": 2}, {"hint": "gpipe", "dispatch": Dispatch.FIXED}):
        schedule = ours(**settings)
        for num_microbatches in (1, 6, 3):
            expected = rig.run(native(), num_microbatches=num_microbatches)
            assert rig.run(schedule, num_microbatches=num_microbatches) == expected
        with torch.no_grad():
            for num_microbatches in (40, 2):
                evaluate = partial(rig.run, num_microbatches=num_microbatches, forward_only=True)
                assert evaluate(schedule).losses == evaluate(native()).losses
        schedule.close()


def refuse_before_the_first_task(rig: Rig) -> None:
    config = rig.stage.config
    schedule = ours(hint="fb")
    for name, value in (
        ("overlap_moe_expert_parallel_comm", True),
        ("num_microbatches_with_partial_activation_checkpoints", 0),
        ("fine_grained_activation_offloading", True),
        ("num_moe_experts", 8),
        ("cuda_graph_impl", "local"),
    ):
        before = getattr(config, name)
        setattr(config, name, value)
        with pytest.raises(UsageError, match=f"{name}.* cannot run readiness-first"):
            rig.run(schedule, never_called)
        setattr(config, name, before)
    for arguments, complaint in (
        ({"model": [rig.stage.module] * 2}, "2 model chunks are more"),
        ({"data_iterator": [iter(())] * 2}, "2 data iterators are more"),
        ({"p2p_communicator": object()}, "come together or not at all"),
    ):
        with pytest.raises(UsageError, match=complaint):
            rig.run(lambda arguments=arguments, **given: schedule(**{**given, **arguments}))
    assert not links()
    from rrfp.megatron.dropin import get_forward_backward_func

    with pytest.raises(UsageError, match="2 model chunks a rank"):
        get_forward_backward_func(2, 2)


def never_called(*_: object) -> None:
    raise AssertionError("a task has begun")


def fail_and_go_on(rig: Rig) -> None:
    """What a stage raises comes out there, its neighbour is told at once, and both can go on."""
    schedule = ours(hint="b-first")
    expected = rig.run(schedule)

    def short() -> Iterator[Batch]:
        yield from rig.data(2)

    def twice(data_iterator: Iterator[Batch], model: Any) -> Any:
        next(data_iterator)
        return three_value_step(data_iterator, model)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    for failing_stage, step, data, error, complaint in (
        (0, None, short, UsageError, "the data iterator ended after 2 microbatches"),
        (1, None, short, UsageError, "the data iterator ended after 2 microbatches"),
        (1, twice, None, UsageError, "asked for a second item for microbatch 0"),
        (0, broken, None, ZeroDivisionError, ""),
        (1, broken, None, ZeroDivisionError, ""),
    ):
        if rig.layout.pp_rank == failing_stage:
            with pytest.raises(error, match=complaint):
                rig.run(schedule, step, data=data and data())
        else:
            with pytest.raises(PeerLostError, match=f"rank {failing_stage} closed its connection"):
                rig.run(schedule)
        assert not links()
        dist.barrier()
        assert rig.run(schedule) == expected
    schedule.close()


# The reduction of gradients between replicas.


def test_overlapped_reduction_is_started_as_megatron_starts_it(tmp_path: Path) -> None:
    hint = backwards_in_reverse(tmp_path / "reverse.csv", 2)
    for rank, found in enumerate(
        run_ranks(4, on_rigs, reduce_in_many_ways, PP2_DP2, hint, timeout_s=110)
    ):
        for case, (native_one, in_order, *out_of_order) in found.items():
            outcomes, num_calls = native_one
            assert outcomes == outcomes[:1] * 3, "the same step gave different gradients"
            # On the first stage Megatron starts the reduction inside the last backward.
            assert num_calls == (3 if case == "grad_sync_func" and rank // 2 > 0 else 0)
            assert in_order == native_one, case
            for ours_of_case, _ in out_of_order:
                assert ours_of_case == outcomes, case


def reduce_in_many_ways(
    layout: Any, settings: dict[str, Any], hint: str
) -> dict[str, list[tuple[list[Outcome], int]]]:
    """By case, what Megatron's and our schedules came to in three steps, and how often they
    called `grad_sync_func`."""
    from megatron.core import distributed

    plain = distributed.DistributedDataParallelConfig
    distributed.DistributedDataParallelConfig = partial(
        plain, overlap_grad_reduce=True, bucket_size=2000
    )
    schedules = [native(), ours(), ours(hint=hint), ours(hint=hint, dispatch=Dispatch.FIXED)]
    found = {
        "hooks": [reduced(Rig(settings, layout), schedule, None) for schedule in schedules],
        "grad_sync_func": [
            reduced(rig, schedule, rig.stage.module.start_grad_sync)
            for schedule in schedules
            for rig in [Rig(settings, layout)]
        ],
    }
    for schedule in schedules[1:]:
        schedule.close()
    return found


def reduced(
    rig: Rig, schedule: Callable[..., list[Any]], start: Callable[..., None] | None
) -> tuple[list[Outcome], int]:
    # Megatron divides the gradients into buckets on the first stage only.
    assert (len(rig.stage.module.bucket_groups) > 1) == (rig.layout.pp_rank == 0)
    num_calls = 0

    def grad_sync_func(parameters: Iterator[torch.nn.Parameter]) -> None:
        nonlocal num_calls
        num_calls += 1
        assert start is not None
        start(parameters)

    rig.stage.config.grad_sync_func = start and grad_sync_func
    # The first step shows Megatron which gradients to wait for; it overlaps from the second on.
    return [rig.run(schedule) for _ in range(3)], num_calls

"""Ranks that run in step: those that share a collective, and the pipelines that they couple."""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.distributed import HashStore

from rrfp.errors import RrfpError, UsageError
from rrfp.megatron.adapters.groups import replica_group
from rrfp.megatron.step_groups import Place, coupled_pipelines, ranks_of, step_groups
from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.rendezvous import Rendezvous
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks
from tests.megatron.training import SMALL, TIMEOUT_S, native, ours

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)


Ranks = tuple[int, ...]


def places(*pipelines: Ranks, sharing: tuple[Ranks, ...] = ()) -> dict[int, Place]:
    """Every rank's place, in these pipelines and these groups that share a collective."""
    return {
        rank: Place(
            rank,
            pipeline,
            tuple(sorted({rank}.union(*(group for group in sharing if rank in group)))),
        )
        for pipeline in pipelines
        for rank in pipeline
    }


def agreed(by_rank: Mapping[int, Place], timeout_s: float = 30.0) -> dict[int, Any]:
    """By rank, its group, or the error that it raised."""
    store = HashStore()

    def one(place: Place) -> Any:
        try:
            pipelines = coupled_pipelines(place, Rendezvous(store, "test", place.rank, timeout_s))
        except Exception as error:
            return error
        return tuple(pipeline[place.pp_rank] for pipeline in pipelines)

    with ThreadPoolExecutor(len(by_rank)) as threads:
        return dict(zip(by_rank, threads.map(one, by_rank.values()), strict=True))


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        pytest.param(places((0, 2), (1, 3)), [(0,), (1,), (2,), (3,)], id="replicas are free"),
        pytest.param(
            places((0, 2), (1, 3), sharing=((0, 1), (2, 3))),
            [(0, 1), (0, 1), (2, 3), (2, 3)],
            id="tensor parallel",
        ),
        pytest.param(
            places((0, 2), (1, 3), sharing=((2, 3),)),
            [(0, 1), (0, 1), (2, 3), (2, 3)],
            id="experts on the last stage only",
        ),
        pytest.param(
            places((0, 4), (1, 5), (2, 6), (3, 7), sharing=((0, 1), (5, 6))),
            [(0, 1, 2), (0, 1, 2), (0, 1, 2), (3,), (4, 5, 6), (4, 5, 6), (4, 5, 6), (7,)],
            id="a chain over two stages",
        ),
        pytest.param(
            places(
                *((rank, rank + 4) for rank in range(4)),
                sharing=((0, 1), (2, 3), (4, 5), (6, 7), (0, 2)),
            ),
            [(0, 1, 2, 3)] * 4 + [(4, 5, 6, 7)] * 4,
            id="tensor parallel, with experts on the first stage",
        ),
        pytest.param(
            places((3, 0), (2, 1), sharing=((0, 1),)),
            [(1, 0), (1, 0), (2, 3), (2, 3)],
            id="ranks numbered the other way",
        ),
    ],
)
def test_coupled_pipelines_agree_on_every_stage(
    by_rank: dict[int, Place], expected: list[Ranks]
) -> None:
    found = agreed(by_rank)
    assert [found[rank] for rank in sorted(found)] == expected


def test_a_collective_across_stages_is_refused_on_every_rank() -> None:
    by_rank = places((0, 1), (2, 3), sharing=((1, 2),))
    for error in agreed(by_rank).values():
        assert isinstance(error, UsageError)
        assert "put such ranks on the same stages" in str(error)


def test_a_rank_that_does_not_come_is_named() -> None:
    by_rank = places((0, 2), (1, 3), sharing=((2, 3),))
    del by_rank[3]
    for error in agreed(by_rank, timeout_s=0.5).values():
        assert isinstance(error, PeerLostError)
        assert "for rank 3" in str(error)


def test_ranks_that_numpy_computed_can_be_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """`initialize_model_parallel(np.int64(1), np.int64(2))` leaves such ranks in its groups."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [np.int64(0), np.int64(2)])
    assert json.dumps(ranks_of(object())) == "[0, 2]"


@pytest.mark.slow
def test_megatrons_groups_give_the_place() -> None:
    settings = {**SMALL, "pp": 2, "dp": 2, "ep": 2, "experts": 4}
    found = run_ranks(4, places_in_megatron, settings, timeout_s=110)
    for rank, (dense, moe, passed) in enumerate(found):
        pipeline = (rank % 2, rank % 2 + 2)
        assert dense == Place(rank, pipeline, (rank,))
        # Ranks 0 and 1 are replicas of the first stage and share its experts.
        assert moe == passed == Place(rank, pipeline, (rank // 2 * 2, rank // 2 * 2 + 1))


def places_in_megatron(settings: dict[str, Any]) -> list[Place]:
    """This rank's place in a dense model, in one with experts, and in groups that it passes."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core.process_groups_config import ProcessGroupCollection

    from rrfp.megatron.step_groups import place_in, step_groups
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.settings import TrainSettings

    with parallel_groups(TrainSettings(**settings), timeout_s=60.0):
        groups = step_groups(None, None)
        passed = ProcessGroupCollection.use_mpu_process_groups()
        return [
            place_in(groups, has_experts=False),
            place_in(groups, has_experts=True),
            place_in(passed, has_experts=True),
        ]


@pytest.mark.parametrize("told", [b"[[5], [9]]", b"[[0, 1], [0]]", b"\x80\x04N.", b"[[1]]"])
def test_an_invalid_place_is_reported_with_its_rank(told: bytes) -> None:
    store = HashStore()
    store.set("test/place-in-groups/1", told)  # type: ignore[arg-type]
    with pytest.raises(RrfpError, match=r"what rank 1 published as .* cannot be read"):
        coupled_pipelines(Place(0, (0, 1), (0,)), Rendezvous(store, "test", 0, 5.0))


def test_a_collection_need_not_name_what_others_know() -> None:
    """Megatron's schedules of 0.19 ask a loop's collection for tp and cp only."""
    pipeline = SimpleNamespace(size=lambda: 2)
    given = SimpleNamespace(tp="tp", cp="cp")
    found = step_groups(SimpleNamespace(pp_group=pipeline), given)
    assert (found.pp, found.tp, found.cp) == (pipeline, "tp", "cp")
    assert not hasattr(given, "pp")
    with pytest.raises(UsageError, match=r"^the process groups of this step have no pp, and"):
        step_groups(object(), given)
    with pytest.raises(UsageError, match=r"^the process groups of this step have no dp_cp, and"):
        replica_group(given)


# Several models in one process, an actor and a critic: each has its own groups, its own number of
# chunks and links of its own, and learns what it learns under Megatron's own schedule. Their
# modules and their config are the plainest that Megatron takes; one stage has no parameters at all.


NUM = 8
WIDTH, BATCH, LENGTH = 8, 2, 3


class Stage(torch.nn.Module):
    """A stage of a few numbers; an empty one hands on what it gets."""

    def __init__(self, config: Any, stage: int, num_stages: int, *, is_empty: bool) -> None:
        super().__init__()
        self.config = config
        self.model_type = None
        self.pre_process, self.post_process = stage == 0, stage == num_stages - 1
        generator = torch.Generator().manual_seed(stage)
        if not is_empty:
            self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self._input: Any = None

    def set_input_tensor(self, tensors: Any) -> None:
        self._input = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self, given: torch.Tensor | None) -> torch.Tensor:
        value = given if self.pre_process else self._input
        assert value is not None
        return torch.tanh(value @ self.weight) if hasattr(self, "weight") else value


def forward_step(data_iterator: Iterator[torch.Tensor], model: Stage) -> Any:
    output = model(next(data_iterator))

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.square().mean()
        return mean, {"loss": mean.detach()}

    return output, loss


class Model:
    """A model on the pipelines of this rank's groups."""

    def __init__(self, pipelines: list[list[int]], num_chunks: int, empty: int | None) -> None:
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.process_groups_config import ProcessGroupCollection

        rank = dist.get_rank()
        groups = [dist.new_group(ranks) for ranks in pipelines]
        (index,) = (number for number, ranks in enumerate(pipelines) if rank in ranks)
        selves = [dist.new_group([each]) for each in range(dist.get_world_size())]
        config: Any = ModelParallelConfig(
            pipeline_model_parallel_size=len(pipelines[index]), pipeline_dtype=torch.float32
        )
        # Megatron's own schedules ask for these, ours does not.
        if num_chunks > 1:
            config.virtual_pipeline_model_parallel_size = num_chunks
        config.hidden_size, config.fine_grained_activation_offloading = WIDTH, False
        num_ranks, pp_rank = len(pipelines[index]), pipelines[index].index(rank)
        num_stages = num_ranks * num_chunks
        self.chunks = [
            Stage(config, stage, num_stages, is_empty=stage == empty)
            for stage in range(pp_rank, num_stages, num_ranks)
        ]
        collection = ProcessGroupCollection()
        collection.tp = collection.cp = selves[rank]
        collection.pp = groups[index]
        collection.embd = collection.pos_embd = None
        collection.dp_cp = selves[rank]
        self._arguments = {
            "forward_step_func": forward_step,
            "model": self.chunks if num_chunks > 1 else self.chunks[0],
            "num_microbatches": NUM,
            "seq_length": LENGTH,
            "micro_batch_size": BATCH,
            "p2p_communicator": P2PCommunicator(groups[index], config),
            "pg_collection": collection,
        }

    def step(self, schedule: Callable[..., Any], seed: int, **arguments: Any) -> list[Any]:
        """Losses and gradients of a step on data of its own."""
        generator = torch.Generator().manual_seed(seed)
        items = list(torch.randn(NUM, LENGTH, BATCH, WIDTH, generator=generator))
        for chunk in self.chunks:
            chunk.zero_grad()
        iterators: Any = [iter(items) for _ in self.chunks]
        losses = schedule(
            **self._arguments,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            **arguments,
        )
        gradients = [
            parameter.grad.tolist()
            for chunk in self.chunks
            for parameter in chunk.parameters()
            if parameter.grad is not None
        ]
        return [[item["loss"].item() for item in losses], gradients]


def in_the_world(work: Callable[[], Any], num_ranks: int) -> Any:
    """Run `work()` where torch's ranks have met."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    with parallel_groups(TrainSettings(pp=num_ranks), timeout_s=120.0):
        return work()


def test_an_actor_and_a_critic_live_side_by_side() -> None:
    for found in run_ranks(4, in_the_world, act_and_criticise, 4, timeout_s=TIMEOUT_S):
        for case, (expected, got) in found.items():
            assert got == expected, case


def act_and_criticise() -> dict[str, Any]:
    """By step, what Megatron's own schedule gives on this rank, and what ours does."""
    from megatron.core import parallel_state

    actor = Model([[0, 1, 2, 3]], 1, empty=None)
    critic = Model([[0, 1], [2, 3]], 1, empty=None)
    interleaved = Model([[0, 1, 2, 3]], 2, empty=None)

    def alternate(schedule: Callable[[int], Any]) -> dict[str, Any]:
        found = {}
        for step in range(3):
            for name, model in (("actor", actor), ("critic", critic), ("chunks", interleaved)):
                parallel_state.set_virtual_pipeline_model_parallel_world_size(
                    2 if model is interleaved else None
                )
                run = schedule(len(model.chunks))
                found[f"{name} trains, step {step}"] = model.step(run, step)
                with torch.no_grad():
                    looked = model.step(run, 10 + step, forward_only=True)
                found[f"{name} is evaluated, step {step}"] = looked
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        return found

    expected = alternate(natives)
    schedule = ours(hint="bfw")
    got = alternate(lambda _: schedule)
    schedule.close()
    return {case: (expected[case], got[case]) for case in expected}


def natives(num_chunks: int) -> Callable[..., Any]:
    from megatron.core.pipeline_parallel import schedules

    function: Callable[..., Any] = (
        schedules.forward_backward_pipelining_without_interleaving
        if num_chunks == 1
        else schedules.forward_backward_pipelining_with_interleaving
    )
    return function


def test_ranks_wait_as_long_as_their_process_group_does() -> None:
    late, ended = run_ranks(2, in_the_world, wait_for_the_second_rank, 2, timeout_s=50.0)[0]
    assert late.startswith("rank 0 waited 2 s for rank 1, which")
    assert ended == "rank 1 has ended before its first step; see its own output for the cause"


def wait_for_the_second_rank() -> list[str]:
    """The first rank's errors while the second one does not come, and after that has ended."""
    from rrfp.errors import RrfpError
    from rrfp.runtime.exit_hooks import at_end
    from rrfp.runtime.rendezvous import default_store

    told, store = [], default_store()
    for wait_s in (2, 3600):
        with patch.object(dist, "new_group", partial(dist.new_group, timeout=timedelta(0, wait_s))):
            model = Model([[0, 1]], 1, empty=None)
        schedule = ours()
        if dist.get_rank() == 0:
            try:
                model.step(schedule, 0)
            except RrfpError as error:
                told.append(str(error))
            store.set(f"told/{wait_s}", "")
        else:
            if wait_s == 3600:
                at_end.run()
            store.wait([f"told/{wait_s}"], timedelta(seconds=100))
    return told


def test_a_stage_without_parameters_trains() -> None:
    for found in run_ranks(3, in_the_world, train_with_an_empty_stage, 3, timeout_s=TIMEOUT_S):
        for expected, got in found:
            assert got == expected


def train_with_an_empty_stage() -> list[tuple[Any, Any]]:
    """The results on this rank of Megatron's own schedule, and of rrfp's under each hint."""
    found = []
    for empty in (1, 2):
        model = Model([[0, 1, 2]], 1, empty=empty)
        expected = model.step(native(), 0)
        for hint in ("bf", "bfw", "f-first"):
            schedule = ours(hint=hint)
            found.append((expected, model.step(schedule, 0)))
            schedule.close()
    return found


def test_a_rank_that_fails_before_its_links_are_open_notifies_the_others() -> None:
    first, *others = run_ranks(3, in_the_world, fail_on_the_first_rank, 3, timeout_s=TIMEOUT_S)
    assert first == "2 data iterators came with 1 model chunks; pass a list of one per chunk"
    for told in others:
        assert told == f"rank 0 failed while the ranks met: {first}"


def fail_on_the_first_rank() -> str:
    """The error of this rank. The timeout of the links is far longer than that of the test."""
    from rrfp.errors import RrfpError
    from rrfp.megatron.dropin import get_forward_backward_func
    from rrfp.megatron.settings import DispatchSettings

    model = Model([[0, 1, 2]], 1, empty=None)
    schedule = get_forward_backward_func(settings=DispatchSettings(connect_s=3600.0))
    try:
        if dist.get_rank() == 0:
            model.step(lambda **given: schedule(**{**given, "data_iterator": [None, None]}), 0)
        else:
            model.step(schedule, 0)
    except RrfpError as error:
        told = str(error)
    dist.barrier()
    # All can go on.
    assert model.step(schedule, 0)[1]
    schedule.close()
    return told

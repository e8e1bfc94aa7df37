"""Which ranks run in step: those that share a collective, and whole pipelines that they couple."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import distributed as dist
from torch.distributed import HashStore

from rrfp.errors import RrfpError, UsageError
from rrfp.megatron.adapters.group_collections import replicas_of
from rrfp.megatron.step_groups import Place, coupled_pipelines, ranks_of, step_groups
from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.rendezvous import Rendezvous
from tests.ranks import run_ranks
from tests.training import SMALL

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
def test_a_place_that_cannot_be_is_told_with_its_rank(told: bytes) -> None:
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
        replicas_of(given)

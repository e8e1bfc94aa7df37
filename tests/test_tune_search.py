"""What `rrfp tune` finds: even splits, and proposals within the memory."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rrfp.errors import UsageError
from rrfp.planning.trials import Setting, run_settings
from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admit
from rrfp.schedule.knobs import Bytes, parse_hold
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.layer_costs import even_cut
from rrfp.simulate.jitter import NO_JITTER
from rrfp.tune.from_costs import Asked, source_of_costs
from rrfp.tune.search import Found, tune
from rrfp.tune.source import balanced, loads
from tests.tuned import MODEL, UNEVEN, written


class TestSplits:
    """Splits by the ranks' loads."""

    def test_none_is_more_even(self) -> None:
        draw = random.Random(2)
        for _ in range(20):
            placement = draw.choice([*Placement])
            shape = Shape(2, 1, 2, placement)
            # Layers of one kind, as moving one by one is exact for them only.
            work = [draw.random(), *[1.0] * 9, 3 * draw.random()]
            slowness = [1.0, draw.choice([1.0, 1.5])]

            def worst(
                split: tuple[int, ...],
                work: list[float] = work,
                slowness: list[float] = slowness,
                shape: Shape = shape,
            ) -> float:
                return max(loads(split, work, slowness, shape))

            found = balanced(even_cut(9, 4), work, slowness, shape)
            every = [
                split
                for split in product(range(10), repeat=4)
                if sum(split) == 9 and min(split[1:3]) > 0
            ]
            assert worst(found) == pytest.approx(min(map(worst, every)))


def found_of(
    text: str,
    memory: str = "1.0x",
    simulations: int = 300,
    num_best: int = 5,
    **asked: Any,
) -> Found:
    given = Asked(**{"pp": 4, "microbatches": 6, **asked})
    return tune(
        source_of_costs(text, given, NO_JITTER),
        parse_hold(memory, auto=False),
        simulations=simulations,
        num_predicted=4,
        num_best=num_best,
    )


class TestSearch:
    """What is found."""

    def test_the_same_every_time(self, tmp_path: Path) -> None:
        path = str(written(tmp_path, UNEVEN))
        first, second = (found_of(path, layers=(16,)) for _ in range(2))
        assert first == second
        means = [each.mean_s for each in first.proposals]
        assert means == sorted(means)
        assert first.own is not None
        assert means[0] < first.own.mean_s
        assert first.num_simulated <= 300

    def test_a_plain_search_of_all_finds_nothing_better(self) -> None:
        """Without layers to move, on a few hints over one chunk and a V."""
        found = found_of("multimodal", pp=2)
        assert isinstance(found.memory, Bytes)
        best = found.proposals[0]
        seeds = range(1240, 1244)
        settings = []
        for hint, placement, admit in product(("bf", "bfw", "bfw-deep", "zb-v"), Placement, Admit):
            if admit not in (Admit.GIVEN, Admit.PYRAMID):
                continue
            if (hint == "zb-v" and placement is Placement.LOOP) or (
                hint in ("bf", "bfw") and placement is Placement.V
            ):
                continue
            chunks = 1 if placement is Placement.LOOP else 2
            policy, shape = fitted(
                Policy(hint_named(hint), hold=found.memory), Shape(2, 6, chunks, placement)
            )
            settings.append(
                Setting(shape=shape, policy=policy, costs=resolve_costs("multimodal"), admit=admit)
            )
        plain = min(row.mean_s for row in run_settings(settings, seeds))
        assert best.mean_s <= 1.03 * plain

    def test_all_proposals_stay_within_the_memory(self) -> None:
        found = found_of("multimodal", "0.7x")
        assert isinstance(found.memory, Bytes)
        assert all((each.peak_bytes or 0) <= found.memory.num for each in found.proposals)

    def test_uneven_loads_are_mended_by_the_split(self, tmp_path: Path) -> None:
        path = str(written(tmp_path, UNEVEN))
        found = found_of(path, layers=(16,))
        assert found.imbalance is not None
        assert found.imbalance.startswith("Pipeline rank 1 has")
        split = found.proposals[0].candidate.split
        assert split is not None
        assert len(set(split)) > 1
        without = found_of(path)
        assert without.imbalance is not None
        assert without.imbalance.endswith("which --layers N lets be searched.")
        assert found.proposals[0].mean_s < 0.95 * without.proposals[0].mean_s

    def test_too_little_memory_is_refused_with_what_suffices(self, tmp_path: Path) -> None:
        path = str(written(tmp_path, UNEVEN))
        with pytest.raises(UsageError, match="set it to") as refused:
            found_of(path, "1000B", layers=(16,))
        least = str(refused.value).split("set it to ")[1].split(" ")[0]
        assert found_of(path, least, layers=(16,)).proposals
        below = f"{int(least[:-1]) - 1}B"
        with pytest.raises(UsageError, match="set it to"):
            found_of(path, below, layers=(16,))

    def test_microbatches_of_any_size_of_a_model(self, tmp_path: Path) -> None:
        """Where every task takes long whatever its length, few large microbatches are better."""
        text = MODEL.split("[vision]")[0] + "[device]\nflops_per_s = 1e15\nlayer_s = 1e-2\n"
        found = found_of(str(written(tmp_path, text)), "100x", microbatches=16)
        assert found.proposals[0].candidate.joined > 1

    def test_a_backward_that_is_not_split(self, tmp_path: Path) -> None:
        rows = "kind,pp_rank,chunk,microbatch,seconds\n"
        rows += "".join(f"{kind},{rank},,,0.02\n" for kind in "FB" for rank in range(3))
        found = found_of(str(written(tmp_path, rows, "rows.csv")), "3", pp=3)
        assert {each.candidate.hint for each in found.proposals} <= {
            *("bf", "b-first", "fb", "1f1b", "bf-deep", "interleaved")
        }
        assert all(each.peak_bytes is None for each in found.proposals)


def test_an_order_that_binds_has_no_hold() -> None:
    for each in found_of("uniform", num_best=50).proposals:
        assert (each.candidate.hold is None) == (each.candidate.dispatch is Dispatch.FIXED)

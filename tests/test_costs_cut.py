"""Costs by layer: of stages that are cut anew, and of microbatches joined or divided."""

from itertools import product
from pathlib import Path

import pytest

from rrfp.errors import UsageError
from rrfp.replay.cost_sources import costs_of, resolve_costs
from rrfp.schedule.shape import SPLIT_BACKWARD, Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.costs.cut_files import layered_of
from rrfp.simulate.costs.language_models import FlopCosts
from rrfp.simulate.costs.layer_costs import CutCosts
from rrfp.simulate.costs.model import StepCosts, Uneven
from rrfp.trace.perfetto.reader import read_trace
from tests.called import Run, run
from tests.tuned import MODEL, TRACE, UNEVEN, written

__all__ = ["run"]


def assert_same(found: StepCosts, expected: StepCosts, off_ns: int = 0) -> None:
    """The same times but for rounding, and the same of everything else."""
    for name in ("forward", "input_gradient", "weight_gradient"):
        for row, other in zip(
            getattr(found.times, name), getattr(expected.times, name), strict=True
        ):
            assert all(abs(a - b) <= off_ns for a, b in zip(row, other, strict=True))
    assert found.sizes == expected.sizes
    assert found.links == expected.links
    assert found.gradient_sync_ns == expected.gradient_sync_ns


class TestCosts:
    """Costs by layer."""

    @pytest.mark.parametrize("uneven", Uneven)
    def test_stages_cut_as_they_were_cost_the_same(self, uneven: Uneven, tmp_path: Path) -> None:
        for text, split in (
            (str(written(tmp_path, UNEVEN)), (4, 4, 3, 4)),
            ("multimodal", (2,) * 4),
        ):
            costs, shape = resolve_costs(text), Shape(4, 5, kinds=SPLIT_BACKWARD)
            cut = CutCosts(layered_of(costs, shape, split, uneven), split)
            for seed in range(3):
                assert_same(cut.step(shape, seed, 0), costs.step(shape, seed, 0))

    def test_a_models_stages_are_the_same(self, tmp_path: Path) -> None:
        costs = resolve_costs(str(written(tmp_path, MODEL)))
        assert isinstance(costs, FlopCosts)
        for num_ranks, chunks in product((2, 5), (1, 2)):
            shape = Shape(num_ranks, 4, chunks)
            cut = CutCosts(costs, costs.split_over(shape.num_stages))
            # Sums in another order differ in their last bit.
            assert_same(cut.step(shape, 7, 1), costs.step(shape, 7, 1), off_ns=1)

    def test_a_recorded_run_is_the_same(self) -> None:
        costs = costs_of(read_trace(TRACE))
        shape, split = costs.shape, (2,) * costs.shape.num_stages
        cut = CutCosts(layered_of(costs, shape, split), split)
        assert_same(cut.step(shape, 1, 0), costs.step(shape, 1, 0), off_ns=1)

    def test_a_slow_rank_stays_slow_and_heavy_layers_stay_heavy(self, tmp_path: Path) -> None:
        """Rank 1 takes half as long again. With one layer less, it takes a quarter less as a slow
        rank; and its neighbour, which gets the layer, what its own take, or that much more."""
        costs, shape = resolve_costs(str(written(tmp_path, UNEVEN))), Shape(4, 3)
        forward = costs.step(shape, 0, 0).times.forward
        for uneven, factor in ((Uneven.RANKS, 1.0), (Uneven.LAYERS, 1.5)):
            layered = layered_of(costs, shape, (4, 4, 4, 4), uneven)
            after = CutCosts(layered, (4, 3, 5, 4)).step(shape, 0, 0).times.forward
            assert after[1] == pytest.approx([0.75 * ns for ns in forward[1]], abs=1)
            grown = [(1 + factor / 4) * ns for ns in forward[2]]
            assert after[2] == pytest.approx(grown, abs=1)

    def test_the_head_stays_on_the_last_stage(self, tmp_path: Path) -> None:
        """The last stage takes 8 ms of F more than four layers: without any it takes these."""
        costs, shape = resolve_costs(str(written(tmp_path, UNEVEN))), Shape(4, 3)
        layered = layered_of(costs, shape, (4, 4, 4, 4))
        before = costs.step(shape, 0, 0)
        after = CutCosts(layered, (4, 6, 6, 0)).step(shape, 0, 0)
        head = [round(ns * 8 / 28) for ns in before.times.forward[3]]
        assert after.times.forward[3] == pytest.approx(head, abs=1)
        assert after.sizes is not None
        assert before.sizes is not None
        kept = [num / 3 for num in before.sizes.kept[3]]
        assert after.sizes.kept[3] == pytest.approx(kept, abs=1)

    def test_a_vision_layer_stays_one(self) -> None:
        """On a stage of text, a layer of images grows with the images."""
        costs, shape = resolve_costs("multimodal"), Shape(8, 6)
        layered = layered_of(costs, shape, (4,) * 8)
        before = costs.step(shape, 3, 0).times.forward
        after = CutCosts(layered, (4, 4, 3, 5, 4, 4, 4, 4)).step(shape, 3, 0).times.forward
        joint = [own + other / 4 for own, other in zip(before[3], before[2], strict=True)]
        assert after[3] == pytest.approx(joint, abs=1)

    def test_joined_and_divided_microbatches(self, tmp_path: Path) -> None:
        """Two become one: all their work, and what each task takes anyhow once."""
        costs = resolve_costs(str(written(tmp_path, MODEL)))
        assert isinstance(costs, FlopCosts)
        split = costs.split_over(4)
        given = CutCosts(costs, split).step(Shape(4, 6), 0, 0)
        joined = CutCosts(costs, split, joined=2).step(Shape(4, 3), 0, 0)
        divided = CutCosts(costs, split, divided=2).step(Shape(4, 12), 0, 0)
        assert given.sizes is not None
        assert joined.sizes is not None
        for stage in range(4):
            fixed_ns = split[stage] * 1e-4 * 1e9
            row = given.times.forward[stage]
            pairs = [row[2 * i] + row[2 * i + 1] - fixed_ns for i in range(3)]
            assert joined.times.forward[stage] == pytest.approx(pairs, abs=2)
            halves = [(row[i // 2] - fixed_ns) / 2 + fixed_ns for i in range(12)]
            assert divided.times.forward[stage] == pytest.approx(halves, abs=2)
            kept = given.sizes.kept[stage]
            sums = [kept[2 * i] + kept[2 * i + 1] for i in range(3)]
            assert joined.sizes.kept[stage] == pytest.approx(sums, abs=2)
        assert sum(joined.links.num_bytes) == sum(given.links.num_bytes)

    def test_a_document_that_cuts(self, run: Run, tmp_path: Path) -> None:
        written(tmp_path, UNEVEN)
        document = """
[cut]
costs = "costs.toml"
layers = "4,3,5,4"
[cut.given]
layers = "4,4,4,4"
pp = 4
microbatches = 3
"""
        found = resolve_costs(str(written(tmp_path, document, "cut.toml")))
        layered = layered_of(resolve_costs("costs.toml"), Shape(4, 3), (4, 4, 4, 4))
        expected = CutCosts(layered, (4, 3, 5, 4))
        assert_same(found.step(Shape(4, 3), 5, 0), expected.step(Shape(4, 3), 5, 0))
        code, _, err = run("simulate", "--costs", "cut.toml", "--pp", "4", "--microbatches", "3")
        assert (code, err) == (0, "")
        for wrong, told in (
            (document.replace("4,3,5,4", "4,3,5,5"), "17 layers in all and the model has 16"),
            (document.replace("4,3,5,4", "4,0,8,4"), "leaves a stage in the middle without layers"),
            (document.replace("4,3,5,4", "four"), "write the layers of each stage"),
            (document.split("[cut.given]")[0], "does not say how many layers"),
            (document.replace("costs.toml", "cut.toml"), "is to be cut itself"),
        ):
            written(tmp_path, wrong, "cut.toml")
            with pytest.raises(UsageError, match=told):
                resolve_costs("cut.toml")

    def test_costs_of_another_pipeline_are_refused(self) -> None:
        layered = layered_of(resolve_costs("uniform"), Shape(4, 2), (2,) * 4)
        with pytest.raises(UsageError, match="of 4 pipeline ranks, not 2"):
            CutCosts(layered, (4, 4)).step(Shape(2, 2), 0, 0)
        with pytest.raises(UsageError, match="into 2 stages"):
            CutCosts(layered, (4, 4)).step(Shape(4, 2), 0, 0)


def test_fixed_times_are_those_of_every_kind(tmp_path: Path) -> None:
    costs = resolve_costs(str(written(tmp_path, MODEL)))
    assert isinstance(costs, FlopCosts)
    for kind in Kind:
        assert costs.fixed_ns[kind].sum() == pytest.approx(16 * 1e-4 * 1e9)

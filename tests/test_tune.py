"""`rrfp tune`: costs by layer, the search, and what it prints."""

import csv
import io
import json
import random
import shlex
import shutil
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from rrfp.cli import main as cli
from rrfp.errors import UsageError
from rrfp.inputs.layer_layout import layout_string, parse_layout
from rrfp.replay.cost_files import resolve_costs
from rrfp.replay.recorded_costs import costs_of
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints.table import hint_named
from rrfp.schedule.hold import Bytes, parse_hold
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind
from rrfp.simulate.costs.cut_files import layered_of
from rrfp.simulate.costs.flops import FlopCosts
from rrfp.simulate.costs.model import StepCosts
from rrfp.simulate.costs.uneven import Uneven
from rrfp.simulate.costs.units import CutCosts, even_cut
from rrfp.simulate.jitter import NO_JITTER
from rrfp.simulate.trial import Setting, run_settings
from rrfp.trace.perfetto.reader import read_trace
from rrfp.tune.from_costs import Asked, source_of_costs
from rrfp.tune.search import Found, tune
from rrfp.tune.splits import balanced, loads

Run = Callable[..., tuple[int, str, str]]

TRACE = Path(__file__).parent.parent / "traces/gpt-pp4-bf.pftrace"

MODEL = """
[language]
layers = 11
hidden = 256
ffn = 1024
heads = 8
vocabulary = 50000
tokens = { median = 512, sigma = 0.5, least = 16, most = 4096 }
[vision]
layers = 5
hidden = 128
ffn = 512
heads = 4
images = { median = 2 }
patches = { median = 256, sigma = 0.5, most = 1024 }
[device]
flops_per_s = 1e12
layer_s = 1e-4
[links]
latency_s = 1e-4
bandwidth_bytes_per_s = 1e9
"""

UNEVEN = """
seconds = { F = 0.020, B = 0.022, W = 0.014 }
bytes = 1000000
length = "text"
lengths = { text = 0.4 }
[[ranks]]
pp_ranks = "1"
seconds = { F = 0.030, B = 0.033, W = 0.021 }
[[ranks]]
pp_ranks = "3"
seconds = { F = 0.028, B = 0.028, W = 0.018 }
bytes = 1500000
"""


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("tune", ...)` gives the exit code and both outputs, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def rrfp(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rrfp", *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return rrfp


def written(directory: Path, text: str, name: str = "costs.toml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


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


class TestLayouts:
    """Megatron's notation."""

    def test_megatron_reads_the_same(self) -> None:
        draw = random.Random(1)
        for _ in range(50):
            split = tuple(draw.randrange(5) for _ in range(draw.randrange(2, 9)))
            text = layout_string(split)
            assert parse_layout(text, "it") == split
            rows = PipelineParallelLayerLayout.parse_str_to_list(text)
            assert [sum(each.name == "decoder" for each in row) for row in rows] == list(split)

    @pytest.mark.parametrize("text", ["Et*3|t|L", "Ettt|(tt|)*29,t|L", "E|(t*2|)*3t,tL"])
    def test_what_megatron_unrolls(self, text: str) -> None:
        rows = PipelineParallelLayerLayout.parse_str_to_list(text)
        expected = tuple(sum(each.name == "decoder" for each in row) for row in rows)
        assert parse_layout(text, "it") == expected

    @pytest.mark.parametrize("text", ["", "tt|tt", "Ett|tt", "EttL|tt", "Etx|tL", "Et*99999|tL"])
    def test_others_are_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match="--layout is"):
            parse_layout(text, "--layout")


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


class TestCommand:
    """`rrfp tune` as it is called."""

    SMALL = ("--pp", "4", "--microbatches", "6", "--simulations", "200", "--seeds", "4")

    def test_the_json(self, run: Run, tmp_path: Path) -> None:
        written(tmp_path, UNEVEN)
        code, out, err = run(
            *("tune", "costs.toml", "--memory", "16MiB", "--layers", "16", *self.SMALL),
            *("--format", "json"),
        )
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert len(found["proposals"]) == 5
        for each in found["proposals"]:
            assert each["low_s"] <= each["predicted_s"] <= each["high_s"]
            assert each["peak_bytes"] <= 16 * 2**20
            assert each["real_s"] is None
            assert sum(each["layers"]) == 16
            words = shlex.split(each["flags"])
            if "--layout" in words:
                layout = words[words.index("--layout") + 1]
                assert list(parse_layout(layout, "it")) == each["layers"]
            assert (each["megatron_flags"] is None) == ("--placement v" in each["flags"])

    def test_flags_of_train_mean_what_was_predicted(self, run: Run) -> None:
        """`rrfp simulate` with a proposal's flags takes what was predicted."""
        code, out, _ = run(
            *("tune", "multimodal", *self.SMALL, "--format", "json"),
            *("--per-task-ms", "0", "--per-message-ms", "0"),
        )
        assert code == 0
        for each in json.loads(out)["proposals"]:
            code, out, err = run(
                *("simulate", *shlex.split(each["flags"]), "--costs", "multimodal"),
                *(
                    "--jitter",
                    "lognormal:0.01",
                    "--seed",
                    "1240",
                    "--seeds",
                    "4",
                    "--format",
                    "json",
                ),
            )
            assert (code, err) == (0, "")
            assert json.loads(out)["rows"][0]["makespan_s"]["mean"] == pytest.approx(
                each["predicted_s"]
            )

    def test_the_table_fits(self, run: Run, tmp_path: Path) -> None:
        written(tmp_path, UNEVEN)
        arguments = ("tune", "costs.toml", "--layers", "16", *self.SMALL)
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= 80
        assert "rrfp train" in out
        assert "only the split of the layers" in " ".join(out.split())
        code, out, err = run(*arguments, "--format", "md")
        assert (code, err) == (0, "")
        assert out.count("```") == 10
        code, out, err = run(*arguments, "--format", "csv")
        assert (code, err) == (0, "")
        assert len(list(csv.DictReader(io.StringIO(out)))) == 5

    def test_a_recorded_run(self, run: Run, tmp_path: Path) -> None:
        trace = shutil.copy(TRACE, tmp_path)
        code, out, err = run(
            *("tune", str(trace), "--memory", "4", "--simulations", "200", "--format", "json")
        )
        assert code == 0, err
        found = json.loads(out)
        own = found["own"]
        assert own["is_run"]
        assert own["predicted_s"] == pytest.approx(own["measured_s"], rel=0.1)
        assert found["proposals"][0]["predicted_s"] < own["predicted_s"]

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("uniform",), "--pp is missing"),
            (("uniform", "--pp", "4"), "--microbatches is missing"),
            (("uniform", *SMALL, "--memory", "lots"), "--memory is 'lots'"),
            (("uniform", *SMALL, "--memory", "auto"), "--memory is 'auto'"),
            (("uniform", *SMALL, "--layers", "3"), "as many at least"),
            (("uniform", *SMALL, "--layers", "1,2"), "is of 2 stages"),
            (("uniform", *SMALL, "--layers", "x"), "--layers is 'x'"),
            (("gone.toml", *SMALL), "cannot read the costs"),
            ((str(TRACE), "--pp", "4"), "a run says it itself"),
        ],
    )
    def test_wrong_usage(self, run: Run, arguments: tuple[str, ...], told: str) -> None:
        code, out, err = run("tune", *arguments)
        assert (code, out) == (2, "")
        assert told in err

    def test_bytes_need_costs_that_tell_them(self, run: Run, tmp_path: Path) -> None:
        written(tmp_path, "seconds = { F = 0.02, B = 0.02, W = 0.01 }\n")
        code, _, err = run("tune", "costs.toml", *self.SMALL, "--memory", "1GiB")
        assert code == 2
        assert "give the costs bytes, or the memory in microbatches" in err

    def test_a_short_budget_still_answers(self, run: Run) -> None:
        code, out, err = run("tune", "uniform", *self.SMALL, "--budget-s", "0.1", "--format", "csv")
        assert (code, err) == (0, "")
        assert len(out.splitlines()) > 1

    def test_ctrl_c_ends_it(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("rrfp.tune.evaluate.run_settings", interrupted)
        code, out, err = run("tune", "uniform", *self.SMALL)
        assert (code, out, err) == (130, "", "rrfp: interrupted\n")


def test_an_order_that_binds_has_no_hold() -> None:
    for each in found_of("uniform", num_best=50).proposals:
        assert (each.candidate.hold is None) == (each.candidate.dispatch is Dispatch.FIXED)


def test_fixed_times_are_those_of_every_kind(tmp_path: Path) -> None:
    costs = resolve_costs(str(written(tmp_path, MODEL)))
    assert isinstance(costs, FlopCosts)
    for kind in Kind:
        assert costs.fixed_ns[kind].sum() == pytest.approx(16 * 1e-4 * 1e9)

"""`rrfp tune` finds splits and settings within the memory, and its proposals train."""

import csv
import io
import json
import random
import shlex
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from rrfp.errors import UsageError
from rrfp.inputs import layout_string, parse_layout
from rrfp.planning.trials import Setting, run_settings
from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admit
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Bytes, Dispatch, Policy, parse_hold
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.layer_costs import CutCosts, even_cut
from rrfp.simulate.jitter import NO_JITTER
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings
from rrfp.tune.from_costs import CostOptions, source_of_costs
from rrfp.tune.search import SearchResult, tune
from rrfp.tune.source import balanced, loads
from tests.analyze.simulated_runs import MODEL, TRACE, UNEVEN, written
from tests.train.trained import Run, read_metrics, rrfp, run

__all__ = ["run"]


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

    def test_a_memory_in_bytes_needs_costs_with_sizes(self, run: Run, tmp_path: Path) -> None:
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

        monkeypatch.setattr("rrfp.tune.search.run_settings", interrupted)
        code, out, err = run("tune", "uniform", *self.SMALL)
        assert (code, out, err) == (130, "", "rrfp: interrupted\n")


# What `rrfp tune` finds: even splits, and proposals within the memory.


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
) -> SearchResult:
    given = CostOptions(**{"pp": 4, "microbatches": 6, **asked})
    return tune(
        source_of_costs(text, given, NO_JITTER),
        parse_hold(memory, auto=False),
        simulations=simulations,
        num_predicted=4,
        num_best=num_best,
    )


class TestSearch:
    """Results of searches."""

    def test_the_same_every_time(self, tmp_path: Path) -> None:
        path = str(written(tmp_path, UNEVEN))
        first, second = (found_of(path, layers=(16,)) for _ in range(2))
        assert first == second
        means = [each.mean_s for each in first.proposals]
        assert means == sorted(means)
        assert first.own is not None
        assert means[0] < first.own.mean_s
        assert first.num_simulated <= 300

    @pytest.mark.parametrize("simulations", [1, 120])
    def test_counts_the_steps_that_it_simulates(self, simulations: int) -> None:
        """Without those of the run's own settings, also if predictions alone exceed the limit."""
        source = source_of_costs("uniform", CostOptions(pp=2, microbatches=4), NO_JITTER)
        simulated: list[None] = []
        found = tune(
            source,
            2,
            simulations=simulations,
            num_predicted=4,
            on_simulation=lambda: simulated.append(None),
        )
        assert found.own is not None
        assert found.num_simulated == len(simulated) - len(found.own.steps_s)

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
        """With a large fixed time per task, few large microbatches are better."""
        text = MODEL.split("[vision]")[0] + "[device]\nflops_per_s = 1e15\nlayer_s = 1e-2\n"
        found = found_of(str(written(tmp_path, text)), "100x", microbatches=16)
        assert found.proposals[0].candidate.joined > 1

    def test_a_backward_that_is_not_split(self, tmp_path: Path) -> None:
        rows = "kind,pp_rank,chunk,microbatch,seconds\n"
        rows += "".join(f"{kind},{rank},,,0.02\n" for kind in "FB" for rank in range(3))
        found = found_of(str(written(tmp_path, rows, "rows.csv")), "3", pp=3)
        assert {each.candidate.policy.hint.name for each in found.proposals} <= {
            *("bf", "b-first", "fb", "1f1b", "bf-deep", "interleaved")
        }
        assert all(each.peak_bytes is None for each in found.proposals)


def test_an_order_that_binds_has_no_hold() -> None:
    for each in found_of("uniform", num_best=50).proposals:
        assert (each.candidate.policy.hold is None) == (
            each.candidate.policy.dispatch is Dispatch.FIXED
        )


# Uneven layouts, and proposals of `rrfp tune`, for real.


SMALL = ("--hidden", "32", "--microbatches", "4", "--seq-length", "32", "--steps", "2")

HEAVY_HEAD = """
seconds = { F = 0.06, B = 0.06, W = 0.04 }
bytes = 1000000
[[ranks]]
last_share = 0.01
seconds = { F = 0.12, B = 0.12, W = 0.08 }
"""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"layout": "Et*3|t*2L", "layers": 5, "pp": 4}, "is of 2 stages, and 4 pipeline ranks"),
        ({"layout": "Et*3|t*2L", "layers": 6, "pp": 2}, "has 5 layers in all and --layers is 6"),
        ({"layout": "3,0,3", "layers": 6, "pp": 3}, "a stage in the middle without layers"),
        ({"layout": "ttt|tt", "layers": 5, "pp": 2}, "must begin with the embedding"),
        ({"layout": "2,2", "layers": 4, "pp": 2, "model": "vlm"}, "leave --layout out"),
        ({"layers": 5, "pp": 2}, "or divide them with --layout"),
    ],
)
def test_layouts_that_cannot_be(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_settings(TrainSettings(**flags))


def losses(directory: Path, *flags: str) -> list[float]:
    done = rrfp(directory, "train", *SMALL, "--no-trace", "--out", "run", "--force", *flags)
    assert done.returncode == 0, done.stderr
    return [line["loss"] for line in read_metrics(directory / "run")]


@pytest.mark.slow
def test_an_uneven_layout_trains_the_same(tmp_path: Path) -> None:
    """In a loop, in a V with stages of no layers at both ends, and under Megatron's own schedule.

    The first loss is the same to the bit. The norm of the gradients, which clips them, is summed
    over ranks, so that later losses differ in their last digits.
    """
    even, *others = (
        losses(tmp_path, "--pp", "2", "--layers", "6", *flags)
        for flags in (
            (),
            ("--layout", "Et|t*5L"),
            ("--chunks=2", "--placement=v", "--hint=bfw-deep", "--layout=0,2,4,0"),
            ("--dispatch=megatron", "--layout=2,4"),
        )
    )
    for each in others:
        assert each[0] == even[0]
        assert each == pytest.approx(even, rel=1e-5)


@pytest.mark.slow
def test_trials_of_costs_and_of_a_run(tmp_path: Path) -> None:
    """The first proposals, paced; then the run of one as what is tuned."""
    (tmp_path / "costs.toml").write_text(HEAVY_HEAD)
    search = ("--simulations", "300", "--try", "1", "--steps", "2", "--format", "json")
    done = rrfp(
        *(tmp_path, "tune", "costs.toml", "--pp", "2", "--microbatches", "6", "--layers", "8"),
        *search,
    )
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["proposals"][0]
    assert sum(first["layers"]) == 8
    # Less would be faster than possible; cores may be busy.
    assert 0.98 * first["predicted_for_real_s"] < first["real_s"]
    assert first["real_s"] < 1.5 * first["predicted_for_real_s"]
    (written,) = (tmp_path / "runs" / "tune").iterdir()
    cut = resolve_costs(f"{written}")
    assert isinstance(cut, CutCosts)
    assert list(cut.split) == first["layers"]
    done = rrfp(tmp_path, "tune", first["run"], "--memory", "3", *search)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["own"]["is_run"]
    assert found["own"]["predicted_s"] == pytest.approx(found["own"]["measured_s"], rel=0.1)
    assert found["proposals"][0]["real_s"] > 0


@pytest.mark.slow
def test_what_was_not_trained_here_cannot_be_tried(tmp_path: Path) -> None:
    made = rrfp(tmp_path, "simulate", "--pp", "2", "--microbatches", "4", "--out", "simulated")
    assert made.returncode == 0
    done = rrfp(tmp_path, "tune", "simulated", "--memory", "2", "--try", "1")
    assert done.returncode == 2
    assert "run the job itself with the proposal's flags" in done.stderr


# Which layers lie on which stage, in Megatron's notation.


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

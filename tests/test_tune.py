"""`rrfp tune` as it is called, and what it prints."""

import csv
import io
import json
import shlex
import shutil
from pathlib import Path

import pytest

from rrfp.inputs import parse_layout
from tests.called import Run, run
from tests.tuned import TRACE, UNEVEN, written

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

        monkeypatch.setattr("rrfp.tune.search.run_settings", interrupted)
        code, out, err = run("tune", "uniform", *self.SMALL)
        assert (code, out, err) == (130, "", "rrfp: interrupted\n")

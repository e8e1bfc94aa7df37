"""`rrfp verify`: every hint on every layout learns the same, and a difference would be seen."""

import json
import subprocess
import sys
from dataclasses import asdict
from math import nan
from pathlib import Path
from typing import Any

import pytest

from rrfp.errors import UsageError
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import AgreementRule, Dispatch
from rrfp.trace.run_dir import RunDir
from rrfp.train.settings import TrainSettings
from rrfp.verify.sameness import LAYOUTS, RANDOM, RankResult, Variant, variants_of, verify
from tests.train.trained import rrfp

GROUPED = {"pp2-tp2-sp", "moe-pp2-ep2"}
SHORT = ("bfw", "zb-v", "interleaved", RANDOM)
ON_A_V = {"zb-v", "v-half", "v-min"}


def verdicts(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["verdicts"]
    assert all(verdict["same"] for verdict in found)
    return found


IN_LONG_RUNS_ONLY = (
    "pp4",
    "pp2-tp2-sp",
    "pp4-c2-loop",
    "moe-pp2-ep2",
    "pp2-dp2-distopt",
    "vlm-pp4",
    "vlm-pp2-c2-v",
)
"""Shorter tests of chunks, reduction and the multimodal model also cover these layouts."""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, marks=pytest.mark.slow if each in IN_LONG_RUNS_ONLY else ())
        for each in LAYOUTS
    ],
)
def test_every_layout_learns_the_same(layout: str, tmp_path: Path) -> None:
    """The short version: fewer hints, one step."""
    hints = [f"--hint={hint}" for hint in SHORT]
    found = verdicts(
        rrfp(tmp_path, "verify", f"--layout={layout}", *hints, "--steps=1", "--format=json")
    )
    rules = list(AgreementRule) if layout in GROUPED else [None]
    combinations = {(verdict["hint"], verdict["agreement"]) for verdict in found}
    assert combinations >= {(hint, rule) for hint in ("bfw", RANDOM) for rule in rules}
    assert {verdict["dropout"] > 0 for verdict in found} == {False, True}
    assert {verdict["reference"].split()[0] for verdict in found if not verdict["dropout"]} == {
        Dispatch.FIXED if layout.endswith("-v") else Dispatch.MEGATRON
    }


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_whole_matrix_learns_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rrfp", "verify", "--format", "json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2900,
    )
    found = verdicts(done)
    assert {verdict["layout"] for verdict in found} == set(LAYOUTS)
    assert {verdict["hint"] for verdict in found} == {*HINTS, RANDOM}


def test_every_valid_combination_is_there() -> None:
    one_chunk = {*HINTS, RANDOM} - {*ON_A_V, "interleaved"}
    chunks = {*HINTS, RANDOM} - {"1f1b", "zb-h1"}
    expected = dict.fromkeys(LAYOUTS, one_chunk) | {
        "pp4-c2-loop": chunks - ON_A_V,
        "pp2-c2-v": chunks - {"interleaved"},
        "vlm-pp2-c2-v": chunks - {"interleaved"},
    }
    for layout, hints in expected.items():
        _, *ours = variants_of(layout)
        rules = set(AgreementRule) if layout in GROUPED else {None}
        for has_dropout in (False, True):
            combinations = {
                (variant.hint, variant.agreement)
                for variant in ours
                if (variant.dropout > 0) == has_dropout
            }
            assert combinations == {(hint, rule) for hint in hints for rule in rules}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"losses": [2.0, 1.0 + 2**-52]}, "rank 1, loss of step 1: 1.0000000000000002, not 1.0"),
        ({"grad_norms": [0.75, nan, -0.0]}, "rank 1, gradient norm of step 2: -0.0, not 0.0"),
        ({"grad_norms": [0.5, nan, 0.0]}, "rank 1, gradient norm of step 0: 0.5, not 0.75"),
        ({"gradients_sha256": {"norm": "b", "bias": "d"}}, "rank 1, gradient of bias"),
        ({"parameters_sha256": "b"}, "rank 1, final parameters"),
    ],
)
def test_the_last_bit_of_one_rank_is_seen(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    same = RankResult([2.0, 1.0], [0.75, nan, 0.0], "a", {"norm": "b", "bias": "c"})

    def launch(settings: TrainSettings, run: RunDir) -> None:
        for rank in range(settings.layout.world_size):
            runs = [asdict(same), asdict(same)]
            if rank == 1:
                runs[1] |= change
            lines = "".join(f"{json.dumps(learned)}\n" for learned in runs)
            (run.path / f"learned-{rank}.jsonl").write_text(lines)

    variants = [
        Variant("1f1b", Dispatch.MEGATRON, None),
        Variant("bf", Dispatch.READY, None),
    ]
    (verdict,) = verify("pp4", variants, tmp_path, steps=2, launch=launch, device={})
    assert verdict.difference == told


@pytest.mark.parametrize(
    ("chosen", "told"),
    [({"layout": "pp3"}, "'pp3' is not a layout"), ({"hints": ("zigzag",)}, "is not a hint")],
)
def test_what_there_is_not_is_refused(chosen: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        variants_of(**{"layout": "pp4", **chosen})

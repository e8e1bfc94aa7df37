"""`rrfp tune` called in this process, and costs and a run for it to tune."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rrfp.cli import main as cli

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

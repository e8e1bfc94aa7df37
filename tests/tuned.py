"""Costs, a model of them, and a run for `rrfp tune` to tune."""

from pathlib import Path

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


def written(directory: Path, text: str, name: str = "costs.toml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path

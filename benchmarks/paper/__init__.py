"""The tables of arXiv 2605.18750, simulated: `python -m benchmarks.paper` writes `docs/paper.md`.

`published.toml` is what the paper gives and `parameters.toml` what it does not; `fit` finds the
four figures there that are fitted.
"""

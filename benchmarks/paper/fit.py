"""Fits the four figures under `[fitted]` in `parameters.toml`: `python -m benchmarks.paper.fit`.

On the four language rows of Table 1 and on nothing else. What is made small is the mean size of the
logarithm of simulated / published, over the twelve speedups and, at a quarter of the weight, the
sixteen times. The search goes from the figures in the file, one at a time, up and down by a step
that halves when no figure gets better.
"""

from math import log
from typing import Any

from benchmarks.paper.workload import Method, Simulation, Workload, load

_FIGURES = ("flops_per_s", "all_reduce_bytes_per_s", "meeting_s", "sigma")
_FIRST_STEP, _LAST_STEP = 0.3, 0.02
_WEIGHT_OF_TIMES = 0.25
_PUBLISHED = (Method.BLOCKING_1F1B, Method.ZB, Method.BF, Method.BFW)


def misfit(parameters: dict[str, Any]) -> float:
    """How far simulation and paper are apart on the language rows; 0.1 is about 10%."""
    simulation = Simulation(parameters, num_seeds=1)
    total = weight = 0.0
    for row in load("published")["rows"]:
        workload = Workload(**row["workload"])
        if workload.vision is not None:
            continue
        published = [row["seconds"][method] for method in _PUBLISHED]
        seconds = simulation.seconds([simulation.setting(workload, each) for each in _PUBLISHED])
        for ours, theirs in zip(seconds, published, strict=True):
            total += _WEIGHT_OF_TIMES * abs(log(ours / theirs))
            weight += _WEIGHT_OF_TIMES
        for ours, theirs in zip(seconds[1:], published[1:], strict=True):
            total += abs(log(seconds[0] / ours * theirs / published[0]))
            weight += 1
    return total / weight


def main() -> None:
    parameters = load("parameters")
    best, step = misfit(parameters), _FIRST_STEP
    while step > _LAST_STEP:
        before = best
        for figure in _FIGURES:
            for factor in (1 + step, 1 / (1 + step)):
                fitted = parameters["fitted"]
                tried = {**parameters, "fitted": {**fitted, figure: fitted[figure] * factor}}
                at = misfit(tried)
                if at < best:
                    best, parameters = at, tried
                    break
        print(f"{best:.4f}", parameters["fitted"], flush=True)
        if best == before:
            step /= 2


if __name__ == "__main__":
    main()

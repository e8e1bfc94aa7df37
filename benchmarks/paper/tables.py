"""Markdown tables of the paper's published figures beside simulated ones."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any

from benchmarks.paper.workload import Method, Parameters, Simulation, Workload, load

COMPARED = (Method.BLOCKING_1F1B, Method.ZB, Method.BF, Method.BFW)
"""The methods whose seconds the paper gives."""
_FASTER = (Method.BF, Method.BFW)
_Pair = tuple[Method, Method]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of Tables 1 and 2: seconds a step, of each method."""

    workload: Workload
    published: Mapping[Method, float]
    simulated: Mapping[Method, float]

    @property
    def is_fitted(self) -> bool:
        """The language rows are what the parameters were fitted on."""
        return self.workload.vision is None

    def published_speedup(self, method: Method) -> float:
        return self.published[Method.BLOCKING_1F1B] / self.published[method]

    def speedup(self, method: Method) -> float:
        return self.simulated[Method.BLOCKING_1F1B] / self.simulated[method]

    def error(self, method: Method) -> float:
        """Relative error of the simulated speedup."""
        return self.speedup(method) / self.published_speedup(method) - 1

    @property
    def wrong_signs(self) -> list[_Pair]:
        """The pairs of methods of which the simulation has the other one win."""
        return [
            (one, other)
            for one, other in combinations(COMPARED, 2)
            if (self.published[one] < self.published[other])
            != (self.simulated[one] < self.simulated[other])
        ]


def compare(row: Mapping[str, Any], simulation: Simulation) -> Comparison:
    """One row of `published.toml`, simulated."""
    workload = Workload(**row["workload"])
    methods = tuple(Method)
    seconds = simulation.seconds([simulation.setting(workload, each) for each in methods])
    published = {method: row["seconds"][method] for method in COMPARED}
    return Comparison(workload, published, dict(zip(methods, seconds, strict=True)))


def speedup_cells(comparison: Comparison) -> list[str]:
    """A row of the page's first table."""
    cells = [comparison.workload.models, comparison.workload.ranks]
    for method in COMPARED[1:]:
        ours, theirs = comparison.speedup(method), comparison.published_speedup(method)
        cells.append(f"{ours:.2f} ({theirs:.2f}, {comparison.error(method):+.0%})")
    ours_s = comparison.simulated[Method.BLOCKING_1F1B]
    cells.append(f"{ours_s:.2f} ({comparison.published[Method.BLOCKING_1F1B]:.2f})")
    cells.append(f"{comparison.speedup(Method.ASYNC_1F1B):.2f}")
    return cells


def predicted_speedups(rows: Sequence[Mapping[str, Any]], simulation: Simulation) -> str:
    """The predicted rows of Tables 1 and 2, under assumptions that were not chosen."""
    cells = []
    for row in rows:
        if "vision" in row["workload"]:
            compared = compare(row, simulation)
            figures = (f"{compared.speedup(m):.2f} ({compared.error(m):+.0%})" for m in _FASTER)
            cells.append([compared.workload.models, compared.workload.ranks, *figures])
    return markdown(["models", "TP/PP/DP", "BF", "BFW"], cells)


def speedups(comparisons: Iterable[Comparison]) -> str:
    """Tables 1 and 2."""
    head = ["models", "TP/PP/DP", "ZB", "BF", "BFW", "1F1B, s", "async 1F1B"]
    return markdown(head, map(speedup_cells, comparisons))


def mean_error(comparisons: Iterable[Comparison], methods: Sequence[Method] = _FASTER) -> float:
    """The mean absolute error of the speedups of these methods."""
    return fmean(abs(each.error(method)) for each in comparisons for method in methods)


def summary(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """The figures that the page's prose quotes."""
    predicted = [each for each in comparisons if not each.is_fitted]
    fitted = [each for each in comparisons if each.is_fitted]
    num_signs = sum(1 for _ in combinations(COMPARED, 2)) * len(comparisons)
    num_wrong = sum(len(each.wrong_signs) for each in comparisons)
    within = [abs(each.error(m)) <= 0.15 for each in predicted for m in _FASTER]
    return {
        "predicted_error": f"{mean_error(predicted):.1%}",
        "bf_error": f"{mean_error(predicted, [Method.BF]):.1%}",
        "bfw_error": f"{mean_error(predicted, [Method.BFW]):.1%}",
        "fitted_error": f"{mean_error(fitted):.1%}",
        "num_within": str(sum(within)),
        "num_predicted": str(len(within)),
        "num_right": str(num_signs - num_wrong),
        "num_signs": str(num_signs),
        "async_gain": f"{fmean(each.speedup(Method.ASYNC_1F1B) for each in predicted):.2f}",
        "bf_gain": f"{fmean(each.speedup(Method.BF) for each in predicted):.2f}",
        "bfw_gain": f"{fmean(each.speedup(Method.BFW) for each in predicted):.2f}",
        "published_bf_gain": f"{fmean(e.published_speedup(Method.BF) for e in predicted):.2f}",
        "published_bfw_gain": f"{fmean(e.published_speedup(Method.BFW) for e in predicted):.2f}",
    }


def wrong_signs(comparisons: Sequence[Comparison]) -> str:
    """The comparisons that another method wins in the simulation than in the paper."""
    cells = []
    for each in comparisons:
        for pair in each.wrong_signs:
            ours, theirs = (
                min(pair, key=of.__getitem__) for of in (each.simulated, each.published)
            )
            cells.append([each.workload.models, each.workload.ranks, ours, theirs])
    head = ["models", "TP/PP/DP", "wins simulated", "wins published"]
    return markdown(head, cells)


def alternatives(rows: Sequence[Mapping[str, Any]], assumptions: Mapping[str, Parameters]) -> str:
    """The predicted rows under other assumptions."""
    cells = []
    for what, parameters in assumptions.items():
        simulation = Simulation(parameters)
        compared = [compare(row, simulation) for row in rows if "vision" in row["workload"]]
        gains = [fmean(each.speedup(method) for each in compared) for method in _FASTER]
        num_wrong = sum(len(each.wrong_signs) for each in compared)
        cells.append(
            [
                what,
                *(f"{gain:.2f}" for gain in gains),
                f"{mean_error(compared):.0%}",
                f"{num_wrong}",
            ]
        )
    return markdown(["assumption", "BF", "BFW", "mean error", "wrong signs"], cells)


def other_assumptions(parameters: Parameters) -> dict[str, Parameters]:
    """The parameters as chosen, and with each change of `alternatives.toml`."""
    changed = {each["what"]: each["set"] for each in load("alternatives")["alternatives"]}
    return {what: _merged(parameters, each) for what, each in {"as chosen": {}, **changed}.items()}


def _merged(parameters: Parameters, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with some changed, in the tables within as well."""
    return {
        key: _merged(value, changes[key])
        if isinstance(changes.get(key), Mapping) and isinstance(value, Mapping)
        else changes.get(key, value)
        for key, value in parameters.items()
    }


def jitter(published: Mapping[str, Any], simulation: Simulation) -> str:
    """Table 6: by how much injected jitter slows a step."""
    workload = Workload(**published["workload"])
    levels = ("J0", "J1", "J2", "J3")
    methods = (Method.BLOCKING_1F1B, Method.BF)
    seconds = simulation.seconds(
        [
            simulation.setting(workload, method, jitter=level)
            for method in methods
            for level in levels
        ]
    )
    cells = []
    for number, level in enumerate(levels[1:], 1):
        row = [level]
        for method, of_method in zip(methods, (seconds[:4], seconds[4:]), strict=True):
            ours, theirs = of_method[number] / of_method[0] - 1, published[level][method]
            row.append(f"{ours:.1%} / {theirs:.1%}")
        cells.append(row)
    return markdown(["level", "1F1B", "BF"], cells)


def hints(published: Mapping[str, Any], assumptions: Mapping[str, Parameters]) -> str:
    """Table 7: by how much other hints are slower than BF."""
    workload = Workload(**published["workload"])
    names = ("bf", "fb", "b-first", "f-first")
    columns = []
    for parameters in assumptions.values():
        simulation = Simulation(parameters)
        best, *others = simulation.seconds(
            [simulation.setting(workload, Method.BF, hint=name) for name in names]
        )
        columns.append([f"{seconds / best - 1:+.1%}" for seconds in others])
    cells = [
        [name, f"{published[name]:+.1%}", *figures]
        for name, *figures in zip(names[1:], *columns, strict=True)
    ]
    return markdown(["against BF", "published", *assumptions], cells)


def scaling(published: Sequence[Mapping[str, Any]], simulation: Simulation) -> str:
    """Table 8: the speedup of BF over blocking 1F1B."""
    cells = []
    for row in published:
        workload = Workload(**row["workload"])
        speedups = []
        for value in row["values"]:
            varied = replace(workload, **{row["vary"]: value})
            blocking_s, bf_s = simulation.seconds(
                [simulation.setting(varied, each) for each in (Method.BLOCKING_1F1B, Method.BF)]
            )
            speedups.append(blocking_s / bf_s)
        cells.append(
            [
                f"{workload.models}, TP {workload.tp}",
                {"pp": "PP", "vision": "vision model", "batch": "batch"}[row["vary"]],
                ", ".join(map(str, row["values"])),
                ", ".join(f"{each:.2f}" for each in speedups),
                ", ".join(f"{each:.2f}" for each in row["speedups"]),
            ]
        )
    return markdown(["workload", "varied", "over", "simulated", "published"], cells)


def limits(published: Mapping[str, Any], simulation: Simulation) -> str:
    """Figure 5: the limit."""
    workload, values = Workload(**published["workload"]), published["values"]
    methods = (Method.BF, Method.BFW)
    first, *seconds = simulation.seconds(
        [
            simulation.setting(workload, Method.BLOCKING_1F1B),
            *(simulation.setting(workload, m, limit=each) for m in methods for each in values),
        ]
    )
    cells = [
        [str(method), *(f"{first / each:.2f}" for each in of_method)]
        for method, of_method in zip(
            methods, (seconds[: len(values)], seconds[len(values) :]), strict=True
        )
    ]
    return markdown(["speedup at limit", *map(str, values)], cells)


def at_equal_memory(table: Mapping[str, Any]) -> str:
    """A comparison by `rrfp simulate`, with the command that makes it."""
    command = table["command"].strip()
    words = shlex.split(command.replace("\\\n", " "))
    done = subprocess.run(
        [sys.executable, "-m", *words, "--format", "json"], check=True, capture_output=True
    )
    rows = json.loads(done.stdout)["rows"]
    num, labels = len(table["columns"]), table["labels"]
    cells = []
    for place, label in enumerate(labels):
        of_label = rows[place :: len(labels)]
        assert len(of_label) == num, f"the command makes {len(rows)} rows, not {num} a label"
        held = max(max(row["peak_held"]) for row in of_label)
        cells.append([label, f"{held:g}", *(f"{row['ratio_to_load']:.3f}" for row in of_label)])
    return f"```\n{command}\n```\n\n" + markdown(["method", "holds", *table["columns"]], cells)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *others])

"""Simulates all of it, writes the page and draws its picture: `python -m benchmarks.paper`."""

from string import Template

from benchmarks.paper import charts, tables
from benchmarks.paper.workload import FOLDER, Simulation, load

_TRIED_ON_HINTS = ("as chosen", "no limit", "images all of one size")


def main() -> None:
    published, parameters = load("published"), load("parameters")
    simulation, assumptions = Simulation(parameters), tables.other_assumptions(parameters)
    comparisons = []
    for row in published["rows"]:
        comparisons.append(tables.compare(row, simulation))
        print("|", " | ".join(tables.speedup_cells(comparisons[-1])), flush=True)
    parts = {
        "speedups": tables.speedups(comparisons),
        "wrong_signs": tables.wrong_signs(comparisons),
        **tables.summary(comparisons),
        "jitter": tables.jitter(published["jitter"], simulation),
        "hints": tables.hints(
            published["hints"], {what: assumptions[what] for what in _TRIED_ON_HINTS}
        ),
        "scaling": tables.scaling(published["scaling"], simulation),
        "limits": tables.limits(published["limits"], simulation),
        "alternatives": tables.alternatives(published["rows"], assumptions),
        "without_limit": tables.predicted_speedups(
            published["rows"], Simulation(assumptions["no limit"])
        ),
        **{name: tables.at_equal_memory(table) for name, table in load("equal_memory").items()},
    }
    prose = (FOLDER / "page.template").read_text(encoding="utf-8")
    charts.PAGE.write_text(Template(prose).substitute(parts), encoding="utf-8")
    print(f"wrote {charts.PAGE}")
    charts.main()


if __name__ == "__main__":
    main()

"""Simulates all of it and writes the page: `python -m benchmarks.paper`."""

from pathlib import Path
from string import Template

from benchmarks.paper import tables
from benchmarks.paper.workload import FOLDER, Simulation, load

PAGE = Path("docs/paper.md")
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
    prose = (FOLDER / "page.md").read_text(encoding="utf-8")
    PAGE.write_text(Template(prose).substitute(parts), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()

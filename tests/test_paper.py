"""The page with the paper's tables says what its command makes."""

from pathlib import Path

import pytest

from benchmarks.paper import tables
from benchmarks.paper.workload import Method, Simulation, Workload, document, load
from rrfp.simulate.costs.language_models import parse_flops

PAGE = Path("docs/paper.md").read_text(encoding="utf-8")


def test_the_page_has_a_row_as_it_is_simulated() -> None:
    row = load("published")["rows"][0]
    comparison = tables.compare(row, Simulation(load("parameters")))
    line = "| " + " | ".join(tables.speedup_cells(comparison)) + " |"
    assert line in PAGE.splitlines()
    assert comparison.is_fitted


def test_every_published_row_is_on_the_page() -> None:
    rows = load("published")["rows"]
    assert len(rows) == 20
    for row in rows:
        workload = Workload(**row["workload"])
        line = next(
            line
            for line in PAGE.splitlines()
            if line.startswith(f"| {workload.models} | {workload.ranks} |")
        )
        for method in tables.COMPARED[1:]:
            published = row["seconds"][Method.BLOCKING_1F1B] / row["seconds"][method]
            assert f"/ {published:.2f} |" in line


def test_every_workload_is_a_model_that_the_simulator_reads() -> None:
    parameters = load("parameters")
    for row in load("published")["rows"]:
        workload = Workload(**row["workload"])
        asynchronous, blocking = (
            parse_flops(document(workload, parameters, is_blocking=each), workload.models)
            for each in (False, True)
        )
        assert asynchronous.tensor_parallel.size == workload.tp
        assert blocking.links.latency_s - asynchronous.links.latency_s == pytest.approx(
            parameters["fitted"]["meeting_s"]
        )


def test_every_parameter_says_where_it_comes_from() -> None:
    """Models say it once, in the line of their name; all else in its own line or the one above."""
    text = (Path("benchmarks/paper") / "parameters.toml").read_text(encoding="utf-8")
    before, is_model = "", False
    for line in text.splitlines():
        if line.startswith("["):
            is_model = line.startswith(("[language.", "[vision."))
            assert not is_model or "#" in line, line
        elif line and not line.startswith("#") and not is_model:
            assert "#" in line or before.startswith("#"), line
        before = line


def test_signs_and_errors() -> None:
    workload = Workload("GPT3-Large", 1, 8, 1, 64, "ViT-H")
    published = dict(zip(tables.COMPARED, (4.0, 3.0, 2.0, 1.0), strict=True))
    simulated = dict(zip(tables.COMPARED, (4.0, 1.0, 2.0, 2.5), strict=True))
    comparison = tables.Comparison(workload, published, simulated)
    assert comparison.wrong_signs == [
        (Method.ZB, Method.BF),
        (Method.ZB, Method.BFW),
        (Method.BF, Method.BFW),
    ]
    assert comparison.error(Method.BF) == 0
    assert comparison.error(Method.BFW) == pytest.approx(-0.6)
    assert tables.mean_error([comparison]) == pytest.approx(0.3)


def test_the_page_has_the_prose_it_is_made_from() -> None:
    prose = Path("benchmarks/paper/page.md").read_text(encoding="utf-8")
    fixed = [line for line in prose.splitlines() if "$" not in line]
    assert len(fixed) > 40
    lines = set(PAGE.splitlines())
    assert [line for line in fixed if line not in lines] == []


def test_the_page_has_the_commands_it_quotes() -> None:
    for table in load("equal_memory").values():
        assert f"```\n{table['command'].strip()}\n```" in PAGE
        assert len(table["labels"]) == table["command"].count("--row")


def test_the_picture_is_of_the_tables_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("altair", reason="the picture needs the extra `report`")
    pytest.importorskip("vl_convert", reason="the picture needs the extra `report`")
    from benchmarks.paper import charts

    for heading, num_rows in {"Table 6": 3, "Table 7": 3, "Table 8": 5, "Figure 5": 2}.items():
        assert len(charts.table(PAGE, heading)) == 1 + num_rows
    drawn = tmp_path / "paper.svg"
    drawn.write_text(charts.draw(PAGE), encoding="utf-8")
    assert drawn.read_bytes() == charts.PICTURE.read_bytes()
    assert f"]({charts.PICTURE.relative_to('docs')})" in PAGE


def test_every_figure_of_the_tables_is_drawn() -> None:
    pytest.importorskip("altair", reason="the picture needs the extra `report`")
    from benchmarks.paper import charts

    published = load("published")
    jitter, hints = charts.slowdowns(PAGE)
    *scaling, limits = charts.speedups(PAGE)
    drawn = (jitter, hints, *scaling, limits)
    for chart in drawn:
        assert {len(curve.values) for curve in chart.curves} == {len(chart.places)}
    assert {curve.name for chart in drawn for curve in chart.curves} == set(charts.COLOURS)
    slows = {c.name: c.values for c in jitter.curves if c.source == "published"}
    assert slows["BF"] == tuple(
        pytest.approx(100 * published["jitter"][level]["bf"], abs=0.06) for level in jitter.places
    )
    assert len(hints.curves) == 4
    for chart, row in zip(scaling, published["scaling"], strict=True):
        assert chart.places == tuple(map(str, row["values"]))
        assert chart.curves[1].values == tuple(row["speedups"])
    assert limits.places == tuple(map(str, published["limits"]["values"]))
    assert [curve.name for curve in limits.curves] == ["BF", "BFW"]


def test_a_page_without_a_table_is_told() -> None:
    pytest.importorskip("altair", reason="the picture needs the extra `report`")
    from benchmarks.paper import charts

    page = PAGE.replace("## Table 7: hints", "## Hints")
    with pytest.raises(ValueError, match=r"no table `Table 7`"):
        charts.slowdowns(page)

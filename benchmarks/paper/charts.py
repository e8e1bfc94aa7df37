"""Draws Tables 6, 7 and 8 and Figure 5: `python -m benchmarks.paper.charts`.

What is drawn is read from the page, so that picture and tables cannot differ.
"""

import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import altair as alt
import vl_convert

PAGE = Path("docs/paper.md")
PICTURE = Path("docs/images/paper.svg")

_SIMULATED, _PUBLISHED = "simulated", "published"
# The colours of Okabe and Ito, which colour-blind readers tell apart. The first three are methods,
# the others columns of Table 7, where dashes tell black from black.
COLOURS = {
    "1F1B": "#D55E00",
    "BF": "#0072B2",
    "BFW": "#009E73",
    "Table 7, as chosen": "#000000",
    "Table 7, no limit": "#E69F00",
    "Table 7, images all of one size": "#CC79A7",
    "Table 7, published": "#000000",
}
_DASHES = {_SIMULATED: [1, 0], _PUBLISHED: [5, 3]}
# vl-convert measures text in the first, which it brings along; the others are as wide.
_FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
_WIDTH, _HEIGHT, _SPACING = 205, 130, 22
# The third place of the first row, where no chart is.
_LEGEND_X, _LEGEND_Y = 540, 0
_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart: a figure for each place on the axis."""

    name: str
    source: str
    """Simulated or published."""
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A small chart; its places are in the order of the table."""

    title: str
    across: str
    """Title of the x axis."""
    up: str
    """Title of the y axis."""
    places: tuple[str, ...]
    curves: tuple[Curve, ...]


def table(page: str, heading: str) -> list[list[str]]:
    """The head and the rows of the first table in the section of this heading.

    Raises:
        ValueError: The page lacks the section, or the section a table.
    """
    section = re.search(rf"^## {heading}:.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    lines = section[0].splitlines() if section else []
    tables = [list(group) for is_row, group in groupby(lines, _is_row) if is_row]
    if not tables:
        raise ValueError(f"{PAGE} has no table `{heading}`; run python -m benchmarks.paper")
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in tables[0])
    return [head, *rows]


def _is_row(line: str) -> bool:
    return line.startswith("|")


def slowdowns(page: str) -> list[Chart]:
    """The charts of Tables 6 and 7."""
    return [_jitter(page), _hints(page)]


def speedups(page: str) -> list[Chart]:
    """The charts of Table 8 and Figure 5."""
    return [*_scaling(page), _limits(page)]


def _jitter(page: str) -> Chart:
    head, *rows = table(page, "Table 6")
    levels, *columns = zip(*rows, strict=True)
    curves = []
    for title, cells in zip(head[1:], columns, strict=True):
        name = title.split()[0]
        both = zip(*map(_figures, cells), strict=True)
        curves += [
            Curve(name, source, values)
            for source, values in zip((_SIMULATED, _PUBLISHED), both, strict=True)
        ]
    return Chart("Table 6: injected jitter", "level", "step slows by, %", levels, tuple(curves))


def _hints(page: str) -> Chart:
    head, *rows = table(page, "Table 7")
    hints, *columns = zip(*rows, strict=True)
    curves = tuple(
        Curve(
            f"Table 7, {name}",
            _PUBLISHED if name == _PUBLISHED else _SIMULATED,
            tuple(value for cell in cells for value in _figures(cell)),
        )
        for name, cells in zip(head[1:], columns, strict=True)
    )
    return Chart("Table 7: hints", "hint", "slower than BF by, %", hints, curves)


def _limits(page: str) -> Chart:
    """The chart of Figure 5. The paper gives no numbers for it, except that it is flat from 16
    on."""
    head, *rows = table(page, "Figure 5")
    curves = tuple(
        Curve(name.upper(), _SIMULATED, tuple(value for cell in cells for value in _figures(cell)))
        for name, *cells in rows
    )
    return Chart("Figure 5: the limit", "limit", "speedup over 1F1B", tuple(head[1:]), curves)


def _scaling(page: str) -> list[Chart]:
    _, *rows = table(page, "Table 8")
    return [
        Chart(
            f"Table 8: {workload}",
            {"PP": "pipeline ranks"}.get(varied, varied),
            "speedup of BF over 1F1B",
            tuple(over.split(", ")),
            (
                Curve("BF", _SIMULATED, _figures(simulated)),
                Curve("BF", _PUBLISHED, _figures(published)),
            ),
        )
        for workload, varied, over, simulated, published in rows
    ]


def _figures(cell: str) -> tuple[float, ...]:
    """`2.3% / 2.8%` or `1.07, 1.94` as two figures."""
    return tuple(float(each.removesuffix("%")) for each in re.split(" / |, ", cell))


def draw(page: str) -> str:
    """The picture of the page, as SVG."""
    upper = alt.hconcat(*map(_drawn, slowdowns(page)), spacing=_SPACING)
    lower = alt.concat(*map(_drawn, speedups(page)), columns=_COLUMNS, spacing=_SPACING)
    lower = lower.resolve_scale(y="shared")
    picture = (
        alt.vconcat(upper, lower, spacing=_SPACING, background="white", padding=10)
        .configure(font=_FONT)
        .configure_view(stroke=None)
        .configure_axis(
            labelFontSize=11,
            titleFontSize=11,
            titleFontWeight="normal",
            gridColor="#e4e4e4",
            domainColor="#888888",
            tickColor="#888888",
        )
        .configure_title(fontSize=12, anchor="start", frame="group", offset=8)
        .configure_legend(
            orient="none",
            labelFontSize=11,
            symbolType="stroke",
            symbolSize=500,
            symbolStrokeWidth=1.8,
        )
    )
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return vl_convert.vegalite_to_svg(picture.to_json(), vl_version=version)


def _drawn(chart: Chart) -> alt.LayerChart:
    data = [
        {"place": place, "value": value, "name": curve.name, "source": curve.source}
        for curve in chart.curves
        for place, value in zip(chart.places, curve.values, strict=True)
    ]
    x = alt.X("place:N", sort=None, title=chart.across)
    y = alt.Y("value:Q", title=chart.up)
    colour = alt.Color("name:N", title=None)
    dashes = alt.StrokeDash("source:N", title=None)
    shown = [name for name in COLOURS if _PUBLISHED not in name]
    base = alt.Chart(alt.InlineData(values=data), width=_WIDTH, height=_HEIGHT).encode(
        x.scale(type="point", padding=0.3).axis(labelAngle=0),
        y.scale(zero=False, nice=4).axis(tickCount=5, minExtent=20),
        colour.scale(domain=list(COLOURS), range=list(COLOURS.values())).legend(
            values=shown, legendX=_LEGEND_X, legendY=_LEGEND_Y + 46
        ),
    )
    lines = base.mark_line(strokeWidth=1.8).encode(
        dashes.scale(domain=list(_DASHES), range=list(_DASHES.values())).legend(
            symbolStrokeColor="black", legendX=_LEGEND_X, legendY=_LEGEND_Y
        )
    )
    points = base.mark_point(filled=True, size=28, opacity=1)
    return alt.LayerChart(layer=[lines, points], title=chart.title)


def main() -> None:
    PICTURE.write_text(draw(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()

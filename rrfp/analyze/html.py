"""One HTML page that needs no other file: text, tables, and charts that a script draws.

Whatever comes from a trace is text. It is escaped in the page and in the script element that holds
the charts, and it stands only in their data, never where Vega would read it as an expression. The
page's own policy runs no other script, evaluates no string as code, and uses no network.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, NewType

import vl_convert

from rrfp.analyze.table import Table, joined_heading

Markup = NewType("Markup", str)
"""HTML whose text is escaped."""


def text(words: object) -> Markup:
    """Any text, as text."""
    return Markup(escape(_printable(str(words))))


def element(name: str, *content: Markup, **attributes: str) -> Markup:
    """An element; `class_` is the attribute `class`, and `aria_label` is `aria-label`."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{told}>{''.join(content)}</{name}>")


def joined(parts: Iterable[Markup]) -> Markup:
    """One after another."""
    return Markup("\n".join(parts))


def paragraph(words: object) -> Markup:
    """A paragraph of text."""
    return element("p", text(words))


def advice(words: str) -> Markup:
    """A paragraph in which flags, with their values, are code."""
    flag = r"--[a-z-]+( (\d[\d-]*|bfw?(-deep)?|ready|intersection|pyramid)\b)?"
    return element("p", Markup(re.sub(flag, r"<code>\g<0></code>", text(words))))


def section(name: str, title: str, *content: Markup) -> Markup:
    """A part of the page with a heading; `name` is its address within the page."""
    return element("section", element("h2", text(title)), *content, id=name)


def table_element(table: Table) -> Markup:
    """A table in a box of its own that scrolls, and its conclusions below it.

    The first column heads its row.
    """
    shown = table.shown(on_page=True)
    aligned = [{"class_": "text"} if column.unit.is_text else {} for column, _ in shown]
    head = (
        element("th", text(joined_heading(column)), scope="col", **align)
        for (column, _), align in zip(shown, aligned, strict=True)
    )
    rows = []
    for cells in zip(*(cells for _, cells in shown), strict=True):
        first, *others = (text(cell.rstrip()) for cell in cells)
        row = [element("th", first, scope="row", **aligned[0])]
        row += [element("td", c, **align) for c, align in zip(others, aligned[1:], strict=True)]
        rows.append(element("tr", *row))
    caption = table.caption or table.title.rpartition("\n")[2]
    box = element(
        "div",
        element(
            "table",
            element("caption", text(caption)),
            element("thead", element("tr", *head)),
            element("tbody", *rows),
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )
    return joined([box, *map(paragraph, table.notes())])


def figure(name: str, spec: dict[str, Any]) -> Markup:
    """The place of a chart. The title moves from the chart to the caption, where it can wrap."""
    title = spec.pop("title")
    words = [str(title["text"]), *map(str, title.get("subtitle", ()))]
    return element(
        "figure",
        element(
            "figcaption",
            element("b", text(words[0])),
            *(element("span", text(note)) for note in words[1:]),
        ),
        element("div", class_="plot", role="img", aria_label=". ".join(words), data_chart=name),
    )


def page(title: str, body: Markup, charts: Mapping[str, dict[str, Any]], vega_lite: str) -> str:
    """The whole page; `charts` has the specifications of its figures by name."""
    scripts = [_vega(vega_lite), _asset("page.js")]
    return Template(_asset("page.html")).substitute(
        title=text(title),
        policy=text(_policy(scripts)),
        style=_asset("page.css"),
        body=body,
        charts=_for_script(charts),
        vega=scripts[0],
        script=scripts[1],
    )


def _policy(scripts: Iterable[str]) -> str:
    """A policy under which only these scripts run and nothing is fetched."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _for_script(value: object) -> str:
    """JSON that cannot close the script element around it."""
    told = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return told.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _printable(words: str) -> str:
    """Text that UTF-8 can hold, without control characters, which HTML cannot."""
    whole = words.encode("utf-8", "replace").decode()
    return "".join(c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in whole)


@cache
def _vega(vega_lite: str) -> str:
    """Vega, Vega-Lite and vega-embed, as one script."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vega_lite)


@cache
def _asset(name: str) -> str:
    return (files("rrfp.analyze") / "page" / name).read_text(encoding="utf-8")

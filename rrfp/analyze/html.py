"""Builds a self-contained HTML page: text, tables, and charts that a script draws.

Everything from a trace is untrusted text. It is escaped in the page and in the script element of
the charts, and appears only in their data, never where Vega would evaluate it as an expression. The
page's content security policy allows no other script, no evaluation of strings and no network.
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
    """Escape any text; characters that HTML or UTF-8 forbids are replaced."""
    return Markup(escape(_printable(str(words))))


def element(name: str, *content: Markup, **attributes: str) -> Markup:
    """Make an element with escaped attributes; `class_` is `class`, and `aria_label` is
    `aria-label`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{''.join(content)}</{name}>")


def joined(parts: Iterable[Markup]) -> Markup:
    """Join parts with line breaks."""
    return Markup("\n".join(parts))


def paragraph(words: object) -> Markup:
    """Make a paragraph of text."""
    return element("p", text(words))


def advice(words: str) -> Markup:
    """Make a paragraph of text in which flags, with known or numeric values, are code."""
    flag = r"--[a-z-]+( (\d[\d-]*|bfw?(-deep)?|ready|intersection|pyramid)\b)?"
    return element("p", Markup(re.sub(flag, r"<code>\g<0></code>", text(words))))


def section(name: str, title: str, *content: Markup) -> Markup:
    """Make a section with a heading; `name` is its anchor."""
    return element("section", element("h2", text(title)), *content, id=name)


def table_element(table: Table) -> Markup:
    """Make a scrollable table, with its notes below. Cells of the first column are row headers."""
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
    """Make the placeholder of a chart with a caption.

    Moves the title from `spec` to the caption.
    """
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
    """Return the whole page; `charts` has the Vega-Lite specification of each figure by name."""
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
    """Return a content security policy that allows only these scripts and no requests."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _for_script(value: object) -> str:
    """Return compact JSON that cannot close the script element around it.

    Raises ValueError for NaN and infinity.
    """
    content = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _printable(words: str) -> str:
    """Replace control characters below the space, except newline and tab, and surrogates."""
    whole = words.encode("utf-8", "replace").decode()
    return "".join(c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in whole)


@cache
def _vega(vega_lite: str) -> str:
    """Return Vega, Vega-Lite and vega-embed as one script; made once."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vega_lite)


@cache
def _asset(name: str) -> str:
    """Read a file of `rrfp/analyze/page`, once."""
    return (files("rrfp.analyze") / "page" / name).read_text(encoding="utf-8")

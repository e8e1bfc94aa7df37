"""The page of two runs: what differs, a step of each on one axis, and the figures."""

from collections.abc import Sequence
from typing import Any

from rrfp import __version__
from rrfp.analyze.charts.files import VEGA_LITE, spec_of
from rrfp.analyze.charts.gantt import gantts
from rrfp.analyze.compare import Comparison, Estimate
from rrfp.analyze.comparison.differences import Differences, warning
from rrfp.analyze.frames import Frames
from rrfp.analyze.html import (
    Markup,
    element,
    figure,
    joined,
    page,
    paragraph,
    section,
    table,
    text,
)
from rrfp.analyze.settings import run_settings
from rrfp.analyze.units import tell
from rrfp.errors import RrfpError
from rrfp.trace.initial_view import middle_step
from rrfp.trace.records import NS_PER_S
from rrfp.trace.steps import count_of, step_names


def comparison_page(
    names: Sequence[str],
    runs: Sequence[Frames],
    report: Comparison,
    unlike: Differences,
    verdict: Sequence[str],
) -> str:
    """The page, as HTML, of runs A and B under these names. `verdict` has sentences on `report`,
    and `unlike` the settings that differ."""
    charts: dict[str, dict[str, Any]] = {}
    title = f"{names[1]} against {names[0]}"
    told = warning(unlike)
    header = [element("h1", text(title))]
    header += [
        _facts(f"{which} is {name}", run, step_s)
        for which, name, run, step_s in zip("AB", names, runs, report.step_s, strict=True)
    ]
    header.append(element("p", text(" ".join(verdict)), class_="lead"))
    if told:
        header.append(element("p", text(told), class_="warning", role="note"))
    body = [
        element("header", *header),
        section("ratios", "How much longer B takes", _ratio_table(report)),
        section("steps", "A step of each", _steps(runs, charts)),
        section("causes", "Where the difference lies", _cause_table(report)),
    ]
    if unlike:
        body.append(section("differences", "What else differs", _difference_table(unlike)))
    body.append(element("footer", paragraph(f"Made by rrfp {__version__}.")))
    return page(title, joined(body), charts, VEGA_LITE)


def _facts(name: str, run: Frames, step_s: float) -> Markup:
    settings = run_settings(run)
    told = [name]
    if settings.get("hint") is not None:
        told.append(f"hint {settings['hint']}, {settings.get('dispatch', 'ready')} dispatch")
    told += [f"{bound} {settings[bound]}" for bound in ("limit", "hold") if settings.get(bound)]
    steps = run.windows["step"].to_list()
    told.append(f"{count_of(steps)} of {tell(step_s * NS_PER_S)} (median)")
    if run.warm_up:
        told.append(f"{step_names(run.warm_up)} left out, as warm-up")
    return element("p", text("; ".join(told)), class_="facts")


def _steps(runs: Sequence[Frames], charts: dict[str, dict[str, Any]]) -> Markup:
    """Of each run the step of median length, both on one axis of time."""
    chosen = {}
    for which, run in zip("AB", runs, strict=True):
        windows = {step: (start, end) for step, start, end in run.windows.iter_rows()}
        step = middle_step(windows)
        assert step is not None  # Of a run without steps nothing is compared.
        chosen[which] = (run, step)
    try:
        charts["gantt"] = spec_of(gantts(chosen, "A step of median length of each, on one axis"))
    except RrfpError as error:
        return element("p", text(f"The steps are not drawn: {error}."), class_="why")
    return figure("gantt", charts["gantt"])


def _ratio_table(report: Comparison) -> Markup:
    ratios = {
        "step time, for the same work": report.same_work_ratio,
        "step time": report.step_time_ratio,
        "work": report.work_ratio,
    }
    return table(
        "B over A, medians over steps with the intervals that hold 95 of 100 bootstrap medians",
        ["", "B over A", "from", "to", ""],
        [
            [name, *(f"{value:.3f}" for value in _values(each)), _noise(each, 1)]
            for name, each in ratios.items()
            if each is not None
        ],
    )


def _cause_table(report: Comparison) -> Markup:
    return table(
        f"What B has more of in a step than A, the mean over {report.ranks_told}",
        ["", "B less A", "from", "to", ""],
        [
            [name, *(_signed(value) for value in _values(each)), _noise(each, 0)]
            for name, each in report.causes_s.items()
        ],
    )


def _difference_table(unlike: Differences) -> Markup:
    return table(
        "Settings in which the runs differ, besides those of the schedule",
        ["", "setting", "A", "B"],
        [
            [what, name, a, b]
            for what, settings in unlike.items()
            for name, (a, b) in settings.items()
        ],
        texts=4,
    )


def _values(each: Estimate) -> tuple[float, float, float]:
    return each.median, each.low, each.high


def _noise(each: Estimate, nothing: float) -> str:
    return "" if each.leaves_out(nothing) else "noise"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else ''}{tell(seconds * NS_PER_S)}" if seconds else "0"

"""The HTML page of a run: findings, each analysis with chart and table, settings, trace check.

If a run lacks the data of a part, the page states the reason in its place. Also the page of two
compared runs.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rrfp import __version__
from rrfp.analyze.bubbles import bubble_table, bubbles, structural_shares
from rrfp.analyze.charts.durations import message_times, misalignment_map, task_times
from rrfp.analyze.charts.export import VEGA_LITE, spec_of
from rrfp.analyze.charts.gantt import gantt, gantts
from rrfp.analyze.charts.per_rank import bubble_causes, hint_order, memory_held, progress
from rrfp.analyze.compare import Comparison, Differences, comparison_tables, warning
from rrfp.analyze.critical_path import critical_path, path_table
from rrfp.analyze.deviations import deviation_table, deviations
from rrfp.analyze.findings import (
    NUM_FINDINGS,
    Blame,
    Finding,
    Replays,
    blame,
    findings,
    headline,
    replays,
)
from rrfp.analyze.frames import Frames, choose_steps, frames_of, run_settings, step_time_ns
from rrfp.analyze.html import (
    Markup,
    advice,
    element,
    figure,
    joined,
    page,
    paragraph,
    section,
    table_element,
    text,
)
from rrfp.analyze.memory import memory, memory_table, peak_bytes
from rrfp.analyze.misalignment import link_table, misalignment
from rrfp.analyze.table import TEXT, Column, Table, format_time
from rrfp.analyze.whatif import whatif_table
from rrfp.errors import RrfpError
from rrfp.replay.bottlenecks import BottleneckKind
from rrfp.schedule.policy import Dispatch
from rrfp.trace.check import check_contents, recording_fraction
from rrfp.trace.initial_view import middle_step
from rrfp.trace.perfetto.reader import TraceContents
from rrfp.trace.records import EVALUATION, NS_PER_S, counted, format_step_counts, step_names
from rrfp.trace.run_dir import RunDir

_MOST_SETTINGS = 200
_MOST_LETTERS = 300


def settings_element(frames: Frames) -> Markup:
    """Make the table of the first 200 settings, with a note that counts the others.

    Long values are shortened. Without settings it is a paragraph that says so.
    """
    flat = list(_flattened(frames.settings))
    if not flat:
        return paragraph("The trace has no settings of its run.")
    more = len(flat) - _MOST_SETTINGS
    names = [key.removeprefix("settings.") for key, _ in flat[:_MOST_SETTINGS]]
    values = [shortened(value) for _, value in flat[:_MOST_SETTINGS]]
    return table_element(
        Table(
            "Settings of the run",
            [Column("setting", names, TEXT), Column("value", values, TEXT)],
            [f"{more} more are not shown."] if more > 0 else [],
        )
    )


def shortened(words: str) -> str:
    """Cut a text after 300 characters and add ` ...`; a shorter text is returned as it is."""
    return words if len(words) <= _MOST_LETTERS else f"{words[:_MOST_LETTERS]} ..."


def _flattened(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested settings under dotted names; a list is one leaf."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flattened(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value)


def report(
    name: str, contents: TraceContents, steps: range | None = None, *, evaluations: bool = False
) -> str:
    """Return the HTML page of a run, titled `name`, for the steps of `frames.choose_steps`.

    Raises UsageError if the run has none of the selected steps.
    """
    frames = choose_steps(frames_of(contents.recording), steps, evaluations=evaluations)
    return report_on(name, contents, frames)


def report_on(name: str, contents: TraceContents, frames: Frames) -> str:
    """Return the HTML page of a run, titled `name`, for the steps in `frames`."""
    return _Page(name, contents, frames).html()


def report_of(trace: Path) -> str:
    """Return the name of a trace in reports.

    It is the name of the run's directory, with the number of a later session, or for another file
    its name without suffix.
    """
    whole = trace.resolve()
    run = RunDir(whole.parent)
    if whole in (run.trace, run.joined_trace):
        return whole.parent.name
    for each in run.sessions():
        if each.trace == whole:
            return f"{whole.parent.name}, session {each.session}"
    return whole.stem


Parts = Iterator[Callable[[], Markup]]
"""The parts of a section as functions, which may raise RrfpError."""


class _Page:
    """Builds the page of a run, section by section."""

    def __init__(self, name: str, contents: TraceContents, frames: Frames) -> None:
        self._name = name
        self._contents = contents
        self._frames = frames
        self._charts: dict[str, dict[str, Any]] = {}

    def html(self) -> str:
        """Build all sections and return the page; a part that lacks its data is a sentence."""
        sections = [
            ("findings", "What matters", self._findings),
            ("bubbles", "Where the time went", self._bubbles),
            ("step", "The slowest step", self._step),
            ("order", "Hint and order", self._order),
            ("memory", "Memory", self._memory),
            ("links", "Messages and stages", self._links),
            ("times", "Task times", self._times),
            ("whatif", "What if", self._what_if),
            ("settings", "Settings", self._settings),
            ("health", "The trace", self._health),
        ]
        body = [
            element("header", element("h1", text(f"Why {self._name} waited")), self._facts()),
            element(
                "nav",
                *(element("a", text(title), href=f"#{name}") for name, title, _ in sections),
                aria_label="Sections",
            ),
        ]
        body += [section(name, title, *self._all(make())) for name, title, make in sections]
        body.append(element("footer", paragraph(f"Made by rrfp {__version__}.")))
        return page(f"Why {self._name} waited", joined(body), self._charts, VEGA_LITE)

    def _all(self, parts: Parts) -> Iterator[Markup]:
        """Make each part, or a sentence with the reason if the part raises RrfpError."""
        for part in parts:
            try:
                yield part()
            except RrfpError as error:
                yield element("p", text(_sentence(str(error))), class_="why")

    def _chart(self, name: str, draw: Callable[[], Any]) -> Callable[[], Markup]:
        """Return a part that draws a chart, adds it to the page's charts under `name`, and places
        it."""

        def made() -> Markup:
            self._charts[name] = spec_of(draw())
            return figure(name, self._charts[name])

        return made

    def _facts(self) -> Markup:
        """Make the line of facts: policy, layout, microbatches, step time, and which steps are left
        out."""
        run = self._frames.run
        facts = _schedule_facts(self._frames)
        layout = [
            f"{run[column].n_unique()} {noun}"
            for column, noun in (
                ("pp_rank", "pipeline ranks"),
                ("tp_rank", "tensor-parallel"),
                ("dp_rank", "replicas"),
            )
            if column == "pp_rank" or run[column].n_unique() > 1
        ]
        facts.append(" x ".join(layout))
        num_microbatches = self._frames.tasks["microbatch"].n_unique()
        facts.append(f"{num_microbatches} microbatches")
        steps = self._frames.windows["step"].to_list()
        if steps:
            facts.append(
                f"{format_step_counts(steps)} of {format_time(step_time_ns(self._frames))} (mean)"
            )
        if self._frames.warm_up:
            facts.append(f"{step_names(self._frames.warm_up)} skipped as warm-up")
        if self._frames.num_left_out:
            facts.append(f"{counted(self._frames.num_left_out, EVALUATION)} left out")
        return element("p", text("; ".join(facts)), class_="facts")

    @cached_property
    def _blame(self) -> Blame:
        return blame(self._frames)

    @cached_property
    def _found(self) -> list[Finding]:
        """The three findings with the largest saving or share."""
        replayed = self._replays
        found = findings(self._frames, self._blame, replayed.run, replayed.culprits)
        return found[:NUM_FINDINGS]

    def _findings(self) -> Parts:
        """Yield the parts of the findings: the headline, and the list of findings.

        Without findings a sentence says that no fix would save 1% of a step.
        """
        yield lambda: element("p", text(headline(self._frames, self._blame)), class_="lead")
        yield (
            lambda: (
                element("ol", *map(self._finding, self._found), class_="findings")
                if self._found
                else paragraph("Fixing any one thing would save less than 1% of a step.")
            )
        )

    def _finding(self, found: Finding) -> Markup:
        """Make the list item of a finding, with its saving, or its share if it was not replayed."""
        part = found.share if found.saving is None else found.saving
        return element(
            "li",
            element("span", text(f"{part:.0%}"), class_="share"),
            element("h3", text(found.title)),
            advice(found.figures),
            advice(found.advice),
            paragraph(
                f"It accounts for {part:.0%} of a step; the saving of a fix is not known."
                if found.saving is None
                else f"In a replay with this fixed, a step takes {part:.1%} less."
            ),
        )

    @cached_property
    def _replays(self) -> Replays:
        """Replays of the run with suspects fixed and with the usual changes, made once."""
        return replays(self._frames, with_usual=True)

    def _bubbles(self) -> Parts:
        """Yield the chart and the table of bubbles by rank, with the structural part if known."""
        shares = structural_shares(self._frames)
        yield self._chart("bubbles", lambda: bubble_causes(self._frames, shares))
        yield lambda: table_element(
            bubble_table(bubbles(self._frames).with_structural(shares), by_rank=True)
        )

    def _step(self) -> Parts:
        """Yield Gantt chart, critical path and progress of the slowest step."""
        yield self._chart("gantt", lambda: gantt(self._frames))
        yield lambda: table_element(path_table(critical_path(self._frames), self._frames.stages))
        yield self._chart("progress", lambda: progress(self._frames))

    def _order(self) -> Parts:
        """Yield the chart of the slowest step's hint positions, and the table of departures from
        the hint."""
        yield self._chart("hint", lambda: hint_order(self._frames))
        yield lambda: table_element(deviation_table(deviations(self._frames), self._frames.stages))

    def _memory(self) -> Parts:
        """Yield chart and table of activation memory, and the savings of other bounds.

        Without activation bytes it is the table alone, which then raises RrfpError.
        """
        if peak_bytes(self._frames) is not None:
            yield self._chart("memory", lambda: memory_held(self._frames))
        # Without bytes this part states the reason for the whole section.
        yield lambda: table_element(memory_table(memory(self._frames)))
        if peak_bytes(self._frames) is not None and (savings := self._savings_of_bounds()):
            yield lambda: paragraph(savings)

    def _savings_of_bounds(self) -> str:
        """Describe the replayed savings of other bounds, or state that nothing is saved.

        Empty if the run was not replayed, or under fixed dispatch.
        """
        run, kinds = self._replays.run, (BottleneckKind.MEMORY, BottleneckKind.BOUND)
        if run is None or run.policy.dispatch is Dispatch.FIXED:
            return ""
        if run.policy.limit is None and run.policy.hold is None:
            return "No bound withheld forwards."
        savings = [
            f"With {each.change.flags} a step takes {each.saving:.1%} less."
            for each in self._replays.culprits
            if each.kind in kinds
        ]
        return " ".join(savings) or "A wider bound would save less than 1% of a step."

    def _links(self) -> Parts:
        """Yield map and table of misalignment, and the chart of message times."""
        yield self._chart("misalignment", lambda: misalignment_map(self._frames))
        yield lambda: table_element(link_table(misalignment(self._frames), self._frames.stages))
        yield self._chart("message-times", lambda: message_times(self._frames))

    def _times(self) -> Parts:
        """Yield the chart of task times."""
        yield self._chart("task-times", lambda: task_times(self._frames))

    def _what_if(self) -> Parts:
        """Yield the table of usual changes with its replay error, or why the run is not
        replayed."""
        usual = self._replays.usual
        if usual is None:
            why_not = f"The run is not replayed: {self._replays.why_not}"
            yield lambda: element("p", text(_sentence(why_not)), class_="why")
            return
        yield lambda: paragraph(
            f"{len(usual.run.steps)} steps, evenly over the run, replayed in virtual time. "
            f"Without changes, the replay is {usual.replay_error:.1%} off the measured time."
        )
        yield lambda: table_element(whatif_table(usual, step_time_ns(self._frames)))

    def _settings(self) -> Parts:
        yield lambda: settings_element(self._frames)

    def _health(self) -> Parts:
        """Yield the trace's problems, unfinished steps, cost of recording and clock error.

        Without problems a sentence says so; the other parts are left out if empty or unknown.
        """
        problems = check_contents(self._contents)
        yield (
            lambda: (
                element("ul", *(element("li", text(problem)) for problem in problems))
                if problems
                else paragraph(
                    "The trace is whole: nothing is lost, open, unmatched or impossible."
                )
            )
        )
        finished = set(self._frames.windows["step"])
        left_out = [step for step in self._frames.steps if step not in finished]
        if left_out:
            yield lambda: paragraph(
                f"Left out, as not every rank finished them: {shortened(step_names(left_out))}."
            )
        fraction = recording_fraction(self._contents.recording)
        if fraction is not None:
            yield lambda: paragraph(
                f"Recording took at most {fraction:.2%} of a rank's time in its steps."
            )
        run = self._frames.run
        error_ns = run["clock_error_ns"].max() if run.height else 0
        if isinstance(error_ns, int) and error_ns:
            num_hosts = run["host"].n_unique()
            whose = f"{num_hosts} hosts" if num_hosts > 1 else "the host and its GPUs"
            yield lambda: paragraph(
                f"The clocks of {whose} were compared; times may be off by "
                f"{format_time(error_ns)} between them."
            )


def _schedule_facts(frames: Frames) -> list[str]:
    """Return hint, dispatch and bounds of a run as texts, as far as the trace has them."""
    settings = run_settings(frames)
    facts = [f"{name} {settings[name]}" for name in ("limit", "hold") if settings.get(name)]
    if settings.get("hint") is not None:
        facts.insert(0, f"hint {settings['hint']}, {settings.get('dispatch', 'ready')} dispatch")
    return facts


def _sentence(words: str) -> str:
    """Capitalize an error message and end it with a period."""
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"


# The page of two compared runs.


def comparison_page(
    names: Sequence[str],
    runs: Sequence[Frames],
    report: Comparison,
    unlike: Differences,
    verdict: Sequence[str],
) -> str:
    """Return the HTML page that compares runs A and B: ratios, a step of each on one axis, causes.

    `verdict` has sentences about `report`, and `unlike` the settings that differ.
    """
    charts: dict[str, dict[str, Any]] = {}
    title = f"{names[1]} against {names[0]}"
    caution = warning(unlike)
    header = [element("h1", text(title))]
    header += [
        _facts(f"{which} is {name}", run, step_s)
        for which, name, run, step_s in zip("AB", names, runs, report.step_s, strict=True)
    ]
    header.append(element("p", text(" ".join(verdict)), class_="lead"))
    if caution:
        header.append(element("p", text(caution), class_="warning", role="note"))
    ratios, causes = comparison_tables(report, ())
    body = [
        element("header", *header),
        section("ratios", "How much longer B takes", table_element(ratios)),
        section("steps", "A step of each", _steps(runs, charts)),
        section("causes", "Where the difference lies", table_element(causes)),
    ]
    if unlike:
        body.append(section("differences", "What else differs", _difference_table(unlike)))
    body.append(element("footer", paragraph(f"Made by rrfp {__version__}.")))
    return page(title, joined(body), charts, VEGA_LITE)


def _facts(name: str, run: Frames, step_s: float) -> Markup:
    """Make the line of facts of a compared run: name, policy, steps and their median time."""
    facts = [name, *_schedule_facts(run)]
    steps = run.windows["step"].to_list()
    facts.append(f"{format_step_counts(steps)} of {format_time(step_s * NS_PER_S)} (median)")
    if run.warm_up:
        facts.append(f"{step_names(run.warm_up)} skipped as warm-up")
    return element("p", text("; ".join(facts)), class_="facts")


def _steps(runs: Sequence[Frames], charts: dict[str, dict[str, Any]]) -> Markup:
    """Draw the step of median length of each run on a common time axis; adds to `charts`.

    If a step cannot be drawn, return a sentence with the reason.
    """
    chosen = {}
    for which, run in zip("AB", runs, strict=True):
        windows = {step: (start, end) for step, start, end in run.windows.iter_rows()}
        step = middle_step(windows)
        assert step is not None  # Runs without steps are not compared.
        chosen[which] = (run, step)
    try:
        charts["gantt"] = spec_of(gantts(chosen, "A step of median length of each, on one axis"))
    except RrfpError as error:
        return element("p", text(f"The steps are not drawn: {error}."), class_="why")
    return figure("gantt", charts["gantt"])


def _difference_table(unlike: Differences) -> Markup:
    """Make the table of settings that differ, with the values of A and B."""
    rows = [
        (what, name, *values)
        for what, settings in unlike.items()
        for name, values in settings.items()
    ]
    columns = zip(("", "setting", "A", "B"), zip(*rows, strict=True), strict=True)
    return table_element(
        Table(
            "Settings in which the runs differ, besides those of the schedule",
            [Column(heading, [*map(str, values)], TEXT) for heading, values in columns],
        )
    )

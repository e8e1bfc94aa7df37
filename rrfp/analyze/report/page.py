"""The page of a report: the findings first, then each analysis with its chart and its table.

The settings follow, and how sound the trace is. Where a run lacks the data for a part, the page
says why in its place; the other parts stand.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rrfp import __version__
from rrfp.analyze.charts.causes import bubble_causes
from rrfp.analyze.charts.durations import message_times, task_times
from rrfp.analyze.charts.files import VEGA_LITE, spec_of
from rrfp.analyze.charts.gantt import gantt
from rrfp.analyze.charts.hint_order import hint_order
from rrfp.analyze.charts.links import misalignment_map
from rrfp.analyze.charts.memory import memory_held
from rrfp.analyze.charts.progress import progress
from rrfp.analyze.chosen import choose, step_time_ns
from rrfp.analyze.findings.blame import Blame, blame
from rrfp.analyze.findings.findings import NUM_FINDINGS, Finding, findings
from rrfp.analyze.findings.replays import Replays, replays
from rrfp.analyze.findings.shares import headline
from rrfp.analyze.frames import Frames, frames_of
from rrfp.analyze.html import (
    Markup,
    advice,
    element,
    figure,
    joined,
    page,
    paragraph,
    section,
    text,
)
from rrfp.analyze.memory.peaks import memory, peak_bytes
from rrfp.analyze.report.tables import (
    bubble_table,
    critical_path_table,
    deviation_table,
    link_table,
    memory_table,
    settings_parts,
    shortened,
    whatif_table,
)
from rrfp.analyze.settings import run_settings
from rrfp.analyze.structural_steps import structural_shares
from rrfp.analyze.units import tell
from rrfp.errors import RrfpError
from rrfp.replay.culprits import CulpritKind
from rrfp.schedule.policy import Dispatch
from rrfp.trace.check import check_contents
from rrfp.trace.cost import recording_fraction
from rrfp.trace.perfetto.reader import TraceContents
from rrfp.trace.rundir import RunDir
from rrfp.trace.steps import EVALUATION, count_of, counted, step_names


def report(
    name: str, contents: TraceContents, steps: range | None = None, *, evaluations: bool = False
) -> str:
    """The page, as HTML, of a run under that name: of the steps that train, or with `evaluations`
    of the run's evaluations. `steps` chooses among these by number; None takes all but the warm-up.

    Raises UsageError when the run has none of those asked for.
    """
    frames = choose(frames_of(contents.recording), steps, evaluations=evaluations)
    return report_on(name, contents, frames)


def report_on(name: str, contents: TraceContents, frames: Frames) -> str:
    """The page of the steps that are in these tables, of a run under that name."""
    return _Page(name, contents, frames).html()


def report_of(trace: Path) -> str:
    """What a report calls a trace: the run's directory, with the session if it is that of a later
    one, or the file if it has another name."""
    whole = trace.resolve()
    run = RunDir(whole.parent)
    if whole in (run.trace, run.joined_trace):
        return whole.parent.name
    for each in run.sessions():
        if each.trace == whole:
            return f"{whole.parent.name}, session {each.session}"
    return whole.stem


Parts = Iterator[Callable[[], Markup]]
"""The parts of a section, each made in its place on the page; it may raise RrfpError."""


class _Page:
    """The sections of one page."""

    def __init__(self, name: str, contents: TraceContents, frames: Frames) -> None:
        self._name = name
        self._contents = contents
        self._frames = frames
        self._charts: dict[str, dict[str, Any]] = {}

    def html(self) -> str:
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
        """What each part gives, or the sentence that says why it gives nothing."""
        for part in parts:
            try:
                yield part()
            except RrfpError as error:
                yield element("p", text(_sentence(str(error))), class_="why")

    def _chart(self, name: str, draw: Callable[[], Any]) -> Callable[[], Markup]:
        def made() -> Markup:
            self._charts[name] = spec_of(draw())
            return figure(name, self._charts[name])

        return made

    def _facts(self) -> Markup:
        run, settings = self._frames.run, run_settings(self._frames)
        told = []
        if settings.get("hint") is not None:
            told.append(f"hint {settings['hint']}, {settings.get('dispatch', 'ready')} dispatch")
        told += [f"{name} {settings[name]}" for name in ("limit", "hold") if settings.get(name)]
        layout = [
            f"{run[column].n_unique()} {noun}"
            for column, noun in (
                ("pp_rank", "pipeline ranks"),
                ("tp_rank", "tensor-parallel"),
                ("dp_rank", "replicas"),
            )
            if column == "pp_rank" or run[column].n_unique() > 1
        ]
        told.append(" x ".join(layout))
        num_microbatches = self._frames.tasks["microbatch"].n_unique()
        told.append(f"{num_microbatches} microbatches")
        steps = self._frames.windows["step"].to_list()
        if steps:
            told.append(f"{count_of(steps)} of {tell(step_time_ns(self._frames))} (mean)")
        if self._frames.warm_up:
            told.append(f"{step_names(self._frames.warm_up)} left out, as warm-up")
        if self._frames.num_left_out:
            told.append(f"{counted(self._frames.num_left_out, EVALUATION)} left out")
        return element("p", text("; ".join(told)), class_="facts")

    @cached_property
    def _blame(self) -> Blame:
        return blame(self._frames)

    @cached_property
    def _found(self) -> list[Finding]:
        replayed = self._replays
        found = findings(self._frames, self._blame, replayed.run, replayed.culprits)
        return found[:NUM_FINDINGS]

    def _findings(self) -> Parts:
        yield lambda: element("p", text(headline(self._frames, self._blame)), class_="lead")
        yield (
            lambda: (
                element("ol", *map(self._finding, self._found), class_="findings")
                if self._found
                else paragraph("Fixing any one thing would save less than 1% of a step.")
            )
        )

    def _finding(self, found: Finding) -> Markup:
        part = found.share if found.saving is None else found.saving
        return element(
            "li",
            element("span", text(f"{part:.0%}"), class_="share"),
            element("h3", text(found.title)),
            advice(found.told),
            advice(found.advice),
            paragraph(
                f"It owns {part:.0%} of a step; what fixing it saves is not known."
                if found.saving is None
                else f"Replayed with it fixed, a step takes {part:.1%} less."
            ),
        )

    @cached_property
    def _replays(self) -> Replays:
        return replays(self._frames, with_usual=True)

    def _bubbles(self) -> Parts:
        shares = structural_shares(self._frames)
        yield self._chart("bubbles", lambda: bubble_causes(self._frames, shares))
        yield lambda: bubble_table(self._frames, shares)

    def _step(self) -> Parts:
        yield self._chart("gantt", lambda: gantt(self._frames))
        yield lambda: critical_path_table(self._frames)
        yield self._chart("progress", lambda: progress(self._frames))

    def _order(self) -> Parts:
        yield self._chart("hint", lambda: hint_order(self._frames))
        yield lambda: deviation_table(self._frames)

    def _memory(self) -> Parts:
        if peak_bytes(self._frames) is None:
            # Said once, and not for each part.
            yield lambda: paragraph(memory(self._frames).told)
            return
        found = memory(self._frames)
        yield lambda: paragraph(found.told)
        yield self._chart("memory", lambda: memory_held(self._frames))
        yield lambda: memory_table(found)
        if self._told_room():
            yield lambda: paragraph(self._told_room())

    def _told_room(self) -> str:
        """What another bound would save, by replay; empty where none was replayed."""
        run, kinds = self._replays.run, (CulpritKind.MEMORY, CulpritKind.BOUND)
        if run is None or run.policy.dispatch is Dispatch.FIXED:
            return ""
        if run.policy.limit is None and run.policy.hold is None:
            return "No bound withheld forwards."
        told = [
            f"With {each.change.flags} a step takes {each.saving:.1%} less."
            for each in self._replays.culprits
            if each.kind in kinds
        ]
        return " ".join(told) or "A wider bound would save less than 1% of a step."

    def _links(self) -> Parts:
        yield self._chart("misalignment", lambda: misalignment_map(self._frames))
        yield lambda: link_table(self._frames)
        yield self._chart("message-times", lambda: message_times(self._frames))

    def _times(self) -> Parts:
        yield self._chart("task-times", lambda: task_times(self._frames))

    def _what_if(self) -> Parts:
        usual = self._replays.usual
        if usual is None:
            why_not = f"The run is not replayed: {self._replays.why_not}"
            yield lambda: element("p", text(_sentence(why_not)), class_="why")
            return
        yield lambda: paragraph(
            f"{len(usual.run.steps)} steps, evenly over the run, replayed in virtual time. As "
            f"it was, the replay is {usual.replay_error:.1%} off what was measured."
        )
        yield lambda: whatif_table(usual, step_time_ns(self._frames))
        for words in filter(None, (usual.conclusion, usual.caution)):
            yield partial(paragraph, words)

    def _settings(self) -> Parts:
        yield lambda: joined(settings_parts(self._frames))

    def _health(self) -> Parts:
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
                f"Recording took {fraction:.2%} of the steps' time, on the rank where it took most."
            )
        run = self._frames.run
        error_ns = run["clock_error_ns"].max() if run.height else 0
        if isinstance(error_ns, int) and error_ns:
            num_hosts = run["host"].n_unique()
            whose = f"{num_hosts} hosts" if num_hosts > 1 else "the host and its GPUs"
            yield lambda: paragraph(
                f"The clocks of {whose} were compared; times may be off by {tell(error_ns)} between"
                " them."
            )


def _sentence(words: str) -> str:
    """An error's sentence, as one of a page."""
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"

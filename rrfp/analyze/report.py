"""`rrfp analyze report`: all that a run's trace tells, as one page.

The findings come first, then each analysis with its chart and its table, then the settings and how
sound the trace is. What a run has no data for is said in its place, and the rest stands.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from rrfp import __version__
from rrfp.analyze.blame import Blame, blame
from rrfp.analyze.bubbles import CAUSES, bubbles
from rrfp.analyze.charts.causes import bubble_causes
from rrfp.analyze.charts.durations import message_times, task_times
from rrfp.analyze.charts.files import VEGA_LITE, spec_of, structural_shares
from rrfp.analyze.charts.gantt import gantt
from rrfp.analyze.charts.hint_order import hint_order
from rrfp.analyze.charts.links import misalignment_map
from rrfp.analyze.charts.progress import progress
from rrfp.analyze.chosen import choose
from rrfp.analyze.critical_path import critical_path
from rrfp.analyze.deviations import deviations
from rrfp.analyze.findings import Finding, findings, headline
from rrfp.analyze.frames import Frames, frames_of, recording_of, windows
from rrfp.analyze.html import (
    Markup,
    advice,
    element,
    figure,
    joined,
    page,
    paragraph,
    section,
    table,
    text,
)
from rrfp.analyze.misalignment import misalignment
from rrfp.analyze.settings import run_settings
from rrfp.analyze.units import Unit, tell
from rrfp.analyze.whatif import Change, WhatIf, what_if
from rrfp.errors import RrfpError, UsageError
from rrfp.simulate.recorded import RecordedRun
from rrfp.trace.check import check_contents
from rrfp.trace.cost import recording_fraction
from rrfp.trace.perfetto_reader import TraceContents
from rrfp.trace.steps import EVALUATION, count_of, counted, step_name, step_names

_NUM_TASKS_REPLAYED = 6_000
"""A replay takes as many steps as have so many tasks, evenly over the run."""
_MOST_TASKS_OF_A_STEP = 10_000
"""Steps of more are not replayed for a report."""
_MOST_OWNERS = 12
_LEAST_SAVING = 0.005
_MOST_SETTINGS = 200
_MOST_LETTERS = 300


def report(
    name: str, contents: TraceContents, steps: range | None = None, *, evaluations: bool = False
) -> str:
    """The page of a run, as it was read: of its steps that train, or its evaluations; of these,
    None being all.

    Raises UsageError when the run has none of those asked for.
    """
    frames = choose(frames_of(contents.recording), steps, evaluations=evaluations)
    return _Report(name, contents, frames).page()


@dataclass(frozen=True, slots=True)
class _Replays:
    """What the run would have taken otherwise, as far as it can be replayed."""

    savings: dict[str, tuple[str, float]]
    """By finding (`what`): the change in words, and the share of a step that it saves."""
    usual: WhatIf | None
    """The sensible set of changes."""
    num_steps: int
    why_not: str
    """Why there are none, in a sentence; empty where there are."""


class _Report:
    """The parts of one page."""

    def __init__(self, name: str, contents: TraceContents, frames: Frames) -> None:
        self._name = name
        self._contents = contents
        self._frames = frames
        self._charts: dict[str, dict[str, Any]] = {}

    def page(self) -> str:
        sections = [
            ("findings", "What matters", self._findings),
            ("bubbles", "Where the time went", self._bubbles),
            ("step", "The slowest step", self._step),
            ("order", "Hint and order", self._order),
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

    def _all(self, parts: Iterator[Callable[[], Markup]]) -> Iterator[Markup]:
        """What the parts give, or the sentence that says why one gives nothing."""
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
        whole = windows(self._frames)
        lengths_ns = (whole["end_ns"] - whole["start_ns"]).to_list()
        if lengths_ns:
            steps = whole["step"].to_list()
            told.append(f"{count_of(steps)} of {tell(median(lengths_ns))} (median)")
        if self._frames.num_left_out:
            told.append(f"{counted(self._frames.num_left_out, EVALUATION)} left out")
        return element("p", text("; ".join(told)), class_="facts")

    @cached_property
    def _blame(self) -> Blame:
        return blame(self._frames)

    @cached_property
    def _found(self) -> list[Finding]:
        return findings(self._frames, self._blame)

    def _findings(self) -> Iterator[Callable[[], Markup]]:
        yield lambda: element("p", text(headline(self._frames, self._blame)), class_="lead")
        yield (
            lambda: (
                element("ol", *map(self._finding, self._found), class_="findings")
                if self._found
                else paragraph("Nothing else owns as much as 1% of a step.")
            )
        )

    def _finding(self, found: Finding) -> Markup:
        saving = self._replays.savings.get(found.what)
        return element(
            "li",
            element("span", text(f"{found.share:.0%}"), class_="share"),
            element("h3", text(found.title)),
            advice(found.told),
            advice(found.advice),
            *([paragraph(_saving(*saving))] if saving else []),
        )

    @cached_property
    def _replays(self) -> _Replays:
        """Of a few steps, evenly over the run."""
        finished = windows(self._frames)["step"].to_list()
        of_a_step = self._frames.tasks.height / max(1, len(self._frames.steps))
        if of_a_step > _MOST_TASKS_OF_A_STEP:
            why_not = (
                f"a step has {of_a_step:,.0f} tasks, which take long to replay; 'rrfp analyze "
                "whatif' does"
            )
            return _Replays({}, None, 0, why_not)
        num_steps = min(len(finished), max(1, int(_NUM_TASKS_REPLAYED / max(of_a_step, 1))))
        chosen = [finished[index * len(finished) // num_steps] for index in range(num_steps)]
        remedied: list[Finding] = []

        def remedies(run: RecordedRun) -> list[Change]:
            changes = []
            for found in self._found:
                change = found.remedy(run) if found.remedy else None
                if change is not None and _goes_with(change, run):
                    remedied.append(found)
                    changes.append(change)
            return changes

        try:
            recording = recording_of(self._frames.of_steps(chosen))
            usual = what_if(recording)
            rows = what_if(recording, remedies).rows
        except RrfpError as error:
            return _Replays({}, None, 0, str(error))
        savings = {
            found.what: (row.what, row.saving) for found, row in zip(remedied, rows, strict=True)
        }
        return _Replays(savings, usual, len(usual.run.steps), "")

    def _bubbles(self) -> Iterator[Callable[[], Markup]]:
        shares = structural_shares(self._frames)
        yield self._chart("bubbles", lambda: bubble_causes(self._frames, shares))
        yield lambda: self._bubble_table(shares)

    def _bubble_table(self, shares: Sequence[float]) -> Markup:
        divided = bubbles(self._frames).with_structural(shares)
        causes = [cause for cause in CAUSES if any(rank.causes_ns[cause] for rank in divided.ranks)]
        rows = []
        for rank in divided.ranks:
            parts_ns = [rank.busy_ns, rank.bubble_ns]
            if rank.structural_ns is not None and rank.excess_ns is not None:
                parts_ns += [rank.structural_ns, rank.excess_ns]
            parts_ns += [rank.causes_ns[cause] for cause in causes]
            stages = " ".join(map(str, rank.stages))
            rows.append(
                [rank.rank, stages, *(f"{100 * ns / rank.window_ns:.1f}" for ns in parts_ns)]
            )
        parts = ["structural", "excess"] if shares else []
        return table(
            "Each rank's time, in % of it",
            ["rank", "stage", "work", "bubble", *parts, *causes],
            rows,
            texts=0,
        )

    def _step(self) -> Iterator[Callable[[], Markup]]:
        yield self._chart("gantt", lambda: gantt(self._frames))
        yield self._path_table
        yield self._chart("progress", lambda: progress(self._frames))

    def _path_table(self) -> Markup:
        path = critical_path(self._frames)
        owners = path.owners
        rows: list[list[object]] = [
            [
                owner.pp_rank,
                owner.kind,
                tell(owner.time_ns),
                _percent(owner.time_ns, path.length_ns),
            ]
            for owner in owners[:_MOST_OWNERS]
        ]
        rest_ns = sum(owner.time_ns for owner in owners[_MOST_OWNERS:])
        if rest_ns:
            rows.append(
                [
                    f"{len(owners) - _MOST_OWNERS} more",
                    "",
                    tell(rest_ns),
                    _percent(rest_ns, path.length_ns),
                ]
            )
        return table(
            f"Critical path of {step_name(path.step)}: who owns its {tell(path.length_ns)}",
            ["pipeline rank", "kind", "time", "%"],
            rows,
            texts=2,
        )

    def _order(self) -> Iterator[Callable[[], Markup]]:
        yield self._chart("hint", lambda: hint_order(self._frames))
        yield lambda: table(
            "Departures from the hint's order, by pipeline rank",
            ["pipeline rank", "dispatches", "deviating %", "mean displacement", "max", "Kendall"],
            [
                [
                    row["pp_rank"],
                    row["dispatches"],
                    f"{100 * row['deviating_fraction']:.1f}",
                    f"{row['mean_displacement']:.2f}",
                    row["max_displacement"],
                    f"{row['kendall_tau_distance']:.4f}",
                ]
                for row in deviations(self._frames).to_dicts()
            ],
        )

    def _links(self) -> Iterator[Callable[[], Markup]]:
        yield self._chart("misalignment", lambda: misalignment_map(self._frames))
        yield self._link_table
        yield self._chart("message-times", lambda: message_times(self._frames))

    def _link_table(self) -> Markup:
        links = misalignment(self._frames)
        columns = [
            f"{what}_s_{share}" for what in ("queued", "starved") for share in ("median", "p95")
        ]
        return table(
            "Messages queued for their stage, and stages starved of messages, by link",
            ["link", "messages", *(name.replace("_s_", " ").replace("_", " ") for name in columns)],
            [
                [
                    f"{row['from']} to {row['to']}, {row['direction']}",
                    row["messages"],
                    *(tell(row[name] * Unit.S.value) if row[name] else "0" for name in columns),
                ]
                for row in links.to_dicts()
            ],
        )

    def _times(self) -> Iterator[Callable[[], Markup]]:
        yield self._chart("task-times", lambda: task_times(self._frames))

    def _what_if(self) -> Iterator[Callable[[], Markup]]:
        usual = self._replays.usual
        if usual is None:
            why_not = f"The run is not replayed: {self._replays.why_not}"
            yield lambda: element("p", text(_sentence(why_not)), class_="why")
            return
        own = usual.as_it_was
        yield lambda: paragraph(
            f"{self._replays.num_steps} steps, evenly over the run, replayed in virtual time. As "
            f"it was, the replay is {usual.replay_error:.1%} off what was measured."
        )
        yield lambda: table(
            "What a step would have taken",
            ["replayed", "time", "saved %", "most held"],
            [
                [f"as it was: {usual.run.told}", tell(own.makespan_ns), "", _most(own.peak_held)],
                *(
                    [
                        row.what,
                        tell(row.makespan_ns),
                        f"{100 * row.saving:.1f}",
                        _most(row.peak_held),
                    ]
                    for row in usual.rows
                ),
            ],
        )
        for words in filter(None, (usual.conclusion, usual.caution)):
            yield lambda words=words: paragraph(words)  # type: ignore[misc]

    def _settings(self) -> Iterator[Callable[[], Markup]]:
        flat = list(_flattened(self._frames.settings))
        rows = [
            (key.removeprefix("settings."), _shortened(value))
            for key, value in flat[:_MOST_SETTINGS]
        ]
        yield (
            lambda: (
                table("What the run was set to", ["setting", "value"], rows, texts=2)
                if rows
                else paragraph("The trace does not tell the settings of its run.")
            )
        )
        if len(flat) > _MOST_SETTINGS:
            yield lambda: paragraph(f"{len(flat) - _MOST_SETTINGS} more are not shown.")

    def _health(self) -> Iterator[Callable[[], Markup]]:
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
        finished = set(windows(self._frames)["step"])
        left_out = [step for step in self._frames.steps if step not in finished]
        if left_out:
            yield lambda: paragraph(
                f"Left out, as not every rank finished them: {_shortened(step_names(left_out))}."
            )
        fraction = recording_fraction(self._contents.recording)
        if fraction is not None:
            yield lambda: paragraph(
                f"Recording took {fraction:.2%} of the steps' time, on the rank where it took most."
            )
        run = self._frames.run
        error_ns = run["clock_error_ns"].max() if run.height else 0
        if isinstance(error_ns, int) and error_ns:
            yield lambda: paragraph(
                f"The clocks of {run['host'].n_unique()} hosts were compared; times may be off by "
                f"{tell(error_ns)} between them."
            )


def report_of(trace: Path) -> str:
    """What a report calls a trace: the run's directory, or the file where it has another name."""
    whole = trace.resolve()
    return whole.parent.name if whole.name == "trace.pftrace" else whole.stem


def _goes_with(change: Change, run: RecordedRun) -> bool:
    """Whether a run can have a change at all."""
    try:
        change.policy(run)
    except UsageError:
        return False
    return True


def _saving(what: str, saving: float) -> str:
    if abs(saving) < _LEAST_SAVING:
        return f"Replayed with {what}, a step takes as long as before."
    return (
        f"Replayed with {what}, a step takes {abs(saving):.1%} {'less' if saving > 0 else 'more'}."
    )


def _flattened(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of nested settings, under dotted names; a list is one leaf."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flattened(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value)


def _shortened(words: str) -> str:
    return words if len(words) <= _MOST_LETTERS else f"{words[:_MOST_LETTERS]} ..."


def _sentence(words: str) -> str:
    """An error's sentence, as one of a page."""
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"


def _percent(part_ns: float, whole_ns: float) -> str:
    return f"{100 * part_ns / whole_ns:.1f}"


def _most(held: Sequence[float]) -> str:
    return f"{max(held):g}"

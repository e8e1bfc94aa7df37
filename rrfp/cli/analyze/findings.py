"""`rrfp analyze` and `rrfp analyze findings`: the causes of long steps on one screen."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING

import typer

from rrfp.cli.console import print_report, print_tables
from rrfp.cli.options import PEOPLE, Evaluations, Format, FrameFormat, Steps, TracePath, parse_steps
from rrfp.cli.output import left_out_json, note_evaluations, note_missing_records, note_warm_up
from rrfp.cli.progress import working

if TYPE_CHECKING:
    from rich.console import Console

    from rrfp.analyze.failure import Fatal
    from rrfp.analyze.findings import Diagnosis, Finding
    from rrfp.analyze.frames import Frames


# Fitting findings to a screen of 24 lines: texts are shortened, commands never.


_ROWS = 24
_ROWS_AROUND = 2
"""Lines for the prompt and a note on stderr."""
_INDENT = "   "


@dataclass(frozen=True, slots=True)
class Part:
    """One finding on a screen."""

    title: str
    words: str
    """Sentences that may be shortened."""
    command: str
    """One line to copy, which only the terminal breaks."""


def fitted(console: "Console", lead: str, parts: Sequence[Part], last: Sequence[str]) -> list[str]:
    """Return the lines of a screen: the lead, the parts and the last lines, with gaps between.

    A screen has 24 lines, or those of a higher terminal, less two. If there are more, the words of
    parts are shortened, the longest first. If that is not enough, gaps are dropped, and then parts
    from the last one on; a line then says how many are left out.
    """
    rows = max(_ROWS, console.height if console.is_terminal else 0) - _ROWS_AROUND
    num_parts = len(parts)
    while True:
        shown = parts[:num_parts]
        left = [f"{len(parts) - num_parts} more: --format md"] if num_parts < len(parts) else []
        words = [_wrapped(console, part.words, len(_INDENT)) for part in shown]
        lengths = [len(lines) for lines in words]
        blocks = _blocks(console, lead, shown, words, [*left, *last])
        for gap in (1, 0):
            fixed = _num_rows(console, blocks) - sum(lengths) + gap * (len(blocks) - 1)
            if fixed <= rows or (num_parts == 0 and not gap):
                counts = _shortened(lengths, max(0, rows - fixed))
                cut = [
                    _cut(lines, num, console.width)
                    for lines, num in zip(words, counts, strict=True)
                ]
                final = _blocks(console, lead, shown, cut, [*left, *last])
                empty = [""] * gap
                lines = [line for block in final for line in (*empty, *block)]
                return lines[gap:]
        num_parts -= 1


def _blocks(
    console: "Console",
    lead: str,
    parts: Sequence[Part],
    words: Sequence[Sequence[str]],
    last: Sequence[str],
) -> list[list[str]]:
    """Return the lines of the lead, of each part, and of each last line, a block for each. Texts
    are wrapped; commands and lines that begin with `Next: ` are not."""
    return [
        _wrapped(console, lead),
        *(
            [*_hanging(console, part.title), *lines, f"{_INDENT}{part.command}"]
            for part, lines in zip(parts, words, strict=True)
        ),
        *([line] if line.startswith("Next: ") else _wrapped(console, line) for line in last),
    ]


def _num_rows(console: "Console", blocks: Sequence[Sequence[str]]) -> int:
    """Return the number of rows that blocks of lines fill on the terminal, which breaks lines that
    are too long."""
    return sum(max(1, -(-len(line) // console.width)) for block in blocks for line in block)


def _wrapped(console: "Console", words: str, indent: int = 0) -> list[str]:
    """Wrap a text to the console's width, with every line indented by `indent` spaces."""
    from rich.text import Text

    lines = Text(words).wrap(console, console.width - indent)
    return [" " * indent + line.plain.rstrip() for line in lines]


def _hanging(console: "Console", words: str) -> list[str]:
    """Wrap a text and indent it by three spaces from the second line on."""
    first = _wrapped(console, words)[0]
    rest = words[len(first) :].strip()
    return [first, *(_wrapped(console, rest, len(_INDENT)) if rest else ())]


def _shortened(lengths: Sequence[int], most: int) -> list[int]:
    """Reduce numbers of lines until they sum to at most `most`, one at a time from the largest."""
    counts = list(lengths)
    while sum(counts) > most:
        longest = max(range(len(counts)), key=lambda place: (counts[place], place))
        counts[longest] -= 1
    return counts


def _cut(lines: Sequence[str], num: int, width: int) -> list[str]:
    """Return the first `num` lines, up to the end of their last sentence; all if there are no more.

    If no sentence ends in them, the last line ends in an ellipsis.
    """
    if num >= len(lines) or not num:
        return list(lines[:num])
    *first, last = lines[:num]
    for place in reversed(range(num)):
        whole, stop, _ = f"{lines[place]} ".rpartition(". ")
        if stop:
            return [*lines[:place], f"{whole}."]
    while len(last) + 2 > width and " " in last:
        last = last.rsplit(" ", 1)[0]
    return [*first, f"{last} …"]


_NOTABLE_ERROR = 0.01
"""A replay error above which the screen calls small savings uncertain."""

EXAMPLE = "Example: rrfp analyze runs/latest --steps 100:"


def findings(
    path: TracePath = None,
    steps: Steps = None,
    evaluations: Evaluations = False,
    output_format: FrameFormat = Format.TABLE,
) -> None:
    """Show what makes a run's steps long, and how much fixing each cause would save.

    Each suspect is fixed in a replay of the run: a slow stage, rank, replica or
    link, uneven microbatches, a fixed order, a memory bound. Causes that a
    replay cannot remove follow, with the share of the step they account for.

    If the run crashed, it shows each rank's last moments instead: its task or
    wait and what it waited for. With --steps it shows the findings of earlier
    steps.
    """
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.failure import fatal_of
    from rrfp.analyze.findings import finding_table
    from rrfp.analyze.frame_files import CachedTrace
    from rrfp.analyze.frames import choose_steps
    from rrfp.trace.locate import find_run, resolve_trace

    run = find_run(path)
    with working("Reading the trace"):
        cached = CachedTrace(resolve_trace(run))
        everything = cached.frames()
        fatal = fatal_of(everything)
    # Printed commands name the same run.
    name = f"./{run}" if str(run).startswith("-") else str(run)
    if fatal is not None and asked is None and not evaluations:
        if output_format in PEOPLE:
            _print_fatal(fatal, everything, name, markdown=output_format is Format.MD)
            return
        if output_format is Format.JSON and everything.windows.is_empty():
            typer.echo(json.dumps({"run": name, "fatal": fatal.as_json()}, indent=2))
            return
    with working("Reading the trace"):
        frames = choose_steps(everything, asked, evaluations=evaluations)
    note_missing_records(frames)
    note_warm_up(frames)
    with working("Replaying the run without each suspect"):
        found = cached.diagnosis(asked, evaluations=evaluations)
    if output_format in PEOPLE:
        note_evaluations(frames)
    table = finding_table(found, name, steps)
    chosen = "" if steps is None else f" --steps {steps}"
    chosen += " --evaluations" if evaluations else ""
    following = f"rrfp analyze report {quote(name)}{chosen} -o report.html"
    match output_format:
        case Format.TABLE:
            parts = _parts(found, name, steps)
            lead, last = _lead(found), [*_rest(found, frames), f"Next: {following}"]
            from rrfp.cli.console import console

            terminal = console()
            for line in fitted(terminal, lead, parts, last):
                terminal.print(line, soft_wrap=True)
        case Format.MD:
            print(_markdown(found, _rest(found, frames), name, steps, following))
        case Format.JSON:
            document = table.document() | {"evaluations_left_out": frames.num_left_out}
            if fatal is not None:
                document["fatal"] = fatal.as_json()
            typer.echo(json.dumps(document | left_out_json(frames), indent=2))
        case _:
            print_report([table], output_format)


def _print_fatal(fatal: "Fatal", frames: "Frames", name: str, *, markdown: bool) -> None:
    """Print on stdout the table of each rank's last moments, and the command for the finished steps
    if there are any."""
    from rrfp.analyze.failure import fatal_table

    print_tables([fatal_table(fatal, is_whole=markdown)], markdown=markdown)
    if not frames.windows.is_empty():
        print(f"Next, its finished steps: rrfp analyze {quote(name)} --steps 0:")


def _shown(found: "Diagnosis") -> "tuple[Finding, ...]":
    """Return the first NUM_FINDINGS findings, which the screen shows."""
    from rrfp.analyze.findings import NUM_FINDINGS

    return found.findings[:NUM_FINDINGS]


def _lead(found: "Diagnosis") -> str:
    """Return the first line: the headline and the share of time that ranks idle."""
    return f"{found.headline} Ranks idle {found.bubble_fraction:.0%} of the time."


def _rest(found: "Diagnosis", frames: "Frames") -> list[str]:
    """Return the sentences below the findings: why savings are unknown, that no fix saves 1%, or
    how far the replays can be trusted; empty if there is nothing to say."""
    if found.why_not_replayed:
        return [f"The savings of fixes are not known: {found.why_not_replayed}."]
    if not found.findings:
        return ["Fixing any one thing would save less than 1% of a step."]
    notes = []
    num_steps = frames.windows.height
    if found.num_replayed < num_steps:
        notes.append(f"Savings were computed from {found.num_replayed} of {num_steps} steps.")
    if found.replay_error >= _NOTABLE_ERROR:
        notes.append(f"Replays are {found.replay_error:.0%} off; smaller savings are uncertain.")
    return [" ".join(notes)] if notes else []


def _titled(finding: "Finding") -> str:
    """Return the title of a finding with what fixing it saves, or if unknown its share of a
    step."""
    part = (
        f"accounts for {finding.share:.0%} of a step"
        if finding.saving is None
        else f"fixing it saves {finding.saving:.0%}"
    )
    return f"{finding.title}: {part}"


def _parts(found: "Diagnosis", name: str, steps: str | None) -> list[Part]:
    """Make the numbered part of the screen for each finding that it shows."""
    return [
        Part(
            f"{number}. {_titled(each)}", f"{each.figures} {each.advice}", each.command(name, steps)
        )
        for number, each in enumerate(_shown(found), start=1)
    ]


def _markdown(
    found: "Diagnosis", rest: list[str], name: str, steps: str | None, following: str
) -> str:
    """Return the findings that a screen shows, the sentences below them and the next command as
    Markdown."""
    from rrfp.analyze.table import escape_markdown as escaped

    paragraphs = [escaped(_lead(found))]
    for number, each in enumerate(_shown(found), start=1):
        paragraphs.append(f"{number}. **{escaped(_titled(each))}**")
        paragraphs.append(f"   {escaped(f'{each.figures} {each.advice}')}")
        paragraphs.append(f"   ```sh\n   {each.command(name, steps)}\n   ```")
    paragraphs += map(escaped, rest)
    return "\n\n".join([*paragraphs, f"Next:\n\n```sh\n{following}\n```"])

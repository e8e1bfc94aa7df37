"""`rrfp analyze` and `rrfp analyze findings`: the causes of long steps, in one screen."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING

import typer

from rrfp.cli.console import print_report, print_tables
from rrfp.cli.options import PEOPLE, Evaluations, Format, FrameFormat, Steps, TracePath, parse_steps
from rrfp.cli.output import left_out_of, note_evaluations, note_missing_records, note_warm_up
from rrfp.cli.progress import working

if TYPE_CHECKING:
    from rich.console import Console

    from rrfp.analyze.failure import Fatal
    from rrfp.analyze.findings import Diagnosis, Finding
    from rrfp.analyze.frames import Frames


# What fits a screen of 24 lines: advice is shortened, commands never are.


_ROWS = 24
_ROWS_AROUND = 2
"""The prompt, and a note on stderr."""
_INDENT = "   "


@dataclass(frozen=True, slots=True)
class Part:
    """One finding on a screen."""

    title: str
    words: str
    """May be shortened."""
    command: str
    """On one line, to be copied; a terminal breaks it where it must."""


def fitted(console: "Console", lead: str, parts: Sequence[Part], last: Sequence[str]) -> list[str]:
    """The lines of a screen: the lead, the parts, and what is last, with empty lines between them.

    If they are more than a terminal has, or 24, words are shortened, the longest first; where that
    is not enough, empty lines are left out, and then parts from the last one on.
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
                kept = _shortened(lengths, max(0, rows - fixed))
                cut = [
                    _cut(lines, num, console.width) for lines, num in zip(words, kept, strict=True)
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
    return [
        _wrapped(console, lead),
        *(
            [*_hanging(console, part.title), *lines, f"{_INDENT}{part.command}"]
            for part, lines in zip(parts, words, strict=True)
        ),
        *([line] if line.startswith("Next: ") else _wrapped(console, line) for line in last),
    ]


def _num_rows(console: "Console", blocks: Sequence[Sequence[str]]) -> int:
    """How many rows of the terminal they take."""
    return sum(max(1, -(-len(line) // console.width)) for block in blocks for line in block)


def _wrapped(console: "Console", words: str, indent: int = 0) -> list[str]:
    from rich.text import Text

    lines = Text(words).wrap(console, console.width - indent)
    return [" " * indent + line.plain.rstrip() for line in lines]


def _hanging(console: "Console", words: str) -> list[str]:
    """Wrapped, and indented from the second line on."""
    first = _wrapped(console, words)[0]
    rest = words[len(first) :].strip()
    return [first, *(_wrapped(console, rest, len(_INDENT)) if rest else ())]


def _shortened(lengths: Sequence[int], most: int) -> list[int]:
    """How many lines of each there is room for; the longest give way first."""
    kept = list(lengths)
    while sum(kept) > most:
        longest = max(range(len(kept)), key=lambda place: (kept[place], place))
        kept[longest] -= 1
    return kept


def _cut(lines: Sequence[str], num: int, width: int) -> list[str]:
    """Return the first `num` lines, up to the end of their last sentence.

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
"""A replay that is further off makes small savings uncertain, which the screen states."""

EXAMPLE = "Example: rrfp analyze runs/latest --steps 100:"


def findings(
    path: TracePath = None,
    steps: Steps = None,
    evaluations: Evaluations = False,
    output_format: FrameFormat = Format.TABLE,
) -> None:
    """Show what makes a run's steps long, by what fixing it would save.

    Every suspect is fixed in a replay of the run: a slow stage, rank, replica or
    link, uneven microbatches, a binding order, a bound. What no replay can fix
    follows with what it owns of a step.

    Of a run that ended before its time it shows the last moments instead: what
    each rank was in and waited for. --steps asks for the steps before.
    """
    asked = None if steps is None else parse_steps(steps)

    from rrfp.analyze.failure import fatal_of
    from rrfp.analyze.findings import finding_table
    from rrfp.analyze.frame_files import CachedTrace
    from rrfp.analyze.frames import choose
    from rrfp.trace.locate import find_run, resolve_trace

    run = find_run(path)
    with working("Reading the trace"):
        cached = CachedTrace(resolve_trace(run))
        everything = cached.frames()
        fatal = fatal_of(everything)
    # The commands look at what this one has looked at.
    name = f"./{run}" if str(run).startswith("-") else str(run)
    if fatal is not None and asked is None and not evaluations:
        if output_format in PEOPLE:
            _print_fatal(fatal, everything, name, markdown=output_format is Format.MD)
            return
        if output_format is Format.JSON and everything.windows.is_empty():
            typer.echo(json.dumps({"run": name, "fatal": fatal.as_json()}, indent=2))
            return
    with working("Reading the trace"):
        frames = choose(everything, asked, evaluations=evaluations)
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
            typer.echo(json.dumps(document | left_out_of(frames), indent=2))
        case _:
            print_report([table], output_format)


def _print_fatal(fatal: "Fatal", frames: "Frames", name: str, *, markdown: bool) -> None:
    """The last moments of a run, and where to look next."""
    from rrfp.analyze.failure import fatal_table

    print_tables([fatal_table(fatal, is_whole=markdown)], markdown=markdown)
    if not frames.windows.is_empty():
        print(f"Next, its finished steps: rrfp analyze {quote(name)} --steps 0:")


def _shown(found: "Diagnosis") -> "tuple[Finding, ...]":
    from rrfp.analyze.findings import NUM_FINDINGS

    return found.findings[:NUM_FINDINGS]


def _lead(found: "Diagnosis") -> str:
    return f"{found.headline} Ranks idle {found.bubble_fraction:.0%} of the time."


def _rest(found: "Diagnosis", frames: "Frames") -> list[str]:
    """Return the sentences below the findings."""
    if found.why_not_replayed:
        return [f"What fixing would save is not known: {found.why_not_replayed}."]
    if not found.findings:
        return ["Fixing any one thing would save less than 1% of a step."]
    notes = []
    num_steps = frames.windows.height
    if found.num_replayed < num_steps:
        notes.append(f"Savings are those of {found.num_replayed} of the {num_steps} steps.")
    if found.replay_error >= _NOTABLE_ERROR:
        notes.append(f"Replays are {found.replay_error:.0%} off; smaller savings are uncertain.")
    return [" ".join(notes)] if notes else []


def _titled(finding: "Finding") -> str:
    part = (
        f"owns {finding.share:.0%} of a step"
        if finding.saving is None
        else f"fixing it saves {finding.saving:.0%}"
    )
    return f"{finding.title}: {part}"


def _parts(found: "Diagnosis", name: str, steps: str | None) -> list[Part]:
    return [
        Part(
            f"{number}. {_titled(each)}",
            f"{each.told} {each.advice}",
            each.command(name, steps),
        )
        for number, each in enumerate(_shown(found), start=1)
    ]


def _markdown(
    found: "Diagnosis", rest: list[str], name: str, steps: str | None, following: str
) -> str:
    from rrfp.analyze.table import escape_markdown as escaped

    paragraphs = [escaped(_lead(found))]
    for number, each in enumerate(_shown(found), start=1):
        paragraphs.append(f"{number}. **{escaped(_titled(each))}**")
        paragraphs.append(f"   {escaped(f'{each.told} {each.advice}')}")
        paragraphs.append(f"   ```sh\n   {each.command(name, steps)}\n   ```")
    paragraphs += map(escaped, rest)
    return "\n\n".join([*paragraphs, f"Next:\n\n```sh\n{following}\n```"])

"""How proposals are printed."""

import csv
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rrfp.analyze.number_format import Times, tell
from rrfp.cli.output import print_sheets
from rrfp.cli.tables import Column, Sheet
from rrfp.inputs import layout_string
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.knobs import Bytes, Hold, told_bytes
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Placement
from rrfp.trace.records import NS_PER_S
from rrfp.tune.flags import flags_of

if TYPE_CHECKING:
    from rrfp.cli.tune.trial import Tried
    from rrfp.tune.search import Found, Predicted
    from rrfp.tune.source import Candidate, Source

_WIDTH = 79
_FIELDS = (
    "flags",
    "run_flags",
    "megatron_flags",
    "predicted_s",
    "low_s",
    "high_s",
    "peak_bytes",
    "layers",
    "real_s",
    "predicted_for_real_s",
    "run",
)


def print_found(
    source: "Source", found: "Found", trials: "Sequence[Tried]", *, markdown: bool
) -> None:
    """The proposals as a table, and below it their flags."""
    print_sheets([_sheet(source, found, trials)], markdown=markdown)
    for number, each in enumerate(found.proposals, 1):
        flags = flags_of(each.candidate, source)
        print(f"\n**{number}**\n\n```sh" if markdown else f"\n{number}", end="")
        parts = [("rrfp train", flags.train), ("rrfp run", flags.run)]
        if flags.megatron is not None:
            parts.append(("Megatron-LM", flags.megatron))
        lines = [line for name, words in parts for line in _wrapped(name, words)]
        print("\n" + "\n".join(f"  {line}" for line in lines))
        if markdown:
            print("```")


def as_json(source: "Source", found: "Found", trials: "Sequence[Tried]") -> None:
    """The proposals, best first, and what they are held against."""
    own = found.own
    print(
        json.dumps(
            {
                "proposals": _rows(source, found, trials),
                "own": None
                if own is None
                else {
                    "is_run": source.own is not None,
                    "predicted_s": own.mean_s,
                    "low_s": own.low_s,
                    "high_s": own.high_s,
                    "peak_bytes": own.peak_bytes,
                    "measured_s": source.measured_s,
                },
                "memory": str(found.memory),
                "simulations": found.num_simulated,
                "not_searched": list(source.unsearched),
                "imbalance": found.imbalance,
            }
        )
    )


def print_csv(source: "Source", found: "Found", trials: "Sequence[Tried]") -> None:
    """A line a proposal."""
    writer = csv.DictWriter(sys.stdout, _FIELDS, lineterminator="\n")
    writer.writeheader()
    for row in _rows(source, found, trials):
        layers = row["layers"]
        told = " ".join(map(str, layers)) if isinstance(layers, list) else None
        writer.writerow({**row, "layers": told})


def _rows(source: "Source", found: "Found", trials: "Sequence[Tried]") -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for number, each in enumerate(found.proposals):
        flags, split = flags_of(each.candidate, source), each.candidate.split
        tried = trials[number] if number < len(trials) else None
        values = (
            " ".join(flags.train),
            " ".join(flags.run),
            None if flags.megatron is None else " ".join(flags.megatron),
            each.mean_s,
            each.low_s,
            each.high_s,
            each.peak_bytes,
            None if split is None else list(split),
            None if tried is None else tried.real_s,
            None if tried is None else tried.predicted_s,
            None if tried is None else str(tried.path),
        )
        rows.append(dict(zip(_FIELDS, values, strict=True)))
    return rows


def _sheet(source: "Source", found: "Found", trials: "Sequence[Tried]") -> Sheet:
    proposals, own = list(found.proposals), found.own
    rows = [*([] if own is None else [own]), *proposals]
    names = [*([] if own is None else [_own_name(source)]), *map(str, range(1, len(proposals) + 1))]
    times = Times(each.mean_s * NS_PER_S for each in rows)
    columns = [
        Column("", names, is_text=True, is_whole=True),
        Column("what", [told(each.candidate, source) for each in rows], is_text=True),
        Column("predicted", [times.tell(each.mean_s * NS_PER_S) for each in rows]),
        Column("5 to 95%\nof steps", [_interval(each, times) for each in rows]),
    ]
    if own is not None:
        columns.append(
            Column(
                "saved\n%", ["", *(f"{100 * (1 - p.mean_s / own.mean_s):z.1f}" for p in proposals)]
            )
        )
    if all(each.peak_bytes is not None for each in rows):
        columns.append(Column("peak\nmemory", [told_bytes(each.peak_bytes or 0) for each in rows]))
    if trials:
        cells = [[f"{tell(t.real_s * NS_PER_S)}", _error(t)] for t in trials]
        cells += [["", ""]] * (len(proposals) - len(trials))
        before = [] if own is None else [["", ""]]
        columns += [
            Column(heading, [each[place] for each in [*before, *cells]])
            for place, heading in enumerate(("real", "off\n%"))
        ]
    return Sheet(
        f"Best within {_memory(found.memory)}, of {found.num_simulated} simulated steps",
        columns,
        _notes(source, found),
        num_first=0 if own is None else 1,
        dispensable=("5 to 95%\nof steps",),
    )


def _own_name(source: "Source") -> str:
    return "as it ran" if source.own is not None else "1F1B"


def _interval(predicted: "Predicted", times: Times) -> str:
    low, high = (times.tell(each * NS_PER_S) for each in (predicted.low_s, predicted.high_s))
    return f"{low.split()[0]} - {high}"


def _error(tried: "Tried") -> str:
    return f"{100 * (tried.predicted_s / tried.real_s - 1):+.1f}"


def _memory(memory: Hold) -> str:
    if isinstance(memory, Bytes):
        return told_bytes(memory.num)
    return f"{memory} microbatch{'' if memory == 1 else 'es'}"


def _notes(source: "Source", found: "Found") -> list[str]:
    notes = []
    own = found.own
    if source.measured_s is not None and own is not None and source.own is not None:
        off = own.mean_s / source.measured_s - 1
        notes.append(
            f"The run's own steps took {tell(source.measured_s * NS_PER_S)} (mean); what is "
            f"predicted for them is {off:+.1%} off."
        )
    if found.imbalance is not None:
        notes.append(found.imbalance)
    notes += [f"Not searched: {each}." for each in source.unsearched]
    return notes


def told(candidate: "Candidate", source: "Source") -> str:
    """A candidate in a few words."""
    policy = candidate.policy
    words = [policy.hint.name]
    if policy.dispatch is not Dispatch.READY:
        words[0] += f" {policy.dispatch}"
    if policy.w is not WeightGradients.IDLE:
        words[0] += f", W {policy.w}"
    if candidate.chunks > 1:
        where = "a V" if candidate.placement is Placement.V else "a loop"
        words.append(f"{candidate.chunks} chunks in {where}")
    if isinstance(policy.hold, int):
        words.append(f"hold {policy.hold}")
    if policy.waits:
        words.append("patient")
    if candidate.admit is not Admit.GIVEN:
        words.append(str(candidate.admit))
    if candidate.joined != candidate.divided:
        words.append(f"{candidate.microbatches(source.shape.num_microbatches)} microbatches")
    if candidate.split is not None and len(set(candidate.split)) > 1:
        words.append(
            f"layers {layout_string(candidate.split)}"
            if len(candidate.split) <= _FEW_STAGES
            else "uneven layers"
        )
    return ", ".join(words)


_FEW_STAGES = 4
"""Of so many stages the layers are told in the table; those of more stand below it alone."""


def _wrapped(name: str, words: Sequence[str]) -> list[str]:
    """A name, and flags below it in lines that a shell joins again."""
    lines, line = [f"{name}"], " "
    for number, word in enumerate(words):
        room = _WIDTH - 2 - (0 if number == len(words) - 1 else 2)
        if len(line) + 1 + len(word) > room and line.strip():
            lines.append(f"{line} \\")
            line = " "
        line += f" {word}"
    return [*lines, line]

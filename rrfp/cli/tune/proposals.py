"""The table of the proposals of `rrfp tune`, and their flags."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rrfp.analyze.number_format import Times, format_time
from rrfp.analyze.table import BYTES, CHANGE, NAME, TEXT, Column, Table, Unit, seconds
from rrfp.inputs import layout_string
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.policy import Bytes, Dispatch, Hold, format_bytes
from rrfp.schedule.shape import Placement
from rrfp.trace.records import NS_PER_S
from rrfp.tune.flags import flags_of

if TYPE_CHECKING:
    from rrfp.cli.tune.trial import Tried
    from rrfp.tune.search import Found, Predicted
    from rrfp.tune.source import Candidate, Source

_WIDTH = 79
"""The width of the lines of flags."""
_FEW_STAGES = 4
"""The table has the layers of this many stages at most; the flags below it have all."""


def print_flags(source: "Source", found: "Found", *, markdown: bool) -> None:
    """Print the flags of each proposal, to be pasted."""
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


def proposal_table(source: "Source", found: "Found", trials: "Sequence[Tried]") -> Table:
    """The proposals, the best one first, below the run as it is."""
    own = found.own
    return Table(
        f"Best within {_memory(found.memory)}, of {found.num_simulated} simulated steps",
        [*_predictions(source, found), *_trials(found, trials)],
        _notes(source, found),
        has_lead=own is not None,
        dispensable=("5 to 95%\nof steps",),
        facts={
            # The rows take this place.
            "proposals": None,
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
        },
        rows_key="proposals",
    )


def _predictions(source: "Source", found: "Found") -> Iterator[Column]:
    proposals, own = list(found.proposals), found.own
    rows = [*([] if own is None else [own]), *proposals]
    mean_s = [each.mean_s for each in proposals]
    flags = [flags_of(each.candidate, source) for each in proposals]
    times = Times(each.mean_s * NS_PER_S for each in rows)

    def interval(predicted: "Predicted") -> str:
        low, high = (times.format(s * NS_PER_S) for s in (predicted.low_s, predicted.high_s))
        return f"{low.split()[0]} - {high}"

    def words(name: str, values: Sequence[Sequence[str] | None]) -> Column:
        return Column(None, [None if each is None else " ".join(each) for each in values], key=name)

    yield Column(
        "",
        [str(number) for number in range(1, len(proposals) + 1)],
        NAME,
        lead="as it ran" if source.own is not None else "1F1B",
    )
    yield Column(
        "what",
        [candidate_in_words(each.candidate, source) for each in proposals],
        TEXT,
        lead=None if own is None else candidate_in_words(own.candidate, source),
    )
    yield words("flags", [each.train for each in flags])
    yield words("run_flags", [each.run for each in flags])
    yield words("megatron_flags", [each.megatron for each in flags])
    yield Column(
        "predicted",
        mean_s,
        seconds(each.mean_s for each in rows),
        "predicted_s",
        lead=None if own is None else own.mean_s,
    )
    yield Column(
        "5 to 95%\nof steps",
        [interval(each) for each in proposals],
        lead=None if own is None else interval(own),
    )
    if own is not None:
        yield Column("saved\n%", [1 - each / own.mean_s for each in mean_s], CHANGE)
    yield Column(None, [each.low_s for each in proposals], key="low_s")
    yield Column(None, [each.high_s for each in proposals], key="high_s")
    yield Column(
        "peak\nmemory" if all(each.peak_bytes is not None for each in rows) else None,
        [each.peak_bytes for each in proposals],
        BYTES,
        "peak_bytes",
        lead=None if own is None else own.peak_bytes,
    )
    yield Column(None, [each.candidate.split for each in proposals], key="layers")


def _trials(found: "Found", trials: "Sequence[Tried]") -> Iterator[Column]:
    """The columns of the proposals that were tried for real."""
    untried = [None] * (len(found.proposals) - len(trials))
    real_s = [each.real_s for each in trials]
    predicted_s = [each.predicted_s for each in trials]
    off = [
        f"{100 * (predicted / real - 1):+.1f}"
        for predicted, real in zip(predicted_s, real_s, strict=True)
    ]
    unit = Unit(lambda time_s: format_time(time_s * NS_PER_S))
    yield Column("real" if trials else None, [*real_s, *untried], unit, "real_s")
    yield Column("off\n%" if trials else None, [*off, *untried])
    yield Column(None, [*predicted_s, *untried], key="predicted_for_real_s")
    yield Column(None, [*(str(each.path) for each in trials), *untried], key="run")


def _memory(memory: Hold) -> str:
    if isinstance(memory, Bytes):
        return format_bytes(memory.num)
    return f"{memory} microbatch{'' if memory == 1 else 'es'}"


def _notes(source: "Source", found: "Found") -> list[str]:
    notes = []
    own = found.own
    if source.measured_s is not None and own is not None and source.own is not None:
        off = own.mean_s / source.measured_s - 1
        notes.append(
            f"The run's own steps took {format_time(source.measured_s * NS_PER_S)} (mean); what is "
            f"predicted for them is {off:+.1%} off."
        )
    if found.imbalance is not None:
        notes.append(found.imbalance)
    notes += [f"Not searched: {each}." for each in source.unsearched]
    return notes


def candidate_in_words(candidate: "Candidate", source: "Source") -> str:
    """Return a candidate in a few words."""
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

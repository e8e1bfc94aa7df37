"""The sheets of what is played in virtual time: replays of a run, simulated settings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rrfp.analyze.number_format import Times, tell
from rrfp.cli.simulate.asked import SETTINGS, Asked
from rrfp.cli.tables import Column, Sheet, print_csv
from rrfp.planning.candidates import in_words
from rrfp.planning.trials import Row
from rrfp.schedule.knobs import told_bytes
from rrfp.schedule.named_hints import AUTO
from rrfp.trace.records import NS_PER_S, STEP, counted

if TYPE_CHECKING:
    from rrfp.replay.whatif import WhatIf


def whatif_sheet(report: "WhatIf", step_ns: float) -> Sheet:
    """A row a replay: the run as it was, then what each change would have made of its mean step,
    which took `step_ns`."""
    own, *others = [report.as_it_was, *report.rows]
    lengths_ns = [step_ns * (1 - row.saving) for row in others]
    times = Times([step_ns, *lengths_ns])
    return Sheet(
        "What a step would have taken, by replays of the run",
        [
            Column(
                "replayed",
                [f"{own.what}: {report.run.told}", *(row.what for row in others)],
                is_text=True,
            ),
            Column("time", [times.tell(each) for each in (step_ns, *lengths_ns)]),
            Column("saved\n%", ["", *(f"{100 * row.saving:z.1f}" for row in others)]),
            Column("held", [f"{max(row.peak_held):g}" for row in (own, *others)]),
            *_peak_column([row.peak_held_bytes for row in (own, *others)]),
        ],
        [
            f"{counted(len(report.run.steps), STEP)}, measured {tell(step_ns)} each (mean); "
            f"replayed as it was, the run is {report.replay_error:.1%} off.",
            report.bubble.whole.told,
            report.conclusion,
            report.caution,
        ],
        num_first=1,
    )


def _peak_column(peaks: Sequence[Sequence[int] | None]) -> list[Column]:
    """The most that any rank kept in each replay; nothing where sizes are not known."""
    known = [max(peak) for peak in peaks if peak is not None]
    if len(known) < len(peaks):
        return []
    return [Column("peak\nmemory", [*map(told_bytes, known)])]


def trial_sheet(title: str, labels: Sequence[str], rows: "Sequence[Row]") -> Sheet:
    """A row a simulated setting: how long it took, how near to the floor, and what it held."""
    times = Times(row.mean_s * NS_PER_S for row in rows)
    columns = [
        Column("time", [times.tell(row.mean_s * NS_PER_S) for row in rows]),
        Column("spread\n%", [f"{100 * row.spread:.1f}" for row in rows]),
        Column("over\nfirst", [f"{row.ratio_to(rows[0]):.3f}" for row in rows]),
        Column("over\nfloor", [f"{row.ratio_to_floor:.3f}" for row in rows]),
        Column("held", [f"{max(row.peak_held):g}" for row in rows]),
        Column("peak\nmemory", [_told_peak(row) for row in rows]),
        Column("bubble\n%", [f"{100 * row.bubble_fraction:.1f}" for row in rows]),
    ]
    if all(map(_is_of_one_size, rows)):
        columns = [each for each in columns if each.heading != "peak\nmemory"]
    if len(rows[0].trials) == 1:
        columns = [each for each in columns if not each.heading.startswith("spread")]
    if len(rows) == 1:
        columns = [each for each in columns if each.heading != "over\nfirst"]
        floor = rows[0].ratio_to_floor
        said = (
            "No schedule is faster: it is at the floor."
            if floor < 1.0005
            else f"{floor - 1:.1%} over the floor, below which no schedule gets."
        )
        return Sheet(title, columns, [said], num_names=0)
    best = min(range(len(rows)), key=lambda row: rows[row].mean_s)
    said = f"Fastest: {labels[best]}"
    if best:
        said += f", {1 - rows[best].ratio_to(rows[0]):.1%} less than the first row"
    return Sheet(title, [Column("row", labels, is_text=True), *columns], [f"{said}."])


def _is_of_one_size(row: "Row") -> bool:
    """Whether bytes say nothing that the number of microbatches does not."""
    peaks = zip(row.peak_held_bytes or (), row.peak_held, strict=False)
    return len({num_bytes / held for num_bytes, held in peaks}) <= 1


def _told_peak(row: "Row") -> str:
    """The most that a rank kept."""
    return "" if row.peak_held_bytes is None else told_bytes(max(row.peak_held_bytes))


# How `rrfp simulate` tells of its rows: their title, and as JSON and CSV.


def as_json(asked: Sequence[Asked], rows: Sequence[Row]) -> list[dict[str, object]]:
    return [
        {
            **each.described(),
            "chosen": chosen(each, row),
            "makespan_s": {"mean": row.mean_s, "min": row.min_s, "max": row.max_s},
            "spread": row.spread,
            "ratio_to_first": row.ratio_to(rows[0]),
            "floor_s": row.floor_s,
            "ratio_to_floor": row.ratio_to_floor,
            "load_s": row.load_s,
            "ratio_to_load": row.ratio_to_load,
            "bound_s": row.bound_s,
            "peak_held": row.peak_held,
            "peak_held_bytes": row.peak_held_bytes,
            "bubble_fraction": row.bubble_fraction,
        }
        for each, row in zip(asked, rows, strict=True)
    ]


def chosen(asked: Asked, row: Row) -> str | None:
    """What `--hint auto` chose for a row, in words; None if it names its hint."""
    return in_words(row.trials[0].policy) if asked.policy.hint.name == AUTO.name else None


def labels(asked: Sequence[Asked], rows: Sequence[Row]) -> list[str]:
    """What each row is called, with what was chosen for it."""
    return [
        each.label if (told := chosen(each, row)) is None else f"{each.label}: {told}"
        for each, row in zip(asked, rows, strict=True)
    ]


def print_rows(asked: Sequence[Asked], rows: Sequence[Row]) -> None:
    """A line a row: the keys of the JSON, the times in a column each, ranks by spaces."""
    table: list[dict[str, object]] = []
    for row, found in zip(rows, as_json(asked, rows), strict=True):
        times = {"mean_s": row.mean_s, "min_s": row.min_s, "max_s": row.max_s}
        found["peak_held"] = " ".join(map(str, row.peak_held))
        found["peak_held_bytes"] = " ".join(map(str, row.peak_held_bytes or ()))
        flat: dict[str, object] = {}
        for name, value in found.items():
            flat |= times if name == "makespan_s" else {name: value}
        table.append(flat)
    print_csv(table[0], (flat.values() for flat in table))


_ALWAYS_TOLD = ("hint", "dispatch", "links", "costs", "jitter")


def title(asked: Sequence[Asked], seeds: range, rows: Sequence[Row]) -> str:
    """What all rows share; of what is as it is by default, the chief settings. Of a single row,
    also what was chosen for it."""
    described = [each.described() for each in asked]
    own = {SETTINGS[name].flag for each in asked for name in each.own}
    shared = [
        (name, value)
        for name, value in described[0].items()
        if name not in own and all(each[name] == value for each in described)
    ]
    defaults = {each.flag: each.default_described for each in SETTINGS.values()}
    told = [
        f"{name} {value}"
        for name, value in shared
        if name in _ALWAYS_TOLD or value != defaults[name]
    ]
    last = f" to {seeds[-1]}" if len(seeds) > 1 else ""
    if len(rows) == 1 and (choice := chosen(asked[0], rows[0])) is not None:
        told[0] = f"hint auto ({choice})"
    return f"{', '.join(told)}; seed {seeds[0]}{last}"

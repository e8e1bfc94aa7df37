"""How `rrfp simulate` tells of its rows: their title, and as JSON and CSV."""

from collections.abc import Sequence
from dataclasses import fields

from rrfp.cli.sweep import Asked, field_of
from rrfp.cli.tables.csv_cells import print_csv
from rrfp.schedule.hints.auto import AUTO
from rrfp.simulate.choice.candidates import in_words
from rrfp.simulate.trial import Row


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
    return in_words(row.trials[0].policy) if asked.hint == AUTO.name else None


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
    defaults = {field.name: field.default for field in fields(asked[0])}
    own = {field_of(name) for each in asked for name in each.own}
    shared = [
        (name, value)
        for name, value in asked[0].described().items()
        if name not in own and all(getattr(each, name) == value for each in asked)
    ]
    told = [
        f"{name} {value}"
        for name, value in shared
        if name in _ALWAYS_TOLD or value != defaults[name]
    ]
    last = f" to {seeds[-1]}" if len(seeds) > 1 else ""
    if len(rows) == 1 and (choice := chosen(asked[0], rows[0])) is not None:
        told[0] = f"hint auto ({choice})"
    return f"{', '.join(told)}; seed {seeds[0]}{last}"

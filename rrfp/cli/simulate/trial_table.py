"""The table that `rrfp simulate` prints."""

from collections.abc import Iterator, Sequence
from typing import Any

from rrfp.analyze.table import BYTES, COMPACT, PERCENT, RATIO, TEXT, Column, Table, seconds
from rrfp.cli.simulate.row_options import SETTINGS, RowOptions
from rrfp.planning.candidates import describe_choice
from rrfp.planning.trials import Row
from rrfp.schedule.named_hints import AUTO

_ALWAYS_TITLED = ("hint", "dispatch", "links", "costs", "jitter")
"""The settings that a title shows even if they are the default."""


def trial_table(options: Sequence[RowOptions], seeds: range, rows: Sequence[Row]) -> Table:
    """Make the table: time, ratio to the lower bound, and memory of each row.

    A single row has neither a label nor a comparison with the first row.
    """
    labels = [_label(each, row) for each, row in zip(options, rows, strict=True)]
    is_single = len(rows) == 1
    return Table(
        _title(options, seeds, rows),
        [
            Column(None if is_single else "row", labels, TEXT),
            *_settings(options),
            Column(
                None, [_choice(*each) for each in zip(options, rows, strict=True)], key="chosen"
            ),
            *_results(rows),
        ],
        [_floor_sentence(rows[0]) if is_single else _fastest_sentence(labels, rows)],
        num_names=0 if is_single else 1,
        rows_key="rows",
    )


def _settings(options: Sequence[RowOptions]) -> Iterator[Column]:
    """Yield a column for programs for each setting of the rows."""
    described = [each.described() for each in options]
    for name in described[0]:
        yield Column(None, [each[name] for each in described], key=name)


def _results(rows: Sequence[Row]) -> Iterator[Column]:
    """Yield the columns of times, ratios, memory and bubble. Many are for programs only; so are the
    ratio to the first row if there is one row, the spread of one step, and bytes that add
    nothing."""
    mean_s = [row.mean_s for row in rows]
    first = rows[0]

    def column(key: str, values: Sequence[Any], path: str | None = None) -> Column:
        return Column(None, values, key=key, path=path)

    yield Column("time", mean_s, seconds(mean_s), "mean_s", "makespan_s.mean")
    yield column("min_s", [row.min_s for row in rows], "makespan_s.min")
    yield column("max_s", [row.max_s for row in rows], "makespan_s.max")
    spread = None if len(first.trials) == 1 else "spread\n%"
    yield Column(spread, [row.spread for row in rows], PERCENT, "spread")
    over_first = None if len(rows) == 1 else "over\nfirst"
    yield Column(over_first, [row.ratio_to(first) for row in rows], RATIO, "ratio_to_first")
    yield column("floor_s", [row.floor_s for row in rows])
    yield Column("over\nfloor", [row.ratio_to_floor for row in rows], RATIO, "ratio_to_floor")
    yield column("load_s", [row.load_s for row in rows])
    yield column("ratio_to_load", [row.ratio_to_load for row in rows])
    yield column("bound_s", [row.bound_s for row in rows])
    yield Column("held", [max(row.peak_held) for row in rows], COMPACT)
    yield column("peak_held", [row.peak_held for row in rows])
    peaks = [row.peak_held_bytes for row in rows]
    peak_memory = None if all(map(_is_of_one_size, rows)) else "peak\nmemory"
    yield Column(peak_memory, [None if each is None else max(each) for each in peaks], BYTES)
    yield column("peak_held_bytes", peaks)
    yield Column("bubble\n%", [row.bubble_fraction for row in rows], PERCENT, "bubble_fraction")


def _is_of_one_size(row: Row) -> bool:
    """Return True if the peak bytes per held microbatch are equal on all ranks of a row, so that
    bytes add no information; also if bytes are unknown."""
    peaks = zip(row.peak_held_bytes or (), row.peak_held, strict=False)
    return len({num_bytes / held for num_bytes, held in peaks}) <= 1


def _floor_sentence(row: Row) -> str:
    """Return a sentence about how far a row is above the lower bound; within 0.05% it equals the
    bound."""
    floor = row.ratio_to_floor
    if floor < 1.0005:
        return "No schedule can be faster: this is the lower bound."
    return f"{floor:.2f} times the lower bound that no schedule can beat."


def _fastest_sentence(labels: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a sentence that names the row with the smallest mean time, and its saving over the
    first row unless it is the first."""
    best = min(range(len(rows)), key=lambda row: rows[row].mean_s)
    less = f", {1 - rows[best].ratio_to(rows[0]):.1%} less than the first row" if best else ""
    return f"Fastest: {labels[best]}{less}."


def _choice(options: RowOptions, row: Row) -> str | None:
    """Describe the policy that `--hint auto` chose for a row; None for rows with other hints."""
    return describe_choice(row.trials[0].policy) if options.policy.hint.name == AUTO.name else None


def _label(options: RowOptions, row: Row) -> str:
    """Return the label of a row, followed by what `--hint auto` chose for it, if anything."""
    choice = _choice(options, row)
    return options.label if choice is None else f"{options.label}: {choice}"


def _title(options: Sequence[RowOptions], seeds: range, rows: Sequence[Row]) -> str:
    """Return the settings that all rows share, and the seeds: the main settings, and others that
    differ from the default.

    The title of a single row includes the choice of `--hint auto`.
    """
    described = [each.described() for each in options]
    own = {SETTINGS[name].flag for each in options for name in each.own}
    shared = [
        (name, value)
        for name, value in described[0].items()
        if name not in own and all(each[name] == value for each in described)
    ]
    defaults = {each.flag: each.default_described for each in SETTINGS.values()}
    words = [
        f"{name} {value}"
        for name, value in shared
        if name in _ALWAYS_TITLED or value != defaults[name]
    ]
    last = f" to {seeds[-1]}" if len(seeds) > 1 else ""
    if len(rows) == 1 and (choice := _choice(options[0], rows[0])) is not None:
        words[0] = f"hint auto ({choice})"
    return f"{', '.join(words)}; seed {seeds[0]}{last}"

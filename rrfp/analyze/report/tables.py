"""The tables of a report, each made from a run's tables or from a report's figures."""

import json
from collections.abc import Iterator, Sequence

from rrfp.analyze.bubbles import CAUSES, OVERHEAD, bubbles
from rrfp.analyze.deviations import deviations
from rrfp.analyze.frames import Frames
from rrfp.analyze.html import Markup, paragraph, table
from rrfp.analyze.memory.peaks import Memory
from rrfp.analyze.misalignment import misalignment
from rrfp.analyze.path.critical_path import critical_path
from rrfp.analyze.units import Unit, apportioned, tell, tenths
from rrfp.replay.whatif import Row, WhatIf
from rrfp.schedule.hold import told_bytes
from rrfp.trace.steps import step_name

_MOST_OWNERS = 12
_MOST_SETTINGS = 200
_MOST_LETTERS = 300


def bubble_table(frames: Frames, structural_shares: Sequence[float]) -> Markup:
    """Each rank's time by cause. Without structural shares, because the run cannot be replayed, the
    table leaves out the structural part and the excess; without launches, the overhead's parts."""
    divided = bubbles(frames).with_structural(structural_shares)
    causes = [cause for cause in CAUSES if any(rank.causes_ns[cause] for rank in divided.ranks)]
    overhead_parts = [*divided.overhead_parts_ns] if OVERHEAD in causes else []
    rows = []
    for rank in divided.ranks:
        work, *idle = apportioned(
            [rank.busy_ns, *(rank.causes_ns[cause] for cause in causes)], 1000
        )
        parts = [work, 1000 - work]
        if rank.structural_ns is not None:
            structural = round(1000 * rank.structural_ns / rank.window_ns)
            parts += [structural, 1000 - work - structural]
        if overhead_parts:
            # The overhead comes last.
            idle += apportioned([*rank.overhead_parts_ns.values()], idle[-1])
        stages = " ".join(map(str, rank.stages))
        rows.append([rank.rank, stages, *map(tenths, [*parts, *idle])])
    names = ["structural", "excess"] if structural_shares else []
    return table(
        "Each rank's time, in % of it",
        [
            *("rank", "stage", "work", "bubble", *names, *causes),
            *(f"overhead: {part}" for part in overhead_parts),
        ],
        rows,
        texts=0,
    )


def critical_path_table(frames: Frames) -> Markup:
    """Who owns how much of the slowest step's critical path."""
    path = critical_path(frames)
    owners = path.owners
    rows: list[list[object]] = [
        [owner.pp_rank, owner.kind, tell(owner.time_ns)] for owner in owners[:_MOST_OWNERS]
    ]
    times_ns = [owner.time_ns for owner in owners[:_MOST_OWNERS]]
    rest_ns = path.length_ns - sum(times_ns)
    if rest_ns:
        rows.append([f"{len(owners) - _MOST_OWNERS} more", "", tell(rest_ns)])
        times_ns.append(rest_ns)
    for row, tenth in zip(rows, apportioned(times_ns, 1000), strict=True):
        row.append(tenths(tenth))
    return table(
        f"Critical path of {step_name(path.step)}: who owns its {tell(path.length_ns)}",
        ["pipeline rank", "kind", "time", "%"],
        rows,
        texts=2,
    )


def memory_table(found: Memory) -> Markup:
    """The most that each rank held, when, and how much more it could have held."""
    return table(
        "Bytes of activations that each rank held at most",
        *(
            ["rank", "stage", "held", "microbatches", "in", "bound", "room"],
            [
                [
                    each.rank,
                    " ".join(map(str, each.stages)),
                    told_bytes(each.peak_held_bytes),
                    f"{each.peak_held:g}",
                    step_name(each.peak_step),
                    "" if each.budget_bytes is None else told_bytes(each.budget_bytes),
                    told_bytes(each.room_bytes),
                ]
                for each in found.ranks
            ],
        ),
        texts=0,
    )


def deviation_table(frames: Frames) -> Markup:
    """How far each pipeline rank departed from its hint's order."""
    return table(
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
            for row in deviations(frames).to_dicts()
        ],
    )


def link_table(frames: Frames) -> Markup:
    """How messages and stages missed each other, link by link."""
    links = misalignment(frames)
    columns = [f"{what}_s_{share}" for what in ("queued", "starved") for share in ("median", "p95")]
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


def whatif_table(report: WhatIf, step_ns: float) -> Markup:
    """What a step, of `step_ns` as it was, would have taken with each change."""
    own = report.as_it_was
    knows_bytes = own.peak_held_bytes is not None
    return table(
        "What a step would have taken",
        ["replayed", "time", "saved %", "most held", *["peak memory"] * knows_bytes],
        [
            [f"as it was: {report.run.told}", tell(step_ns), "", *_most(own)],
            *(
                [
                    row.what,
                    tell(step_ns * (1 - row.saving)),
                    f"{100 * row.saving:z.1f}",
                    *_most(row),
                ]
                for row in report.rows
            ),
        ],
    )


def settings_parts(frames: Frames) -> Iterator[Markup]:
    """What the run was set to, and how many settings the table leaves out."""
    flat = list(_flattened(frames.settings))
    if not flat:
        yield paragraph("The trace does not tell the settings of its run.")
        return
    rows = [(key.removeprefix("settings."), shortened(value)) for key, value in flat]
    yield table("What the run was set to", ["setting", "value"], rows[:_MOST_SETTINGS], texts=2)
    if len(rows) > _MOST_SETTINGS:
        yield paragraph(f"{len(rows) - _MOST_SETTINGS} more are not shown.")


def shortened(words: str) -> str:
    """At most 300 letters of a text."""
    return words if len(words) <= _MOST_LETTERS else f"{words[:_MOST_LETTERS]} ..."


def _flattened(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of nested settings, under dotted names; a list is one leaf."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flattened(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value)


def _most(row: Row) -> list[str]:
    """What a rank held at most: microbatches, and bytes where they are known."""
    peaks = row.peak_held_bytes
    return [f"{max(row.peak_held):g}", *([] if peaks is None else [told_bytes(max(peaks))])]

"""The sheets of reports on a run: what each says in figures, and in a sentence."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rrfp.analyze.colors import CAUSE_COLOURS, KIND_COLOURS, LINK_COLOUR
from rrfp.analyze.number_format import Times, apportioned, outliers, tell, tenths
from rrfp.cli.tables import Column, Sheet
from rrfp.trace.records import NS_PER_S, count_of, step_name

if TYPE_CHECKING:
    import polars as pl

    from rrfp.analyze.bubbles import Bubbles, RankBubbles
    from rrfp.analyze.critical_path import CriticalPath
    from rrfp.analyze.failure import Fatal, LastMoments


_LINK = "link"
"""As `rrfp.analyze.critical_path` has it, which is slow to import."""
_HEADINGS = {
    "warmup": "warm-\nup",
    "forward_input": "fwd\ninput",
    "backward_input": "bwd\ninput",
    "patience": "pa-\ntience",
    "coordination": "coordi-\nnation",
    "transfer": "trans-\nfer",
    "gradient_sync": "grad\nsync",
    "overhead": "over-\nhead",
}
_COLOURS = KIND_COLOURS | {_LINK: LINK_COLOUR} | CAUSE_COLOURS


def bubble_sheet(bubbles: "Bubbles", why_not_replayed: str = "", *, by_rank: bool = False) -> Sheet:
    """A row a stage, or a rank, and a total: how much of the time was work, how much bubble, and
    why. Work and causes of a row sum to 100.0; causes that nobody had are left out. Where no stage
    has several ranks, its row names its rank too."""
    by_stage: dict[int, list[RankBubbles]] = defaultdict(list)
    for rank in bubbles.ranks:
        by_stage[rank.rank if by_rank else rank.pp_rank].append(rank)
    rows = [*by_stage.values(), list(bubbles.ranks)]
    causes = [cause for cause, total_ns in bubbles.causes_ns.items() if total_ns]
    shares = [
        apportioned(
            [sum(r.busy_ns for r in row), *(sum(r.causes_ns[c] for r in row) for c in causes)], 1000
        )
        for row in rows
    ]
    stages = [_stages(row[0].stages) for row in rows[:-1]]
    names = [Column("stage", [*stages, "all"], is_text=True)]
    if by_rank or len(bubbles.ranks) == len(by_stage):
        ranks = [str(row[0].rank) for row in rows[:-1]]
        names = [
            Column("rank", [*ranks, "all"]),
            Column("stage", [*stages, ""], is_text=True),
        ]
    work, *others = zip(*shares, strict=True)
    overhead = dict(zip(causes, others, strict=True)).get("overhead", (0,))[-1]
    bubble = [1000 - each for each in work]
    return Sheet(
        f"Where the time of {_counted(bubbles.steps)} went, in % of it",
        [
            *names,
            Column("work", [*map(tenths, work)]),
            Column("bubble", [*map(tenths, bubble)], marked=outliers(bubble[:-1])),
            *(
                Column(_HEADINGS.get(cause, cause), [*map(tenths, of)], colour=_COLOURS[cause])
                for cause, of in zip(causes, others, strict=True)
            ),
        ],
        [_told_parts(bubbles, why_not_replayed), _told_overhead(bubbles, overhead)],
        num_names=len(names),
        has_total=True,
    )


def _told_parts(bubbles: "Bubbles", why_not_replayed: str) -> str:
    if bubbles.parts is not None:
        return bubbles.parts.told
    told = f"{bubbles.bubble_fraction:.0%} of the ranks' time was bubble."
    if not why_not_replayed:
        return told
    return f"{told} What of it is structural is not known: {why_not_replayed}."


def _told_overhead(bubbles: "Bubbles", share: int) -> str:
    """What all ranks' overhead was, in tenths that sum to its share in the table; empty where that
    is nothing, or the run has no launches."""
    parts_ns = bubbles.overhead_parts_ns
    if not share or not parts_ns:
        return ""
    launch, decision = map(tenths, apportioned([*parts_ns.values()], share))
    return f"The overhead of {tenths(share)}% is {launch}% launch and {decision}% decision."


def path_sheet(path: "CriticalPath", stages: dict[int, Sequence[int]]) -> Sheet:
    """A row a stage, a column a kind: who owns how much of a step's critical path. Cells are
    rounded so that rows and columns add up to the step."""
    owners = path.owners
    total_ns = sum(owner.time_ns for owner in owners)
    times = Times([path.length_ns])
    cells = dict(
        zip(
            ((owner.pp_rank, owner.kind) for owner in owners),
            apportioned(
                [owner.time_ns for owner in owners], round(10 * total_ns / times.unit.value)
            ),
            strict=True,
        )
    )
    ranks = sorted({pp_rank for pp_rank, _ in cells})
    by_kind: dict[str, int] = defaultdict(int)
    for (_, kind), tenth in cells.items():
        by_kind[kind] += tenth
    # Of a damaged trace there may be others.
    kinds = [kind for kind in dict.fromkeys((*_COLOURS, *by_kind)) if by_kind.get(kind)]
    sums = [sum(cells.get((pp_rank, kind), 0) for kind in by_kind) for pp_rank in ranks]
    last = len(ranks) > 1
    columns = [
        Column("stage", [*(_stages(stages[each]) for each in ranks), *["all"] * last], is_text=True)
    ]
    for kind in kinds:
        of_kind = [cells.get((pp_rank, kind), 0) for pp_rank in ranks]
        texts = [tenths(each) if each else "" for each in of_kind]
        columns.append(
            Column(
                _HEADINGS.get(kind, kind),
                [*texts, *[tenths(sum(of_kind))] * last],
                colour=_COLOURS.get(kind, ""),
            )
        )
    of_step = apportioned(sums, round(1000 * total_ns / path.length_ns))
    columns += [
        Column("sum", [*map(tenths, sums), *[tenths(sum(sums))] * last], marked=outliers(sums)),
        Column("%", [*map(tenths, of_step), *[tenths(sum(of_step))] * last]),
    ]
    said = f"{step_name(path.step).capitalize()} took {tell(path.length_ns)}."
    return Sheet(
        f"Who owns the critical path of {step_name(path.step)}, in {times.unit.symbol}",
        columns,
        [f"{said} {_told_owners(path, stages)}"],
        has_total=last,
    )


def _told_owners(path: "CriticalPath", stages: dict[int, Sequence[int]]) -> str:
    owners = path.owners
    if path.pp_rank is None:
        most = owners[0]
        return (
            f"Most of it is {most.kind} of {_stage(stages[most.pp_rank])}, "
            f"{most.time_ns / path.length_ns:.0%}; links and waits own {path.idle_fraction:.0%}."
        )
    of_rank = stages[path.pp_rank]
    named, is_one = _stage(of_rank).capitalize(), len(of_rank) == 1
    if not owners:
        return f"{named} {'is' if is_one else 'are'} not on the critical path."
    share = sum(owner.time_ns for owner in owners) / path.length_ns
    return f"{named} {'owns' if is_one else 'own'} {share:.1%} of it, most as {owners[0].kind}."


def deviation_sheet(
    report: "pl.DataFrame", stages: dict[int, Sequence[int]], *, by_rank: bool = False
) -> Sheet:
    """A row a stage, or a rank: how far it departed from its hint's order."""
    rows = report.to_dicts()
    share = [row["deviating_fraction"] for row in rows]
    names = [Column("stage", [_stages(stages[row["pp_rank"]]) for row in rows], is_text=True)]
    if by_rank:
        names.insert(0, Column("rank", [str(row["rank"]) for row in rows]))
    worst = max(rows, key=lambda row: row["deviating_fraction"], default=None)
    if worst is None or not worst["deviating_fraction"]:
        said = "Every stage ran its tasks in its hint's order."
    else:
        said = (
            f"{_stage(stages[worst['pp_rank']]).capitalize()} departs most: in "
            f"{worst['deviating_fraction']:.0%} of its dispatches the hint ranks another "
            "unfinished task higher. Under ready dispatch that is no fault by itself."
        )
    return Sheet(
        "How far each stage departed from its hint's order",
        [
            *names,
            Column("dispatches", [str(row["dispatches"]) for row in rows]),
            Column("deviating\n%", [f"{100 * each:.1f}" for each in share], marked=outliers(share)),
            Column("tasks passed\nover, mean", [f"{row['mean_displacement']:.2f}" for row in rows]),
            Column("most", [str(row["max_displacement"]) for row in rows]),
            Column(
                "pairs the other\nway round, %",
                [f"{100 * row['kendall_tau_distance']:.1f}" for row in rows],
            ),
        ],
        [said],
        num_names=len(names),
    )


_FIGURES = ("queued_s_median", "queued_s_p95", "starved_s_median", "starved_s_p95")


def link_sheet(
    report: "pl.DataFrame", stages: dict[int, Sequence[int]], *, by_rank: bool = False
) -> Sheet:
    """A row a link: how long messages lay queued for their stage, and how long it was starved."""
    rows = report.to_dicts()
    figures_ns = {name: [row[name] * NS_PER_S for row in rows] for name in _FIGURES}
    times = Times(each for column in figures_ns.values() for each in column)

    def ends(row: dict[str, int]) -> str:
        return f"{_stages(stages[row['from']])} → {_stages(stages[row['to']])}"

    names = [
        Column("stages", [f"{ends(row)} {row['direction']}" for row in rows], is_text=True),
    ]
    if by_rank:
        ranks = [f"{row['from_rank']} → {row['to_rank']}" for row in rows]
        names.insert(0, Column("ranks", ranks, is_text=True))
    headings = ("queued,\nmedian", "queued,\np95", "starved,\nmedian", "starved,\np95")
    said = []
    for name, words in (
        ("starved_s_p95", "A stage idles longest for messages on {}, {} (p95)."),
        ("queued_s_p95", "Messages lie longest before a busy stage on {}, {} (p95)."),
    ):
        worst = max(rows, key=lambda row: row[name], default=None)
        if worst is not None and worst[name] > 0:
            said.append(words.format(ends(worst), times.tell(worst[name] * NS_PER_S)))
    return Sheet(
        "How messages and their stages missed each other, link by link",
        [
            *names,
            Column("messages", [str(row["messages"]) for row in rows]),
            *(
                Column(
                    heading,
                    [times.tell(each) for each in figures_ns[name]],
                    marked=outliers(figures_ns[name]) if name.endswith("p95") else (),
                )
                for heading, name in zip(headings, _FIGURES, strict=True)
            ),
        ],
        said or ["No message lay queued, and no stage was starved."],
        num_names=len(names),
    )


def stages_by_rank(run: "pl.DataFrame") -> dict[int, Sequence[int]]:
    """The stages of each pipeline rank, from the table of a run's ranks."""
    return dict(run.select("pp_rank", "stages").unique("pp_rank").iter_rows())


def _stages(stages: Iterable[int]) -> str:
    return " ".join(map(str, sorted(stages)))


def _stage(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {_stages(stages)}"


def _counted(steps: Sequence[int]) -> str:
    return count_of(steps) if len(steps) > 1 else step_name(steps[0])


# The sheet of a run's last moments, a row a rank.


MOST_RANKS = 10
"""Rows that fit a screen of 24 lines."""


def fatal_sheet(fatal: "Fatal", *, is_whole: bool) -> Sheet:
    """What each rank did last, what it was in and what it waited for, up to the end of the run. If
    it is not to be whole and ranks are many, those that waited for nobody come first, then those
    that waited longest."""
    ranks = list(fatal.ranks)
    left = 0
    if not is_whole and len(ranks) > MOST_RANKS:
        ranks.sort(key=lambda each: (each.awaited_rank is not None, -(each.amid_s or 0.0)))
        left = len(ranks) - MOST_RANKS
        ranks = ranks[:MOST_RANKS]
    return Sheet(
        f"{fatal.sentence[:1].upper()}{fatal.sentence[1:]}\n"
        f"What each rank did when it ended, in {step_name(fatal.step)}",
        [
            Column("rank", [str(each.rank) for each in ranks]),
            Column("ended last", [each.last or "-" for each in ranks], is_text=True),
            Column("before\nthe end", [_told(each.last_ended_s) for each in ranks]),
            Column("was in", [_amid(each, fatal.step) for each in ranks], is_text=True),
            Column("for", [_told(each.amid_s) for each in ranks]),
            Column("waited for", [_awaited(each) for each in ranks], is_text=True),
        ],
        [f"{left} more ranks waited for others: --format json" if left else ""],
    )


def _amid(each: "LastMoments", step: int) -> str:
    if each.amid is None:
        return "-"
    elsewhere = "" if each.step in (step, None) else f" of {step_name(each.step)}"
    return f"{each.amid}{elsewhere}"


def _awaited(each: "LastMoments") -> str:
    whom = None if each.awaited_rank is None else f"rank {each.awaited_rank}"
    return " of ".join(filter(None, (each.awaited_task, whom))) or "-"


def _told(seconds: float | None) -> str:
    return "-" if seconds is None else tell(seconds * NS_PER_S)

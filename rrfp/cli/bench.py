"""`rrfp bench`: compare readiness-first with the orders and systems in common use."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rrfp.cli.console import print_rows, print_tables
from rrfp.cli.declared_options import one_of, with_options
from rrfp.cli.options import RowFormat
from rrfp.cli.output import missing_for_charts
from rrfp.cli.progress import progress, working
from rrfp.errors import StoppedError, UsageError, did_you_mean
from rrfp.inputs import setting
from rrfp.requirements import install_hint
from rrfp.runtime.pace import MOST_OVER_PACE
from rrfp.schedule.admission import Admit
from rrfp.trace.run_dir import own_files

if TYPE_CHECKING:
    from rrfp.race.entries import Failure
    from rrfp.race.lineup import Lineup
    from rrfp.race.results import ResultRow
    from rrfp.race.runner import BenchDir, Hosts, ModeledTimes
    from rrfp.trace.run_dir import RunDir
    from rrfp.train.settings import TrainSettings


def _print_results(lineup: "Lineup", rows: "Sequence[ResultRow]", output_format: RowFormat) -> None:
    """Print results on stdout: tables by case for people, and one table of all rows for
    programs."""
    from rrfp.race.result_tables import case_tables, result_table

    match output_format:
        case RowFormat.TABLE | RowFormat.MD:
            tables = [table for each in lineup.presets for table in case_tables(each, rows)]
            print_tables(tables, markdown=output_format is RowFormat.MD)
        case RowFormat.JSON:
            print(json.dumps(result_table(rows).document(), allow_nan=False))
        case RowFormat.CSV:
            print_rows(result_table(rows), output_format)


def warn_over_pace(rows: "Sequence[ResultRow]") -> None:
    """Warn on stderr if in any row more than 2% of the tasks took longer than their modelled time;
    the warning names the worst row."""
    over = [row for row in rows if (row.over_pace or 0.0) > MOST_OVER_PACE]
    if over:
        worst = max(over, key=lambda row: row.over_pace or 0.0)
        typer.echo(
            f"Warning: in {len(over)} of {len(rows)} rows the work of more than "
            f"{MOST_OVER_PACE:.0%} of the tasks took longer than its model, {worst.over_pace:.1%} "
            f"in {worst.lineup_row.case.name}: {worst.label}; give them longer ones (--task-ms, or "
            "other costs), or the machine less to do",
            err=True,
        )


def draw_charts(lineup: "Lineup", rows: "Sequence[ResultRow]", directory: Path) -> None:
    """Draw a chart for each preset as .svg and .png in `directory`, and print their paths on
    stderr. A preset without figures gets none. Without the extra `report` it only prints how to
    install it."""
    if missing_for_charts():
        typer.echo(f"Charts need another package: {install_hint('report')}", err=True)
        return
    from rrfp.analyze.charts.export import save
    from rrfp.race.chart import race_chart

    for preset in lineup.presets:
        chart = race_chart(preset, [row for row in rows if row.lineup_row.preset == preset.name])
        if chart is None:
            continue
        with working("Drawing the charts"):
            for ending in ("svg", "png"):
                save(chart, directory / f"{preset.name}.{ending}")
        typer.echo(
            f"The chart of {preset.name} is {directory / preset.name}.svg and .png", err=True
        )


class ScaleName(StrEnum):
    """The size of a race."""

    TINY = "tiny"
    LAPTOP = "laptop"
    NODE = "node"
    CLUSTER = "cluster"


class PeerChoice(StrEnum):
    """The projects that are compared besides Megatron and rrfp."""

    ALL = "all"
    TORCH = "torch"
    DEEPSPEED = "deepspeed"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of `rrfp bench`."""

    preset: list[str] = setting(
        MISSING,
        "rq1 to rq6; several presets share common runs.",
        is_argument=True,
        metavar="PRESET",
        completes=one_of(*(f"rq{number}" for number in range(1, 7))),
    )
    scale: ScaleName = setting(
        ScaleName.LAPTOP,
        "tiny (a smoke test), laptop (default: 8 ranks, 32 microbatches), node "
        "(16, 64) or cluster (32, 128).",
        metavar="SCALE",
    )
    peer: PeerChoice = setting(
        PeerChoice.ALL,
        "Other projects to compare: all (default), torch (PyTorch's pipelining), deepspeed (if "
        "installed) or none.",
        metavar="PROJECT",
    )
    system: list[str] | None = setting(
        None, "Only this system, beside megatron-1f1b; repeatable.", metavar="NAME"
    )
    profile: list[str] | None = setting(
        None,
        "Only these costs (as of simulate --costs) with this jitter; repeatable.",
        metavar="COSTS+JITTER",
    )
    hold: list[str] | None = setting(
        None,
        "Only this memory bound of a rank: a number of microbatches, 40GiB, 1.5x (of 1F1B's "
        "largest peak in bytes), or paper (a limit of 32); repeatable.",
        metavar="SIZE",
    )
    admit: list[Admit] | None = setting(
        None,
        "Only this order of microbatches of rrfp's systems: given, pyramid, or plan (searched "
        "by simulation, from modelled costs); repeatable.",
        metavar="ORDER",
    )
    steps: int | None = setting(None, "Rounds: timed steps of each system.", least=1, most=10_000)
    task_ms: float | None = setting(
        None,
        "Mean time of F, B and W of a rank, in ms, for language, multimodal and uniform costs.",
        least=0.1,
        most=5_000,
        metavar="MS",
    )
    seed: int | None = setting(
        None, "Seed of data, costs and jitter of round 0 [1234].", least=0, most=2**32 - 1
    )
    out: Path | None = setting(None, "Directory of the results [runs/bench-PRESET-SCALE].")
    force: bool = setting(False, "Remove existing results.")
    retry: bool = setting(False, "Run failed entries again.")
    output_format: RowFormat = setting(
        RowFormat.TABLE, "How to print the rows", flag="format", metavar="FORMAT"
    )
    nnodes: int = setting(1, "Hosts", least=1)
    node_rank: int = setting(0, "Number of this host", least=0)
    rdzv_endpoint: str | None = setting(
        None, "Address of host 0, at which the hosts rendezvous.", metavar="HOST:PORT"
    )


@with_options(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Compare readiness-first with the orders and systems in common use.

    rq1 end to end, rq2 where time goes, rq3 injected jitter, rq4 hints, rq5
    scaling, rq6 memory and sameness. Real processes exchange real messages, and
    tasks take modelled times, so that results do not depend on the machine. In
    each round every system runs one step, with the same data, costs and jitter.
    "x megatron" is the speed relative to Megatron's 1F1B. After an interruption
    the same command continues.

    Example: rrfp bench rq1 --scale laptop --profile multimodal --steps 10
    """
    from rrfp.race.lineup import RaceOptions, line_up
    from rrfp.race.presets import PRESETS, SCALES
    from rrfp.race.results import results
    from rrfp.race.runner import BenchDir, Hosts, check, model_entries
    from rrfp.race.systems import Project, check_installed, system_named

    names = list(dict.fromkeys(options.preset))
    for name in names:
        if name not in PRESETS:
            raise UsageError(
                f"'{name}' is not a preset ({', '.join(PRESETS)}){did_you_mean(name, PRESETS)}"
            )
    peers = tuple(each for each in Project if options.peer in (PeerChoice.ALL, each))
    if options.peer is not PeerChoice.ALL:
        for project in peers:
            check_installed(project, f"--peer {options.peer}")
    asked = RaceOptions(
        peers=peers,
        holds=tuple(_bound(text) for text in options.hold or ()),
        admits=tuple(dict.fromkeys(options.admit or ())),
        profiles=tuple(dict.fromkeys(options.profile or ())),
        systems=tuple(system_named(name) for name in options.system or ()),
        steps=options.steps,
        task_ms=options.task_ms,
        seed=options.seed,
    )
    scale = SCALES[options.scale]
    lineup = line_up([PRESETS[name] for name in names], scale, asked)
    if options.nnodes > 1 and options.out is None:
        raise UsageError("several hosts need --out DIR on a file system that all of them share")
    directory = options.out or Path("runs") / f"bench-{'-'.join(names)}-{options.scale}"
    hosts = Hosts(options.nnodes, options.node_rank, options.rdzv_endpoint)
    check(lineup, hosts, directory)
    found = BenchDir(directory)
    if not hosts.leads:
        _join(lineup, found, hosts, retry=options.retry)
        return
    if options.force and options.nnodes > 1:
        raise UsageError(
            f"--force on several hosts could take from one what another has begun; remove "
            f"{directory} instead"
        )
    with own_files(), found.prepare(lineup, force=options.force):

        def model() -> "dict[str, ModeledTimes]":
            with progress("Simulating", len(lineup.entries)) as advance:
                return model_entries(lineup.entries.values(), found.models, lambda: advance(1))

        # Other hosts do not wait for the models, so several hosts get no estimate.
        models = model() if options.nnodes == 1 else None
        try:
            _race(lineup, found, hosts, models, retry=options.retry)
        except (KeyboardInterrupt, StoppedError):
            typer.echo(
                f"What has ended is kept in {directory}; the same command goes on from there",
                err=True,
            )
            raise
        rows = results(lineup, found.ended(lineup), models or model())
        _print_results(lineup, rows, options.output_format)
        warn_over_pace(rows)
        draw_charts(lineup, rows, directory)


def _bound(text: str) -> str:
    """Return the name of a memory bound in presets: `paper` itself, or `hold SIZE` for a size."""
    return text if text == "paper" else f"hold {text}"


def _join(lineup: "Lineup", found: "BenchDir", hosts: "Hosts", *, retry: bool) -> None:
    """Run this host's ranks of all races, on any host but host 0, and print no results. It prints
    on stderr which address it joins, and failed entries."""
    from rrfp.race.runner import race

    typer.echo(f"Host {hosts.node_rank} of {hosts.nnodes} joins {hosts.rdzv_endpoint}", err=True)
    with own_files():
        race(lineup, found, hosts, _launch, _note_failure, retry=retry)


def _race(
    lineup: "Lineup",
    found: "BenchDir",
    hosts: "Hosts",
    models: "dict[str, ModeledTimes] | None",
    *,
    retry: bool,
) -> None:
    """Run the remaining turns with a progress bar, after printing on stderr how many entries and
    turns there are in all and, given models, how long the remaining turns take. If no turn is left,
    it only prints that, and how many failed."""
    from rrfp.race.entries import Turn
    from rrfp.race.runner import race, time_left_s, turns_left

    num_turns = sum(entry.settings.num_steps for entry in lineup.entries.values())

    def num_ended() -> int:
        return sum(isinstance(each, Turn) for each in found.ended(lineup))

    if not any(turns_left(lineup, found, retry=retry)):
        num_missing = num_turns - num_ended()
        failed = f", but for {num_missing} that failed: --retry runs those" if num_missing else ""
        typer.echo(
            f"All {num_turns} turns are in {found.path} already{failed}; --force runs all anew",
            err=True,
        )
        return
    estimate = ""
    if models is not None:
        left_s = time_left_s(lineup, found, models, retry=retry)
        estimate = f"; what is left takes about {_duration(left_s)}"
    typer.echo(
        f"{len(lineup.entries)} entries, {num_turns} turns{estimate}\nResults go to {found.path}",
        err=True,
    )
    with progress("Racing", num_turns, num_ended):
        race(lineup, found, hosts, _launch, _note_failure, retry=retry)


def _launch(settings: "TrainSettings", run: "RunDir") -> None:
    """Run this host's ranks of an entry of the race until they end. Raises RrfpError if one
    fails."""
    from rrfp.race.runner import RANK_MODULE
    from rrfp.train.launch.launcher import launch

    launch(settings, run, RANK_MODULE)


def _note_failure(failure: "Failure") -> None:
    """Print on stderr that an entry failed and is left out, with its error."""
    typer.echo(f"left out, as it failed: {failure.entry}: {failure.error}", err=True)


def _duration(seconds: float) -> str:
    """Format seconds as `42 s`, or from 100 s on as whole minutes, `3 min`."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"

"""`rrfp bench`: race readiness-first against the orders and systems that people use."""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.options import RowFormat
from rrfp.errors import StoppedError, UsageError
from rrfp.runtime.pace import MOST_OVER_PACE

if TYPE_CHECKING:
    from rrfp.bench.modelled import Modelled
    from rrfp.bench.plan import Plan
    from rrfp.bench.results import ResultRow
    from rrfp.bench.runner import BenchDir, Hosts
    from rrfp.megatron.settings import TrainSettings
    from rrfp.megatron.turns import Failure
    from rrfp.trace.rundir import RunDir

_POLL_S = 1.0


class ScaleName(StrEnum):
    """How large a race is."""

    TINY = "tiny"
    LAPTOP = "laptop"
    NODE = "node"
    CLUSTER = "cluster"


class PeerChoice(StrEnum):
    """Whose schedules race besides Megatron's and ours."""

    TORCH = "torch"
    NONE = "none"


def bench(
    preset: Annotated[
        list[str],
        typer.Argument(metavar="PRESET...", help="rq1 to rq6; several share what they both run."),
    ],
    scale: Annotated[
        ScaleName,
        typer.Option(
            help="laptop: 8 ranks, 32 microbatches; node: 16, 64; cluster: 32, 128; tiny: a check "
            "that all of it runs."
        ),
    ] = ScaleName.LAPTOP,
    peer: Annotated[
        PeerChoice,
        typer.Option(help="Whether the schedules of torch.distributed.pipelining race too."),
    ] = PeerChoice.TORCH,
    system: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this system, beside megatron-1f1b; repeatable."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COSTS+JITTER",
            help="Only these costs (as of simulate --costs) with this jitter; repeatable.",
        ),
    ] = None,
    hold: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K",
            help="Only this bound on what a rank holds: a number, a multiple of what 1F1B holds "
            "(1.5x), or paper, its limit of 32; repeatable.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Rounds: timed steps of each system.")
    ] = None,
    task_ms: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=5_000,
            help="What F, B and W of a rank take on average, in ms; of language, multimodal and "
            "uniform costs.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**32 - 1, help="Of data, costs and jitter of round 0 [1234]."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where results go, and are found again [runs/bench-PRESET-SCALE]."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Remove the results that are there already.")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Try again what has failed in --out.")
    ] = False,
    output_format: Annotated[
        RowFormat, typer.Option("--format", help="How to print the rows.")
    ] = RowFormat.TABLE,
    nnodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="This host's number.")] = 0,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Of host 0, where the hosts meet.")
    ] = None,
) -> None:
    """Race readiness-first against the orders and systems that people use.

    rq1 end to end, rq2 where time goes, rq3 injected jitter, rq4 hints, rq5
    scaling, rq6 memory and sameness. Every task and message is real and takes
    the time of a model, so that a race means the same on any machine. Systems
    take turns, one step each a round, under the same data, costs and jitter.
    "x megatron" is how many times as fast as Megatron's 1F1B a system is.
    Interrupted, the same command goes on.

    Example: rrfp bench rq1 --scale laptop --profile multimodal --steps 10
    """
    from rrfp.bench.modelled import model_entries
    from rrfp.bench.plan import Asked, make_plan
    from rrfp.bench.presets import PRESETS, SCALES, preset_named
    from rrfp.bench.results import results
    from rrfp.bench.runner import BenchDir, Hosts, check
    from rrfp.bench.systems import system_named

    names = list(dict.fromkeys(preset))
    for name in names:
        if name not in PRESETS:
            raise UsageError(f"'{name}' is not a preset ({', '.join(PRESETS)})")
    asked = Asked(
        peers=peer is PeerChoice.TORCH,
        holds=tuple(_bound(text) for text in hold or ()),
        profiles=tuple(dict.fromkeys(profile or ())),
        systems=tuple(system_named(name) for name in system or ()),
        steps=steps,
        task_ms=task_ms,
        seed=seed,
    )
    plan = make_plan([preset_named(name, SCALES[scale]) for name in names], SCALES[scale], asked)
    if nnodes > 1 and out is None:
        raise UsageError("several hosts need --out DIR on a file system that all of them share")
    directory = out or Path("runs") / f"bench-{'-'.join(names)}-{scale}"
    hosts = Hosts(nnodes, node_rank, rdzv_endpoint)
    check(plan, hosts, directory)
    found = BenchDir(directory)
    if not hosts.leads:
        _join(plan, found, hosts, retry=retry)
        return
    if force and nnodes > 1:
        raise UsageError(
            f"--force on several hosts could take from one what another has begun; remove "
            f"{directory} instead"
        )
    with found.prepare(plan, force=force):

        def model() -> "dict[str, Modelled]":
            with _progress("Simulating", len(plan.entries)) as advance:
                return model_entries(plan.entries.values(), found.models, lambda: advance(1))

        # Other hosts would not wait for it, so the estimate is left out there.
        models = model() if nnodes == 1 else None
        try:
            _race(plan, found, hosts, models, retry=retry)
        except (KeyboardInterrupt, StoppedError):
            typer.echo(
                f"What has ended is kept in {directory}; the same command goes on from there",
                err=True,
            )
            raise
        rows = results(plan, found.ended(plan), models or model())
        _print(plan, rows, output_format)
        _tell_over_pace(rows)
        _draw(plan, rows, directory)


def _bound(text: str) -> str:
    """The bound as presets name it."""
    return text if text == "paper" else f"hold {text}"


def _join(plan: "Plan", found: "BenchDir", hosts: "Hosts", *, retry: bool) -> None:
    """Run this host's ranks of every race; host 0 says how it goes."""
    from rrfp.bench.runner import race

    typer.echo(f"Host {hosts.node_rank} of {hosts.nnodes} joins {hosts.rdzv_endpoint}", err=True)
    race(plan, found, hosts, _launch, _tell_failure, retry=retry)


def _race(
    plan: "Plan",
    found: "BenchDir",
    hosts: "Hosts",
    models: "dict[str, Modelled] | None",
    *,
    retry: bool,
) -> None:
    from rrfp.bench.runner import race, time_left_s, turns_left
    from rrfp.megatron.turns import Turn

    num_turns = sum(entry.settings.num_steps for entry in plan.entries.values())

    def num_ended() -> int:
        return sum(isinstance(each, Turn) for each in found.ended(plan))

    if not any(turns_left(plan, found, retry=retry)):
        num_missing = num_turns - num_ended()
        failed = f", but for {num_missing} that failed: --retry runs those" if num_missing else ""
        typer.echo(
            f"All {num_turns} turns are in {found.path} already{failed}; --force runs all anew",
            err=True,
        )
        return
    estimate = ""
    if models is not None:
        left_s = time_left_s(plan, found, models, retry=retry)
        estimate = f"; what is left takes about {_duration(left_s)}"
    typer.echo(
        f"{len(plan.entries)} entries, {num_turns} turns{estimate}. Results go to {found.path}",
        err=True,
    )
    with _progress("Racing", num_turns, num_ended):
        race(plan, found, hosts, _launch, _tell_failure, retry=retry)


def _launch(settings: "TrainSettings", run: "RunDir") -> None:
    from rrfp.megatron.launch import launch
    from rrfp.megatron.process import Job

    launch(settings, run, Job.RACE)


def _tell_failure(failure: "Failure") -> None:
    typer.echo(f"left out, as it failed: {failure.entry}: {failure.error}", err=True)


def _tell_over_pace(rows: "Sequence[ResultRow]") -> None:
    """Warn of work that did not fit into its modelled time."""
    over = [row for row in rows if (row.over_pace or 0.0) > MOST_OVER_PACE]
    if over:
        worst = max(over, key=lambda row: row.over_pace or 0.0)
        typer.echo(
            f"Warning: in {len(over)} of {len(rows)} rows the work of more than "
            f"{MOST_OVER_PACE:.0%} of the tasks took longer than its model, {worst.over_pace:.1%} "
            f"in {worst.planned.case.name}: {worst.label}; give them longer ones (--task-ms, or "
            "other costs), or the machine less to do",
            err=True,
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextmanager
def _progress(
    what: str, total: int, num_done: Callable[[], int] | None = None
) -> Iterator[Callable[[int], None]]:
    """Tells on a terminal how much is done and how long the rest will take; `num_done` is asked
    now and then where nobody calls."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total, completed=num_done() if num_done else 0)
        ended = Event()

        def follow(ask: Callable[[], int]) -> None:
            while not ended.wait(_POLL_S):
                progress.update(task, completed=ask())

        threads = [Thread(target=follow, args=(num_done,), daemon=True)] if num_done else []
        for thread in threads:
            thread.start()
        try:
            yield lambda count: progress.advance(task, count)
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def _print(plan: "Plan", rows: "Sequence[ResultRow]", output_format: RowFormat) -> None:
    match output_format:
        case RowFormat.JSON:
            print(json.dumps({"rows": [row.as_json() for row in rows]}, allow_nan=False))
        case RowFormat.CSV:
            _print_csv(rows)
        case RowFormat.TABLE:
            from rich.console import Console

            from rrfp.cli.race_tables import race_tables

            console = Console()
            for preset in plan.presets:
                of_preset = [row for row in rows if row.planned.preset == preset.name]
                console.print(race_tables(preset, of_preset))


def _print_csv(rows: "Sequence[ResultRow]") -> None:
    """A line a row: the keys of the JSON, estimates in three columns each."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for number, row in enumerate(rows):
        flat: dict[str, object] = {}
        found = row.as_json()
        intervals = found.pop("intervals")
        assert isinstance(intervals, dict)
        for name, value in found.items():
            if name == "step_time_s":
                step_time = row.step_time_s
                for part in ("median", "low", "high"):
                    flat[f"{name}_{part}"] = None if step_time is None else getattr(step_time, part)
                continue
            flat[name] = value
            if name in row.ratios:
                flat[f"{name}_low"], flat[f"{name}_high"] = intervals.get(name, (None, None))
        if number == 0:
            writer.writerow(flat)
        writer.writerow(flat.values())


def _draw(plan: "Plan", rows: "Sequence[ResultRow]", directory: Path) -> None:
    """A chart a preset, where what draws charts is installed."""
    if any(find_spec(name) is None for name in ("altair", "vl_convert")):
        typer.echo(
            "No chart is drawn without the extra 'report' (pip install 'rrfp[report]')", err=True
        )
        return
    from rrfp.analyze.charts.files import save
    from rrfp.bench.chart import race_chart

    for preset in plan.presets:
        chart = race_chart(preset, [row for row in rows if row.planned.preset == preset.name])
        if chart is None:
            continue
        for ending in ("svg", "png"):
            save(chart, directory / f"{preset.name}.{ending}")
        typer.echo(
            f"The chart of {preset.name} is {directory / preset.name}.svg and .png", err=True
        )

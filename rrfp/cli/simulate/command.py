"""`rrfp simulate`: what a pipeline would take under one setting, or under many."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.cli.console import print_rows
from rrfp.cli.declared_options import (
    DATA,
    LAYOUT,
    MEMORY,
    OUTPUT,
    SCHEDULE,
    Completer,
    cost_names,
    escaped,
    hint_help,
    hint_names_or_auto,
    one_of,
)
from rrfp.cli.options import RowFormat
from rrfp.cli.output import NOT_WHOLE, WITHOUT_SIZES, note_left_out
from rrfp.cli.progress import progress
from rrfp.schedule.admission import Admit
from rrfp.schedule.balance import AdmitAcross
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.policy import AgreementRule, Dispatch
from rrfp.schedule.shape import Placement
from rrfp.trace.run_policy import POLICY, policies_by_step

if TYPE_CHECKING:
    from rrfp.cli.simulate.rows import Asked
    from rrfp.planning.trials import Row, Setting
    from rrfp.trace.run_dir import RunDir


_LONGEST_LABEL = 100
"""Of a row's directory; file systems take 255 letters."""


_MOST_PRICED = 16
"""Rows whose bounds are looked at."""

_COSTS, _ROWS = "Costs", "Rows"


def _setting(
    panel: str, help_text: str, metavar: str = "TEXT", offers: Completer | None = None
) -> Any:
    """A setting of every row; its text is read where rows and sweeps are."""
    return typer.Option(
        help=escaped(help_text),
        metavar=metavar,
        show_default=False,
        rich_help_panel=panel,
        autocompletion=offers,
    )


def simulate(
    pp: Annotated[str | None, _setting(LAYOUT, "Pipeline ranks.", "N")] = None,
    microbatches: Annotated[
        str | None, _setting(DATA, "Microbatches a step and replica.", "N")
    ] = None,
    hint: Annotated[
        str | None,
        _setting(
            SCHEDULE,
            hint_help(
                "What goes first of the ready tasks: a hint, an order file (.csv), or auto (chosen "
                "by simulating other steps) [bf]."
            ),
            offers=hint_names_or_auto,
        ),
    ] = None,
    dispatch: Annotated[
        str | None,
        _setting(
            SCHEDULE,
            "ready (default: the hint ranks what is ready) or fixed (its order binds).",
            offers=one_of(Dispatch.READY, Dispatch.FIXED),
        ),
    ] = None,
    links: Annotated[
        str | None,
        _setting(
            _COSTS,
            "async (default: messages pass beside the work) or blocking (both ranks wait for "
            "them, as in Megatron's own schedules; with --dispatch fixed).",
            offers=one_of("async", "blocking"),
        ),
    ] = None,
    chunks: Annotated[
        str | None, _setting(LAYOUT, "Model chunks a pipeline rank [1].", "N")
    ] = None,
    placement: Annotated[
        str | None,
        _setting(
            LAYOUT,
            "Where chunks lie: loop (default) or v (with --chunks 2).",
            offers=one_of(*Placement),
        ),
    ] = None,
    tp: Annotated[str | None, _setting(LAYOUT, "Tensor-parallel ranks [1].", "N")] = None,
    dp: Annotated[str | None, _setting(LAYOUT, "Data-parallel replicas [1].", "N")] = None,
    limit: Annotated[
        str | None,
        _setting(
            MEMORY,
            "Forwards a rank may run ahead of its backwards, or none [if ready without --hold: "
            "what fills the pipeline, 32 or more].",
            "N",
        ),
    ] = None,
    hold: Annotated[
        str | None,
        _setting(
            MEMORY,
            "Most activations that a rank keeps, instead of --limit: 8 (microbatches), 40GiB, or "
            "1.0x (of 1F1B's largest peak in bytes).",
            "SIZE",
        ),
    ] = None,
    w: Annotated[
        str | None,
        _setting(
            SCHEDULE,
            "Weight gradients of an order used as a hint: idle (default) or ranked.",
            offers=one_of(*WeightGradients),
        ),
    ] = None,
    agreement: Annotated[
        str | None,
        _setting(
            SCHEDULE,
            "What tensor-parallel ranks run: intersection (default: the best that all have ready) "
            "or unanimous (what all would pick).",
            offers=one_of(*AgreementRule),
        ),
    ] = None,
    patience: Annotated[
        str | None,
        _setting(
            SCHEDULE,
            "How long a free rank waits for a better task that another rank has announced: 0 "
            "(default: never), auto (by how punctual announcements are) or a time such as 5ms.",
            "TIME",
        ),
    ] = None,
    admit: Annotated[
        str | None,
        _setting(
            SCHEDULE,
            "The order in which microbatches enter: given (default), pyramid (light, heavy, "
            "light), plan (searched by simulation, from what is known before the step) or a file "
            "with a line a step.",
            offers=one_of(*Admit),
        ),
    ] = None,
    admit_across: Annotated[
        str | None,
        _setting(
            SCHEDULE,
            "Whether each step's microbatches are dealt to the --dp replicas by cost before they "
            "enter: none (default) or replicas.",
            offers=one_of(*AdmitAcross),
        ),
    ] = None,
    costs: Annotated[
        str | None,
        _setting(
            _COSTS,
            "uniform (default), language, multimodal, a CSV or TOML file, or a run or its trace.",
            offers=cost_names,
        ),
    ] = None,
    jitter: Annotated[
        str | None,
        _setting(
            _COSTS, "none (default), J0 to J3, lognormal:0.5, ...: see docs/reference/costs.md."
        ),
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTINGS",
            help="A row of its own settings, such as 'hint=1f1b dispatch=fixed'; give it again "
            "for each row.",
            rich_help_panel=_ROWS,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A,B,...",
            help="A row for each value, in all combinations if given again, the first the slowest.",
            rich_help_panel=_ROWS,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**32 - 1,
            metavar="N",
            help="The first seed of costs and jitter.",
            rich_help_panel=_ROWS,
        ),
    ] = 1234,
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            max=100_000,
            metavar="N",
            help="Steps of each row, under as many seeds from --seed on.",
            rich_help_panel=_ROWS,
        ),
    ] = 1,
    plan_sims: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**6,
            metavar="N",
            help=escaped("Simulations by which each step of --admit plan is planned [400]."),
            rich_help_panel=_ROWS,
        ),
    ] = None,
    output_format: Annotated[
        RowFormat,
        typer.Option("--format", help="How to print the rows.", rich_help_panel=OUTPUT),
    ] = RowFormat.TABLE,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A directory for the run and its trace, a step a seed; of several rows, each in "
            "a directory of its own below.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace the run in --out.", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """Simulate steps of a pipeline, with the runtime's own dispatcher.

    Nothing is trained: tasks, messages and jitter take their time from data.
    Every row meets the same costs and jitter under the same seed.

    Example: rrfp simulate --pp 8 --microbatches 32 --jitter lognormal:0.5
    --seeds 20 --sweep hint=bf,bfw --sweep limit=4,8,16,32
    """
    given = locals()

    from rrfp.cli.simulate.rows import SETTINGS, asked_rows, field_of, settings_of, with_limits
    from rrfp.cli.simulate.trial_table import trial_table

    texts = {name: given[field_of(name)] for name in SETTINGS}
    flags = {name: text for name, text in texts.items() if text is not None}
    asked = asked_rows(flags, row or [], sweep or [])
    settings = settings_of(asked, recorded=out is not None)
    asked = with_limits(asked, settings)
    if plan_sims is not None:
        settings = [replace(setting, num_plan_simulations=plan_sims) for setting in settings]
    _tell_left_out(settings)
    if not any(text.startswith(("limit=", "hold=")) for text in sweep or ()):
        # Of bounds that are swept, the table tells the price.
        _tell_unfilled(settings)
    chosen = range(seed, seed + seeds)
    if out is None:
        from rrfp.planning.trials import num_plans, run_settings

        num = len(settings) * seeds + num_plans(settings, chosen)
        with progress("Simulating", num) as advance:
            rows = run_settings(settings, chosen, finished=lambda: advance(1))
    else:
        rows = _record(asked, settings, chosen, out, force)
    print_rows(trial_table(asked, chosen, rows), output_format)


def _tell_left_out(settings: "Sequence[Setting]") -> None:
    """Name the steps of recorded runs that are no costs."""
    from rrfp.planning.balanced_costs import as_given
    from rrfp.replay.cost_sources import RecordedCosts

    given = [as_given(setting.costs) for setting in settings]
    runs = [costs for costs in given if isinstance(costs, RecordedCosts)]
    for costs in {id(run): run for run in runs}.values():
        note_left_out(costs.left_out, NOT_WHOLE)
        note_left_out(costs.without_sizes, WITHOUT_SIZES)


def _tell_unfilled(settings: "Sequence[Setting]") -> None:
    """Warn of the first bound that cannot fill its pipeline."""
    from rrfp.simulate.memory_budgets import unfilled

    for setting in settings[:_MOST_PRICED]:
        found = unfilled(setting.policy, setting.shape)
        if found is not None:
            typer.echo(f"Warning: {found.told()}", err=True)
            return


def _record(
    asked: "Sequence[Asked]",
    settings: "Sequence[Setting]",
    seeds: range,
    out: Path,
    force: bool,
) -> "list[Row]":
    """Simulate, one row after the other, and write the run of each."""
    from rrfp.planning.trials import num_plans, run_settings, with_budget, with_choice
    from rrfp.simulate.recording import new_recording
    from rrfp.trace.perfetto.writer import write_run_files

    rows = []
    runs = _make_run_dirs(asked, out, force)
    num = len(settings) * len(seeds) + num_plans(settings, seeds)
    with progress("Simulating", num) as advance:
        for each, asked_setting, run in zip(asked, settings, runs, strict=True):
            setting = with_budget(asked_setting, seeds)
            setting = with_choice(setting, seeds, counts_places=True)
            described = _described(each, setting, seeds)
            recording = new_recording(
                setting.shape, setting.num_members, setting.num_replicas, described
            )
            (row,) = run_settings(
                [setting], seeds, recordings=[recording], finished=lambda: advance(1)
            )
            policies = [trial.policy.described() for trial in row.trials]
            recording.settings = {**recording.settings, **policies_by_step(policies)}
            rows.append(row)
            write_run_files(run, recording)
    where = f"trace is {runs[0].trace}" if len(runs) == 1 else f"traces are below {out}"
    typer.echo(f"The {where}", err=True)
    return rows


def _make_run_dirs(asked: "Sequence[Asked]", out: Path, force: bool) -> "list[RunDir]":
    """`out` for one row; for several, a directory a row in it, by number and what is its own."""
    from rrfp.trace.run_dir import create_run_dir

    run = create_run_dir(out, force, "")
    # Of rows that an earlier, longer sweep left here.
    for earlier in out.glob("*/run.json"):
        create_run_dir(earlier.parent, force, "")
        with suppress(OSError):
            earlier.parent.rmdir()
    if len(asked) == 1:
        return [run]
    digits = len(str(len(asked)))
    runs = []
    for number, each in enumerate(asked, start=1):
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{number:0{digits}} {each.label}".strip())
        runs.append(create_run_dir(out / label[:_LONGEST_LABEL], force, ""))
    return runs


def _described(asked: "Asked", setting: "Setting", seeds: range) -> dict[str, object]:
    """What run.json tells: nothing of this machine or moment, so that it is always the same."""
    from rrfp import __version__

    return {
        "simulated": True,
        "settings": {**asked.described(), "seed": seeds.start, "seeds": len(seeds)},
        POLICY: setting.policy.described(),
        "versions": {"rrfp": __version__},
        "world": asked.num_processes,
    }

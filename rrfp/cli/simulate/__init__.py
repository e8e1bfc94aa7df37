"""`rrfp simulate`: what a pipeline would take under one setting, or under many."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rrfp.cli.console import print_rows
from rrfp.cli.declared_options import OUTPUT, taking
from rrfp.cli.options import RowFormat
from rrfp.cli.output import NOT_WHOLE, WITHOUT_SIZES, note_left_out
from rrfp.cli.progress import progress
from rrfp.cli.simulate.asked import SETTINGS, asked_rows
from rrfp.inputs import setting
from rrfp.trace.run_policy import POLICY, policies_by_step

if TYPE_CHECKING:
    from rrfp.cli.simulate.asked import Asked
    from rrfp.planning.trials import Row, Setting
    from rrfp.trace.run_dir import RunDir


_LONGEST_LABEL = 100
"""The most letters in the name of a row's directory; file systems take 255."""


_MOST_PRICED = 16
"""Rows whose bounds are looked at."""

_ROWS = "Rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The options beside the settings of a row."""

    row: list[str] | None = setting(
        None,
        "A row of its own settings, such as 'hint=1f1b dispatch=fixed'; give it again for each "
        "row.",
        metavar="SETTINGS",
        panel=_ROWS,
    )
    sweep: list[str] | None = setting(
        None,
        "A row for each value, in all combinations if given again, the first the slowest.",
        metavar="NAME=A,B,...",
        panel=_ROWS,
    )
    seed: int = setting(
        1234, "The first seed of costs and jitter", least=0, most=2**32 - 1, panel=_ROWS
    )
    seeds: int = setting(
        1,
        "Steps of each row, under as many seeds from --seed on",
        least=1,
        most=100_000,
        panel=_ROWS,
    )
    plan_sims: int | None = setting(
        None,
        "Simulations by which each step of --admit plan is planned [400].",
        least=1,
        most=10**6,
        panel=_ROWS,
    )
    output_format: RowFormat = setting(
        RowFormat.TABLE, "How to print the rows", flag="format", metavar="FORMAT", panel=OUTPUT
    )
    out: Path | None = setting(
        None,
        "A directory for the run and its trace, a step a seed; of several rows, each in a "
        "directory of its own below.",
        panel=OUTPUT,
    )
    force: bool = setting(False, "Replace the run in --out.", panel=OUTPUT)


@taking(SimulateOptions, SETTINGS.values())
def simulate(options: SimulateOptions, texts: dict[str, str]) -> None:
    """Simulate steps of a pipeline, with the runtime's own dispatcher.

    Nothing is trained: tasks, messages and jitter take their time from data.
    Every row meets the same costs and jitter under the same seed.

    Example: rrfp simulate --pp 8 --microbatches 32 --jitter lognormal:0.5
    --seeds 20 --sweep hint=bf,bfw --sweep limit=4,8,16,32
    """
    from rrfp.cli.simulate.rows import settings_of, with_limits
    from rrfp.cli.simulate.trial_table import trial_table

    flags = {each.spelled: texts[each.flag] for each in SETTINGS.values() if each.flag in texts}
    asked = asked_rows(flags, options.row or [], options.sweep or [])
    settings = settings_of(asked, recorded=options.out is not None)
    asked = with_limits(asked, settings)
    if options.plan_sims is not None:
        num = options.plan_sims
        settings = [replace(setting, num_plan_simulations=num) for setting in settings]
    _tell_left_out(settings)
    if not any(text.startswith(("limit=", "hold=")) for text in options.sweep or ()):
        # Of bounds that are swept, the table tells the price.
        _tell_unfilled(settings)
    chosen = range(options.seed, options.seed + options.seeds)
    if options.out is None:
        from rrfp.planning.trials import num_plans, run_settings

        num = len(settings) * len(chosen) + num_plans(settings, chosen)
        with progress("Simulating", num) as advance:
            rows = run_settings(settings, chosen, finished=lambda: advance(1))
    else:
        rows = _record(asked, settings, chosen, options.out, options.force)
    print_rows(trial_table(asked, chosen, rows), options.output_format)


def _tell_left_out(settings: "Sequence[Setting]") -> None:
    """Name the steps of recorded runs that are no costs."""
    from rrfp.planning.modelled_costs import without_balance
    from rrfp.replay.cost_sources import RecordedCosts

    given = [without_balance(setting.costs) for setting in settings]
    runs = [costs for costs in given if isinstance(costs, RecordedCosts)]
    for costs in {id(run): run for run in runs}.values():
        note_left_out(costs.left_out, NOT_WHOLE)
        note_left_out(costs.without_sizes, WITHOUT_SIZES)


def _tell_unfilled(settings: "Sequence[Setting]") -> None:
    """Warn of the first bound that cannot fill its pipeline."""
    from rrfp.simulate.memory_budgets import unfilled

    for each in settings[:_MOST_PRICED]:
        found = unfilled(each.policy, each.shape)
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
    from rrfp.simulate.step import new_recording
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
    """The content of run.json, which has nothing of this machine or moment and so never varies."""
    from rrfp import __version__

    return {
        "simulated": True,
        "settings": {**asked.described(), "seed": seeds.start, "seeds": len(seeds)},
        POLICY: setting.policy.described(),
        "versions": {"rrfp": __version__},
        "world": asked.num_processes,
    }

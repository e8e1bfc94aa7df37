"""`rrfp simulate`: simulate steps of a pipeline under one or many settings."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rrfp.cli.console import print_rows
from rrfp.cli.declared_options import OUTPUT, with_options
from rrfp.cli.options import RowFormat
from rrfp.cli.output import NOT_WHOLE, WITHOUT_SIZES, note_left_out
from rrfp.cli.progress import progress
from rrfp.cli.simulate.row_options import SETTINGS, parse_rows
from rrfp.inputs import setting
from rrfp.trace.run_json import POLICY, policies_by_step

if TYPE_CHECKING:
    from rrfp.cli.simulate.row_options import RowOptions
    from rrfp.planning.trials import Row, Setting
    from rrfp.trace.run_dir import RunDir


_LONGEST_LABEL = 100
"""The longest name of a row's directory; file systems allow 255 characters."""


_MOST_PRICED = 16
"""The number of rows whose bounds are checked for a warning."""

_ROWS = "Rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The options that are not settings of a row."""

    row: list[str] | None = setting(
        None,
        "A row with its own settings, such as 'hint=1f1b dispatch=fixed'; repeatable.",
        metavar="SETTINGS",
        panel=_ROWS,
    )
    sweep: list[str] | None = setting(
        None,
        "A row for each value; repeatable, for all combinations.",
        metavar="NAME=A,B,...",
        panel=_ROWS,
    )
    seed: int = setting(
        1234, "The first seed of costs and jitter", least=0, most=2**32 - 1, panel=_ROWS
    )
    seeds: int = setting(
        1, "Steps of each row, with as many consecutive seeds", least=1, most=100_000, panel=_ROWS
    )
    plan_sims: int | None = setting(
        None, "Simulations per step for --admit plan [400].", least=1, most=10**6, panel=_ROWS
    )
    output_format: RowFormat = setting(
        RowFormat.TABLE, "How to print the rows", flag="format", metavar="FORMAT", panel=OUTPUT
    )
    out: Path | None = setting(
        None,
        "Directory for the run and its trace, one step per seed; several rows get a "
        "subdirectory each.",
        panel=OUTPUT,
    )
    force: bool = setting(False, "Replace the run in --out.", panel=OUTPUT)


@with_options(SimulateOptions, SETTINGS.values())
def simulate(options: SimulateOptions, texts: dict[str, str]) -> None:
    """Simulate steps of a pipeline with the runtime's own dispatcher.

    Nothing is trained: the times of tasks, messages and jitter come from data.
    With the same seed all rows get the same costs and jitter.

    Example: rrfp simulate --pp 8 --microbatches 32 --jitter lognormal:0.5
    --seeds 20 --sweep hint=bf,bfw --sweep limit=4,8,16,32
    """
    from rrfp.cli.simulate.rows import settings_of, with_limits
    from rrfp.cli.simulate.trial_table import trial_table

    flags = {each.spelled: texts[each.flag] for each in SETTINGS.values() if each.flag in texts}
    requested = parse_rows(flags, options.row or [], options.sweep or [])
    settings = settings_of(requested, recorded=options.out is not None)
    requested = with_limits(requested, settings)
    if options.plan_sims is not None:
        num = options.plan_sims
        settings = [replace(setting, num_plan_simulations=num) for setting in settings]
    _note_left_out_steps(settings)
    # If bounds are swept, the table shows their price.
    if not any(text.startswith(("limit=", "hold=")) for text in options.sweep or ()):
        _warn_unfilled(settings)
    chosen = range(options.seed, options.seed + options.seeds)
    if options.out is None:
        from rrfp.planning.trials import num_plans, run_settings

        num = len(settings) * len(chosen) + num_plans(settings, chosen)
        with progress("Simulating", num) as advance:
            rows = run_settings(settings, chosen, finished=lambda: advance(1))
    else:
        rows = _record(requested, settings, chosen, options.out, options.force)
    print_rows(trial_table(requested, chosen, rows), options.output_format)


def _note_left_out_steps(settings: "Sequence[Setting]") -> None:
    """Print on stderr, once for each recorded run, which of its steps are not used as costs."""
    from rrfp.planning.modeled_costs import without_balance
    from rrfp.replay.cost_sources import RecordedCosts

    given = [without_balance(setting.costs) for setting in settings]
    runs = [costs for costs in given if isinstance(costs, RecordedCosts)]
    for costs in {id(run): run for run in runs}.values():
        note_left_out(costs.left_out, NOT_WHOLE)
        note_left_out(costs.without_sizes, WITHOUT_SIZES)


def _warn_unfilled(settings: "Sequence[Setting]") -> None:
    """Warn on stderr about the first row whose own limit or hold, given as a number, is too small
    to fill its pipeline. Only the first 16 rows are checked."""
    from rrfp.simulate.memory_budgets import unfilled

    for each in settings[:_MOST_PRICED]:
        found = unfilled(each.policy, each.shape)
        if found is not None:
            typer.echo(f"Warning: {found.describe()}", err=True)
            return


def _record(
    requested: "Sequence[RowOptions]",
    settings: "Sequence[Setting]",
    seeds: range,
    out: Path,
    force: bool,
) -> "list[Row]":
    """Simulate one row after the other, write the run directory and trace of each, and print on
    stderr where they are. Raises UsageError if `out` exists without `force`."""
    from rrfp.planning.trials import num_plans, run_settings, with_budget, with_choice
    from rrfp.simulate.step import new_recording
    from rrfp.trace.perfetto.writer import write_run_files

    rows = []
    runs = _make_run_dirs(requested, out, force)
    num = len(settings) * len(seeds) + num_plans(settings, seeds)
    with progress("Simulating", num) as advance:
        for each, given_setting, run in zip(requested, settings, runs, strict=True):
            setting = with_budget(given_setting, seeds)
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


def _make_run_dirs(requested: "Sequence[RowOptions]", out: Path, force: bool) -> "list[RunDir]":
    """Create `out` for one row, or for several rows a numbered directory each in `out`.

    The runs of an earlier command in `out` are removed with `force`; without it, UsageError is
    raised if `out` exists.
    """
    from rrfp.trace.run_dir import create_run_dir

    run = create_run_dir(out, force, "")
    # An earlier, longer sweep may have left rows here.
    for earlier in out.glob("*/run.json"):
        create_run_dir(earlier.parent, force, "")
        with suppress(OSError):
            earlier.parent.rmdir()
    if len(requested) == 1:
        return [run]
    digits = len(str(len(requested)))
    runs = []
    for number, each in enumerate(requested, start=1):
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{number:0{digits}} {each.label}".strip())
        runs.append(create_run_dir(out / label[:_LONGEST_LABEL], force, ""))
    return runs


def _described(requested: "RowOptions", setting: "Setting", seeds: range) -> dict[str, object]:
    """Return the content of run.json: the row's settings, the seeds, the policy, rrfp's version and
    the number of ranks. It has no machine name or time, so that equal runs are identical."""
    from rrfp import __version__

    return {
        "simulated": True,
        "settings": {**requested.described(), "seed": seeds.start, "seeds": len(seeds)},
        POLICY: setting.policy.described(),
        "versions": {"rrfp": __version__},
        "world": requested.num_processes,
    }

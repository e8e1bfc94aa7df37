"""`rrfp train`: train a Megatron GPT over a pipeline and record every dispatch and wait."""

import inspect
import json
import shutil
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.errors import RrfpError, UsageError
from rrfp.runtime.pace import MOST_OVER_PACE
from rrfp.schedule.hints.hint import Hint
from rrfp.train.checks import check_settings
from rrfp.train.declared import Declared
from rrfp.train.settings import DECLARED, TrainSettings

if TYPE_CHECKING:
    from rrfp.trace.rundir import RunDir


def _option(declared: Declared) -> inspect.Parameter:
    """The option of a setting; without it the settings' own default holds, or a TOML file's."""
    spelled = f"--{declared.spelled}"
    kind = str if declared.kind is Hint or issubclass(declared.kind, StrEnum) else declared.kind
    option = typer.Option(
        spelled,
        # In help texts [bf] would be a style, which is not shown.
        help=declared.help_text.replace("[", r"\["),
        show_default=False,
        metavar=declared.metavar,
        rich_help_panel=_PANELS[declared.group],
    )
    return inspect.Parameter(
        declared.flag,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


_PANELS = {
    "policy": "Policy",
    "layout": "Layout of the ranks",
    "model": "Model",
    "data": "Data",
    "run": "Run",
}

_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            help="TOML file of these names, bare or in tables [policy], [layout], [model], "
            r"\[data], [run]; flags go first.".replace(" [", r" \["),
            metavar="FILE",
            show_default=False,
        ),
    ],
)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every setting of a training run, as each was declared."""
    parameters = [*map(_option, DECLARED.values()), _CONFIG]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


@with_settings
def train(config: Path | None = None, **flags: Any) -> None:
    """Train a Megatron GPT readiness-first and trace it.

    Without flags: 4 pipeline stages on this machine's CPU, on the source text
    of Python's standard library, for about a minute.
    The run's directory holds run.json, metrics.jsonl and trace.pftrace.

    Example: rrfp train --hint bf --pp 4 --steps 20
    """
    given = {name: value for name, value in flags.items() if value is not None}
    settings = _settings(config, given)
    _check_policy(settings)
    _check_admission(settings)
    _check_pace(settings)
    _run(settings)


def _settings(config: Path | None, given: dict[str, Any]) -> TrainSettings:
    """What the flags and the file say, checked: nothing has been started yet."""
    from rrfp.train.data.sources import check_data

    settings = (
        TrainSettings(**given) if config is None else TrainSettings.from_toml(config, **given)
    )
    check_settings(settings)
    check_data(settings)
    return settings


def _check_policy(settings: TrainSettings) -> None:
    from rrfp.schedule.rehearsal import fitted

    fitted(settings.effective_policy, settings.shape, counts_places=False)


def _check_admission(settings: TrainSettings) -> None:
    from rrfp.inputs.admission_files import resolve_admission
    from rrfp.megatron.item_costs import resolve_cost

    resolve_admission(settings.policy.admit, settings.data.microbatches)
    resolve_cost(settings.policy.admit_cost)


def _check_pace(settings: TrainSettings) -> None:
    from rrfp.replay.cost_files import costs_file
    from rrfp.trace.rundir import RunDir
    from rrfp.train.pacing import check_pace

    check_pace(settings)
    if settings.run.force and settings.run.out is not None and settings.run.pace is not None:
        costs = costs_file(settings.run.pace)
        if costs is not None and costs.resolve() == RunDir(settings.run.out).trace.resolve():
            raise UsageError(
                f"--force removes the run in {settings.run.out} and --pace takes its times; choose "
                "another directory with --out"
            )


def _run(settings: TrainSettings) -> None:
    from rrfp.cli.live import TrainDisplay
    from rrfp.replay.cost_files import settled
    from rrfp.trace.rundir import RunDir, create_run_dir
    from rrfp.train.description import write_description
    from rrfp.train.ranks.launch import launch

    if settings.run.node_rank > 0:
        assert settings.run.out is not None
        typer.echo(
            f"Host {settings.run.node_rank} of {settings.run.nnodes} joins host 0 at "
            f"{settings.run.rdzv_endpoint}, which shows how the run goes",
            err=True,
        )
        launch(settings, RunDir(settings.run.out))
        return
    if settings.run.nnodes == 1 and settings.run.pace is not None:
        # It may name the newest run, which this one is about to become.
        settings = settings.changed(pace=settled(settings.run.pace))
    run = create_run_dir(settings.run.out, settings.run.force, settings.hint.name)
    write_description(run.run_json, settings, ())
    try:
        with TrainDisplay(run.metrics, settings):
            launch(settings, run)
    except (RrfpError, KeyboardInterrupt):
        _encode_what_is_there(run)
        raise
    _report(run, settings)


def _report(run: "RunDir", settings: TrainSettings) -> None:
    """What a run that came to its end has to show, and where to look next."""
    _tell_pace(run)
    _tell_heldout(run)
    if settings.run.no_trace:
        typer.echo(
            f"Trained {settings.num_steps} steps; the metrics are in {run.metrics}", err=True
        )
        return
    from rich.console import Console

    from rrfp.analyze.bubbles import bubbles
    from rrfp.analyze.cache import load_frames
    from rrfp.cli.tables import bubble_table
    from rrfp.trace.merge import encode_run

    trace = encode_run(run.path)
    Console().print(bubble_table(bubbles(load_frames(trace))))
    rrfp = _program()
    where = "" if settings.run.out is None else f" {run.path}"
    typer.echo(f"The trace is {trace}", err=True)
    typer.echo(f"Next: {rrfp} trace view{where}", err=True)
    typer.echo(f"      {rrfp} analyze bubbles{where} --steps 1:", err=True)


def _tell_pace(run: "RunDir") -> None:
    """Say how many tasks of a paced run took longer than their model."""
    lines = run.metrics.read_text(encoding="utf-8").splitlines()
    steps = [over for line in lines if (over := json.loads(line)["over_pace"]) is not None]
    if not steps:
        return
    num_over, num_tasks = (sum(over[name] for over in steps) for name in ("tasks", "of"))
    worst_ms = max(over["worst_s"] for over in steps) * 1e3
    sentence = (
        f"the work of {num_over} of {num_tasks} tasks ({num_over / num_tasks:.2%}) took longer "
        "than its model"
    )
    if num_over:
        sentence += f", by {worst_ms:.1f} ms at most"
    if num_over > MOST_OVER_PACE * num_tasks:
        sentence = (
            f"Warning: {sentence}; the times of this run are not its model's; use a smaller model "
            "or longer tasks"
        )
    typer.echo(sentence, err=True)


def _tell_heldout(run: "RunDir") -> None:
    """Say how well the trained model does on what it has not seen."""
    last_line = run.metrics.read_text(encoding="utf-8").splitlines()[-1]
    loss = json.loads(last_line)["heldout_loss"]
    if loss is not None:
        typer.echo(f"Held-out loss {loss:.4f}", err=True)


def _encode_what_is_there(run: "RunDir") -> None:
    """Merge what a run that failed has recorded, and say where it is."""
    from rrfp.trace.merge import encode_run

    if not run.records.is_dir():
        return
    try:
        trace = encode_run(run.path)
    except RrfpError as error:
        typer.echo(f"No trace could be made: {error}", err=True)
    else:
        typer.echo(f"The trace of the finished steps is {trace}", err=True)


def _program() -> str:
    """How the user can call this program again; its directory may not be on the PATH."""
    called = Path(sys.argv[0])
    if called.name != "rrfp":
        return f"{sys.executable} -m rrfp"
    found = shutil.which("rrfp")
    is_found = found is not None and Path(found).resolve() == called.resolve()
    return "rrfp" if is_found else str(called)

"""`rrfp train`: train a Megatron GPT over a pipeline and record all dispatches and waits."""

import inspect
import json
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.cli.console import print_tables
from rrfp.cli.declared_options import option_of, with_parameters
from rrfp.cli.errors import describe_bug, interruptible
from rrfp.cli.options import SettingsCommand, show_all
from rrfp.cli.output import note, note_missing_records
from rrfp.cli.progress import working
from rrfp.errors import RrfpError, UsageError
from rrfp.inputs import Declared
from rrfp.runtime.pace import MOST_OVER_PACE
from rrfp.trace.run_dir import own_files
from rrfp.train.checks import check_settings
from rrfp.train.launch.hosts.endpoint import launcher_place, with_launcher_hosts
from rrfp.train.settings import DECLARED, TrainSettings

if TYPE_CHECKING:
    from rrfp.trace.run_dir import RunDir
    from rrfp.train.checkpoints.run_start import RunStart


_CONFIG = Declared(
    flag="config",
    field="config",
    kind=Path,
    help="TOML file of these names, bare or in tables [policy], [layout], [model], [data], [run]; "
    "flags go first.",
    metavar="FILE",
    panel="File of settings",
    is_common=True,
)
_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        bool | None,
        typer.Option(
            "--help-all",
            callback=show_all,
            is_eager=True,
            show_default=False,
            help="Show every option and exit.",
        ),
    ],
)


class TrainCommand(SettingsCommand):
    """The command `rrfp train`, whose short help lists the common settings."""

    common = frozenset(each.flag for each in (*DECLARED.values(), _CONFIG) if each.is_common)


def with_settings(
    command: Callable[..., None], without: Collection[str] = ()
) -> Callable[..., None]:
    """Give a command an option for every declared setting of a run, except those in `without`, and
    --config and --help-all. Returns the command itself."""
    options = [option_of(each) for flag, each in DECLARED.items() if flag not in without]
    return with_parameters(command, [*options, option_of(_CONFIG), _HELP_ALL])


@with_settings
def train(config: Path | None = None, help_all: bool | None = None, **flags: Any) -> None:
    """Train a Megatron GPT readiness-first and trace it.

    Without flags: 4 pipeline stages on this machine's CPU, trained for about a
    minute on the source code of Python's standard library. The run's directory
    holds run.json, metrics.jsonl and trace.pftrace.

    Example: rrfp train --hint bf --pp 4 --steps 20
    """
    given = {name: value for name, value in flags.items() if value is not None}
    settings = (
        TrainSettings(**given) if config is None else TrainSettings.from_toml(config, **given)
    )
    settings = with_launcher_hosts(settings)
    with own_files(shared=settings.run.shared_files):
        _train_until_stopped(settings)


def _train_until_stopped(settings: TrainSettings) -> None:
    """Check the settings and train to the end. If the run saves checkpoints, SIGTERM ends it after
    the current step without an error; otherwise SIGTERM has its usual effect."""
    if settings.run.save is None:
        _check_and_run(settings)
        return
    from rrfp.train.launch.stopping import StopRequestedError, stopping_on_sigterm

    try:
        with stopping_on_sigterm():
            _check_and_run(settings)
    except StopRequestedError:
        _print_stopped_early(settings.run.save, resume=settings.run.resume)


def _check_and_run(settings: TrainSettings) -> None:
    """Check the settings, policy, admission order and pace, then train. Raises UsageError or
    RrfpError."""
    _check_settings(settings)
    _check_policy(settings)
    _check_admission(settings)
    _check_pace(settings)
    _run(settings)


def _print_stopped_early(save: Path, *, resume: bool) -> None:
    """Print on stderr that SIGTERM came before the first step, and with `resume` the newest
    checkpoint's step, if there is one."""
    from rrfp.train.checkpoints.directory import CheckpointDir

    found = CheckpointDir(save).newest(with_content=False) if resume else None
    left = (
        "before the first step, so there is nothing to save"
        if found is None
        else f"before training went on; --resume goes on after step {found.step}"
    )
    note(f"Stopped by SIGTERM {left}")


def _check_settings(settings: TrainSettings) -> None:
    """Raise UsageError if the settings or the data are unusable. Sentences about encoding text for
    a tokenizer go to stderr."""
    from rrfp.train.data.sources import check_data

    check_settings(settings)
    check_data(settings, report=note)


def _check_policy(settings: TrainSettings) -> None:
    """Raise UsageError if the hint does not fit the pipeline, or a binding order deadlocks or
    exceeds a bound."""
    from rrfp.schedule.rehearsal import fitted

    fitted(settings.effective_policy, settings.shape, counts_places=False)


def _check_admission(settings: TrainSettings) -> None:
    """Raise UsageError if the order of microbatches does not fit the run, or its costs are
    unknown."""
    from rrfp.inputs import resolve_admission
    from rrfp.planning.item_costs import resolve_cost
    from rrfp.schedule.admission import check_replicas

    admission = resolve_admission(settings.step.admit, settings.data.microbatches)
    check_replicas(admission, settings.layout.num_replicas)
    resolve_cost(settings.step.admit_cost)


def _check_pace(settings: TrainSettings) -> None:
    """Raise UsageError if --pace does not fit the run, or if --force would remove the run whose
    times it takes."""
    from rrfp.replay.cost_sources import costs_file
    from rrfp.trace.run_dir import RunDir
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
    """Train on this host: host 0 creates or resumes the run, and shows and records it; other hosts
    only run their ranks. If all steps are trained already, it only prints that on stderr and
    removes directories of killed launchers."""
    from rrfp.replay.cost_sources import stable_costs_name
    from rrfp.trace.run_dir import RunDir
    from rrfp.train.checkpoints.run_start import has_trained_all, start_or_resume
    from rrfp.train.launch.launcher import launch
    from rrfp.train.launch.processes import remove_abandoned

    if settings.run.save is not None:
        # The run's files name it and may be read from another working directory.
        settings = settings.changed(save=settings.run.save.absolute())
    if settings.run.node_rank > 0:
        assert settings.run.out is not None
        if has_trained_all(settings):
            remove_abandoned()
            note(f"All {settings.num_steps} steps are trained, and --steps asks for more")
            return
        if launcher_place(settings) is None:
            note(
                f"Host {settings.run.node_rank} of {settings.run.nnodes} joins host 0 at "
                f"{settings.run.rdzv_endpoint}, which shows how the run goes"
            )
        launch(settings, RunDir(settings.run.out), warn=lambda each: note(f"Warning: {each}"))
        return
    if settings.run.nnodes == 1 and settings.run.pace is not None:
        # --pace may name the newest run, which is soon this one.
        settings = settings.changed(pace=stable_costs_name(settings.run.pace))
    beginning = start_or_resume(settings, report=note)
    if beginning.first_step < settings.num_steps:
        _train(beginning, settings)
        return
    # An earlier launcher may have been killed during cleanup, and no other one starts here.
    remove_abandoned()
    note(
        f"All {settings.num_steps} steps are trained; the metrics are in {beginning.metrics}, and "
        "--steps asks for more"
    )


def _train(beginning: "RunStart", settings: TrainSettings) -> None:
    """Train with a display on stderr and record the outcome, then print the summary.

    After an RrfpError or Ctrl-C, merge the records so far into a trace, repeat the warnings, and
    raise again; after SIGTERM before the first step, nothing is merged. Partial checkpoints are
    removed in any case.
    """
    from rrfp.cli.progress import TrainDisplay
    from rrfp.trace.outcome import Outcome, noting_outcome
    from rrfp.train.checkpoints.directory import CheckpointDir
    from rrfp.train.launch.launcher import launch
    from rrfp.train.launch.stopping import StopRequestedError

    run = beginning.run
    warnings: list[str] = []
    try:
        with (
            noting_outcome(run) as note,
            TrainDisplay(run.metrics, settings, beginning.first_step) as display,
        ):

            def warn(sentence: str) -> None:
                warnings.append(sentence)
                display.warn(sentence)

            launch(settings, run, warn=warn)
            if _num_finished(run, settings) < settings.num_steps:
                note.outcome = Outcome.STOPPED
    except RrfpError:
        _merge_partial_records(run)
        _repeat_warnings(warnings)
        raise
    except KeyboardInterrupt:
        # Another Ctrl-C ends the merge; records are kept until a trace holds them.
        with interruptible():
            _merge_partial_records(run)
        _repeat_warnings(warnings)
        raise
    except StopRequestedError:
        _repeat_warnings(warnings)
        raise
    finally:
        if settings.run.save is not None:
            # Ranks that were killed while saving leave partial checkpoints.
            CheckpointDir(settings.run.save).remove_abandoned()
    _print_summary(run, settings, beginning.first_step, warnings)


def _print_summary(
    run: "RunDir", settings: TrainSettings, first_step: int, warnings: list[str]
) -> None:
    """Print the table of bubbles on stdout, and figures and the next commands on stderr; merges the
    ranks' records into a trace before.

    Without a trace it prints no table. Raises RrfpError if the run's directory is gone.
    """
    num_finished = _num_finished(run, settings)
    _repeat_warnings(warnings)
    if not run.path.is_dir():
        raise RrfpError(
            f"{num_finished} steps are trained and saved in {settings.run.save}, but the run's "
            f"directory {run.path} was removed or moved away meanwhile: its trace is lost, and its "
            "metrics are those of the checkpoint"
        )
    print_pace(run, first_step)
    _print_heldout_loss(run)
    if num_finished < settings.num_steps:
        note(
            f"Stopped by SIGTERM after {num_finished} of {settings.num_steps} steps, which are "
            f"saved in {settings.run.save}; --resume goes on"
        )
    if settings.run.no_trace:
        note(f"Trained {num_finished} steps; the metrics are in {run.metrics}")
        return
    from rrfp.analyze.bubbles import bubble_table, bubbles
    from rrfp.analyze.frame_files import load_frames
    from rrfp.trace.locate import resolve_session

    with working("Merging the ranks' records"):
        trace = resolve_session(run.path)
    # With the warm-up, unlike reports, because the metrics include it.
    frames = load_frames(trace, with_warm_up=True)
    note_missing_records(frames)
    print_tables([bubble_table(bubbles(frames))], markdown=False)
    rrfp = _program_name()
    where = "" if settings.run.out is None else f" {quote(str(run.path))}"
    if trace != run.trace:
        where = f" {quote(str(trace))}"
        note(f"Another session of this run went before; {rrfp} trace view {run.path} joins them")
    note(f"The trace is {trace}")
    note(f"Next: {rrfp} trace view{where}")
    note(f"      {rrfp} analyze{where}")


def print_pace(run: "RunDir", first_step: int) -> None:
    """Print on stderr how many tasks took longer than the modelled times of --pace, from
    `first_step` on; a warning above 2%. Prints nothing without such figures.

    Earlier steps belong to sessions that may have used another model.
    """
    steps = [
        line["over_pace"]
        for line in _metrics(run)
        if line["step"] >= first_step and line["over_pace"] is not None
    ]
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
    note(sentence)


def _print_heldout_loss(run: "RunDir") -> None:
    """Print the held-out loss of the last step on stderr, if that step measured it."""
    *_, last = [{"heldout_loss": None}, *_metrics(run)]
    if last["heldout_loss"] is not None:
        note(f"Held-out loss {last['heldout_loss']:.4f}")


def _merge_partial_records(run: "RunDir") -> None:
    """Merge the records of a failed run into a trace and print its path on stderr. Does nothing
    without records; errors are printed, not raised."""
    from rrfp.trace.locate import resolve_session

    if not run.path.is_dir():
        return
    try:
        *_, session = run.sessions() or [run]
        if not session.records.is_dir():
            return
        with working("Merging the ranks' records"):
            trace = resolve_session(run.path)
    # No error here may hide why the run failed.
    except (RrfpError, OSError) as error:
        note(f"No trace was made: {error}")
    except Exception as error:
        note(f"No trace was made: {describe_bug(error)}")
    else:
        note(f"The trace of the finished steps is {trace}")
        note(f"How it ended, rank by rank: {_program_name()} analyze {quote(str(trace))}")


def _num_finished(run: "RunDir", settings: TrainSettings) -> int:
    """Return the number of finished steps: all steps of a run that saves no checkpoints, else the
    newest checkpoint's or the last one in the metrics, whichever is larger."""
    from rrfp.train.checkpoints.directory import CheckpointDir

    if settings.run.save is None:
        return settings.num_steps
    # On a full disk, lines of the metrics may be missing.
    found = CheckpointDir(settings.run.save).newest(with_content=False)
    saved = 0 if found is None else found.step
    return max([saved, *(int(line["step"]) + 1 for line in _metrics(run))])


def _metrics(run: "RunDir") -> list[dict[str, Any]]:
    """Read the lines of a run's metrics.jsonl, a dict for each; empty if the file is missing."""
    if not run.metrics.exists():
        return []
    return [*map(json.loads, run.metrics.read_text(encoding="utf-8").splitlines())]


def _repeat_warnings(warnings: list[str]) -> None:
    """Print the warnings of the run again on stderr, each once, because they may have scrolled
    away."""
    for sentence in dict.fromkeys(warnings):
        note(f"Warning: {sentence}")


def _program_name() -> str:
    """Return how the user can call rrfp again: `rrfp` if that is the program on the PATH, its path,
    or `python -m rrfp`."""
    called = Path(sys.argv[0])
    if called.name != "rrfp":
        return f"{sys.executable} -m rrfp"
    found = shutil.which("rrfp")
    is_found = found is not None and Path(found).resolve() == called.resolve()
    return "rrfp" if is_found else str(called)

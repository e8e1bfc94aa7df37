"""`rrfp chaos`: inject faults into training and check that each is detected and survived."""

import json
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rrfp.analyze.table import NUMBER, TEXT, Column, Table, Unit
from rrfp.chaos.plan import LINK_FAULTS, DisturbedTraining, FaultKind, Stage, plan_faults
from rrfp.cli.console import print_tables
from rrfp.cli.declared_options import one_of, with_options
from rrfp.cli.options import PlainFormat
from rrfp.cli.train import with_settings
from rrfp.errors import RrfpError, StoppedError, UsageError
from rrfp.inputs import setting
from rrfp.schedule.policy import Dispatch
from rrfp.train.checks import check_settings
from rrfp.train.launch.hosts.endpoint import with_launcher_hosts
from rrfp.train.settings import TrainSettings

if TYPE_CHECKING:
    from rrfp.chaos.verdict import Verdict


_NAMED = {True: "right", False: "wrong", None: "-"}
_SAME = {True: "yes", False: "no", None: "-"}


def note_fault(verdict: "Verdict") -> None:
    """Print the outcome of a fault on stderr as soon as it is known: that the run went on, or what
    detected the fault (such as `nobody`), and the seconds until the run went on or ended."""
    seen = verdict.observation
    outcome = "the run went on" if verdict.has_survived else f"found by {verdict.found_by}"
    typer.echo(
        f"fault {verdict.fault.number}: {_fault_name(verdict)} of {seen.injected.victim} in "
        f"{_when(verdict)}: {outcome} after {seen.seconds:.1f} s",
        err=True,
    )


def print_verdicts(verdicts: "list[Verdict]", output_format: PlainFormat) -> None:
    """Sort the verdicts in place into the order of the plan and print them on stdout. The table of
    no verdicts is not printed."""
    # Faults that came too late were injected again at the end.
    verdicts.sort(key=lambda verdict: verdict.fault.number)
    if output_format is PlainFormat.JSON:
        print(json.dumps({"faults": [_as_json(verdict) for verdict in verdicts]}))
    elif verdicts:
        print_tables([_table(verdicts)], markdown=False)


def check(verdicts: "Sequence[Verdict]", keep: Path | None) -> None:
    """Print on stderr the complaints about faults that did not pass and raise RrfpError, or print
    that all passed. `keep` is the directory with the training runs of failed faults, if any."""
    failed = [verdict for verdict in verdicts if not verdict.has_passed]
    for verdict in failed:
        for complaint in verdict.complaints:
            typer.echo(f"fault {verdict.fault.number}: {complaint}", err=True)
    if failed:
        where = "--keep-failed DIR keeps them" if keep is None else f"they are in {keep}"
        raise RrfpError(
            f"{len(failed)} of {len(verdicts)} faults did not pass; their training runs show "
            f"more, and {where}"
        )
    typer.echo(f"All {len(verdicts)} faults passed", err=True)


def _as_json(verdict: "Verdict") -> dict[str, object]:
    """Return a verdict as JSON members; what does not apply is null, such as the error of a run
    that went on."""
    fault, seen = verdict.fault, verdict.observation
    return {
        "number": fault.number,
        "kind": fault.kind,
        "signal": fault.signal or None,
        "hold_s": fault.hold_s or None,
        "of": seen.injected.victim,
        "stage": fault.stage,
        "after_step": seen.injected.num_finished,
        "has_survived": verdict.has_survived,
        "found_by": verdict.found_by or None,
        "seconds": seen.seconds,
        "named_right": verdict.named_right,
        "steps_lost": seen.steps_lost,
        "is_same": verdict.is_same,
        "complaints": verdict.complaints,
        "said": None if seen.went_on else seen.sentence,
    }


def _table(verdicts: "Sequence[Verdict]") -> Table:
    """Make the table of the verdicts, a row for each fault; those that did not pass are marked."""

    def column(heading: str, of: "Callable[[Verdict], str]", unit: Unit = TEXT) -> Column:
        return Column(heading, [of(verdict) for verdict in verdicts], unit)

    failed = {row for row, verdict in enumerate(verdicts) if not verdict.has_passed}
    return Table(
        f"{len(verdicts)} faults, and what became of the training",
        [
            Column("#", [str(verdict.fault.number) for verdict in verdicts], marked=failed),
            column("fault", _fault_name),
            column("of", lambda verdict: verdict.observation.injected.victim),
            column("when", _when),
            column("found by", lambda verdict: verdict.found_by or "survived"),
            column("s", lambda verdict: f"{verdict.observation.seconds:.1f}", NUMBER),
            column("named", lambda verdict: _NAMED[verdict.named_right]),
            column("lost", lambda verdict: str(verdict.observation.steps_lost), NUMBER),
            column("same", lambda verdict: _SAME[verdict.is_same]),
        ],
        [
            "s: from the fault to the end of the last process, or until the run continued. "
            "lost: finished steps that no checkpoint had. same: final parameters and all "
            "losses are equal, bit for bit."
        ],
        mark_meaning="did not pass",
    )


def _fault_name(verdict: "Verdict") -> str:
    """Return a fault's signal, or its kind with the seconds that it is held, if any."""
    fault = verdict.fault
    if fault.signal:
        return fault.signal
    return f"{fault.kind} {fault.hold_s:.1f} s" if fault.hold_s else str(fault.kind)


def _when(verdict: "Verdict") -> str:
    """Return the stage at which a fault was injected and how many steps were finished; the stage
    alone at the start and the close."""
    stage = verdict.fault.stage
    if stage in (Stage.START, Stage.CLOSE):
        return str(stage)
    return f"{stage} {verdict.observation.injected.num_finished}"


_CAMPAIGN_SETTINGS = {
    **dict.fromkeys(("out", "force"), "each training gets a directory of its own"),
    **dict.fromkeys(("save", "keep"), "each training saves to a directory of its own"),
    "resume": "a training that a fault has ended is resumed",
    **dict.fromkeys(("nnodes", "node_rank", "rdzv_endpoint"), "faults are injected on one host"),
}
"""The settings that the campaign sets itself, and the reason."""
_TINY: dict[str, Any] = {
    "model": "mlp",
    "pp": 2,
    "hidden": 32,
    "heads": 4,
    "seq_length": 32,
    "microbatches": 4,
    "steps": 40,
}
"""The default model and number of steps."""
_SAVE_EVERY = 8
_LAYERS_PER_CHUNK = 2


def train_flags(words: Sequence[str]) -> dict[str, Any]:
    """Parse flags of `rrfp train` into a dict by flag, without those that are not given.

    Raises typer's error for an unknown flag, a flag that the campaign sets itself, and a value of a
    wrong type.
    """

    def read(**flags: Any) -> None:
        pass

    trained = typer.Typer()
    trained.command()(with_settings(read, without=_CAMPAIGN_SETTINGS))
    command = typer.main.get_command(trained)
    params = command.make_context("rrfp chaos", [*words]).params
    return {name: value for name, value in params.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """The options of `rrfp chaos` besides training flags."""

    faults: int = setting(20, "Number of faults", least=1)
    fault: list[FaultKind] | None = setting(
        None,
        "Only this kind; repeatable. Default: all.",
        metavar="KIND",
        completes=one_of(*FaultKind),
    )
    keep_failed: Path | None = setting(
        None, "Keep training runs whose fault did not pass here [nowhere].", metavar="DIR"
    )
    output_format: PlainFormat = setting(
        PlainFormat.TABLE, "How to print the verdicts", flag="format", metavar="FORMAT"
    )
    train: list[str] | None = setting(
        None,
        "Flags of rrfp train after --, except those that the campaign sets itself.",
        is_argument=True,
        metavar="-- TRAIN FLAGS",
    )


@with_options(ChaosOptions)
def chaos(options: ChaosOptions) -> None:
    """Inject faults into training and check that each is detected and survived.

    A small model is trained once undisturbed, then again while processes are
    killed or stopped, links dropped, delayed or corrupted, and the disk filled.
    A run that a fault ends is resumed, and each must equal the undisturbed one
    bit for bit. --seed also draws the faults. Takes about ten seconds per fault;
    exits with 1 unless all pass. Only processes that it started are affected.

    Example: rrfp chaos --faults 20 -- --pp 4 --seed 7
    """
    given = train_flags(options.train or [])
    config = given.pop("config", None)
    settings = _settings(given, None if config is None else Path(config))
    check_settings(settings)
    if (num_started := with_launcher_hosts(settings).run.nnodes) > 1:
        raise UsageError(
            f"this command is one of {num_started} that were started together, and faults are "
            "injected on one host; run it by itself"
        )
    kinds = _kinds(options.fault or (), settings)
    if platform.system() != "Linux":
        raise RrfpError("rrfp chaos injects its faults through Linux; run it there")
    from rrfp.train.launch.stopping import StopRequestedError, stopping_on_sigterm

    verdicts: list[Verdict] = []
    try:
        with stopping_on_sigterm():
            for of_training in _inject(settings, kinds, options.faults, options.keep_failed):
                verdicts += of_training
    except StopRequestedError:
        raise StoppedError("the faults were stopped by SIGTERM") from None
    finally:
        print_verdicts(verdicts, options.output_format)
    check(verdicts, options.keep_failed)


def _settings(given: dict[str, Any], config: Path | None) -> TrainSettings:
    """Make the training settings from the given flags and the file; without a file a tiny model is
    the default. Checkpoints are always saved, every 8 steps by default. Raises UsageError if the
    file changes a setting that the campaign sets itself."""
    if config is not None:
        settings = TrainSettings.from_toml(config, **given)
        default = TrainSettings().by_flag()
        for flag, why in _CAMPAIGN_SETTINGS.items():
            if settings.by_flag()[flag] != default[flag]:
                raise UsageError(f"{config} sets {flag.replace('_', '-')}, but {why}; leave it out")
    else:
        settings = TrainSettings(**{**_TINY, **given})
        if "layers" not in given:
            layout = settings.layout
            settings = settings.changed(layers=_LAYERS_PER_CHUNK * layout.pp * layout.chunks)
    # The campaign replaces the directory of checkpoints.
    return settings.changed(save=Path(), save_every=settings.run.save_every or _SAVE_EVERY)


def _kinds(asked: Sequence[FaultKind], settings: TrainSettings) -> tuple[FaultKind, ...]:
    """Return the requested kinds of faults (none: all) that this training supports, and print the
    others on stderr. Raises UsageError if no kind is left: without links there are no link
    faults."""
    kinds = tuple(dict.fromkeys(asked)) or tuple(FaultKind)
    if settings.policy.dispatch is Dispatch.MEGATRON:
        why = "Megatron's own schedule has no links of rrfp"
    elif settings.layout.pp == 1:
        why = "a pipeline of one rank has no links"
    else:
        return kinds
    left = tuple(kind for kind in kinds if kind not in LINK_FAULTS)
    if not left:
        raise UsageError(f"{why}; choose another --fault, or another layout or dispatch")
    if left != kinds:
        others = ", ".join(kind for kind in kinds if kind not in left)
        typer.echo(f"left out: {others}, as {why}", err=True)
    return left


def _inject(
    settings: TrainSettings, kinds: tuple[FaultKind, ...], num_faults: int, keep: Path | None
) -> "Iterator[list[Verdict]]":
    """Train once undisturbed, then inject the faults and yield the verdicts of each disturbed
    training.

    All runs are in a temporary directory that is removed at the end; those with a failed fault are
    copied to `keep`. For faults of the disk it mounts a disk there, or limits the size of files if
    this user may not mount one.
    """
    from rrfp.chaos.campaign import Campaign
    from rrfp.chaos.disk import LimitedFiles, disk_at

    assert settings.run.save_every is not None
    training = DisturbedTraining(
        num_ranks=settings.layout.world_size,
        num_steps=settings.num_steps,
        save_every=settings.run.save_every,
        kinds=kinds,
        # Shorter than the silence after which a process counts as lost.
        most_hold_s=min(3.0, settings.run.silence / 3),
    )
    plan = plan_faults(settings.run.seed, num_faults, training)
    # It will contain sockets, whose paths must be short.
    directory = Path(tempfile.mkdtemp(prefix="rrfp-chaos-"))
    disk_path = directory / "disk"
    disk_path.mkdir()
    is_filled = FaultKind.DISK in kinds
    disk = disk_at(disk_path) if is_filled else LimitedFiles(disk_path)
    try:
        if is_filled and isinstance(disk, LimitedFiles):
            typer.echo(
                "This user may not mount a disk to fill, so the size of files is limited instead",
                err=True,
            )
        campaign = Campaign(settings, directory, disk, keep, note_fault)
        typer.echo(f"Training {settings.num_steps} steps undisturbed", err=True)
        campaign.train_undisturbed()
        yield from campaign.disturb(plan)
    finally:
        disk.close()
        shutil.rmtree(directory, ignore_errors=True)

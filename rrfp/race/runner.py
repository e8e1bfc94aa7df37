"""Runs the races of a lineup, one launch after the other, and resumes interrupted ones."""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO

from rrfp.errors import RrfpError, StoppedError, UsageError
from rrfp.planning.trials import Setting, check_fits, run_settings
from rrfp.race.entries import Entry, Failure, RaceFiles, Turn, append_object, read_objects, rounds
from rrfp.race.lineup import Lineup, cannot_race
from rrfp.race.systems import MEGATRON, check_peer
from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.rehearsal import fitted
from rrfp.simulate.costs.layer_costs import check_divided
from rrfp.simulate.costs.model import Costs, ScaledCosts
from rrfp.simulate.jitter import Jitter, parse_jitter
from rrfp.trace.records import NS_PER_S
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import make_directory, open_own
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings

# Modeled times of entries: lower bound, load and simulated time of each step, with the costs and
# jitter of the real turn. The simulator knows the tasks of peers but not their order, so peers have
# a lower bound and no simulated time.


@dataclass(frozen=True, slots=True)
class ModeledTimes:
    """An entry's modeled times by round, in seconds."""

    floor_s: tuple[float, ...]
    """Lower bounds that no schedule can beat (`rrfp.simulate.time_bounds.floor`)."""
    load_s: tuple[float, ...]
    """Work of the most loaded rank."""
    simulated_s: tuple[float, ...] | None
    """Simulated times; None if the simulator does not know the order."""

    @property
    def times_s(self) -> tuple[float, ...]:
        """The simulated times of the rounds, or the lower bounds if those are unknown."""
        return self.floor_s if self.simulated_s is None else self.simulated_s


def model_entries(
    entries: Iterable[Entry], kept_in: Path, finished: Callable[[], None] = lambda: None
) -> dict[str, ModeledTimes]:
    """Return the modeled times of all entries, by name. Those in the file `kept_in` are not
    simulated again; new ones are appended to it.

    `finished` is called once per entry.
    """
    found = _read(kept_in)
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        if entry.name in found:
            finished()
            continue
        settings = entry.settings
        # Entries with equal keys share random draws.
        key = (
            settings.run.pace,
            settings.run.jitter,
            entry.time_factor,
            settings.run.seed,
            settings.num_steps,
        )
        groups.setdefault(key, []).append(entry)
    for group in groups.values():
        for entry, model in zip(group, _model(group), strict=True):
            append_object(kept_in, {"entry": entry.name, **asdict(model)})
            found[entry.name] = model
            finished()
    return found


def _read(path: Path) -> dict[str, ModeledTimes]:
    """Read the cached models; invalid lines are skipped, and a missing file is empty."""
    names = {"entry", *(field.name for field in fields(ModeledTimes))}
    return {
        values.pop("entry"): ModeledTimes(**values)
        for values in read_objects(path)
        if values.keys() == names
    }


def _model(entries: Sequence[Entry]) -> list[ModeledTimes]:
    """Simulate entries that have the same conditions in every round, and return their modeled
    times."""
    costs = _costs(entries[0])
    jitter = parse_jitter(entries[0].settings.run.jitter)
    seed, steps = entries[0].settings.run.seed, entries[0].settings.num_steps
    rows = run_settings(
        [_setting(entry, costs, jitter) for entry in entries], range(seed, seed + steps)
    )
    return [
        ModeledTimes(
            _seconds(trial.floor_ns for trial in row.trials),
            _seconds(trial.load_ns for trial in row.trials),
            None if entry.peer is not None else _seconds(trial.makespan_ns for trial in row.trials),
        )
        for entry, row in zip(entries, rows, strict=True)
    ]


def _seconds(times_ns: Iterable[int]) -> tuple[float, ...]:
    """Convert times in ns to seconds."""
    return tuple(time_ns / NS_PER_S for time_ns in times_ns)


def _costs(entry: Entry) -> Costs:
    """Return the costs of an entry, with its factor between their times and those of the race."""
    assert entry.settings.run.pace is not None
    return ScaledCosts(resolve_costs(entry.settings.run.pace), entry.time_factor)


def check_model(entry: Entry) -> None:
    """Raise UsageError if an entry's costs or jitter do not fit its ranks."""
    settings = entry.settings
    setting = _setting(entry, _costs(entry), parse_jitter(settings.run.jitter))
    assert settings.run.pace is not None
    check_divided(resolve_costs(settings.run.pace), settings.run.pace, settings.layout.tp)
    check_fits(setting)


def _setting(entry: Entry, costs: Costs, jitter: Jitter) -> Setting:
    """Return the simulator's setting for an entry. Megatron's own schedule is simulated as a fixed
    order with blocking transfers."""
    settings = entry.settings
    is_native = settings.policy.dispatch == Dispatch.MEGATRON
    policy = settings.effective_policy
    if is_native:
        # Megatron's own schedule is a fixed order.
        policy = replace(policy, dispatch=Dispatch.FIXED)
    policy, shape = fitted(policy, settings.shape, counts_places=False)
    return Setting(
        shape=shape,
        policy=policy,
        costs=costs,
        jitter=jitter,
        admit=Admit(settings.step.admit),
        blocking=is_native,
        num_members=settings.layout.tp,
    )


RANK_MODULE = "rrfp.race.rank"
"""The module that each rank runs."""

_LAUNCH_S = 15.0
_BETWEEN_TURNS_S = 1.0
"""Estimated times of a launch and between two turns, on a small machine."""

Launch = Callable[[TrainSettings, RunDir], None]
"""Runs the ranks of a race to their end (`rrfp.train.launch.launcher`)."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a race and this host's number, as in the flags of `rrfp train`."""

    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None

    @property
    def leads(self) -> bool:
        """True on host 0."""
        return self.node_rank == 0

    def applied(self, settings: TrainSettings, out: Path) -> TrainSettings:
        """The settings with these hosts and this output directory."""
        return settings.changed(
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            rdzv_endpoint=self.rdzv_endpoint,
            out=out,
        )


@dataclass(frozen=True, slots=True)
class BenchDir:
    """The directory of a lineup: the lineup, its models, and one directory per race."""

    path: Path

    @property
    def lineup(self) -> Path:
        """The file with the lineup, which is also the lock file."""
        return self.path / "plan.json"

    @property
    def models(self) -> Path:
        """The cache of `model_entries`."""
        return self.path / "models.jsonl"

    def race(self, pp: int, tp: int) -> RaceFiles:
        """Return the files of the race with this grouping of ranks."""
        return RaceFiles(self.path / f"pp{pp}-tp{tp}")

    def ended(self, lineup: Lineup) -> list[Turn | Failure]:
        """Read the lineup's turns and failures so far."""
        return [each for size in lineup.races for each in self.race(*size).read_turns()]

    def prepare(self, lineup: Lineup, *, force: bool) -> IO[bytes]:
        """Create the directory with the lineup's file, or resume an earlier run of the same lineup
        in it.

        `force` deletes the results of any earlier lineup. Raises UsageError if the directory holds
        another lineup and `force` is not set, or other files, if it cannot be made, or if another
        command races in it. The returned file holds a lock: no other process can prepare the
        directory until it is closed.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; choose a directory with --out")
        if self.path.exists() and any(self.path.iterdir()) and not self.lineup.exists():
            raise UsageError(
                f"{self.path} holds something other than a race; choose another directory with "
                "--out"
            )
        text = lineup.to_json()
        try:
            make_directory(self.path)
            file = open_own(self.lineup)
        except OSError as error:
            raise UsageError(
                f"the results' directory {self.path} cannot be made ({error.strerror}); "
                "choose another one with --out"
            ) from None
        try:
            self._lock(file)
            file.seek(0)
            known = file.read().decode(errors="replace")
            if known and not _is_lineup(known):
                raise UsageError(
                    f"{self.lineup} is not a lineup of a race; choose another directory with --out"
                )
            if force:
                self._clear()
            elif known not in ("", text):
                raise UsageError(_why_other(self.path, known, text))
            if known != text:
                file.truncate(0)
                file.write(text.encode())
                file.flush()
        except BaseException:
            file.close()
            raise
        return file

    def _lock(self, file: IO[bytes]) -> None:
        """Lock the lineup's file, without waiting. Raises UsageError if another command holds the
        lock."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another command races in {self.path}; wait for its end or choose another "
                "directory with --out"
            ) from None

    def _clear(self) -> None:
        """Delete the results of all races, the charts (SVG and PNG) and the cached models; the
        lineup's file remains."""
        for found in self.path.glob("pp*-tp*"):
            if found.is_dir():
                shutil.rmtree(found)
        for chart in (*self.path.glob("rq?.svg"), *self.path.glob("rq?.png")):
            chart.unlink()
        self.models.unlink(missing_ok=True)


def _is_lineup(text: str) -> bool:
    """Return whether a text is JSON with a lineup's entries."""
    try:
        lineup = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(lineup, dict) and "entries" in lineup


def _why_other(path: Path, known: str, text: str) -> str:
    """Format the error for a directory with another lineup: the software or the number of cores, if
    only these have changed, or otherwise another race."""
    was, now = json.loads(known), json.loads(text)
    names = {"versions": "software", "cores": "number of cores"}
    differ = [name for name in names if was.get(name) != now[name]]
    if differ and was["entries"] == now["entries"]:
        what = " and ".join(f"{names[name]} ({was.get(name)}, now {now[name]})" for name in differ)
        return (
            f"{path} holds a race that was begun with another {what}; go on with what it was begun "
            "with, or choose another directory with --out"
        )
    return (
        f"{path} holds another race; choose another directory with --out, or remove what is there "
        "with --force"
    )


def check(lineup: Lineup, hosts: Hosts, out: Path) -> None:
    """Raise UsageError for the first entry that cannot run: its settings, its costs or jitter, or
    its peer's requirements do not fit. Each combination of costs and shape is checked once."""
    modeled = set()
    for entry in lineup.entries.values():
        settings = entry.settings
        check_settings(hosts.applied(settings, out))
        kinds = kinds_of(settings.hint.for_shape(settings.shape))
        model = (settings.run.pace, settings.run.jitter, settings.shape, kinds, settings.layout.tp)
        if model not in modeled:
            try:
                check_model(entry)
            except UsageError as error:
                raise cannot_race(entry.name, error) from None
            modeled.add(model)
        if entry.peer is not None:
            check_peer(entry.peer, entry.settings)


def race(
    lineup: Lineup,
    bench: BenchDir,
    hosts: Hosts,
    launch: Launch,
    failed: Callable[[Failure], None],
    *,
    retry: bool = False,
) -> None:
    """Run all remaining turns of the lineup; with `retry`, also those of entries that have failed.

    On a single host, an entry that fails is passed to `failed` and skipped. Raises RrfpError if
    Megatron's 1F1B fails, which all others are compared with, if ranks fail between two turns, and
    for any failure on several hosts, where the next call skips the entry.
    """
    for size, entries in lineup.races.items():
        files = bench.race(*size)
        live = _entries_to_run(entries, files, retry=retry)
        while any(_remaining_turns(live, files)):
            failure = _launch(live, files, hosts, launch)
            if failure is None:
                break
            failed(failure)
            live = [entry for entry in live if entry.name != failure.entry]


def turns_left(
    lineup: Lineup, bench: BenchDir, *, retry: bool = False
) -> Iterator[tuple[int, Entry]]:
    """Yield the turns that `race` would run, as (round, entry)."""
    for size, entries in lineup.races.items():
        files = bench.race(*size)
        yield from _remaining_turns(_entries_to_run(entries, files, retry=retry), files)


def time_left_s(
    lineup: Lineup, bench: BenchDir, models: Mapping[str, ModeledTimes], *, retry: bool = False
) -> float:
    """Estimate the time in seconds of the turns of `turns_left`, with 15 s for each launch and 1 s
    more for each turn."""
    turns = list(turns_left(lineup, bench, retry=retry))
    launches = {(entry.settings.layout.pp, entry.settings.layout.tp) for _, entry in turns}
    return _LAUNCH_S * len(launches) + sum(
        models[entry.name].times_s[number] + _BETWEEN_TURNS_S for number, entry in turns
    )


def _entries_to_run(entries: Sequence[Entry], files: RaceFiles, *, retry: bool) -> list[Entry]:
    """The entries to run: all with `retry`, otherwise those that have not failed."""
    failed = set() if retry else files.failed()
    return [entry for entry in entries if entry.name not in failed]


def _remaining_turns(entries: Sequence[Entry], files: RaceFiles) -> Iterator[tuple[int, Entry]]:
    """The turns of these entries that have not ended, as (round, entry)."""
    return rounds(entries, files.ended())


def _launch(
    entries: Sequence[Entry], files: RaceFiles, hosts: Hosts, launch: Launch
) -> Failure | None:
    """Launch the ranks and wait for their end. Returns the failure of an entry, if one failed on a
    single host; it is appended to the results, and the launch's logs are renamed.

    Host 0 writes the file of entries first. Raises the launch's error if no turn was running, if
    Megatron's 1F1B failed, for an interrupt or an invalid setting, and on several hosts, where host
    0 appends the failure first.
    """
    run = RunDir(files.path)
    if hosts.leads:
        make_directory(files.path)
        files.write_entries(entries)
        files.current_turn_file.unlink(missing_ok=True)
    settings = hosts.applied(_grouping_settings(entries[0].settings), run.path)
    try:
        launch(settings, run)
    except (UsageError, StoppedError):
        raise
    except RrfpError as error:
        if not hosts.leads:
            raise
        failure = _failure_of(error, files)
        by_name = {entry.name: entry for entry in entries}
        if failure is None or _is_reference(by_name[failure.entry]):
            raise
        if hosts.nnodes > 1:
            files.append(failure)
            raise
        failure = replace(failure, error=_move_logs_aside(failure.error, run))
        files.append(failure)
        return failure
    return None


def _grouping_settings(settings: TrainSettings) -> TrainSettings:
    """Settings with the grouping of ranks, which all entries of a race share."""
    return TrainSettings(
        pp=settings.layout.pp, tp=settings.layout.tp, layers=settings.model.layers, no_trace=True
    )


def _failure_of(error: RrfpError, files: RaceFiles) -> Failure | None:
    """Return the failure of the entry whose turn was running, with the error's first line; None
    between turns."""
    current_turn = files.read_current_turn()
    if current_turn is None:
        return None
    name, number = current_turn
    if current_turn in files.ended():
        return None
    return Failure(name, number, str(error).partition("\n")[0])


def _move_logs_aside(sentence: str, run: RunDir) -> str:
    """Rename the logs of a failed launch, as the next launch writes new ones; returns the sentence
    with the new path, unchanged if there are no logs."""
    if not run.logs.exists():
        return sentence
    kept = run.path / f"logs-failed-{len([*run.path.glob('logs-failed-*')])}"
    run.logs.rename(kept)
    return sentence.replace(f"{run.logs}/", f"{kept}/")


def _is_reference(entry: Entry) -> bool:
    """Return whether the entry is Megatron's 1F1B."""
    settings = entry.settings
    return (
        settings.policy.dispatch == Dispatch.MEGATRON and settings.layout.chunks == MEGATRON.chunks
    )

"""Runs the races of a lineup, launch by launch, and resumes interrupted ones."""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from rrfp.errors import RrfpError, StoppedError, UsageError
from rrfp.race.entries import Entry, Failure, RaceFiles, Turn, rounds
from rrfp.race.lineup import Lineup, cannot_race
from rrfp.race.modelled import Modelled, check_model
from rrfp.race.peers import check_peer
from rrfp.race.systems import MEGATRON
from rrfp.schedule.hints.hint import kinds_of
from rrfp.schedule.policy import Dispatch
from rrfp.trace.files.whole_file import make_directory, open_own
from rrfp.trace.rundir import RunDir
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings

RANK_MODULE = "rrfp.race.rank"
"""The module with each rank's work."""

_LAUNCH_S = 15.0
_BETWEEN_TURNS_S = 1.0
"""Rough time of a launch, on a small machine."""

Launch = Callable[[TrainSettings, RunDir], None]
"""Runs the ranks of a race to their end (`rrfp.train.ranks.launch`)."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts that run the ranks, and which one this is, by the flags of `rrfp train`."""

    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None

    @property
    def leads(self) -> bool:
        return self.node_rank == 0

    def applied(self, settings: TrainSettings, out: Path) -> TrainSettings:
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
        return self.path / "plan.json"

    @property
    def models(self) -> Path:
        """The models of the entries (`rrfp.race.modelled`)."""
        return self.path / "models.jsonl"

    def race(self, pp: int, tp: int) -> RaceFiles:
        return RaceFiles(self.path / f"pp{pp}-tp{tp}")

    def ended(self, lineup: Lineup) -> list[Turn | Failure]:
        """The lineup's turns and failures so far."""
        return [each for size in lineup.races for each in self.race(*size).read_turns()]

    def prepare(self, lineup: Lineup, *, force: bool) -> IO[bytes]:
        """Make the directory, or resume an earlier run of the same lineup in it.

        `force` removes what another lineup, or this one, has left. Raises UsageError if another
        lineup is there and `force` is not set, or if something else is there. No other process can
        prepare the directory until the returned file is closed.
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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another command races in {self.path}; wait for its end or choose another "
                "directory with --out"
            ) from None

    def _clear(self) -> None:
        for found in self.path.glob("pp*-tp*"):
            if found.is_dir():
                shutil.rmtree(found)
        for chart in (*self.path.glob("rq?.svg"), *self.path.glob("rq?.png")):
            chart.unlink()
        self.models.unlink(missing_ok=True)


def _is_lineup(text: str) -> bool:
    try:
        lineup = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(lineup, dict) and "entries" in lineup


def _why_other(path: Path, known: str, text: str) -> str:
    """Why the race in a directory is not the one asked for."""
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
    """Raise UsageError for the first entry that cannot run."""
    modelled = set()
    for entry in lineup.entries.values():
        settings = entry.settings
        check_settings(hosts.applied(settings, out))
        kinds = kinds_of(settings.hint.on(settings.shape))
        model = (settings.run.pace, settings.run.jitter, settings.shape, kinds, settings.layout.tp)
        if model not in modelled:
            try:
                check_model(entry)
            except UsageError as error:
                raise cannot_race(entry.name, error) from None
            modelled.add(model)
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
    """Run every turn of the lineup that has not ended yet; with `retry`, also those of entries that
    have failed.

    On a single host an entry that fails is passed to `failed` and left out, and the others go on.
    Raises RrfpError if Megatron's 1F1B fails, without which nothing can be compared, if ranks fail
    between two turns, and for any failure on several hosts, where the next call leaves the entry
    out.
    """
    for size, entries in lineup.races.items():
        files = bench.race(*size)
        live = _live(entries, files, retry=retry)
        while any(_left(live, files)):
            failure = _launch(live, files, hosts, launch)
            if failure is None:
                break
            failed(failure)
            live = [entry for entry in live if entry.name != failure.entry]


def turns_left(
    lineup: Lineup, bench: BenchDir, *, retry: bool = False
) -> Iterator[tuple[int, Entry]]:
    """The turns that `race` would run, by round and entry."""
    for size, entries in lineup.races.items():
        files = bench.race(*size)
        yield from _left(_live(entries, files, retry=retry), files)


def time_left_s(
    lineup: Lineup, bench: BenchDir, models: Mapping[str, Modelled], *, retry: bool = False
) -> float:
    """Roughly how long the turns of `turns_left` take."""
    turns = list(turns_left(lineup, bench, retry=retry))
    launches = {(entry.settings.layout.pp, entry.settings.layout.tp) for _, entry in turns}
    return _LAUNCH_S * len(launches) + sum(
        models[entry.name].times_s[number] + _BETWEEN_TURNS_S for number, entry in turns
    )


def _live(entries: Sequence[Entry], files: RaceFiles, *, retry: bool) -> list[Entry]:
    """The entries that have not failed, or all."""
    failed = set() if retry else files.failed()
    return [entry for entry in entries if entry.name not in failed]


def _left(entries: Sequence[Entry], files: RaceFiles) -> Iterator[tuple[int, Entry]]:
    """The turns to take."""
    return rounds(entries, files.ended())


def _launch(
    entries: Sequence[Entry], files: RaceFiles, hosts: Hosts, launch: Launch
) -> Failure | None:
    """Run the ranks to their end; returns the failure of an entry, if one failed."""
    run = RunDir(files.path)
    if hosts.leads:
        make_directory(files.path)
        files.write_entries(entries)
        files.under_way.unlink(missing_ok=True)
    settings = hosts.applied(_of_race(entries[0].settings), run.path)
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
        failure = replace(failure, error=_with_logs_kept(failure.error, run))
        files.append(failure)
        return failure
    return None


def _of_race(settings: TrainSettings) -> TrainSettings:
    """The settings that all entries of a race share: the grouping of ranks."""
    return TrainSettings(
        pp=settings.layout.pp, tp=settings.layout.tp, layers=settings.model.layers, no_trace=True
    )


def _failure_of(error: RrfpError, files: RaceFiles) -> Failure | None:
    """The failure of the entry whose turn it was; None between turns."""
    under_way = files.read_under_way()
    if under_way is None:
        return None
    name, number = under_way
    if under_way in files.ended():
        return None
    return Failure(name, number, str(error).partition("\n")[0])


def _with_logs_kept(sentence: str, run: RunDir) -> str:
    """Move the logs of a failure aside, because the next launch writes its own; returns the
    sentence with their new place."""
    if not run.logs.exists():
        return sentence
    kept = run.path / f"logs-failed-{len([*run.path.glob('logs-failed-*')])}"
    run.logs.rename(kept)
    return sentence.replace(f"{run.logs}/", f"{kept}/")


def _is_reference(entry: Entry) -> bool:
    settings = entry.settings
    return (
        settings.policy.dispatch == Dispatch.MEGATRON and settings.layout.chunks == MEGATRON.chunks
    )

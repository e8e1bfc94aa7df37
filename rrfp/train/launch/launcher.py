"""Starts the ranks of this host and reports how they ended."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from rrfp.errors import RrfpError, StoppedError, UsageError, numbered
from rrfp.runtime import launchers as variables
from rrfp.system import allow_open_files
from rrfp.trace.outcome import FaultOrigin, FoundBy, RunFailedError
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import open_own
from rrfp.train.data.sources import data_contents
from rrfp.train.launch.hosts.endpoint import local_ranks, place_of
from rrfp.train.launch.private_network import network_of, warn_of_open_ports
from rrfp.train.launch.processes import (
    CgroupLimits,
    Failure,
    SignalledError,
    own_directory,
    run_to_end,
)
from rrfp.train.launch.rank_status import frames_in_dump, hearing, standing_at
from rrfp.train.launch.stopping import failing_for_good
from rrfp.train.launch.store import file_store
from rrfp.train.launch.watchdog import Standstill, Why
from rrfp.train.settings import TrainSettings

TRAINING = "rrfp.train.loop"
"""The module with the work of `rrfp train`'s ranks."""

_MEETING_S = 300.0
"""How long a host waits for the others."""

_IN_STEP = re.compile(r"\bstep \d+$")
_ADVICE = {Why.STOPPED: "see who stops it", Why.FROZEN: "see who freezes it"}

_TORCHS_LOG = "TORCH_CPP_LOG_LEVEL"
"""The variable with the least level that torch's C++ logs on stderr, read as torch is imported."""


def launch(
    settings: TrainSettings,
    run: RunDir,
    work: str = TRAINING,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Run this host's ranks to their end; `work` names the module with their work, and `tell` gets
    what they warn of.

    Raises RrfpError naming the rank that failed first (UsageError if it refused its settings),
    KeyboardInterrupt on Ctrl-C, and StoppedError on another signal; no rank is left then. A run
    that saves checkpoints returns after SIGTERM, too, when the ranks have saved one, or raises
    StopRequestedError if they had not begun a step; it leaves the signal ignored. Must run on the
    main thread.
    """
    allow_open_files(settings.layout.world_size)
    limits = CgroupLimits()
    command = (sys.executable, "-m", "rrfp.train.launch.rank_process", work, str(run.path))
    with own_directory() as directory:
        own = {variables.DIRECTORY: str(directory)}
        with (
            network_of(settings.run) as network,
            _store(settings, run, directory, work) as (environment, elsewhere),
            hearing(directory, tell) as heard,
        ):
            _warn_of_open_ports(settings, network[variables.NETWORK])
            environments = _environments(settings, {**environment, **own, **network, **heard})
            try:
                failures = run_to_end(
                    (*command, settings.to_json()),
                    environments,
                    directory,
                    end_on_request=settings.run.save is not None,
                    lost=elsewhere.lost,
                    silence_s=settings.run.silence,
                    is_whole=settings.run.nnodes == 1,
                    warn=partial(_warn_still, run, tell),
                )
            except SignalledError as error:
                if error.number == signal.SIGINT:
                    # As if it came now, to whoever handles it here.
                    signal.raise_signal(signal.SIGINT)
                    raise KeyboardInterrupt from None
                if error.number == signal.SIGHUP:
                    # A terminal that goes away may say so more than once.
                    signal.signal(signal.SIGHUP, signal.SIG_IGN)
                raise StoppedError(f"the run was stopped by {error.number.name}") from None
            except RrfpError as error:
                note = limits.note(str(error))
                if not note or type(error) is not RrfpError:
                    raise
                raise RrfpError(f"{error}{note}") from None
            if failures:
                for rank, failure in failures.items():
                    _log_stacks(run, rank, "It stood still, and was killed", failure.stacks)
                num_steps = settings.num_steps if work == TRAINING else None
                raise _first_failure(failures, run, elsewhere.reason, num_steps, limits)


def _warn_of_open_ports(settings: TrainSettings, network: str) -> None:
    place = place_of(settings)
    if place is None or place.local_index == 0:  # once a host
        of_store = " and those of the run's store" if settings.run.nnodes > 1 else ""
        warn_of_open_ports(network, f"gloo's ports{of_store}")


class _Elsewhere(Protocol):
    """What is known of the other hosts."""

    def lost(self) -> RrfpError | None:
        """An error once another host is lost or has failed."""
        ...

    def reason(self) -> RrfpError | None:
        """Why ranks of this host have lost those of another; None if nobody says."""
        ...


class _NoOtherHost:
    def lost(self) -> RrfpError | None:
        return None

    def reason(self) -> RrfpError | None:
        return None


@contextmanager
def _store(
    settings: TrainSettings, run: RunDir, directory: Path, work: str
) -> Iterator[tuple[Mapping[str, str], _Elsewhere]]:
    """Keep the ranks' store open, and give the variables that tell them where it is, and what says
    how other hosts are. What ranks of other hosts record comes to host 0."""
    if settings.run.nnodes == 1:
        yield file_store(directory), _NoOtherHost()
        return
    # Imported late: only a launcher of several hosts needs torch.
    with _quiet():
        from rrfp.train.launch.hosts.gathering import gathering
        from rrfp.train.launch.hosts.joining import meeting

    # Ranks with other work read other data.
    data = data_contents(settings)["data"] if work == TRAINING else ""
    with (
        meeting(settings, _MEETING_S, data) as met,
        gathering(met, settings, run),
        failing_for_good(),
        met.pulse.telling(),
    ):
        yield met.environment, met.pulse


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch, imported in this block, from logging on the user's stderr, unless asked to: what
    fails in a launcher is an error, which that tells in a sentence."""
    if _TORCHS_LOG in os.environ:
        yield
        return
    os.environ[_TORCHS_LOG] = "FATAL"
    try:
        yield
    finally:
        del os.environ[_TORCHS_LOG]  # of the ranks, it goes to their logs


def _environments(
    settings: TrainSettings, environment: Mapping[str, str]
) -> dict[int, dict[str, str]]:
    """The environment variables of this host's ranks, by rank."""
    own, place = local_ranks(settings), place_of(settings)
    # A host may have several launchers. One that does not know how many knows of those before.
    num_launchers = 1 if place is None else place.local_count or place.local_index + 1
    first = settings.run.node_rank * len(own)
    return {
        rank: {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(settings.layout.world_size),
            "LOCAL_WORLD_SIZE": str(num_launchers * len(own)),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **environment,
        }
        for rank, local_rank in enumerate(own, start=first)
    }


def _first_failure(
    failures: Mapping[int, Failure],
    run: RunDir,
    elsewhere: Callable[[], RrfpError | None],
    num_steps: int | None = None,
    limits: CgroupLimits | None = None,
) -> RrfpError:
    """The failure that caused the others, as an error. `num_steps` are those of the run, if its
    ranks count them, and `limits` are those that processes of this host have reached."""

    def precedence(rank: int) -> tuple[int, float]:
        failure, report = failures[rank], failures[rank].report
        if failure.exit_code < 0 and not failure.was_ended:
            level = 0
        elif not failure.was_ended if report is None else report.is_own:
            level = 1
        elif failure.standstill is not None:
            level = 2
        else:
            level = 3 if report is not None and report.is_silence else 4
        return level, failure.ended_s

    rank = min(failures, key=precedence)
    failure, log = failures[rank], run.rank_log(rank)
    process, report = f"rank {rank} (pid {failure.pid})", failure.report
    if failure.exit_code < 0 and not failure.was_ended:
        return RunFailedError(
            f"{process} was killed by {_killer(-failure.exit_code, limits)}; its last output is in "
            f"{log}",
            FaultOrigin(FoundBy.LAUNCHER, rank),
        )
    if failure.standstill is not None and (report is None or not report.is_own):
        told = _told_standstill(failure, failure.standstill, log)
        return RunFailedError(f"{process} {told}", FaultOrigin(FoundBy.LAUNCHER, rank))
    if report is None:
        stage = f" {failure.stage}" if failure.stage else ""
        if num_steps is not None and _IN_STEP.search(stage):
            stage += f" of {num_steps}"
        return RunFailedError(
            f"rank {rank} exited with code {failure.exit_code}{stage}{_note(limits)}; see {log}",
            FaultOrigin(FoundBy.LAUNCHER, rank),
        )
    if report.exit_code == UsageError.exit_code:
        return UsageError(report.sentence)
    if (report.is_consequence or report.is_silence) and (reason := elsewhere()):
        return reason
    if report.is_silence:
        for other, ended in failures.items():
            if ended.exit_code == -signal.SIGKILL:
                # The launcher kills processes that a SIGTERM does not end.
                return RunFailedError(
                    f"rank {other} (pid {ended.pid}) did not answer and was killed: "
                    f"{report.sentence}",
                    FaultOrigin(FoundBy.LAUNCHER, other),
                )
    # torch does not say whom a collective has lost.
    culprit = report.culprit or FaultOrigin(FoundBy.COLLECTIVE)
    detail = f"\n{report.detail}" if report.detail else ""
    sentence = f"{report.sentence}{_note(limits, report.sentence)}"
    return RunFailedError(f"rank {rank} failed: {sentence} (see {log}){detail}", culprit)


def _told_standstill(failure: Failure, standstill: Standstill, log: Path) -> str:
    """How a rank stood still: where, why, who waited for it, and where its stack is."""
    seconds = f" for {standstill.seen_s:.0f} s" if standstill.seen_s >= 1 else ""
    at = _at(standstill, failure.stacks)
    told = f"stood still {standstill.stage}{seconds}{at}, and was killed: {standstill.why}"
    if standstill.waiting and standstill.why is not Why.DEADLOCK:
        told += f", while {numbered('rank', standstill.waiting)} waited"
    advice = _ADVICE.get(standstill.why, "--silence gives it longer")
    where = f"its stack is in {log}" if failure.stacks else f"its output is in {log}"
    return f"{told}; {where}, and {advice}"


def _warn_still(
    run: RunDir,
    tell: Callable[[str], None],
    rank: int,
    pid: int,
    standstill: Standstill,
    stacks: str,
) -> None:
    """Warn of a rank that stands still, and may do so for longer."""
    _log_stacks(run, rank, "It stands still", stacks)
    at = _at(standstill, stacks)
    where = f", and its stack is in {run.rank_log(rank)}" if stacks else ""
    tell(
        f"rank {rank} (pid {pid}) has stood still {standstill.stage} for {standstill.seen_s:.0f} s"
        f"{at}: {standstill.why}; it is killed after {standstill.limit_s:.0f} s like that, "
        f"--silence gives it longer{where}"
    )


def _at(standstill: Standstill, stacks: str) -> str:
    """The clause with the line where a rank stands, if that is known."""
    place = standing_at(frames_in_dump(stacks)) or standstill.place
    return f", at {place}" if place else ""


def _log_stacks(run: RunDir, rank: int, how: str, stacks: str) -> None:
    """Add to a rank's log what its threads did while it stood still."""
    if stacks:
        # The run's directory may have gone.
        with suppress(OSError), open_own(run.rank_log(rank)) as log:
            log.write(f"{how}. Its threads:\n{stacks}".encode())


def _note(limits: CgroupLimits | None, reason: str | None = None) -> str:
    return "" if limits is None else limits.note(reason)


def _killer(number: int, limits: CgroupLimits | None) -> str:
    """What has sent a signal that ended a rank: the signal, unless the kernel says why it did."""
    killer = limits.killer() if limits is not None and number == signal.SIGKILL else None
    return killer or _signal_name(number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one has no name

"""Runs the ranks of this host and raises the failure that ended them."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rrfp.errors import RrfpError, StoppedError, UsageError, numbered
from rrfp.runtime import launchers as variables
from rrfp.system import allow_open_files
from rrfp.trace.outcome import FaultOrigin, FoundBy, RunFailedError
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import open_own
from rrfp.train.data.sources import data_contents
from rrfp.train.launch.hosts.endpoint import host_ranks, launcher_place, local_ranks
from rrfp.train.launch.private_network import run_network, warn_of_open_ports
from rrfp.train.launch.processes import (
    CgroupLimits,
    Failure,
    SignalledError,
    launcher_directory,
    supervise_ranks,
)
from rrfp.train.launch.rank_status import format_position, forwarding_warnings, frames_in_dump
from rrfp.train.launch.stopping import ignoring_sigterm_on_failure
from rrfp.train.launch.store import file_store
from rrfp.train.launch.watchdog import Hang, Why
from rrfp.train.settings import TrainSettings

TRAINING = "rrfp.train.loop"
"""The module with the work of a rank of `rrfp train`."""

_JOIN_S = 300.0
"""How long a host waits for the others to join."""

_IN_STEP = re.compile(r"\bstep \d+$")
_ADVICE = {Why.STOPPED: "see who stops it", Why.FROZEN: "see who freezes it"}

_TORCH_LOG = "TORCH_CPP_LOG_LEVEL"
"""The variable with the lowest level that torch's C++ logs to stderr; torch reads it on import."""


def launch(
    settings: TrainSettings,
    run: RunDir,
    work: str = TRAINING,
    warn: Callable[[str], None] = lambda _: None,
) -> None:
    """Run this host's ranks until they end, in the run's own network if it has one. `work` names
    the module with their work; `warn` receives their warnings and those of hangs.

    Raise RrfpError naming the rank that caused the failure (UsageError if it refused its settings)
    or the host that was lost, KeyboardInterrupt on Ctrl-C, and StoppedError on another signal; no
    rank is left then. After SIGTERM a run that saves checkpoints returns when the ranks have saved
    one, or raises StopRequestedError if they had not begun a step; it leaves the signal ignored.
    Must run on the main thread.
    """
    allow_open_files(settings.layout.world_size)
    limits = CgroupLimits()
    command = (sys.executable, "-m", "rrfp.train.launch.rank_process", work, str(run.path))
    with (
        launcher_directory() as directory,
        run_network(settings.run) as network,
        _open_store(settings, run, directory, work) as (store, other_hosts),
        forwarding_warnings(directory, warn) as warnings,
    ):
        _warn_of_open_ports(settings, network[variables.NETWORK])
        own = {variables.DIRECTORY: str(directory)}
        environments = _environments(settings, {**store, **own, **network, **warnings})
        try:
            failures = supervise_ranks(
                (*command, settings.to_json()),
                environments,
                directory,
                end_on_request=settings.run.save is not None,
                lost=other_hosts.lost,
                silence_s=settings.run.silence,
                is_whole=settings.run.nnodes == 1,
                warn=partial(_warn_of_hang, run, warn),
            )
        except SignalledError as error:
            if error.number == signal.SIGINT:
                # Raised again for the handler of this process.
                signal.raise_signal(signal.SIGINT)
                raise KeyboardInterrupt from None
            if error.number == signal.SIGHUP:
                # A closed terminal may send it more than once.
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
            raise _first_failure(failures, run, other_hosts.reason, num_steps, limits)


def _warn_of_open_ports(settings: TrainSettings, network: str) -> None:
    """Warn, in one launcher per host, if the ports of gloo and of a store between hosts accept any
    connection."""
    place = launcher_place(settings)
    if place is None or place.local_index == 0:  # once per host
        of_store = " and those of the run's store" if settings.run.nnodes > 1 else ""
        warn_of_open_ports(network, f"gloo's ports{of_store}")


class _OtherHosts(NamedTuple):
    """Functions that return errors of other hosts."""

    lost: Callable[[], RrfpError | None] = lambda: None
    """Returns an error once another host is lost or has failed."""
    reason: Callable[[], RrfpError | None] = lambda: None
    """Waits for the reason why ranks here have lost peers on another host; None if unknown."""


@contextmanager
def _open_store(
    settings: TrainSettings, run: RunDir, directory: Path, work: str
) -> Iterator[tuple[Mapping[str, str], _OtherHosts]]:
    """Join the other hosts, if any, and keep the ranks' store open, a file on a single host. Yield
    the variables that name it, and the state of the other hosts, whose records go to host 0."""
    if settings.run.nnodes == 1:
        yield file_store(directory), _OtherHosts()
        return
    # Imported late: only a launcher of several hosts needs torch.
    with _silencing_torch_log():
        from rrfp.train.launch.hosts.gathering import gathering_records
        from rrfp.train.launch.hosts.joining import joined_hosts

    # Ranks with other work read other data.
    data = data_contents(settings)["data"] if work == TRAINING else ""
    with (
        joined_hosts(settings, _JOIN_S, data) as hosts,
        gathering_records(hosts, settings, run),
        ignoring_sigterm_on_failure(),
        hosts.heartbeat.reporting_failure(),
    ):
        yield hosts.environment, _OtherHosts(hosts.heartbeat.lost, hosts.heartbeat.reason)


@contextmanager
def _silencing_torch_log() -> Iterator[None]:
    """Keep torch, imported in this block, from logging to stderr, unless the user's environment
    sets the level. The launcher reports its failures as errors of one sentence."""
    if _TORCH_LOG in os.environ:
        yield
        return
    os.environ[_TORCH_LOG] = "FATAL"
    try:
        yield
    finally:
        del os.environ[_TORCH_LOG]  # ranks log to their own files


def _environments(
    settings: TrainSettings, environment: Mapping[str, str]
) -> dict[int, dict[str, str]]:
    """Return the environment variables of this host's ranks, by rank: RANK and the others of
    torch's launcher, OMP_NUM_THREADS (1 unless the user has set it), and `environment`."""
    own, place = local_ranks(settings), launcher_place(settings)
    # A host may have several launchers. Without their number, at least those before are known.
    num_launchers = 1 if place is None else place.local_count or place.local_index + 1
    return {
        rank: {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(settings.layout.world_size),
            "LOCAL_WORLD_SIZE": str(num_launchers * len(own)),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **environment,
        }
        for rank, local_rank in zip(host_ranks(settings, settings.run.node_rank), own, strict=True)
    }


def _first_failure(
    failures: Mapping[int, Failure],
    run: RunDir,
    reason_elsewhere: Callable[[], RrfpError | None],
    num_steps: int | None = None,
    limits: CgroupLimits | None = None,
) -> RrfpError:
    """Return, as an error, the failure that caused the others: first a kill from outside, then a
    rank's own error, a hang, silence, and a lost peer, each time the earliest. For the last two
    `reason_elsewhere` waits for a reason from another host, which is returned instead. `num_steps`
    are the steps of the run, if its ranks count them."""

    def precedence(rank: int) -> tuple[int, float]:
        failure, report = failures[rank], failures[rank].report
        if failure.exit_code < 0 and not failure.was_ended:
            level = 0
        elif not failure.was_ended if report is None else report.is_own:
            level = 1
        elif failure.hang is not None:
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
    if failure.hang is not None and (report is None or not report.is_own):
        hang = _describe_hang(failure, failure.hang, log)
        return RunFailedError(f"{process} {hang}", FaultOrigin(FoundBy.LAUNCHER, rank))
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
    if (report.is_consequence or report.is_silence) and (reason := reason_elsewhere()):
        return reason
    if report.is_silence:
        for other, ended in failures.items():
            if ended.exit_code == -signal.SIGKILL:
                # The launcher kills processes that SIGTERM does not end.
                return RunFailedError(
                    f"rank {other} (pid {ended.pid}) did not answer and was killed: "
                    f"{report.sentence}",
                    FaultOrigin(FoundBy.LAUNCHER, other),
                )
    # torch does not report which rank a collective has lost.
    culprit = report.culprit or FaultOrigin(FoundBy.COLLECTIVE)
    detail = f"\n{report.detail}" if report.detail else ""
    sentence = f"{report.sentence}{_note(limits, report.sentence)}"
    return RunFailedError(f"rank {rank} failed: {sentence} (see {log}){detail}", culprit)


def _describe_hang(failure: Failure, hang: Hang, log: Path) -> str:
    """Describe where and why a killed rank hung, which ranks waited meanwhile, and where its stack
    is."""
    seconds = f" for {hang.seen_s:.0f} s" if hang.seen_s >= 1 else ""
    fact = f"stood still {hang.stage}{seconds}{_at(hang, failure.stacks)}, and was killed"
    waited = ""
    if hang.waiting and hang.why is not Why.DEADLOCK:
        waited = f", while {numbered('rank', hang.waiting)} waited"
    where = f"its stack is in {log}" if failure.stacks else f"its output is in {log}"
    advice = _ADVICE.get(hang.why, "--silence gives it longer")
    return f"{fact}: {hang.why}{waited}; {where}, and {advice}"


def _warn_of_hang(
    run: RunDir, warn: Callable[[str], None], rank: int, pid: int, hang: Hang, stacks: str
) -> None:
    """Warn of a rank that hangs below its limit, and add its stacks to its log."""
    _log_stacks(run, rank, "It stands still", stacks)
    where = f", and its stack is in {run.rank_log(rank)}" if stacks else ""
    warn(
        f"rank {rank} (pid {pid}) has stood still {hang.stage} for {hang.seen_s:.0f} s"
        f"{_at(hang, stacks)}: {hang.why}; it is killed after {hang.limit_s:.0f} s like that, "
        f"--silence gives it longer{where}"
    )


def _at(hang: Hang, stacks: str) -> str:
    """Return the clause with the source line of a hang, from its stacks or else its status page;
    empty if unknown."""
    place = format_position(frames_in_dump(stacks)) or hang.place
    return f", at {place}" if place else ""


def _log_stacks(run: RunDir, rank: int, event: str, stacks: str) -> None:
    """Append the stacks of a rank's threads to its log, if there are any; errors are ignored."""
    if stacks:
        # The run's directory may have been removed.
        with suppress(OSError), open_own(run.rank_log(rank)) as log:
            log.write(f"{event}. Its threads:\n{stacks}".encode())


def _note(limits: CgroupLimits | None, reason: str | None = None) -> str:
    """Return the clause with the limit of the cgroup that explains a failure; empty if there is no
    such limit."""
    return "" if limits is None else limits.note(reason)


def _killer(number: int, limits: CgroupLimits | None) -> str:
    """Name what killed a rank: for SIGKILL the kernel's OOM killer, if that has killed a process of
    this cgroup, else the signal, by name or number."""
    if limits is not None and number == signal.SIGKILL and (killer := limits.killer()):
        return killer
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one has no name

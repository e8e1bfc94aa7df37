"""Starts the ranks of this host and reports how they ended."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp.errors import RrfpError, StoppedError, UsageError
from rrfp.runtime import variables
from rrfp.trace.rundir import RunDir
from rrfp.train.ranks.children import Failure, SignalledError, ending_signal, run_to_end
from rrfp.train.ranks.place import place_of
from rrfp.train.ranks.private_network import network_of
from rrfp.train.ranks.stores import file_store, store_at
from rrfp.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch.distributed import Store

TRAINING = "rrfp.train.rank"
"""The module with the work of `rrfp train`'s ranks."""

_MEETING_S = 300.0
"""How long a host waits for the others."""
_ANSWER_S = 30.0


def launch(settings: TrainSettings, run: RunDir, work: str = TRAINING) -> None:
    """Run this host's ranks to their end; `work` names the module with their work.

    Raises RrfpError naming the rank that failed first (UsageError if it refused its settings),
    KeyboardInterrupt on Ctrl-C, and StoppedError on another signal; no rank is left then. A run
    that saves checkpoints returns after SIGTERM, too, when the ranks have saved one, and leaves the
    signal ignored. Must run on the main thread.
    """
    command = (sys.executable, "-m", "rrfp.train.ranks.process", work, str(run.path))
    # tempfile makes a directory that only its owner may enter.
    with tempfile.TemporaryDirectory(prefix="rrfp-run-") as name:
        directory = Path(name)
        with (
            network_of(settings.run) as network,
            _store(settings, run, directory) as (environment, lost),
        ):
            environments = _environments(settings, {**environment, **network})
            end_on_request = settings.run.save is not None
            try:
                failures = run_to_end(
                    (*command, settings.to_json()),
                    environments,
                    directory,
                    end_on_request=end_on_request,
                    lost=lost,
                )
            except SignalledError as error:
                if error.number == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise StoppedError(f"the run was stopped by {error.number.name}") from None
            if failures:
                ended_by = ending_signal(end_on_request=end_on_request)
                raise _first_failure(failures, run, settings.run.nnodes, ended_by)


@contextmanager
def _store(
    settings: TrainSettings, run: RunDir, directory: Path
) -> Iterator[tuple[Mapping[str, str], Callable[[], str]]]:
    """Keep the ranks' store open, and give the variables that tell them where it is, and what says
    whether another host is lost. What ranks of other hosts record comes to host 0."""
    if settings.run.nnodes == 1:
        yield file_store(directory), str
        return
    # Imported late: only a launcher of several hosts needs torch.
    from rrfp.train.ranks.gathering import gathering
    from rrfp.train.ranks.meeting import meeting
    from rrfp.train.ranks.pulse import beating

    def within(store: "Store") -> AbstractContextManager[None]:
        return gathering(store, settings, run)

    with meeting(settings, _MEETING_S, within) as environment:
        # A connection of its own: on the meeting's a call may wait for another to be answered.
        store = store_at(environment[variables.STORE], _ANSWER_S)
        with beating(store, settings.run.node_rank, settings.run.nnodes) as pulse:
            yield environment, pulse.lost


def _environments(
    settings: TrainSettings, environment: Mapping[str, str]
) -> dict[int, dict[str, str]]:
    """The environment variables of this host's ranks, by rank."""
    num_own = settings.layout.world_size // settings.run.nnodes
    place = place_of(settings)
    # A host may have several launchers, and devices are shared out over all of its ranks.
    first_local, num_launchers = 0, 1
    if place is not None:
        # Whoever does not know how many there are knows of those before.
        num_launchers = place.local_count or place.local_index + 1
        first_local = place.local_index * num_own
    return {
        settings.run.node_rank * num_own + number: {
            "RANK": str(settings.run.node_rank * num_own + number),
            "LOCAL_RANK": str(first_local + number),
            "WORLD_SIZE": str(settings.layout.world_size),
            "LOCAL_WORLD_SIZE": str(num_launchers * num_own),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **environment,
        }
        for number in range(num_own)
    }


def _first_failure(
    failures: Mapping[int, Failure],
    run: RunDir,
    num_hosts: int,
    ended_by: signal.Signals = signal.SIGTERM,
) -> RrfpError:
    """The failure that caused the others, as an error; the launcher ended these with `ended_by`."""

    def precedence(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        was_killed = failure.exit_code < 0 and failure.exit_code != -ended_by
        is_consequence = failure.report is None or failure.report.is_consequence
        return 0 if was_killed else 2 if is_consequence else 1, failure.ended_s

    rank = min(failures, key=precedence)
    failure, log = failures[rank], run.rank_log(rank)
    report = failure.report
    if failure.exit_code == -signal.SIGKILL:
        for other in failures.values():
            if other.report is not None and other.report.is_silence:
                # The launcher kills processes that a SIGTERM does not end.
                return RrfpError(
                    f"rank {rank} (pid {failure.pid}) did not answer and was killed: "
                    f"{other.report.sentence}"
                )
    if failure.exit_code < 0:
        return RrfpError(
            f"rank {rank} (pid {failure.pid}) was killed by {_signal_name(-failure.exit_code)}; "
            f"its last output is in {log}"
        )
    if report is None:
        return RrfpError(f"rank {rank} ended with exit code {failure.exit_code}; see {log}")
    if report.exit_code == UsageError.exit_code:
        return UsageError(report.sentence)
    if report.is_consequence and num_hosts > 1:
        return RrfpError(
            f"rank {rank} failed after a rank of another host: {report.sentence} (that host's "
            "rrfp train names the first)"
        )
    detail = f"\n{report.detail}" if report.detail else ""
    return RrfpError(f"rank {rank} failed: {report.sentence} (see {log}){detail}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one has no name

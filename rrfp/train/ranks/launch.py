"""Starts the ranks of this host and reports how they ended."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rrfp.errors import RrfpError, StoppedError, UsageError
from rrfp.trace.rundir import RunDir
from rrfp.train.data.contents import data_contents
from rrfp.train.ranks.children import Failure, SignalledError, ending_signal, run_to_end
from rrfp.train.ranks.place import place_of
from rrfp.train.ranks.stopping import failing_for_good
from rrfp.train.ranks.stores import file_store
from rrfp.train.settings import TrainSettings

TRAINING = "rrfp.train.rank"
"""The module with the work of `rrfp train`'s ranks."""

_MEETING_S = 300.0
"""How long a host waits for the others."""


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
        with _store(settings, run, directory, work) as (environment, elsewhere):
            environments = _environments(settings, environment)
            end_on_request = settings.run.save is not None
            try:
                failures = run_to_end(
                    (*command, settings.to_json()),
                    environments,
                    directory,
                    end_on_request=end_on_request,
                    lost=elsewhere.lost,
                )
            except SignalledError as error:
                if error.number == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise StoppedError(f"the run was stopped by {error.number.name}") from None
            if failures:
                ended_by = ending_signal(end_on_request=end_on_request)
                raise _first_failure(failures, run, elsewhere.reason, ended_by)


class _Elsewhere(Protocol):
    """What is known of the other hosts."""

    def lost(self) -> str:
        """A sentence once another host is lost or has failed; until then empty."""
        ...

    def reason(self) -> str:
        """Why ranks of this host have lost those of another; empty if nobody says."""
        ...


class _NoOtherHost:
    def lost(self) -> str:
        return ""

    def reason(self) -> str:
        return ""


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
    with _quiet_torch():
        from rrfp.train.ranks.gathering import gathering
        from rrfp.train.ranks.meeting import meeting

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
def _quiet_torch() -> Iterator[None]:
    """Let torch be imported so that its C++ is quiet here, not in the ranks: it would show stacks
    of what the launcher says in a sentence, such as that the store has gone."""
    name = "TORCH_CPP_LOG_LEVEL"
    given = os.environ.get(name)
    os.environ.setdefault(name, "FATAL")
    yield
    if given is None:
        del os.environ[name]


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
    elsewhere: Callable[[], str],
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
    if (report.is_consequence or report.is_silence) and (reason := elsewhere()):
        return RrfpError(reason)
    detail = f"\n{report.detail}" if report.detail else ""
    return RrfpError(f"rank {rank} failed: {report.sentence} (see {log}){detail}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one has no name

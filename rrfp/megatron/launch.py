"""Starts the ranks of this node with torch's elastic launcher and says how they ended."""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rrfp.errors import RrfpError, StoppedError, UsageError
from rrfp.megatron.failure import FailureReport, first_line
from rrfp.megatron.meeting import meet
from rrfp.megatron.process import Job
from rrfp.megatron.settings import TrainSettings
from rrfp.trace.rundir import RunDir

_SHUTDOWN_S = 5
_MEETING_S = 300.0
"""How long a host waits for the others to come."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(settings: TrainSettings, run: RunDir, job: Job = Job.TRAIN) -> None:
    """Run this host's ranks to their end.

    Raises RrfpError naming the rank that failed first (UsageError when it refused its settings),
    KeyboardInterrupt on Ctrl-C, and StoppedError on another signal; no rank is left then. Must run
    on the main thread.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if settings.nnodes == 1:
        # gloo would ask for the address of the host's name, which not every machine can tell.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Host 0 serves the store for as long as it is kept.
    _store = meet(settings, _MEETING_S) if settings.nnodes > 1 else None
    module = "rrfp.megatron.process"
    command = (sys.executable, "-m", module, job, str(run.path), settings.to_json())
    with tempfile.TemporaryDirectory(prefix="rrfp-errors-") as error_dir, _elastic_manners():
        config = LaunchConfig(
            min_nodes=settings.nnodes,
            max_nodes=settings.nnodes,
            nproc_per_node=settings.world_size // settings.nnodes,
            run_id="rrfp",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=error_dir),
            shutdown_timeout=_SHUTDOWN_S,
            **_rendezvous(settings),
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            raise _first_failure(error.failures, run, settings.nnodes) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise StoppedError(f"the run was stopped by {error.sigval.name}") from None
        except (DistError, RendezvousError) as error:
            raise RrfpError(
                f"the elastic launcher failed ({first_line(str(error))}); see whether the other "
                "hosts still run"
            ) from None


@contextmanager
def _elastic_manners() -> Iterator[None]:
    """Keep the elastic launcher from the terminal, and from this process' signals afterwards."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _rendezvous(settings: TrainSettings) -> dict[str, Any]:
    if settings.nnodes == 1:
        return {
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "127.0.0.1:0",
            "local_addr": "127.0.0.1",
        }
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": settings.rdzv_endpoint,
        "rdzv_configs": {"rank": settings.node_rank, "timeout": round(_MEETING_S)},
    }


def _first_failure(failures: dict[int, ProcessFailure], run: RunDir, num_hosts: int) -> RrfpError:
    """The failure that the others follow from, as an error."""
    reports = {
        rank: FailureReport.read(failure.error_file_data) for rank, failure in failures.items()
    }

    def precedence(rank: int) -> tuple[int, int]:
        report, failure = reports[rank], failures[rank]
        # The launcher itself ends the other ranks with SIGTERM.
        was_killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
        is_consequence = report is None or report.is_consequence
        return 0 if was_killed else 2 if is_consequence else 1, failure.timestamp

    rank = min(failures, key=precedence)
    failure, report, log = failures[rank], reports[rank], run.rank_log(rank)
    if failure.exitcode == -signal.SIGKILL:
        for other in filter(None, reports.values()):
            if other.is_silence:
                # The launcher kills what a SIGTERM does not end.
                return RrfpError(
                    f"rank {rank} (pid {failure.pid}) did not answer and was killed: "
                    f"{other.sentence}"
                )
    if failure.exitcode < 0:
        return RrfpError(
            f"rank {rank} (pid {failure.pid}) was killed by {failure.signal_name()}; "
            f"what it said last is in {log}"
        )
    if report is None:
        return RrfpError(f"rank {rank} ended with exit code {failure.exitcode}; see {log}")
    if report.exit_code == UsageError.exit_code:
        return UsageError(report.sentence)
    if report.is_consequence and num_hosts > 1:
        return RrfpError(
            f"rank {rank} failed after a rank of another host: {report.sentence} (that host's "
            "rrfp train names the first)"
        )
    detail = f"\n{report.detail}" if report.detail else ""
    return RrfpError(f"rank {rank} failed: {report.sentence} (see {log}){detail}")

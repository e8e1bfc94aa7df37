"""Starts the ranks of this node with torch's elastic launcher and says how they ended."""

import logging
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rrfp.errors import RrfpError, UsageError
from rrfp.megatron.failure import FailureReport, log_path
from rrfp.megatron.settings import TrainSettings

_SHUTDOWN_S = 5


@dataclass(frozen=True, slots=True)
class Nodes:
    """The hosts of a run, in torch's words."""

    num_nodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    """host:port of node 0; every node names the same."""

    def validate(self, world_size: int) -> None:
        """Raise UsageError when the ranks cannot be spread over these nodes."""
        if self.num_nodes < 1 or world_size % self.num_nodes:
            raise UsageError(
                f"{world_size} ranks do not divide over {self.num_nodes} nodes; change --nnodes"
            )
        if not 0 <= self.node_rank < self.num_nodes:
            raise UsageError(
                f"--node-rank is {self.node_rank}; it must be in 0..{self.num_nodes - 1}"
            )
        if self.num_nodes > 1 and self.rdzv_endpoint is None:
            raise UsageError("several nodes need --rdzv-endpoint HOST:PORT of node 0")


def launch(settings: TrainSettings, run_dir: Path, nodes: Nodes) -> None:
    """Run this node's ranks to their end.

    Raises RrfpError naming the rank that failed first (UsageError when it refused its settings),
    and KeyboardInterrupt on Ctrl-C; no rank is left then. Must run on the main thread.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="rrfp-errors-") as error_dir:
        config = LaunchConfig(
            min_nodes=nodes.num_nodes,
            max_nodes=nodes.num_nodes,
            nproc_per_node=settings.world_size // nodes.num_nodes,
            run_id=run_dir.name,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=error_dir),
            shutdown_timeout=_SHUTDOWN_S,
            **_rendezvous(nodes),
        )
        command = (sys.executable, "-m", "rrfp.megatron.process", str(run_dir), settings.to_json())
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            raise _first_failure(error.failures, run_dir) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RrfpError(f"the run was stopped by {error.sigval.name}") from None


def _rendezvous(nodes: Nodes) -> dict[str, Any]:
    if nodes.num_nodes == 1:
        return {
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "127.0.0.1:0",
            "local_addr": "127.0.0.1",
        }
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": nodes.rdzv_endpoint,
        "rdzv_configs": {"rank": nodes.node_rank},
    }


def _first_failure(failures: dict[int, ProcessFailure], run_dir: Path) -> RrfpError:
    """The failure that the others follow from, as an error."""

    def precedence(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        _, failure = item
        report = FailureReport.read(failure.error_file_data)
        # The launcher itself ends the other ranks with SIGTERM.
        was_killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
        is_consequence = report is None or report.is_consequence
        return 0 if was_killed else 2 if is_consequence else 1, failure.timestamp

    rank, failure = min(failures.items(), key=precedence)
    log = log_path(run_dir, rank)
    if failure.exitcode < 0:
        return RrfpError(
            f"rank {rank} (pid {failure.pid}) was killed by {failure.signal_name()}; "
            f"what it said last is in {log}"
        )
    report = FailureReport.read(failure.error_file_data)
    if report is None:
        return RrfpError(f"rank {rank} ended with exit code {failure.exitcode}; see {log}")
    if report.exit_code == UsageError.exit_code:
        return UsageError(report.sentence)
    return RrfpError(f"rank {rank} failed: {report.sentence} (see {log})")

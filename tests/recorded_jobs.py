"""A Megatron job run by `rrfp run` on a test's ranks, and what its recording says."""

import sys
from importlib import metadata
from pathlib import Path
from unittest.mock import patch

from rrfp.trace.check import check_contents
from rrfp.trace.locate import resolve_trace
from rrfp.trace.perfetto.reader import TraceContents, read_contents
from rrfp.trace.records import Phase, Recording

ROOT = Path(__file__).parent.parent
JOB = ROOT / "tests" / "megatron_job.py"


def run_script(options: list[str], arguments: list[str]) -> None:
    """Run the job by `rrfp run` on this rank; in a process of its own."""
    from rrfp.cli.main import main
    from rrfp.runtime.exit_hooks import at_end

    sys.argv = ["rrfp", "run", *options, str(JOB), *arguments]
    assert main() == 0
    # The processes of a test end in another way than those of a job.
    at_end.run()


def run_script_beside(protobuf: str, options: list[str], arguments: list[str]) -> None:
    """The same in an environment that seems to have this version of protobuf."""
    real = metadata.version
    with patch.object(
        metadata, "version", lambda name: {"protobuf": protobuf}.get(name) or real(name)
    ):
        run_script(options, arguments)


def read_whole(run: Path) -> TraceContents:
    contents = read_contents(resolve_trace(run))
    assert check_contents(contents) == []
    return contents


def steps_of(recording: Recording) -> set[tuple[int, ...]]:
    """The steps that each rank recorded, in the order in which they ended."""
    return {
        tuple(phase.step for phase in rank.phases if phase.phase == Phase.SCHEDULE)
        for rank in recording.ranks
    }

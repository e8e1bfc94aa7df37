"""Writes the files of an imported or simulated run."""

import json

from rrfp.trace.files.whole_file import write_whole
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording
from rrfp.trace.rundir import RunDir, update_latest


def write_run_files(run: RunDir, recording: Recording) -> None:
    """Write a recording's description and trace into a run's directory. May raise OSError."""
    write_trace(run.trace, recording)
    write_whole(run.run_json, f"{json.dumps(recording.settings, indent=2)}\n".encode())
    update_latest(run.path.parent)

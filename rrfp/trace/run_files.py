"""Writes the files of an imported or simulated run."""

import json

from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording
from rrfp.trace.rundir import RunDir, update_latest


def write_run_files(run: RunDir, recording: Recording) -> None:
    """Write a recording's description and trace into a run's directory. May raise OSError."""
    write_trace(run.trace, recording)
    run.run_json.write_text(f"{json.dumps(recording.settings, indent=2)}\n", encoding="utf-8")
    update_latest(run.path.parent)

"""Readers of what runs of rrfp leave behind."""

import json
from pathlib import Path

from rrfp.analyze.frame_files import load_frames
from rrfp.race.entries import Failure, RaceFiles, Turn
from rrfp.trace.flight_record import FlightRing, ring_of
from rrfp.trace.outcome import noting_outcome
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording
from rrfp.trace.run_dir import RunDir
from rrfp.trace.spill import SpillWriter, row_of
from rrfp.train.settings import TrainSettings
from tests.fuzz.reader import Reader, rrfp
from tests.recordings import make_recording

TRACE = "run.pftrace"


def recording() -> Recording:
    made = make_recording(2, 3, 3)
    settings = TrainSettings(pp=2, microbatches=3, steps=3).described()
    made.settings |= {"settings": settings, "policy": {"hint": "1f1b", "dispatch": "ready"}}
    return made


def _trace(directory: Path) -> None:
    write_trace(directory / TRACE, recording())


def _records(directory: Path, session: int = 1) -> RunDir:
    """A run that died before its records became a trace."""
    run, made = RunDir(directory / "run", session), recording()
    run.path.mkdir(exist_ok=True)
    run.run_json.write_text(json.dumps(made.settings))
    for records in made.ranks:
        writer = SpillWriter(run.rank_records(records.info.rank), records.info)
        for step in range(3):
            for found in records.by_name().values():
                writer.append(row_of(each) for each in found if each.step == step)
            writer.flush()
        writer.close()
    return run


def _dead_run(directory: Path) -> None:
    """A run whose ranks were killed in the middle of a step."""
    run = _records(directory)
    for records in recording().ranks:
        ring = FlightRing(ring_of(run.rank_records(records.info.rank)))
        for found in records.by_name().values():
            for each in found:
                ring.put(each)


def _ended_run(directory: Path) -> None:
    run = RunDir(directory / "run")
    run.path.mkdir()
    made = recording()
    write_trace(run.trace, made)
    run.run_json.write_text(json.dumps(made.settings))
    metrics = (
        {"step": step, "loss": 3.5 - step, "grad_norm": 1.0, "seconds": 0.5, "tokens": 96}
        for step in range(3)
    )
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    with noting_outcome(run) as note:
        note.error = "rank 1 was killed by SIGKILL"


def _resumed_run(directory: Path) -> None:
    """Two sessions, of which one has its trace yet."""
    run, made = RunDir(directory / "run"), recording()
    _records(directory, 2)
    write_trace(run.trace, made)
    told = {**made.settings, "session": 2, "first_step": 1, "sessions": [made.settings]}
    run.run_json.write_text(json.dumps(told))


def _cached_trace(directory: Path) -> None:
    _trace(directory)
    load_frames(directory / TRACE)
    rrfp("analyze", str(directory / TRACE))()


def _race(directory: Path) -> None:
    race = RaceFiles(directory)
    race.append(Turn("a", 0, 1.0, 0.5, 0.3, 0.1, 2.0, 24, 0, None, 0.0, True))
    race.append(Turn("a", 1, 1.1, 0.5, 0.3, 0.1, 2.0, 24, 0))
    race.append(Failure("b", 0, "rank 1 was killed by SIGKILL"))


def _read_race() -> object:
    race = RaceFiles(Path())
    return race.read_turns(), race.ended(), race.failed()


_REPORTS = tuple(
    rrfp("analyze", *report, TRACE)
    for report in (
        (),
        ("bubbles",),
        ("bubbles", "--format", "csv"),
        ("deviations",),
        ("memory",),
        ("misalignment",),
        ("critical-path",),
        ("whatif",),
        ("findings", "--format", "json"),
        ("compare", TRACE),
        ("bubbles", "--evaluations"),
    )
)

READERS = (
    Reader(
        "trace",
        _trace,
        (TRACE,),
        (
            *_REPORTS,
            *(rrfp("trace", "check", TRACE),) * 6,
            rrfp("trace", "export", TRACE, "-o", "trace.json"),
            rrfp("trace", "export", TRACE, "-o", "tables"),
            rrfp("simulate", "--pp", "2", "--microbatches", "3", "--costs", TRACE),
        ),
        share=2,
    ),
    Reader(
        "page of a trace",
        _trace,
        (TRACE,),
        (
            rrfp("analyze", "report", TRACE, "-o", "report.html"),
            rrfp("analyze", "chart", "gantt", TRACE, "-o", "gantt.svg"),
        ),
    ),
    Reader(
        "records",
        _records,
        ("run/records/*",),
        (
            rrfp("trace", "check", "run"),
            rrfp("watch", "--once", "run"),
            rrfp("watch", "--once", "--format", "json", "run"),
            rrfp("analyze", "bubbles", "run"),
        ),
        share=3,
    ),
    Reader(
        "flight records",
        _dead_run,
        ("run/records/*.ring",),
        (
            rrfp("trace", "check", "run"),
            rrfp("analyze", "run"),
            rrfp("watch", "--once", "run"),
        ),
    ),
    Reader(
        "run directory",
        _ended_run,
        ("run/run.json", "run/metrics.jsonl", "run/outcome.json"),
        (
            rrfp("runs", "."),
            rrfp("runs", ".", "--format", "json"),
            rrfp("runs", ".", "--format", "csv"),
            rrfp("watch", "--once", "run"),
            rrfp("trace", "check", "run"),
        ),
        share=4,
    ),
    Reader(
        "sessions",
        _resumed_run,
        ("run/run.json", "run/trace.pftrace", "run/records-2/*"),
        (rrfp("trace", "check", "run"), rrfp("analyze", "bubbles", "run"), rrfp("runs", ".")),
    ),
    Reader(
        "table cache",
        _cached_trace,
        (f"{TRACE}.frames/*/*",),
        (
            rrfp("analyze", "bubbles", TRACE, "--format", "json"),
            rrfp("analyze", "findings", TRACE, "--format", "json"),
            rrfp("analyze", "critical-path", TRACE, "--format", "json"),
            rrfp("analyze", "deviations", TRACE, "--format", "csv"),
            rrfp("analyze", TRACE),
        ),
        same=True,
    ),
    Reader("race", _race, ("turns.jsonl",), (_read_race,), share=4),
)

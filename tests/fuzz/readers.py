"""All readers that are fuzzed, by name."""

import gzip
import io
import json
import os
import pickle
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import numpy as np
import polars as pl
from PIL import Image

from rrfp.analyze.frame_files import load_frames
from rrfp.cli import app, errors
from rrfp.inputs import parse_layout, resolve_balancing
from rrfp.race.entries import Failure, RaceFiles, Turn
from rrfp.schedule.hints import format_order
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.shape import Shape
from rrfp.trace.flight_record import FlightRing, ring_of
from rrfp.trace.outcome import noting_outcome
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.records import Recording
from rrfp.trace.run_dir import RunDir
from rrfp.trace.spill import SpillWriter, row_of
from rrfp.train.checkpoints.directory import FILE, METRICS, CheckpointDir, Manifest
from rrfp.train.checkpoints.run_start import check_continues
from rrfp.train.data.images import Part, PictureFolder
from rrfp.train.data.sources import check_data, data_contents, open_corpus
from rrfp.train.data.tokens import write_index
from rrfp.train.settings import TrainSettings
from tests.analyze.recordings import make_recording
from tests.interchange.made_profiles import (
    DONE,
    PIPELINE,
    STARTED,
    WORLD,
    dump,
    execution_trace,
    exports,
    operators,
    plain_profile,
    played,
    protobuf,
    spans_file,
)
from tests.interchange.test_other_tools import steps_of_two_stages, written
from tests.train.test_images import write_lines
from tests.train.test_tokenized_data import END, train_tokenizer, write_jsonl, write_parquet

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

Attempt = Callable[[], object]
"""Reads files in the working directory. RrfpError means refused; any other error is a finding."""


class BrokenPromiseError(Exception):
    """A command ended in a way that is never allowed, such as with a traceback."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A part of rrfp that reads files which others may have made or damaged."""

    name: str
    make: Callable[[Path], object]
    """Writes undamaged files into a directory."""
    damaged: tuple[str, ...]
    """Glob patterns below the directory of the files to damage, one file in each input."""
    attempts: tuple[Attempt, ...]
    """The attempts, one of which is drawn for each input."""
    share: int = 1
    """The number of inputs in proportion to other readers'; fast readers get more."""
    same: bool = False
    """True if damage must not change the output, because the files are only a cache."""
    has_log: bool = False
    """True if only ranks read the files. Their stderr is a log, in which a panic of Rust may
    precede the error that ends the run."""


def rrfp(*arguments: str) -> Attempt:
    """An attempt that runs a command line. It must succeed, or refuse in one sentence on stderr."""

    def run() -> str:
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = errors.run_app(app.app, arguments)
            out.flush()
        if os.environ.get(errors.DEBUG_VARIABLE):
            raise BrokenPromiseError(err.getvalue()[-3000:])
        output = out.buffer.getvalue().decode("utf-8", "surrogateescape")
        _check(code, output, err.getvalue())
        return output if code == 0 else f"{code}: {err.getvalue()}"

    return run


def refusing_to_start(*arguments: str) -> Attempt:
    """An attempt that runs `rrfp train` until it would make a directory and start processes."""
    run = rrfp("train", "--out", "run", *arguments)

    def stop(_: object) -> None:
        pass

    def run_patched() -> object:
        with patch("rrfp.cli.train._run", stop):
            return run()

    return run_patched


def _check(code: object, out: str, err: str) -> None:
    def broken(why: str) -> NoReturn:
        raise BrokenPromiseError(f"{why}: {err[-2000:]!r}")

    if code not in (0, 1, 2, 3):
        broken(f"exit code {code}")
    for word in ("this is a bug", "Traceback", "panicked at", "the system refused"):
        if word in err:
            broken(word)
    last = err.strip().split("\n")[-1]
    # `trace check` prints its findings on stdout; a failed gate ends with a sentence like an error.
    if code in (2, 3) and not last.startswith("rrfp: "):
        broken(f"exit code {code} without a sentence")
    if code == 1 and not last.startswith("rrfp: ") and not out:
        broken("exit code 1 without a word")
    if found := _UNPRINTABLE.search(out + err):
        broken(f"{found[0]!r} reaches the terminal")


# Readers of training data and checkpoints.


_DATA = Path("data")
_FORMATS = ("png", "jpg", "gif", "bmp", "ppm", "tiff", "webp")


def _text_settings(**flags: object) -> TrainSettings:
    return TrainSettings(data=_DATA, seq_length=16, **flags)


def _read_text(**flags: object) -> None:
    settings = _text_settings(**flags)
    check_data(settings)
    corpus = open_corpus(settings.data)
    for document, length in enumerate(corpus.lengths[:20].tolist()):
        corpus.tokens(document, 0, min(length, 1000))


def _texts(directory: Path) -> None:
    data = directory / _DATA
    data.mkdir()
    write_jsonl(data / "a.jsonl")
    (data / "b.txt").write_text("def f():\n    return 'some text'\n" * 3)


def _rows(directory: Path) -> None:
    data = directory / _DATA
    data.mkdir()
    write_parquet(data / "a.parquet")


def _tokenized(directory: Path) -> None:
    _texts(directory)
    (directory / "tokenizer").mkdir()
    train_tokenizer(directory / "tokenizer", END)
    (directory / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def _read_tokenized() -> None:
    os.environ["XDG_CACHE_HOME"] = str(Path("cache").absolute())
    _read_text(tokenizer=Path("tokenizer"))


def _pair(directory: Path) -> None:
    lengths = np.array([5, 7, 0, 30], np.int32)
    tokens = np.arange(lengths.sum(), dtype=np.uint16)
    (directory / "data.bin").write_bytes(tokens.tobytes())
    write_index(directory / _DATA, np.uint16, lengths, np.array([0, 2, 3, 4]))


def _pictures(directory: Path) -> None:
    data = directory / _DATA
    data.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 3), np.uint8)
    lines = []
    for number, ending in enumerate(_FORMATS):
        Image.fromarray(pixels).save(data / f"{number}.{ending}")
        lines.append({"image": f"{number}.{ending}", "text": f"a picture {number}"})
    Image.fromarray(pixels).quantize(16).save(data / "p.png", transparency=3)
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(data / "d.png")
    write_lines(data, [*lines, {"image": "p.png", "text": "p"}, {"image": "d.png", "text": "d"}])


def _read_pictures() -> None:
    settings = TrainSettings(model="vlm", data=_DATA)
    check_data(settings)
    folder = PictureFolder(_DATA, settings)
    folder.picture(Part.HELDOUT, 0)
    for number in range(9):
        folder.picture(Part.TRAINING, number)


def _checkpoint(directory: Path) -> None:
    settings = TrainSettings(pp=2, layers=4, microbatches=4, steps=8)
    path = directory / "saved" / "step-00000004"
    path.mkdir(parents=True)
    (path / METRICS).write_text('{"step": 3}\n')
    manifest = Manifest(
        4, settings.described(), "run", {"torch": "2"}, {METRICS: 12}, data_contents(settings)
    )
    (path / FILE).write_text(manifest.to_json())


def _resume() -> None:
    found = CheckpointDir(Path("saved")).newest()
    settings = TrainSettings(pp=2, layers=4, microbatches=4, steps=8)
    if found is not None:
        check_continues(settings, found.manifest.contents, found)


OF_DATA = (
    Reader("texts", _texts, ("data/*",), (_read_text,), 10),
    Reader("texts in Parquet", _rows, ("data/*",), (_read_text,), 5, has_log=True),
    Reader("tokenizer", _tokenized, ("tokenizer/*",), (_read_tokenized,), 2),
    Reader("pairs of tokens", _pair, ("data.bin", "data.idx"), (_read_text,), 10),
    Reader("pictures", _pictures, ("data/*",), (_read_pictures,), 3),
    Reader("checkpoint", _checkpoint, ("saved/*/*",), (_resume,), 10),
)


# Readers of small files that a user writes: orders, costs, settings.


_SIZE = ("--pp", "2", "--microbatches", "3")

_ROWS = """\
kind,pp_rank,chunk,microbatch,seconds,bytes
F,0,,,0.01,1000
B,0,,,0.02,
W,0,,,0.01,500
F,1,0,,0.01,1000
F,1,0,2,0.03,2000
B,1,,,0.02,
W,1,,,0.01,
"""
_TABLE = """\
seconds = { F = 0.02, B = 0.02, W = 0.02 }
bytes = 1e9
length = "text"
[lengths]
text = 0.5
images = 1.0
[[ranks]]
first_share = 0.375
length = "images"
"""
_MODEL = """\
split = "layers"
[device]
flops_per_s = 60e12
layer_s = 2e-4
[language]
layers = 4
hidden = 256
ffn = 1024
heads = 4
vocabulary = 1000
tokens = { median = 128, sigma = 0.5 }
"""
_CUT = """\
[cut]
costs = "uniform"
layers = "2,2"
joined = 1
[cut.given]
layers = "2,2"
pp = 2
microbatches = 3
"""
_SETTINGS = """\
pp = 2
layers = 4
microbatches = 3
steps = 2
hint = "bf"
limit = 4
lr = 1e-3
seed = 5
jitter = "lognormal:0.5"
pace = "uniform"
seq_length = 64
layout = "Ett|ttL"
"""


def _written(name: str, text: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / name).write_text(text)

    return make


def _order(directory: Path) -> None:
    order = hint_named("zb-h1").for_shape(Shape(2, 3))
    (directory / "order.csv").write_text(format_order(order))  # type: ignore[arg-type]


def _read_assignment() -> object:
    return resolve_balancing("dealing.csv")


def _read_layout() -> object:
    text = Path("layout.txt").read_text(encoding="utf-8", errors="surrogateescape")
    return parse_layout(text, "--layout")


def _costs(name: str) -> tuple[Attempt, ...]:
    return (rrfp("simulate", *_SIZE, "--costs", name, "--seeds", "1"),)


OF_INPUTS = (
    Reader(
        "order",
        _order,
        ("order.csv",),
        (
            rrfp("hint", "check", "order.csv", *_SIZE),
            rrfp("simulate", *_SIZE, "--hint", "order.csv", "--seeds", "1"),
            rrfp("simulate", *_SIZE, "--hint", "order.csv", "--dispatch", "fixed", "--seeds", "1"),
        ),
        share=6,
    ),
    Reader(
        "order of entry",
        _written("entry.txt", "2 0 1\n0,1,2\n"),
        ("entry.txt",),
        (rrfp("simulate", *_SIZE, "--admit", "entry.txt", "--seeds", "1"),),
        share=6,
    ),
    Reader(
        "dealing",
        _written("dealing.csv", "0 3; 1 2\n1,2;0,3\n"),
        ("dealing.csv",),
        (_read_assignment,),
        20,
    ),
    Reader(
        "layout", _written("layout.txt", "Et*3|(tt|)*2t*3L"), ("layout.txt",), (_read_layout,), 20
    ),
    Reader("rows of costs", _written("c.csv", _ROWS), ("c.csv",), _costs("c.csv"), 6),
    Reader("table of costs", _written("c.toml", _TABLE), ("c.toml",), _costs("c.toml"), 5),
    Reader("costs of a model", _written("c.toml", _MODEL), ("c.toml",), _costs("c.toml"), 5),
    Reader("costs that are cut", _written("c.toml", _CUT), ("c.toml",), _costs("c.toml"), 5),
    Reader(
        "settings",
        _written("run.toml", _SETTINGS),
        ("run.toml",),
        (refusing_to_start("--config", "run.toml"),),
        share=2,
    ),
)


# Readers of other programs' traces.


_RAN = played("1f1b", Shape(2, 3), 2)
_IMPORT = (rrfp("trace", "import", "given", "-o", "run"),)
_HANG = (
    rrfp("trace", "import", "--flight-recorder", "given"),
    rrfp("trace", "import", "--flight-recorder", "given", "--format", "json"),
)


def _given(directory: Path) -> Path:
    made = directory / "given"
    made.mkdir()
    return made


def _profiles(directory: Path) -> None:
    given = _given(directory)
    for rank, rows in enumerate(_RAN):
        content = plain_profile(rows, rank, 2, pg_config=[{"pg_desc": "pp", "ranks": [0, 1]}])
        (given / f"rank_{rank}.json").write_text(json.dumps(content))


def _packed_profiles(directory: Path) -> None:
    given = _given(directory)
    for rank, rows in enumerate(_RAN):
        content = json.dumps(plain_profile(rows, rank, 2)).encode()
        (given / f"rank_{rank}.json.gz").write_bytes(gzip.compress(content, 1, mtime=0))


def _exports(directory: Path) -> None:
    exports(_RAN, _given(directory), late_ns=7_000)


def _spans(directory: Path) -> None:
    spans_file(_given(directory) / "spans.jsonl", _RAN)


def _nodes(directory: Path) -> None:
    given = _given(directory)
    for rank, rows in enumerate(_RAN):
        (given / f"linked.{rank}.json").write_text(json.dumps(execution_trace(rows)))


def _binary_nodes(directory: Path) -> None:
    given = _given(directory)
    for rank, rows in enumerate(_RAN):
        (given / f"job.{rank}.et").write_bytes(protobuf(operators(rows), has_times=True))


def _table(directory: Path) -> None:
    rows = [row for step in range(3) for row in steps_of_two_stages(step)]
    written(_given(directory) / "t.csv", rows)


def _parquet_table(directory: Path) -> None:
    _table(directory)
    csv = directory / "given" / "t.csv"
    pl.read_csv(csv).write_parquet(csv.with_suffix(".parquet"))
    csv.unlink()


def _dumps(directory: Path) -> None:
    given = _given(directory)
    for rank in range(3):
        entries = [
            ("all_reduce", WORLD, 1, DONE),
            (f"recv {rank}<-{rank + 1}", PIPELINE, 1, STARTED),
            ("p2p:coalesced", PIPELINE, 2, STARTED),
        ]
        content = dump(entries[: 3 - rank % 2])
        (given / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))


def _json_dumps(directory: Path) -> None:
    _dumps(directory)
    for file in (directory / "given").iterdir():
        content = pickle.loads(file.read_bytes())
        (directory / "given" / f"rank_{file.name[-1]}.json").write_text(json.dumps(content))
        file.unlink()


OF_IMPORTS = (
    Reader("profiles", _profiles, ("given/*",), _IMPORT, 2),
    Reader("packed profiles", _packed_profiles, ("given/*",), _IMPORT),
    Reader("exports of Nsight Systems", _exports, ("given/*",), _IMPORT, 2),
    Reader("spans of OpenTelemetry", _spans, ("given/*",), _IMPORT, 2),
    Reader("execution traces", _nodes, ("given/*",), _IMPORT, 2),
    Reader("execution traces in protobuf", _binary_nodes, ("given/*",), _IMPORT, 2),
    Reader("tables of StragglerAnalysis", _table, ("given/*",), _IMPORT, 2),
    Reader("the same in Parquet", _parquet_table, ("given/*",), _IMPORT, 2),
    Reader("dumps of a flight recorder", _dumps, ("given/*",), _HANG, 5),
    Reader("the same in JSON", _json_dumps, ("given/*",), _HANG, 5),
)


# Readers of the files of rrfp's own runs.


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
    """A run of two sessions, only the first of which has its trace."""
    run, made = RunDir(directory / "run"), recording()
    _records(directory, 2)
    write_trace(run.trace, made)
    content = {**made.settings, "session": 2, "first_step": 1, "sessions": [made.settings]}
    run.run_json.write_text(json.dumps(content))


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

OF_RUNS = (
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


READERS: dict[str, Reader] = {
    reader.name: reader
    for readers in (
        OF_RUNS,
        OF_INPUTS,
        OF_IMPORTS,
        OF_DATA,
    )
    for reader in readers
}

"""`rrfp watch` on the command line: its page, its lines, and what an alert runs."""

import http.server
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rrfp.schedule.shape import Shape
from rrfp.trace.outcome import noting_outcome
from rrfp.trace.perfetto.writer import write_run_files
from rrfp.trace.records import Recording
from rrfp.trace.run_dir import RunDir
from rrfp.watch.alarms import (
    MEASURES,
    Kind,
    Measure,
    measures_as_json,
    measures_of_metrics,
    measures_of_step,
)
from rrfp.watch.exporters import KINDS, open_exporter
from tests.analyze.slowed_runs import SETTING, SLOW, Live, Setting, figures_of, record
from tests.train.trained import rrfp_here

ROOT = Path(__file__).parents[2]


def _write_run(path: Path, recording: Recording) -> None:
    path.mkdir()
    write_run_files(RunDir(path), recording)


def test_a_run_without_records_shows_its_metrics(tmp_path: Path) -> None:
    line = {"step": 4, "loss": 2.5, "step_time_s": 0.5, "tokens": 100, "busy_fraction": [0.5, 0.25]}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "outcome.json").write_text('{"outcome": "finished", "error": null}\n')
    shown = rrfp_here(tmp_path, "watch", str(tmp_path), "--once")
    assert "loss 2.5000  500 ms a step  200 tokens/s" in shown.stdout
    assert "No records: neither" in shown.stdout
    lines = rrfp_here(tmp_path, "watch", str(tmp_path))
    assert lines.stdout.splitlines()[0].startswith("step 4  loss 2.5")


def test_the_page_names_what_is_slow_in_24_lines(
    tmp_path: Path, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _write_run(tmp_path / "run", record(SLOW, 30))
    shown = rrfp_here(tmp_path, "watch", "run", "--once")
    lines = shown.stdout.splitlines()
    assert (shown.returncode, shown.stderr) == (0, "")
    page = "".join(f"{line.rstrip()}\n" for line in lines)
    golden("screens/watch.txt", page)
    assert page in (ROOT / "docs" / "guide" / "watch.md").read_text()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    told = " ".join(shown.stdout.split())
    assert "Slow: rank 2 (stage 2, replica 0, on simulated) takes" in told
    assert "longer than before, since step 12" in told


def test_lines_and_json_state_each_step_and_alert_once(tmp_path: Path) -> None:
    _write_run(tmp_path / "run", record(SLOW, 30))
    lines = rrfp_here(tmp_path, "watch", "run").stdout.splitlines()
    assert [line for line in lines if line.startswith("step 7  ")]
    assert len(lines) == 1 + 30 + 1
    told = [json.loads(line) for line in _stdout(tmp_path, "watch", "run", "--format", "json")]
    assert [each["step"] for each in told if each["event"] == "step"] == [*range(30)]
    (slow,) = [each for each in told if each["event"] == "slow"]
    assert (slow["kind"], slow["ranks"], slow["since_step"]) == ("rank", [2], 12)
    last = next(each for each in reversed(told) if each["event"] == "step")
    assert last["slow"]["rank_2"] == pytest.approx(0.5, abs=0.1)
    assert 0 < last["bubble_fraction"] < 1


def test_alert_says_nothing_of_a_clean_run(tmp_path: Path) -> None:
    _write_run(tmp_path / "run", record(SETTING, 30))
    assert _stdout(tmp_path, "watch", "run", "--alert") == ["run: recorded, and over"]


def test_an_alert_runs_the_command(tmp_path: Path) -> None:
    _write_run(tmp_path / "run", record(SLOW, 30))
    command = 'echo "$RRFP_ALERT $RRFP_ALERT_KIND $RRFP_ALERT_RANKS $RRFP_ALERT_SINCE_STEP" >> told'
    done = rrfp_here(tmp_path, "watch", "run", "--alert", "--alert-command", command)
    assert done.returncode == 0
    assert (tmp_path / "told").read_text() == "slow rank 2 12\n"
    failing = "sleep 1; echo no; exit 4"
    for shown in ("--alert", "--once"):
        failed = rrfp_here(tmp_path, "watch", "run", shown, "--alert-command", failing)
        assert failed.stderr == "note: the alert command ended with 4: no\n"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("nowhere",), 1, "there is no run or trace at nowhere"),
        (("run.json",), 2, "run.json is not the directory of a run"),
        ((".", "--alert", "--once"), 2, "--alert waits for steps to come"),
        ((".", "--export", "prometeus:x"), 2, "did you mean 'prometheus'?"),
        ((".", "--export", "wandb"), 2, "--export wandb needs a directory"),
        ((), 1, "there is no run yet in runs"),
    ],
)
def test_what_cannot_be_watched_is_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    (tmp_path / "run.json").write_text("{}")
    done = rrfp_here(tmp_path, "watch", *arguments)
    assert done.returncode == code
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_live_page_draws_and_leaves_with_the_run(tmp_path: Path) -> None:
    """In a terminal of 80 x 24, on a run that goes on meanwhile; then Ctrl-C on another one."""
    live = Live(tmp_path / "run", record(SLOW, 30))
    with noting_outcome(live.run):
        live.write(*range(10))
        screen = _Screen(tmp_path, "watch", "run")
        assert screen.shows("10 of 30 steps")
        live.write(*range(10, 30))
        assert screen.shows("30 of 30 steps")
        assert screen.shows("Slow: rank 2")
        live.end()
    assert screen.shows("finished")
    assert screen.ended() == 0
    (tmp_path / "other").mkdir()
    screen = _Screen(tmp_path, "watch", "other")
    assert screen.shows("nothing is recorded yet")
    screen.interrupt()
    assert screen.ended() == 130


def _stdout(directory: Path, *arguments: str) -> list[str]:
    return rrfp_here(directory, *arguments).stdout.splitlines()


class _Screen:
    """A command in a terminal."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._master, terminal = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rrfp", *arguments],
            cwd=directory,
            env={**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        self._shown = b""

    def shows(self, text: str, within_s: float = 60.0) -> bool:
        """Whether it comes to show this."""
        deadline_s = time.monotonic() + within_s
        while text.encode() not in self._shown:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{text!r} is not in {self._shown[-2000:].decode()}")
            self._read()
        return True

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def ended(self) -> int:
        deadline_s = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < deadline_s:
            self._read()
        self._process.kill()
        os.close(self._master)
        assert rb"\x1b" not in self._shown, "what moves the cursor is shown as text"
        return self._process.wait()

    def _read(self) -> None:
        ready, _, _ = select.select([self._master], [], [], 0.1)
        if ready:
            with suppress(OSError):
                self._shown += os.read(self._master, 65536)


# What `rrfp watch --export` leaves, read back by the libraries' own readers.


EXPORTED = Setting(Shape(2, 4), replicas=1, hint="bf", seed=1, onset=12, scatter=0.05)
EXPORTED_SLOW = replace(EXPORTED, shape=Shape(4, 4), cause=Kind.RANK, stage=1, times=1.6)
NUM_STEPS = 25


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended, with a slow rank and metrics."""
    path = tmp_path / "one"
    path.mkdir()
    write_run_files(RunDir(path), record(EXPORTED_SLOW, NUM_STEPS))
    lines = (
        {"step": step, "loss": 5 - step / 10, "step_time_s": 0.5, "tokens": 1000, "grad_norm": 1.0}
        for step in range(NUM_STEPS)
    )
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def expected() -> dict[str, float]:
    """Some measures of the last step, as the records have them."""
    figures = figures_of(record(EXPORTED_SLOW, NUM_STEPS))[-1]
    return {each.path: each.value for each in measures_of_step(figures, [])}


def watch(run: Path, export: str) -> None:
    done = rrfp_here(run.parent, "watch", "one", "--export", export)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_measure_is_described_and_has_its_unit_in_its_name() -> None:
    figures = figures_of(record(EXPORTED, 1))[0]
    line = {"loss": 1.0, "step_time_s": 2.0, "tokens": 10, "heldout_loss": None, "grad_norm": 3.0}
    measures = [*measures_of_metrics(line), *measures_of_step(figures, [])]
    assert {each.name for each in measures} <= MEASURES.keys()
    told = measures_as_json(measures)
    assert told["tokens_per_s"] == 5.0
    assert "heldout_loss" not in told
    assert told["busy_fraction"].keys() == {"0", "1"}
    assert "peak_held_bytes" not in told


def test_the_bytes_held_are_a_measure_where_they_are_known() -> None:
    recording = record(EXPORTED, 1)
    first = recording.ranks[0]
    first.tasks[:] = [task._replace(held_bytes=1000 * task.held) for task in first.tasks]
    figures = figures_of(recording)[0]
    measures = [*measures_of_step(figures, [])]
    assert {each.name for each in measures} <= MEASURES.keys()
    most = max(task.held for task in first.tasks)
    assert measures_as_json(measures)["peak_held_bytes"] == {str(first.info.pp_rank): 1000 * most}


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_library_is_a_sentence_with_the_command(
    kind: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrfp.watch.exporters.find_spec", lambda _: None)
    where = "http://127.0.0.1:1" if kind == "otel" else "x.prom"
    done = rrfp_here(run.parent, "watch", "one", "--export", f"{kind}:{where}")
    assert done.returncode == 1
    assert f"pip install '.[{kind}]' in a checkout of rrfp" in done.stderr
    assert done.stderr.count("\n") == 1


def test_tensorboard(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watch(run, f"tensorboard:{tmp_path / 'events'}")
    events = EventAccumulator(str(tmp_path / "events" / "one"))
    events.Reload()
    losses = events.Scalars("loss")
    assert [each.step for each in losses] == [*range(NUM_STEPS)]
    assert losses[-1].value == pytest.approx(2.6)
    for path, value in expected().items():
        assert events.Scalars(path)[-1].value == pytest.approx(value)
    slow = events.Scalars("slow/place_rank_1")
    assert 12 + 8 <= slow[0].step + 1 <= 12 + 10
    assert slow[-1].value == pytest.approx(0.6, abs=0.1)


def test_prometheus(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the extra 'prometheus' is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    watch(run, f"prometheus:{tmp_path / 'rrfp.prom'}")
    families = {
        each.name: each
        for each in text_string_to_metric_families((tmp_path / "rrfp.prom").read_text())
    }
    assert families["rrfp_step"].samples[0].value == NUM_STEPS - 1
    assert families["rrfp_loss"].samples[0].labels == {"run": "one"}
    (busy,) = [
        each.value
        for each in families["rrfp_busy_fraction"].samples
        if each.labels == {"run": "one", "pp_rank": "1"}
    ]
    assert busy == pytest.approx(expected()["busy_fraction/pp_rank_1"])
    assert families["rrfp_slow"].samples[0].labels == {"run": "one", "place": "rank_1"}
    refused = rrfp_here(run.parent, "watch", "one", "--export", "prometheus:x.txt")
    assert refused.returncode == 2
    assert "x.txt does not end in .prom" in refused.stderr


@contextmanager
def collector(status: int) -> Iterator[tuple[str, list[bytes]]]:
    """A collector that answers with a status, and what it was sent."""
    taken: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            taken.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", taken
        finally:
            server.shutdown()
            thread.join()


def test_opentelemetry(run: Path) -> None:
    reason = "the extra 'otel' is not installed"
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=reason)
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    with collector(200) as (address, taken):
        watch(run, f"otel:{address}")
    (metrics,) = ExportMetricsServiceRequest.FromString(taken[-1]).resource_metrics
    resource = {each.key: each.value.string_value for each in metrics.resource.attributes}
    assert (resource["service.name"], resource["rrfp.run"]) == ("rrfp", "one")
    gauges = {each.name: each.gauge.data_points for each in metrics.scope_metrics[0].metrics}
    busy = {
        point.attributes[0].value.string_value: point.as_double
        for point in gauges["rrfp.busy_fraction"]
    }
    assert busy["1"] == pytest.approx(expected()["busy_fraction/pp_rank_1"])
    assert gauges["rrfp.slow"][0].as_double == pytest.approx(0.6, abs=0.1)


def test_closing_sends_the_last_measures_to_the_collector() -> None:
    reason = "the extra 'otel' is not installed"
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=reason)
    with collector(200) as (address, taken):
        exporter = open_exporter(f"otel:{address}", "one")
        exporter.add(0, "metrics", [Measure("loss", None, 2.5)])
        exporter.close()
    (sent,) = taken
    assert b"rrfp.loss" in sent


def test_a_collector_that_refuses_ends_the_export_and_not_the_watching(run: Path) -> None:
    reason = "the extra 'otel' is not installed"
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=reason)
    with collector(404) as (address, _):
        done = rrfp_here(run.parent, "watch", "one", "--export", f"otel:{address}")
    assert done.returncode == 0
    assert f"--export otel:{address} has ended: no collector took the measures" in done.stderr
    assert f"step {NUM_STEPS - 1}" in done.stdout


def records_of(file: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, a log as LevelDB writes it: blocks of 32 KiB, with records that
    are whole or in a first, middle and last part. The library reads it in Go only."""
    assert file.startswith(b":W&B")
    place, block, whole = 7, 2**15, b""
    while len(file) - place >= 7:
        if block - place % block < 7:
            place += block - place % block
            continue
        length = int.from_bytes(file[place + 4 : place + 6], "little")
        part = file[place + 6]
        whole += file[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):
            yield whole
            whole = b""


def test_wandb_offline(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    watch(run, f"wandb:{tmp_path / 'w'}")
    (file,) = (tmp_path / "w").glob("wandb/offline-run-*/run-*.wandb")
    found: dict[int, dict[str, float]] = {}
    for octets in records_of(file.read_bytes()):
        told = Record.FromString(octets)
        if told.WhichOneof("record_type") == "history":
            items = {
                each.key or ".".join(each.nested_key): json.loads(each.value_json)
                for each in told.history.item
            }
            found.setdefault(items["step"], {}).update(items)
    assert [*found] == [*range(NUM_STEPS)]
    assert found[NUM_STEPS - 1]["loss"] == pytest.approx(2.6)
    for path, value in expected().items():
        assert found[NUM_STEPS - 1][path] == pytest.approx(value)

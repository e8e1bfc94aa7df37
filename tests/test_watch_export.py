"""What `rrfp watch --export` leaves, read back by the libraries' own readers."""

import http.server
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rrfp.schedule.shape import Shape
from rrfp.trace.perfetto.writer import write_run_files
from rrfp.trace.run_dir import RunDir
from rrfp.watch.alarms import TOLD, Kind, as_json, of_metrics, of_step
from rrfp.watch.exporters.exporter import KINDS
from tests.trained import rrfp_here
from tests.watched import Setting, figures_of, record

SETTING = Setting(Shape(2, 4), replicas=1, hint="bf", seed=1, onset=12, scatter=0.05)
SLOW = replace(SETTING, shape=Shape(4, 4), cause=Kind.RANK, stage=1, times=1.6)
NUM_STEPS = 25


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended, with a slow rank and metrics."""
    path = tmp_path / "one"
    path.mkdir()
    write_run_files(RunDir(path), record(SLOW, NUM_STEPS))
    lines = (
        {"step": step, "loss": 5 - step / 10, "step_time_s": 0.5, "tokens": 1000, "grad_norm": 1.0}
        for step in range(NUM_STEPS)
    )
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def expected() -> dict[str, float]:
    """Some measures of the last step, as the records have them."""
    figures = figures_of(record(SLOW, NUM_STEPS))[-1]
    return {each.path: each.value for each in of_step(figures, [])}


def watch(run: Path, export: str) -> None:
    done = rrfp_here(run.parent, "watch", "one", "--export", export)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_measure_is_described_and_has_its_unit_in_its_name() -> None:
    figures = figures_of(record(SETTING, 1))[0]
    line = {"loss": 1.0, "step_time_s": 2.0, "tokens": 10, "heldout_loss": None, "grad_norm": 3.0}
    measures = [*of_metrics(line), *of_step(figures, [])]
    assert {each.name for each in measures} <= TOLD.keys()
    told = as_json(measures)
    assert told["tokens_per_s"] == 5.0
    assert "heldout_loss" not in told
    assert told["busy_fraction"].keys() == {"0", "1"}
    assert "peak_held_bytes" not in told


def test_the_bytes_held_are_a_measure_where_they_are_known() -> None:
    recording = record(SETTING, 1)
    first = recording.ranks[0]
    first.tasks[:] = [task._replace(held_bytes=1000 * task.held) for task in first.tasks]
    figures = figures_of(recording)[0]
    measures = [*of_step(figures, [])]
    assert {each.name for each in measures} <= TOLD.keys()
    most = max(task.held for task in first.tasks)
    assert as_json(measures)["peak_held_bytes"] == {str(first.info.pp_rank): 1000 * most}


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_library_is_a_sentence_with_the_command(
    kind: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrfp.watch.exporters.exporter.find_spec", lambda _: None)
    where = "http://127.0.0.1:1" if kind == "otel" else "x.prom"
    done = rrfp_here(run.parent, "watch", "one", "--export", f"{kind}:{where}")
    assert done.returncode == 1
    assert f"pip install 'rrfp[{kind}]'" in done.stderr
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

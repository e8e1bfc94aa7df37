"""OpenTelemetry: gauges, sent to a collector by OTLP over HTTP."""

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
from opentelemetry.sdk.resources import Resource

from rrfp.errors import RrfpError, UsageError
from rrfp.watch.alarms import MEASURES, Measure

_PATH = "/v1/metrics"
_TIMEOUT_S = 5


def open_at(where: str, run: str) -> "OpentelemetryMetrics":
    """Send to a collector, given as `http://HOST:PORT`; the path is added where it is missing."""
    if not where.startswith(("http://", "https://")):
        raise UsageError(
            f"'{where}' is not the address of a collector; write it as --export "
            "otel:http://HOST:4318"
        )
    address = where.rstrip("/")
    return OpentelemetryMetrics(address if address.endswith(_PATH) else f"{address}{_PATH}", run)


class OpentelemetryMetrics:
    """Gauges named `rrfp.…`, of a resource that names the run."""

    def __init__(self, endpoint: str, run: str) -> None:
        self._endpoint = endpoint
        self._reader = InMemoryMetricReader()
        resource = Resource.create({"service.name": "rrfp", "rrfp.run": run})
        self._provider = MeterProvider([self._reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("rrfp.watch")
        self._gauges = {
            name: meter.create_gauge(f"rrfp.{name}", description=told)
            for name, told in MEASURES.items()
        }
        self._step = meter.create_gauge("rrfp.step", description="The last step that has ended.")
        self._slow: set[tuple[str, str]] = set()
        self._exporter = OTLPMetricExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        # It would tell of each failure on stderr, where the page is; `flush` tells of one.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())

    def take(self, step: int, source: str, measures: Sequence[Measure]) -> None:
        self._step.set(step)
        if source == "records":
            # A gauge keeps its last value, and what has recovered is slow no more.
            for key, place in self._slow:
                self._gauges["slow"].set(0.0, {key: place})
            self._slow = {each.label for each in measures if each.name == "slow" and each.label}
        for name, label, value in measures:
            self._gauges[name].set(value, {label[0]: label[1]} if label else {})

    def flush(self) -> None:
        data = self._reader.get_metrics_data()
        if data is None:
            return
        result = self._exporter.export(data, timeout_millis=_TIMEOUT_S * 1000)
        if result is not MetricExportResult.SUCCESS:
            raise RrfpError(f"no collector took the measures at {self._endpoint}")

    def close(self) -> None:
        self._exporter.shutdown()
        self._provider.shutdown()

"""Exporters, which send a run's measures to another system; a user writes `prometheus:FILE`.

Each exporter imports its library when it is opened, because the libraries are optional.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rrfp.errors import RrfpError, UsageError, did_you_mean
from rrfp.requirements import install_hint
from rrfp.trace.safe_files import write_whole
from rrfp.watch.alarms import MEASURES, Measure


class Exporter(Protocol):
    """Receives measures as a run goes on.

    A method may raise RrfpError or OSError; the caller then continues without this exporter.
    """

    def add(self, step: int, source: str, measures: Sequence[Measure]) -> None:
        """Add all measures of a step from one source, `records` or `metrics`."""

    def flush(self) -> None:
        """Write the measures added so far."""

    def close(self) -> None:
        """Write the measures added so far and release the library's resources."""


class TensorboardFiles:
    """Writes TensorBoard event files with torch's SummaryWriter: each measure is a scalar."""

    def __init__(self, where: str, run: str) -> None:
        """Write to the subdirectory `run` of `where`, so that TensorBoard shows runs separately."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(_made(Path(where) / run, "tensorboard")))

    def add(self, step: int, source: str, measures: Sequence[Measure]) -> None:
        """Add each measure as a scalar; `source` is ignored."""
        del source
        for measure in measures:
            self._writer.add_scalar(measure.path, measure.value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class PrometheusFile:
    """Writes the newest measures to a text file for node_exporter's textfile collector.

    Gauges are named `rrfp_...` and have the label `run`. Each flush replaces the whole file.
    """

    def __init__(self, where: str, run: str) -> None:
        import prometheus_client

        self._path = Path(where)
        if self._path.suffix != ".prom":
            raise UsageError(
                f"{where} does not end in .prom, and the textfile collector reads no other file; "
                "name the file so"
            )
        if not self._path.parent.is_dir():
            raise UsageError(
                f"{self._path.parent} is not a directory; make it, or give --export prometheus a "
                "file in one"
            )
        self._run = run
        self._newest: dict[str, tuple[int, list[Measure]]] = {}
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Yield `rrfp_step` (the last step) and the newest gauges; nothing before the first `add`.

        prometheus_client calls this to write the file.
        """
        from prometheus_client.metrics_core import GaugeMetricFamily

        if not self._newest:
            return
        step = GaugeMetricFamily("rrfp_step", "The last step that has ended.", labels=["run"])
        step.add_metric([self._run], max(step for step, _ in self._newest.values()))
        yield step
        families: dict[str, Any] = {}
        for _, measures in self._newest.values():
            for name, label, value in measures:
                key, place = ([label[0]], [label[1]]) if label else ([], [])
                if name not in families:
                    families[name] = GaugeMetricFamily(
                        f"rrfp_{name}", MEASURES[name], labels=["run", *key]
                    )
                families[name].add_metric([self._run, *place], value)
        yield from families.values()

    def add(self, step: int, source: str, measures: Sequence[Measure]) -> None:
        """Replace the measures of this source; nothing is written until `flush`."""
        self._newest[source] = step, [*measures]

    def flush(self) -> None:
        """Replace the file by one with the newest measures of all sources."""
        import prometheus_client

        write_whole(self._path, prometheus_client.generate_latest(self._registry))

    def close(self) -> None:
        """Write the file, as `flush` does."""
        self.flush()


_OTLP_PATH = "/v1/metrics"
_OTLP_TIMEOUT_S = 5


class OpentelemetryMetrics:
    """Sends gauges named `rrfp.…` to a collector, by OTLP over HTTP. The resource names the run."""

    def __init__(self, where: str, run: str) -> None:
        """`where` is `http://HOST:PORT`; the path `/v1/metrics` is added if it is missing."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        if not where.startswith(("http://", "https://")):
            raise UsageError(
                f"'{where}' is not the address of a collector; write it as --export "
                "otel:http://HOST:4318"
            )
        self._endpoint = where.rstrip("/").removesuffix(_OTLP_PATH) + _OTLP_PATH
        self._reader = InMemoryMetricReader()
        resource = Resource.create({"service.name": "rrfp", "rrfp.run": run})
        self._provider = MeterProvider([self._reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("rrfp.watch")
        self._gauges = {
            name: meter.create_gauge(f"rrfp.{name}", description=text)
            for name, text in MEASURES.items()
        }
        self._step = meter.create_gauge("rrfp.step", description="The last step that has ended.")
        self._slow: set[tuple[str, str]] = set()
        self._exporter = OTLPMetricExporter(endpoint=self._endpoint, timeout=_OTLP_TIMEOUT_S)
        # The library would log every failure to stderr, over the live page; `flush` raises instead.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())

    def add(self, step: int, source: str, measures: Sequence[Measure]) -> None:
        """Set the gauges; nothing is sent until `flush`.

        With `records`, a place that is no longer slow is set to 0.
        """
        self._step.set(step)
        if source == "records":
            # A gauge keeps its last value, so a place that has recovered is set to 0.
            for key, place in self._slow:
                self._gauges["slow"].set(0.0, {key: place})
            self._slow = {each.label for each in measures if each.name == "slow" and each.label}
        for name, label, value in measures:
            self._gauges[name].set(value, {label[0]: label[1]} if label else {})

    def flush(self) -> None:
        """Send the gauges set since the last `flush`, if any. Raises RrfpError if that fails."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        data = self._reader.get_metrics_data()
        if data is None:
            return
        result = self._exporter.export(data, timeout_millis=_OTLP_TIMEOUT_S * 1000)
        if result is not MetricExportResult.SUCCESS:
            raise RrfpError(f"no collector took the measures at {self._endpoint}")

    def close(self) -> None:
        """Send what was added since the last `flush`, and shut down. Raises RrfpError if the
        collector does not accept it."""
        try:
            self.flush()
        finally:
            self._exporter.shutdown()
            self._provider.shutdown()


class WandbOffline:
    """Writes a Weights & Biases run to disk; `wandb sync` uploads it. Nothing is sent to a host."""

    def __init__(self, where: str, run: str) -> None:
        import wandb

        # wandb's own machine figures would be those of the machine that watches.
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run: Any = wandb.init(
            project="rrfp",
            name=run,
            dir=str(_made(Path(where), "wandb")),
            mode="offline",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, source: str, measures: Sequence[Measure]) -> None:
        """Log the measures of a step as one row; `source` is ignored."""
        del source
        self._run.log({"step": step, **{each.path: each.value for each in measures}})

    def flush(self) -> None:
        """Do nothing: wandb's own process writes continuously."""

    def close(self) -> None:
        self._run.finish()


def _made(directory: Path, kind: str) -> Path:
    """Create the directory if needed and return it. Raises UsageError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be made ({error.strerror}); give --export {kind} a directory that "
            "can be written"
        ) from error
    return directory


class _ExporterKind(NamedTuple):
    """A value of KIND in `--export KIND:WHERE`."""

    open_at: Callable[[str, str], Exporter]
    packages: tuple[str, ...]
    """The packages that it imports."""
    where: str
    """A description of WHERE for messages."""


KINDS = {
    "tensorboard": _ExporterKind(TensorboardFiles, ("tensorboard",), "a directory"),
    "prometheus": _ExporterKind(
        PrometheusFile, ("prometheus_client",), "a file that ends in .prom"
    ),
    "otel": _ExporterKind(
        OpentelemetryMetrics,
        ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
        "the http address of a collector",
    ),
    "wandb": _ExporterKind(WandbOffline, ("wandb",), "a directory"),
}
"""The exporters by kind, which is also the name of the extra that installs the packages."""


def open_exporter(argument: str, run: str) -> Exporter:
    """Open the exporter that `argument` names as `KIND:WHERE`, for a run of this name.

    Raises UsageError for an invalid argument, and RrfpError if the library is missing or does not
    load.
    """
    kind, colon, where = argument.partition(":")
    if kind not in KINDS:
        known = did_you_mean(kind, KINDS) or f"; it takes {', '.join(KINDS)}"
        raise UsageError(f"--export knows no '{kind}'{known}")
    if not (colon and where):
        raise UsageError(f"--export {kind} needs {KINDS[kind].where}; write --export {kind}:WHERE")
    missing = [name for name in KINDS[kind].packages if not _is_installed(name)]
    if missing:
        raise RrfpError(
            f"--export {kind} needs {' and '.join(missing)}, which this installation lacks; "
            f"{install_hint(kind)}"
        )
    try:
        return KINDS[kind].open_at(where, run)
    except ImportError as error:
        raise RrfpError(
            f"--export {kind} cannot load its library ({error}); {install_hint(kind)} again"
        ) from error


def _is_installed(name: str) -> bool:
    """Return whether a module can be found; False if its parent package is missing."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False

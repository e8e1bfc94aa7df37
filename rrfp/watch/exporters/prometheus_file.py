"""Prometheus: a text file with the newest measures, for node_exporter's textfile collector."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily

from rrfp.errors import UsageError
from rrfp.trace.safe_files import write_whole
from rrfp.watch.alarms import MEASURES, Measure


def open_at(where: str, run: str) -> "PrometheusFile":
    path = Path(where)
    if path.suffix != ".prom":
        raise UsageError(
            f"{path} does not end in .prom, and the textfile collector reads no other file; name "
            "the file so"
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"{path.parent} is not a directory; make it, or give --export prometheus a file in one"
        )
    return PrometheusFile(path, run)


class PrometheusFile:
    """Gauges named `rrfp_...`, each with the label `run`. The file is replaced whole."""

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run
        self._newest: dict[str, tuple[int, list[Measure]]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What the library asks for."""
        if not self._newest:
            return
        step = GaugeMetricFamily("rrfp_step", "The last step that has ended.", labels=["run"])
        step.add_metric([self._run], max(step for step, _ in self._newest.values()))
        yield step
        families: dict[str, GaugeMetricFamily] = {}
        for _, measures in self._newest.values():
            for name, label, value in measures:
                if name not in families:
                    labels = ["run", *([label[0]] if label else [])]
                    families[name] = GaugeMetricFamily(
                        f"rrfp_{name}", MEASURES[name], labels=labels
                    )
                families[name].add_metric([self._run, *([label[1]] if label else [])], value)
        yield from families.values()

    def take(self, step: int, source: str, measures: Sequence[Measure]) -> None:
        self._newest[source] = step, [*measures]

    def flush(self) -> None:
        write_whole(self._path, generate_latest(self._registry))

    def close(self) -> None:
        self.flush()

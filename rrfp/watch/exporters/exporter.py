"""What takes the measures of a run, and how a user names it: `prometheus:FILE` and so on."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from rrfp.errors import RrfpError, UsageError, did_you_mean
from rrfp.watch.alarms import Measure


class Exporter(Protocol):
    """Takes measures as they come. A method may raise RrfpError or OSError; whoever follows the
    run then goes on without this exporter."""

    def take(self, step: int, source: str, measures: Sequence[Measure]) -> None:
        """Take all measures of a step that one source has: `records` or `metrics`."""

    def flush(self) -> None:
        """Write what was taken."""

    def close(self) -> None:
        """Write what was taken, and end."""


KINDS = {
    "tensorboard": ("tensorboard_files", ("tensorboard",), "a directory"),
    "prometheus": ("prometheus_file", ("prometheus_client",), "a file that ends in .prom"),
    "otel": (
        "opentelemetry_metrics",
        ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
        "the http address of a collector",
    ),
    "wandb": ("wandb_offline", ("wandb",), "a directory"),
}
"""The module, the packages that it needs, and what stands behind the colon. The name is also that
of the extra."""


def open_exporter(asked: str, run: str) -> Exporter:
    """The exporter that is asked for as `KIND:WHERE`, for a run of this name.

    Raises UsageError for anything else, and RrfpError if its library is missing.
    """
    kind, colon, where = asked.partition(":")
    if kind not in KINDS:
        known = did_you_mean(kind, KINDS) or f"; it takes {', '.join(KINDS)}"
        raise UsageError(f"--export knows no '{kind}'{known}")
    module, packages, what = KINDS[kind]
    if not (colon and where):
        raise UsageError(f"--export {kind} needs {what}; write --export {kind}:WHERE")
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        raise RrfpError(
            f"--export {kind} needs {' and '.join(missing)}, which this installation lacks; "
            f"install the extra '{kind}' (pip install 'rrfp[{kind}]')"
        )
    try:
        # By name, so that a library is imported only where it is asked for.
        exporter: Exporter = import_module(f"rrfp.watch.exporters.{module}").open_at(where, run)
    except ImportError as error:
        raise RrfpError(
            f"--export {kind} cannot load its library ({error}); reinstall the extra '{kind}' "
            f"(pip install 'rrfp[{kind}]')"
        ) from error
    return exporter


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False

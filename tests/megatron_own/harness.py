"""Starts the process in which Megatron's tests run, and makes a table of what comes back."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tests.e2e.ranks import loopback_store

NUM_RANKS = 8

LIMIT_S = 90.0
"""For one test; it takes 5 to 30 s on two cores."""

_TOTAL_LIMIT_S = 1500.0

_COLUMNS = {"native": "native", "install": "install()", "names": "every name"}

_IN_EVERY_NAME = "schedules.py"
"""How the files end whose tests call a schedule by its name, or assert which they are given."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a test, or of all its items, on all of its ranks."""

    test: str
    num_items: int
    outcome: str
    """`passed`, `failed`, `skipped` or `hung`."""
    reason: str
    num_ranks: int
    ranks: tuple[int, ...]
    """The ranks that had this outcome."""
    seconds: float

    def __str__(self) -> str:
        return {"passed": "pass", "failed": "fail", "skipped": "skip"}.get(
            self.outcome, self.outcome
        )


def version_of(checkout: Path) -> str | None:
    """The version of Megatron-Core in a checkout of Megatron-LM; None for other directories."""
    info = checkout / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        return None
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", info.read_text(), re.MULTILINE))


def check_checkout(checkout: Path) -> str | None:
    """Why the tests of this checkout cannot be run under this Python; None if they can."""
    version = version_of(checkout)
    if version is None:
        return f"{checkout} is no checkout of Megatron-LM: it has no megatron/core/package_info.py"
    installed = metadata.version("megatron-core")
    if version.split(".")[:2] != installed.split(".")[:2]:
        return (
            f"{checkout} has Megatron-Core {version} and {installed} is installed here; check out "
            f"core_v{installed}, or run this in an environment with {version}"
        )
    return None


def run(
    checkout: Path, schedule: str, logs: Path, pytest_args: Sequence[str] = ()
) -> dict[str, Outcome]:
    """Run the tests under one schedule (`native`, `install` or `names`); what became of each, by
    its name. `logs` gets a folder a test, with the output of every rank."""
    store = loopback_store()
    job = {
        "checkout": str(checkout.resolve()),
        "schedule": schedule,
        "num_ranks": NUM_RANKS,
        "limit_s": LIMIT_S,
        "port": store.port,
        "logs": str(logs.resolve()),
        "only_file": _IN_EVERY_NAME if schedule == "names" else "",
        "pytest_args": list(pytest_args),
    }
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("inside.py")), json.dumps(job)],
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            # Nothing is compiled: a compiler may be missing, and eight ranks share two cores.
            "TORCHDYNAMO_DISABLE": "1",
        },
        timeout=_TOTAL_LIMIT_S,
        check=True,
        text=True,
    )
    lines = map(json.loads, finished.stdout.splitlines())
    return {line["test"]: Outcome(**{**line, "ranks": tuple(line["ranks"])}) for line in lines}


def table(by_schedule: Mapping[str, Mapping[str, Outcome]]) -> str:
    """The outcomes as a table of Markdown, and below it the reasons of what did not pass."""
    reasons: list[str] = []

    def cell(outcome: Outcome | None) -> str:
        if outcome is None:
            return ""
        if not outcome.reason:
            return str(outcome)
        if outcome.reason not in reasons:
            reasons.append(outcome.reason)
        return f"{outcome} ({reasons.index(outcome.reason) + 1})"

    tests: dict[str, Outcome] = {}
    for outcomes in by_schedule.values():
        tests.update(outcomes)
    rows = [["test", "ranks", *(_COLUMNS[schedule] for schedule in by_schedule)]]
    for name, test in tests.items():
        of_many = f", {test.num_items} items" if test.num_items > 1 else ""
        cells = [cell(outcomes.get(name)) for outcomes in by_schedule.values()]
        rows.append([f"`{name}`{of_many}".replace("|", "\\|"), str(test.num_ranks), *cells])
    lines = [_row(rows[0]), _row(["---"] * len(rows[0])), *map(_row, rows[1:])]
    return "\n".join([*lines, "", *(f"{n}. {why}" for n, why in enumerate(reasons, 1))])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"

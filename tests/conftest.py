"""Fixtures and hooks of all tests: golden texts, hypothesis profiles, and the sequence of files."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Two threads per process are slower if a test runs more processes than the machine has cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Background jobs of a shell ignore SIGINT. Processes that a test interrupts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A quick run always tries the same examples, so that only a change of the code can make it fail.
settings.register_profile("quick", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile("quick")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files in tests/golden"
    )


LONGEST = (
    "megatron/test_learns_the_same.py",
    "train/test_train.py",
    "megatron/test_run_recorded.py",
    "train/test_checkpoint_damage.py",
    "e2e/test_ranks.py",
    "train/test_checkpoint.py",
    "megatron/test_gradient_hooks.py",
    "train/test_checkpoint_dir.py",
    "products/test_doctor.py",
    "project/test_pages.py",
    "train/test_hosts.py",
    "trace/test_check.py",
    "analyze/test_step_choice.py",
    "security/test_exposure.py",
    "train/test_slurm.py",
    "megatron/test_planned_steps.py",
    "products/test_chaos.py",
    "megatron/test_native.py",
    "cli/test_bench.py",
    "cli/test_run_script.py",
)
"""The slowest files, the slowest first (`pytest --durations=0`)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, so that no worker still runs one after the others have ended."""
    tests = Path(__file__).parent
    rank = {(tests / name).resolve(strict=True): place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server of rank processes, if any test needs it, so that its imports run during the
    first tests."""
    if "tests.e2e.ranks" in sys.modules and not session.config.option.collectonly:
        sys.modules["tests.e2e.ranks"].start_server()


@pytest.fixture(autouse=True)
def _interrupts_stay_pytests() -> Iterator[None]:
    """Restore the handler of Ctrl-C after each test. A command that a test calls in this process
    replaces it, and processes of later tests would inherit an ignored Ctrl-C."""
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    yield
    signal.signal(signal.SIGINT, handler)
    sys.unraisablehook = hook


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares a text with the file of that name in tests/golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; look at the text, then use --update-golden"
        assert text == path.read_text()

    return compare

"""What every test may use: golden texts, and how hard hypothesis tries."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Two threads a process lose time as soon as a test runs more processes than the machine has cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell has its background jobs ignore it, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A quick run tries the same examples every time, so that it fails for the change at hand only.
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
"""The files that take longest, in that order (`pytest --durations=0`)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no worker has one left when the others are done."""
    tests = Path(__file__).parent
    rank = {(tests / name).resolve(strict=True): place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests start ranks, their server imports what they need beside the first tests."""
    if "tests.e2e.ranks" in sys.modules and not session.config.option.collectonly:
        sys.modules["tests.e2e.ranks"].start_server()


@pytest.fixture(autouse=True)
def _interrupts_stay_pytests() -> Iterator[None]:
    """A command that a test calls in this process takes Ctrl-C for good, and may leave it ignored,
    which the processes of later tests would inherit."""
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    yield
    signal.signal(signal.SIGINT, handler)
    sys.unraisablehook = hook


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` holds a text against the file of that name in tests/golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; look at the text, then use --update-golden"
        assert text == path.read_text()

    return compare

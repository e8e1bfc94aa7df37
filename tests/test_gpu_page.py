"""The page of figures from GPUs and the kit that measures them list the same lines."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import figures, lines, training
from benchmarks.gpu.__main__ import HEAD, NOT_RUN, table
from benchmarks.gpu.lines import LINES, Line, Measured
from benchmarks.gpu.messages import one_way_us
from rrfp.errors import UsageError
from rrfp.runtime.device.cuda_runtime import CudaPresence, Gpu, cuda_problem
from rrfp.runtime.isolated_call import NoAnswerError, probe
from rrfp.train.settings import TrainSettings
from rrfp.verify.sameness import Learned

ROOT = Path(__file__).parent.parent
GPU = CudaPresence((Gpu("NVIDIA H200", 150_000_000_000, "0"),), None)


def rows(text: str) -> list[list[str]]:
    """The cells of a Markdown table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


ROWS = rows((ROOT / "docs" / "gpu.md").read_text())


def test_the_page_and_the_kit_have_the_same_lines() -> None:
    head, _, *lines = ROWS
    assert tuple(head) == HEAD
    assert [line[:2] for line in lines] == [[line.name, line.goal] for line in LINES]


@pytest.mark.parametrize("row", ROWS[2:], ids=lambda row: row[0])
def test_a_figure_says_when_where_and_on_what_commit(row: list[str]) -> None:
    figure, when, where, commit = row[2:]
    if figure == "not run yet":
        assert {when, where, commit} == {""}
    else:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", when)
        assert where
        assert re.fullmatch(r"[0-9a-f]{7,40}\+?", commit)


def test_without_a_gpu_the_kit_says_so() -> None:
    problem = cuda_problem()
    if problem is None:
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"Nothing is measured: {problem}\n",
        "",
    )


@pytest.mark.parametrize(
    ("name", "told", "figure", "holds"),
    [
        ("Copies within", 1900.2, "1900 GB/s", True),
        ("Launch of", {"spinning": 8.26, "blocking": 31.0}, "8.3 us spinning, 31.0 us", True),
        ("device, 64 MB", {"ipc": 1600.0, "own": 2000.0}, "1600 GB/s, 80%", True),
        ("device, 64 MB", {"ipc": 1500.0, "own": 2000.0}, "1500 GB/s, 75%", False),
        ("64 KB by CUDA's", 31.26, "31.3 us", True),
        ("64 KB over CUDA IPC", 59.9, "59.9 us", True),
        ("64 KB over CUDA IPC", 60.0, "60.0 us", False),
        ("64 MB over CUDA IPC", 100.0, "100 us, 671 GB/s", True),
        ("64 MB through", 20_000.0, "20000 us, 3 GB/s", True),
        ("of a vlm", [], "the same", True),
        ("of a vlm", ["bf on rank 1: loss"], "1 differences, the first bf on rank 1", False),
        ("bf16", [], "the same", True),
        ("bf16", ["bf on rank 1: loss"], "4 differences, the first 4 stages, gpt: bf on", False),
        ("One process", [], "the same", True),
        ("One process", ["gradient of x"], "2 differences, the first gradient of x", False),
        ("own time", {"share": 0.0123, "gap_us": 9.0}, "1.23%", True),
        ("own time", {"share": 0.02, "gap_us": 9.0}, "2.00%", False),
        ("idle between", {"share": 0.0, "gap_us": 19.94}, "19.9 us", True),
        ("idle between", {"share": 0.0, "gap_us": 20.0}, "20.0 us", False),
        ("1,000 steps", {"first": [1.0, 2.0], "last": [1.0, 1.5]}, "1.0 and 2.0 MB at", True),
        ("1,000 steps", {"first": [1.0, 2.0], "last": [1.0, 2.1]}, "1.0 and 2.0 MB at", False),
        ("Most", {"megatron": [100.0], "fixed": [101.9]}, "1.019 of its own", True),
        ("Most", {"megatron": [100.0], "fixed": [103.0]}, "1.030 of its own", False),
        ("sanitizer", 0, "clean", True),
        ("sanitizer", 99, "memcheck exits with 99; racecheck exits with 99", False),
    ],
)
def test_a_line_holds_up_to_its_goal(
    monkeypatch: pytest.MonkeyPatch, name: str, told: object, figure: str, holds: bool
) -> None:
    monkeypatch.setattr(lines, "probe", lambda *_, **__: told)
    monkeypatch.setattr(lines, "cuda_presence", lambda: GPU)
    lines._own_time.cache_clear()
    *_, line = (line for line in LINES if name in line.name)
    measured = line.measure()
    assert measured.figure.startswith(figure)
    assert measured.holds is holds


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "measure", [figures.copies, figures.large_ipc, figures.wake_ups, figures.bare_message]
)
def test_measuring_refuses_without_a_driver(measure: Callable[[], object]) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        measure()


@pytest.mark.parametrize("transport", ["shm", "bounce"])
def test_messages_are_sent_over_the_transport_of_a_run(transport: str) -> None:
    assert probe(one_way_us, "cpu", transport, 1 << 20, 3, limit_s=60) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "measure", [figures.small_message, figures.large_message, figures.bounced_message]
)
def test_sending_messages_refuses_without_a_driver(measure: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="the model is on cuda"):
        measure()


def fails() -> Measured:
    raise NoAnswerError("it was killed: Bus error")


def test_the_table_has_the_form_of_the_page() -> None:
    lines = (
        Line("one", "fast", lambda: Measured("9 us"), is_timed=True),
        Line("two", "fast", lambda: Measured("90 us", holds=False), is_timed=True),
        Line("three", "fast", fails),
        Line("four", "", fails, lacks=lambda: "there is no sanitizer"),
    )
    printed = [*table(lines, GPU)]
    head, _, *told = rows("\n".join(row for row, _ in printed))
    assert tuple(head) == HEAD
    assert [holds for _, holds in printed] == [True, True, True, False, False, True]
    figures = ["9 us", "90 us: missed", "failed: it was killed: Bus error"]
    assert [line[2] for line in told] == [*figures, f"{NOT_RUN}: there is no sanitizer"]
    assert told[0][4].startswith("1 x NVIDIA H200, torch ")
    assert told[3][3:] == ["", "", ""]


# What is measured of training, on the CPU.


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["gpt", "moe", "vlm"])
def test_layouts_learn_the_same_to_the_bit(model: str) -> None:
    assert probe(training.differences, {}, 4, model, limit_s=250.0) == []
    assert probe(training.one_process, {}, 4, model, limit_s=250.0) == []


def test_a_difference_between_layouts_is_seen() -> None:
    def rank(loss: float, **gradients: str) -> Learned:
        return Learned([loss], [1.0], "", gradients)

    chain = [rank(2.0, first="a"), rank(2.0, last="b")]
    assert training._across(chain, [rank(2.0, first="a", last="b")], "one") == []
    assert training._across(chain, [rank(1.5, first="a", last="c")], "one") == [
        "one: gradient of last",
        "one: first loss 1.5, not 2.0",
    ]
    assert training._across(chain, [rank(2.0, first="a")], "one") == ["one: gradient of last"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ranks_own_time_is_what_no_task_takes() -> None:
    told = probe(training.own_time, {}, limit_s=100.0)
    assert 0 < told["share"] < 1
    # Where tasks take 5 ms the two are the same figure.
    assert told["gap_us"] == pytest.approx(5e3 * told["share"] / (1 - told["share"]), rel=0.5)


def test_what_a_runs_metrics_tell_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(directory: str, flags: dict[str, Any]) -> Path:
        asked.append(flags)
        return Path(directory)

    def metrics(_: Path) -> Iterator[dict[str, Any]]:
        for step in range(asked[-1]["steps"]):
            grown = 10 * (step >= 90)
            ended = [1_000_000 * (7 if step == 0 else 100 + step % 3 + grown)]
            yield {"allocated_bytes": ended, "peak_allocated_bytes": [2_000_000]}

    monkeypatch.setattr(training, "_train", run)
    monkeypatch.setattr(training, "_metrics", metrics)
    assert training.growth({"device": "cuda"}, 100) == {"first": [100.0], "last": [110.0]}
    assert asked[-1]["device"] == "cuda"
    assert training.most_memory({}, 2) == {"megatron": [2.0], "fixed": [2.0]}
    assert [each["dispatch"] for each in asked[1:]] == ["megatron", "fixed"]


@pytest.mark.parametrize("where", [training.SHARED, training.OWN])
def test_where_it_trains_is_what_rrfp_train_takes(where: dict[str, Any]) -> None:
    command = training._command("somewhere", {"pp": 2, **where})
    assert command[1:] == [
        *("-m", "rrfp", "train", "--out", "somewhere/run", "--pp", "2", "--device", "cuda"),
        *(["--share-gpu"] if where is training.SHARED else []),
    ]
    TrainSettings(**where)

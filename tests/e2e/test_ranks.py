"""Ranks of tests: they meet, they end together, and none of them leaves anything to the next."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.e2e.ranks import RankFailedError, run_ranks

PATIENCE_S = 100.0


def sum_over_ranks(value: int) -> tuple[int, int]:
    dist.init_process_group("gloo")
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(os.environ["RANK"]), int(total.item())


def end_in_many_ways(how: str) -> None:
    if os.environ["RANK"] == "1":
        if how == "raise":
            raise ValueError("rank 1 has had enough")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise, then a death":
            time.sleep(0.5)
            os._exit(3)
        if how == "leave":
            threading.Thread(target=time.sleep, args=(60,), name="a-link", daemon=True).start()
            return
    if how == "raise, then a death":
        raise ConnectionError("rank 1 closed its connection")
    time.sleep(60)


def test_ranks_meet_in_a_gloo_group_and_return_by_rank() -> None:
    assert run_ranks(2, sum_over_ranks, 10) == [(0, 30), (1, 30)]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("how", "timeout_s", "message"),
    [
        ("raise", 60.0, "rank 1 raised(?s:.*)rank 1 has had enough"),
        ("die", 60.0, "rank 1 died with exit code -9"),
        ("raise, then a death", 60.0, "rank 1 died with exit code 3"),
        ("hang", 0.5, "rank 0, 1 did not end in time"),
    ],
)
def test_one_bad_rank_ends_them_all(how: str, timeout_s: float, message: str, fresh: bool) -> None:
    with pytest.raises(RankFailedError, match=message):
        run_ranks(2, end_in_many_ways, how, timeout_s=timeout_s, fresh=fresh)
    assert multiprocessing.active_children() == []


def test_a_thread_that_outlives_what_started_it_is_an_error() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 raised(?s:.*)outlived .* a-link; close"):
        run_ranks(2, end_in_many_ways, "leave")


def test_where_a_late_rank_was_is_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    def error_output(timeout_s: float) -> str:
        with pytest.raises(RankFailedError):
            run_ranks(1, end_in_many_ways, "hang", timeout_s=timeout_s)
        return capfd.readouterr().err

    # On a busy machine a rank may not have come there in the shorter time.
    assert any("in end_in_many_ways" in error_output(timeout_s) for timeout_s in (3.0, 30.0))


def change_everything() -> list[Any]:
    """The global state of a new rank, which then changes all of it."""
    import megatron.core.parallel_state as parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    found = [
        dist.is_initialized(),
        parallel_state.model_parallel_is_initialized(),
        sorted(get_cuda_rng_tracker().get_states()),
        torch.initial_seed(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        "MADE_UP" in os.environ,
        str(Path.cwd()),
        "made_up" in sys.modules,
        signal.getsignal(signal.SIGUSR1),
        parallel_state.get_tensor_model_parallel_world_size.__name__,
    ]
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    get_cuda_rng_tracker().add("made up", 1)
    torch.manual_seed(7)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    os.environ["MADE_UP"] = "1"
    os.chdir("/")
    sys.modules["made_up"] = sys
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    parallel_state.get_tensor_model_parallel_world_size = len
    return found


def test_a_rank_finds_nothing_of_the_one_before() -> None:
    first, second = (run_ranks(1, change_everything)[0] for _ in range(2))
    assert first == second
    assert first[:3] == [False, False, []]


def test_ranks_have_the_environment_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "two"):
        monkeypatch.setenv("MADE_UP", value)
        assert run_ranks(2, os.getenv, "MADE_UP") == [value] * 2


def is_imported() -> bool:
    return "megatron.core" in sys.modules


def test_only_fresh_ranks_have_imported_nothing() -> None:
    assert run_ranks(1, is_imported) == [True]
    assert run_ranks(1, is_imported, fresh=True) == [False]


def write_and_wait(directory: Path) -> None:
    (directory / str(os.getpid())).touch()
    time.sleep(60)


PROGRAM = """
import sys
from pathlib import Path
from tests.e2e.ranks import run_ranks
from tests.e2e.test_ranks import write_and_wait
if __name__ == "__main__":
    run_ranks(2, write_and_wait, Path(sys.argv[1]))
"""


def test_no_rank_outlives_a_test_session_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "pids").mkdir()
    session = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "pids")],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    await_that(lambda: len(list((tmp_path / "pids").iterdir())) == 2)
    session.kill()
    session.wait()
    pids = [path.name for path in (tmp_path / "pids").iterdir()]
    await_that(lambda: not any(Path("/proc", pid).exists() for pid in pids))


def await_that(holds: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)

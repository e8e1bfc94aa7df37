import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailedError, run_ranks


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
    time.sleep(60)


def test_ranks_meet_in_a_gloo_group_and_return_by_rank() -> None:
    assert run_ranks(2, sum_over_ranks, 10) == [(0, 30), (1, 30)]


@pytest.mark.parametrize(
    ("how", "timeout_s", "message"),
    [
        ("raise", 60.0, "rank 1 raised(?s:.*)rank 1 has had enough"),
        ("die", 60.0, "rank 1 died with exit code -9"),
        ("hang", 0.5, "rank 0, 1 did not end in time"),
    ],
)
def test_one_bad_rank_ends_them_all(how: str, timeout_s: float, message: str) -> None:
    with pytest.raises(RankFailedError, match=message):
        run_ranks(2, end_in_many_ways, how, timeout_s=timeout_s)
    assert multiprocessing.active_children() == []

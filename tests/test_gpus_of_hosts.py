"""Launchers that compare which GPUs their ranks are to take, before any starts a rank."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rrfp.errors import UsageError
from rrfp.runtime.device.cuda_runtime import Gpu
from rrfp.train.launch.hosts import joining as gpus
from rrfp.train.launch.hosts.endpoint import local_ranks
from rrfp.train.launch.hosts.joining import Taken, check_apart, meeting
from rrfp.train.settings import TrainSettings
from tests.slurm import task
from tests.trained import free_port

ONE_GPU_EACH = "{} ranks on {} take a GPU each and it has {}; start fewer, or let them share"


def launchers(*told: str) -> list[Taken]:
    """Each as `host seen taken`, a letter a GPU."""
    parts = (each.split() for each in told)
    return [Taken(f"{host}/boot", tuple(seen), tuple(taken)) for host, seen, taken in parts]


@pytest.mark.parametrize(
    "told",
    [
        ("n0 ab a", "n0 ab b"),  # torchrun
        ("n0 a a", "n0 b b"),  # srun --gpus-per-task=1
        ("n0 ab ab", "n1 cd cd"),  # a launcher a host
    ],
)
def test_ranks_that_have_a_gpu_each(told: tuple[str, ...]) -> None:
    for own in range(len(told)):
        check_apart(launchers(*told), own)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("n0 ab a", "n0 ab b", "n0 ab a", "n0 ab b"), ONE_GPU_EACH.format(4, "this host", 2)),
        (("n1 c c", "n0 a a", "n0 a a"), ONE_GPU_EACH.format(2, "n0", 1)),
        # Nobody has said which of a host's processes each is; or two containers have one GPU.
        (("n0 ab a", "n0 ab a"), "ranks 0 and 1 take the same GPU, a, and NCCL takes no two"),
        (("n1 cd cd", "n0 a a", "n2 a a"), "ranks 2 and 3 take the same GPU, a, and NCCL takes"),
    ],
)
def test_ranks_that_have_not(told: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_apart(launchers(*told), 0)


def test_what_a_launcher_tells_is_read_again() -> None:
    (taken,) = launchers("n0 ab a")
    assert Taken.decoded([taken.host, [*taken.seen], [*taken.taken]]) == taken
    for other in (None, [], ["n0", "ab", ["a"]], ["n0", ["a"], [1]]):
        with pytest.raises(ValueError, match="is not"):
            Taken.decoded(other)


def test_the_ranks_of_a_task_among_those_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_ranks(TrainSettings(pp=4)) == range(4)
    for name, value in task(1, 2).items():
        monkeypatch.setenv(name, value)
    placed: dict[str, Any] = {"nnodes": 2, "rdzv_endpoint": "localhost:29500"}
    assert local_ranks(TrainSettings(pp=4, node_rank=1, **placed)) == range(2, 4)
    # Hosts that the command line names are hosts of their own.
    assert local_ranks(TrainSettings(pp=4, node_rank=0, **placed)) == range(2)


@pytest.mark.parametrize(
    ("pp", "words"),
    [(4, ONE_GPU_EACH.format(4, "this host", 2)), (2, "ranks 0 and 1 take the same GPU")],
)
def test_launchers_on_one_host_that_take_the_same_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, pp: int, words: str
) -> None:
    two = tuple(Gpu("GPU", 2**30, uuid) for uuid in "01")
    monkeypatch.setattr(gpus, "gpus_here", lambda: two)
    endpoint = f"127.0.0.1:{free_port()}"

    def meet(node_rank: int, *, share_gpu: bool = False) -> None:
        chosen: dict[str, Any] = {"device": "cuda", "pp": pp, "share_gpu": share_gpu}
        settings = TrainSettings(nnodes=2, node_rank=node_rank, rdzv_endpoint=endpoint, **chosen)
        with meeting(settings, 20.0):
            pass

    with ThreadPoolExecutor() as hosts:
        for met in [hosts.submit(meet, node_rank) for node_rank in (0, 1)]:
            with pytest.raises(UsageError, match=words):
                met.result(timeout=20)
        for met in [hosts.submit(meet, node_rank, share_gpu=True) for node_rank in (0, 1)]:
            met.result(timeout=20)

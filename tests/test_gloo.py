"""All of a rank's gloo groups are served by one thread."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def num_devices() -> int:
    names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
    return sum(name.startswith("gloo_") for name in names)


def meet() -> tuple[int, float, float]:
    """The gloo devices of this rank in Megatron's groups, and sums over two groups of them."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core import parallel_state

    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.settings import TrainSettings

    with parallel_groups(TrainSettings(pp=2, dp=2)) as layout:
        pipeline, replicas = torch.tensor([10.0**layout.rank]), torch.tensor([10.0**layout.rank])
        dist.all_reduce(pipeline, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(replicas, group=parallel_state.get_data_parallel_group())
        return num_devices(), pipeline.item(), replicas.item()


def test_groups_share_a_device_and_not_their_messages() -> None:
    found = run_ranks(4, meet, timeout_s=200)
    assert found == [(1, 101, 11), (1, 1010, 11), (1, 101, 1100), (1, 1010, 1100)]

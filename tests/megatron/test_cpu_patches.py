"""Megatron-Core on the CPU, on machines with and without GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import clip_grads
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.tensor_parallel import random as random_states
from megatron.core.transformer import TransformerConfig, torch_norm
from megatron.core.transformer import utils as transformer_utils
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from rrfp.megatron.cpu.patches import prepare_cpu
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def host() -> None:
    prepare_cpu()


@pytest.fixture
def states() -> random_states.CudaRNGStatesTracker:
    tracker = random_states.CudaRNGStatesTracker()
    tracker.add("one", 1)
    tracker.add("two", 2)
    return tracker


def drawn(seed: int, num: int) -> list[float]:
    numbers: list[float] = torch.rand(num, generator=torch.Generator().manual_seed(seed)).tolist()
    return numbers


def test_torch_itself_stays_as_it_is() -> None:
    assert torch.cuda.__name__ == "torch.cuda"
    assert torch.zeros.__module__ != "rrfp.megatron.cpu.patches"
    assert p2p_communication.torch is not torch
    assert p2p_communication.torch.Tensor is torch.Tensor
    before = p2p_communication.torch
    prepare_cpu()
    assert p2p_communication.torch is before


def test_torchs_compiler_is_not_imported_and_compiles_what_comes_later() -> None:
    program = """
import sys
from rrfp.megatron.cpu.patches import prepare_cpu
prepare_cpu()
assert "torch._inductor" not in sys.modules
import torch
from megatron.core.transformer.utils import gelu_impl
assert not hasattr(gelu_impl, "_torchdynamo_orig_callable")
assert hasattr(torch.compile(abs), "_torchdynamo_orig_callable")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_chosen_device_counts_and_not_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def touched(*_: object, **__: object) -> None:
        raise AssertionError("the GPU was touched")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("current_device", "synchronize", "current_stream", "Stream", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, touched)
    assert transformer_utils.get_default_causal_mask(3).tolist() == [
        [False, True, True],
        [False, False, True],
        [False, False, False],
    ]
    assert str(p2p_communication.torch.cuda.current_device()) == "cpu"
    p2p_communication.torch.cuda.synchronize()
    assert _ParamAndGradBuffer.__init__.__globals__["torch"].cuda.is_available() is False


def test_gradients_are_clipped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clip_grads.clip_grad_by_total_norm_fp32([parameter], 1.0, 5.0)
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


def test_a_gradient_of_another_type_is_still_an_error() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.ones(2, dtype=torch.float64)
    with pytest.raises(AssertionError):
        clip_grads.clip_grad_by_total_norm_fp32([parameter], 1.0, 5.0)


def test_a_named_random_state_goes_on_where_it_stopped(
    states: random_states.CudaRNGStatesTracker,
) -> None:
    torch.manual_seed(7)
    outer = torch.rand(1).tolist()
    with states.fork("one"):
        first = torch.rand(2).tolist()
    outer += torch.rand(1).tolist()
    with states.fork("one"):
        first += torch.rand(1).tolist()
    assert first == pytest.approx(drawn(1, 3), abs=0)
    assert outer == pytest.approx(drawn(7, 2), abs=0)


def test_random_states_nest(states: random_states.CudaRNGStatesTracker) -> None:
    with states.fork("one"):
        first = torch.rand(1).tolist()
        with states.fork("two"):
            second = torch.rand(2).tolist()
        first += torch.rand(1).tolist()
    assert first == drawn(1, 2)
    assert second == drawn(2, 2)


def test_an_error_inside_a_fork_restores_the_outer_state(
    states: random_states.CudaRNGStatesTracker,
) -> None:
    torch.manual_seed(7)

    def fail() -> None:
        with states.fork("one"):
            torch.rand(5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.rand(2).tolist() == drawn(7, 2)


def test_random_states_can_be_saved_and_restored(
    states: random_states.CudaRNGStatesTracker,
) -> None:
    saved = states.get_states()
    with states.fork("one"):
        first = torch.rand(2).tolist()
    states.set_states(saved)
    with states.fork("one"):
        assert torch.rand(2).tolist() == first


def test_a_seed_or_a_name_is_added_once(states: random_states.CudaRNGStatesTracker) -> None:
    with pytest.raises(ValueError, match="seed 1 already"):
        states.add("three", 1)
    with pytest.raises(ValueError, match="state one already"):
        states.add("one", 3)


def test_recomputation_draws_the_same_dropout() -> None:
    assert run_ranks(1, recompute, timeout_s=60) == [True]


def recompute() -> bool:
    prepare_cpu()
    from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker

    from rrfp.train.launch.process_groups import parallel_groups

    def layer(value: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            inner = torch.nn.functional.dropout(value, 0.5)
        return torch.nn.functional.dropout(inner * value, 0.5)

    with parallel_groups(TrainSettings(pp=1, layers=1)):
        gradients = []
        for run in (lambda value: checkpoint(layer, False, value), layer):
            random_states.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
            value = torch.arange(1.0, 65.0, requires_grad=True)
            output = run(value)
            torch.rand(3)
            output.sum().backward()
            assert value.grad is not None
            gradients.append((output.tolist(), value.grad.tolist()))
    return gradients[0] == gradients[1]


def test_the_router_multiplies_without_transformer_engine() -> None:
    tokens, weight = torch.randn(3, 1, 4), torch.randn(2, 4, requires_grad=True)
    logits = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    assert torch.equal(logits, tokens @ weight.t())
    logits.sum().backward()
    assert weight.grad is not None


def test_the_sizes_of_an_exchange_are_what_torch_takes() -> None:
    sizes = torch.tensor([3, 0, 5])
    assert token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True).tolist() == [3, 0, 5]
    assert token_dispatcher.maybe_move_tensor_to_cpu(sizes, record_stream=True) is sizes
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None
    stream = token_dispatcher.torch.cuda.Stream()
    stream.wait_stream(token_dispatcher.torch.cuda.current_stream())
    stream.record_event().synchronize()


@pytest.mark.filterwarnings("ignore:full scope is deprecated")
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_say_whether_their_gradients_are_summed_over_the_group(
    normalization: str, sequence_parallel: bool
) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        normalization=normalization,
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=2,
    )
    norm = torch_norm.WrappedTorchNorm(config, 8)
    assert type(norm).__name__ == normalization
    assert all(p.sequence_parallel is sequence_parallel for p in norm.parameters())


# All of a rank's gloo groups are served by one thread.


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


@pytest.mark.slow
def test_groups_share_a_device_and_not_their_messages() -> None:
    found = run_ranks(4, meet, timeout_s=200)
    assert found == [(1, 101, 11), (1, 1010, 11), (1, 101, 1100), (1, 1010, 1100)]

"""Megatron-LM's training on a machine without a GPU: what `prepare_cpu` leaves, because only
`megatron.training`, checkpoints, the rerun state machine and multi-token prediction name it.

Only ranks of tests import this. It is the same under Megatron's schedule and ours, and no file of
the checkout is changed: modules of Megatron get a torch of their own, in which CUDA is the CPU.
"""

import importlib
import importlib.util
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

LOADED = (
    "megatron.training",
    "megatron.training.async_utils",
    "megatron.training.checkpointing",
    "megatron.training.datasets.data_samplers",
    "megatron.core.rerun_state_machine",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.mapping",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.torch",
)
"""Modules that name CUDA and that a script may import only later."""

UNUSED = ("regex", "six", "yaml")
"""Packages that Megatron's training imports for tokenizers and files that no run here uses. Those
that are missing are stood in for."""

OF_TRITON = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
"""Kernels that no run here uses; the module imports triton without asking."""

_CREATORS = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros")

_CUDA_TYPES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


def prepare() -> None:
    """Import Megatron-LM, which must be on the module search path, and have it run on the CPU."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _bring_compiled_helpers()
        prepare_cpu()
        _stand_in_for_missing_packages()
        for name in LOADED:
            importlib.import_module(name)
    _put_cpu_in_place_of_cuda()
    _leave_out_what_asks_for_a_gpu()
    _let_a_distributed_optimizer_load()


def _stand_in_for_missing_packages() -> None:
    _stand_in_for(*UNUSED)
    # torch looks for triton, too, when it is imported, and must not find a stand-in.
    triton = _stand_in_for("triton", "triton.language")
    importlib.import_module(OF_TRITON)
    for name in triton:
        del sys.modules[name]


def _stand_in_for(*names: str) -> list[str]:
    """The names of the packages that are missing."""
    missing = [name for name in names if not _is_there(name.partition(".")[0])]
    for name in missing:
        sys.modules[name] = _Anything(name)
        sys.modules[name].__path__ = []
    return missing


def _is_there(name: str) -> bool:
    module = sys.modules.get(name)
    return not isinstance(module, _Anything) and importlib.util.find_spec(name) is not None


class _Anything(ModuleType):
    """A module in which every name is a decorator that leaves functions as they are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", _as_it_is)


def _as_it_is(*arguments: Any, **_options: object) -> Any:
    return arguments[0] if arguments else _as_it_is


def _bring_compiled_helpers() -> None:
    """The data set's C++ from the installed wheel: a checkout would compile it into itself."""
    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is None:
        files = metadata.files("megatron-core") or []
        path = next(Path(file.locate()) for file in files if file.name.startswith("helpers_cpp."))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    utils: Any = importlib.import_module("megatron.core.datasets.utils")
    utils.compile_helpers = _nothing


def _nothing(*_args: object, **_kwargs: object) -> None:
    pass


def _itself(tensor_or_module: Any, *_args: object, **_kwargs: object) -> Any:
    return tensor_or_module


class _Event:
    """`torch.cuda.Event` for the straggler detector, which reads times between two."""

    def __init__(self, **_options: object) -> None:
        self.time_s = 0.0

    def record(self, *_args: object) -> None:
        self.time_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return 1e3 * (end.time_s - self.time_s)


def _put_cpu_in_place_of_cuda() -> None:
    """Every module of Megatron that still has torch itself gets the copy that `prepare_cpu` gave to
    others, with more of CUDA."""
    prepared: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules").torch
    cuda = type("_Cuda", (type(prepared.cuda),), {})("torch.cuda")
    for name in ("set_device", "set_stream", "reset_peak_memory_stats"):
        setattr(cuda, name, _nothing)
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "device_memory_used",
        "temperature",
        "power_draw",
        "utilization",
        "clock_rate",
    ):
        setattr(cuda, name, lambda *_args: 0)
    cuda.memory_stats = lambda *_args: defaultdict(int)
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: False
    cuda.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
    cuda.get_device_capability = lambda *_args: (8, 0)
    cuda.set_rng_state = lambda state, *_args: torch.set_rng_state(state)
    cuda.get_device_properties = lambda *_args: SimpleNamespace(major=8, minor=0)
    cuda.Event = _Event
    cuda.nvtx = torch.cuda.nvtx
    cpu_torch: Any = ModuleType("torch", torch.__doc__)
    vars(cpu_torch).update(vars(prepared))
    vars(cpu_torch).update({name: _on_cpu(getattr(torch, name)) for name in _CREATORS})
    vars(cpu_torch)["cuda"] = cuda
    detector = importlib.import_module("megatron.core.utils")
    for name, module in [*sys.modules.items()]:
        has_torch = getattr(module, "torch", None) is torch or module is detector
        if name.partition(".")[0] == "megatron" and has_torch:
            setattr(module, "torch", cpu_torch)  # noqa: B010
    tensor: Any = torch.Tensor
    module_type: Any = torch.nn.Module
    tensor.cuda = module_type.cuda = _itself


def _on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def created(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return create(*args, **kwargs)

    return created


def _leave_out_what_asks_for_a_gpu() -> None:
    initialize: Any = importlib.import_module("megatron.training.initialize")
    if hasattr(initialize, "fused_kernels"):  # It asks CUDA's compiler for its version.
        initialize.fused_kernels.load = _nothing
    strategies = "megatron.core.dist_checkpointing.strategies"
    writer: Any = importlib.import_module(f"{strategies}.filesystem_async")
    # It asks psutil, for the log.
    writer._process_memory = lambda: 0


def _let_a_distributed_optimizer_load() -> None:
    """Without Apex or Transformer Engine it reads its number of steps from states that it does not
    have before it has loaded them, and gives all parameters one counter, which each of them counts
    up."""
    module: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer = module.DistributedOptimizer
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    def with_states(self: Any) -> Any:
        if not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return state_dict(self)

    def with_counters_of_their_own(self: Any, state: Any) -> None:
        num_steps = state["optimizer"]["param_groups"][0]["step"]
        load_state_dict(self, state)
        for of_parameter in self.optimizer.state.values():
            of_parameter["step"] = torch.tensor(num_steps)

    optimizer.state_dict, optimizer.load_state_dict = with_states, with_counters_of_their_own


_FORWARDS, _BACKWARDS = 1, 2


def let_interleaving_run_over_gloo() -> None:
    """Patch Megatron's interleaved schedule, which relies on NCCL twice: that a tensor may be freed
    as soon as a send is enqueued, and that each group has an order of its own, so that two ranks
    that are neighbors of each other twice tell their two directions apart. Outputs are therefore
    not freed, and messages are tagged by direction; the arithmetic stays Megatron's."""
    schedules: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    p2p: Any = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    schedules.deallocate_output_tensor = lambda *_args, **_kwargs: None
    # Megatron's own asserts that the output was freed.
    schedules.custom_backward = lambda output, gradient: torch.autograd.backward(output, gradient)
    p2p._p2p_ops = _p2p_ops


def _p2p_ops(
    *,
    tensor_send_prev: torch.Tensor | None,
    tensor_recv_prev: torch.Tensor | None,
    tensor_send_next: torch.Tensor | None,
    tensor_recv_next: torch.Tensor | None,
    group: dist.ProcessGroup,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> dict[str, Any]:
    requests = {}
    if tensor_send_next is not None:
        requests["send_next"] = dist.isend(
            tensor_send_next, next_pipeline_rank, group, tag=_FORWARDS
        )
    if tensor_recv_prev is not None:
        requests["recv_prev"] = dist.irecv(
            tensor_recv_prev, prev_pipeline_rank, group, tag=_FORWARDS
        )
    if tensor_send_prev is not None:
        requests["send_prev"] = dist.isend(
            tensor_send_prev, prev_pipeline_rank, group, tag=_BACKWARDS
        )
    if tensor_recv_next is not None:
        requests["recv_next"] = dist.irecv(
            tensor_recv_next, next_pipeline_rank, group, tag=_BACKWARDS
        )
    return requests

"""Makes Megatron-Core run on the CPU, its own schedules and optimizers included.

Megatron-Core uses CUDA in about thirty places of its training path. They are of four kinds. Each
kind is patched in one way, for the *chosen* device, whether or not the machine has a GPU:

1. ``torch.cuda.current_device()``, synchronization, streams, and tensors created with
   ``device="cuda"``: the modules in `_MODULES` get, under the name ``torch``, a copy of torch's
   namespace. In it, ``cuda`` is torch's own CPU counterpart, and functions that create tensors
   accept "cuda" for "cpu". torch itself is not changed, and lookups use no wrapper.
2. Type checks by name (``tensor.type() == 'torch.cuda.FloatTensor'``) and ``tensor.cuda()``: the
   functions in `_FUNCTIONS` get the CPU's names in their constants and attribute names.
3. The random-state tracker: `CpuRNGStatesTracker` forks the CPU generator.
4. The token exchange between experts uses Transformer Engine's matrix product if installed, and
   copies its split sizes from the GPU: both are replaced.

Functions that Megatron compiles with ``torch.compile`` stay uncompiled: compiling for the CPU needs
a C++ compiler, and importing the compiler takes every rank a second.

Further patches are also needed on GPUs: for Megatron-Core without Transformer Engine, and for gloo,
which ranks use that share a GPU. `prepare_cpu` must run before any other part of rrfp imports
megatron.
"""

import contextlib
import importlib
import inspect
import logging
import operator
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy.typing as npt
import torch

_CORE = "megatron.core"

_IMPORTS = ("datasets.indexed_dataset", "models.gpt.gpt_layer_specs", "optimizer")
"""Modules that the rest of this package imports, besides `_MODULES`."""

_MODULES = (
    "distributed.distributed_data_parallel",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rope_utils",
    "models.common.embeddings.rotary_pos_embedding",
    "models.gpt.gpt_model",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "parallel_state",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "tensor_parallel.utils",
    "timers",
    "transformer.dot_product_attention",
    "transformer.moe.router",
    "transformer.moe.token_dispatcher",
    "transformer.utils",
    "utils",
)
"""Modules of megatron.core that use ``torch.cuda`` or ``device="cuda"``."""

_FUNCTIONS = (
    "models.common.language_module.language_module:"
    "LanguageModule.setup_embeddings_and_output_layer",
    "optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    "optimizer.distrib_optimizer:DistributedOptimizer.__init__",
    "optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
    "optimizer.distrib_optimizer:DistributedOptimizer.get_parameter_state_dp_zero",
    "optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
)
"""Functions that compare a tensor's type name with CUDA's, or call ``tensor.cuda()``."""

_CPU_NAMES = {
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
    "cuda": "cpu",
}

_CREATORS = ("arange", "empty", "full", "ones", "tensor", "zeros")

_prepared = False


def prepare_cpu() -> None:
    """Import Megatron-Core without compiling its functions, and patch its modules for the CPU.
    Further calls do nothing."""
    global _prepared
    if not _prepared:
        with _without_import_warnings(), _without_compilation():
            for name in (*_IMPORTS, *_MODULES):
                _core(name)
        _install_cpu_torch()
        _install_cpu_random_states()
        prepare_without_transformer_engine()
        _install_expert_exchange()
        reduce_losses_among_several()
        for path in _FUNCTIONS:
            _use_cpu_names(path)
        _prepared = True


@contextlib.contextmanager
def _without_import_warnings() -> Iterator[None]:
    """Suppress, for the block, Python warnings and the log of torch's C++ extensions. At import
    Megatron warns that Transformer Engine and Apex are missing, uses deprecated parts of torch, and
    logs that CUDA is missing; on the CPU none of this matters."""
    extensions = logging.getLogger("torch.utils.cpp_extension")
    level = extensions.level
    extensions.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        extensions.setLevel(level)


@contextlib.contextmanager
def _without_compilation() -> Iterator[None]:
    """Replace `torch.compile`, for the block, by a function that does not compile."""
    compiles = torch.compile
    torch.compile = _as_written  # type: ignore[assignment]  # its overloads say what it compiles
    try:
        yield
    finally:
        torch.compile = compiles


def _as_written(function: Any = None, **_options: object) -> Any:
    """Replaces ``torch.compile``, with and without options: returns the function unchanged."""
    return _as_written if function is None else function


def _core(name: str) -> Any:
    """Import a module of megatron.core."""
    return importlib.import_module(f"{_CORE}.{name}")


class _CpuStream(torch.cpu.Stream):
    """torch's CPU stream, which lacks `record_event` and takes no device."""

    def __init__(self, device: object = None, priority: int = -1) -> None:
        super().__init__(priority)

    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]
        """Return a new CPU event."""
        return torch.cpu.Event()


class _CpuInPlaceOfCuda(ModuleType):
    """``torch.cuda`` as Megatron uses it, on the CPU: torch's own CPU counterparts."""

    current_device = staticmethod(torch.cpu.current_device)
    current_stream = staticmethod(torch.cpu.current_stream)
    default_stream = staticmethod(torch.cpu.current_stream)
    stream = staticmethod(torch.cpu.stream)
    synchronize = staticmethod(torch.cpu.synchronize)
    Stream = _CpuStream
    is_available = staticmethod(lambda: False)
    empty_cache = staticmethod(lambda: None)
    get_rng_state = staticmethod(torch.get_rng_state)
    manual_seed = staticmethod(torch.manual_seed)


def _on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function that creates tensors, so that `device="cuda"` means the CPU."""

    def created(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return create(*args, **kwargs)

    return created


def _install_cpu_torch() -> None:
    """Give the modules in `_MODULES`, as their `torch`, a copy of torch's namespace that uses the
    CPU for `cuda` and `device="cuda"`. torch itself does not change."""
    cpu_torch = ModuleType("torch", torch.__doc__)
    vars(cpu_torch).update(vars(torch))
    vars(cpu_torch).update({name: _on_cpu(getattr(torch, name)) for name in _CREATORS})
    vars(cpu_torch)["cuda"] = _CpuInPlaceOfCuda("torch.cuda")
    for name in _MODULES:
        _core(name).torch = cpu_torch


def _use_cpu_names(path: str) -> None:
    """Replace CUDA's names by the CPU's in the code of a function of megatron.core, given as
    `module:name`. Changes the function object in place, beneath its decorators."""
    module, _, name = path.partition(":")
    found = operator.attrgetter(name)(_core(module))
    function = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(function, FunctionType)
    function.__code__ = _with_cpu_names(function.__code__)


def _with_cpu_names(code: CodeType) -> CodeType:
    """Return a copy of a code object, nested ones included, in which the CPU's names replace CUDA's
    among constants and attribute names."""

    def renamed(value: object) -> object:
        if isinstance(value, CodeType):
            return _with_cpu_names(value)
        if isinstance(value, tuple):
            return tuple(renamed(item) for item in value)
        return _CPU_NAMES.get(value, value) if isinstance(value, str) else value

    names = tuple(_CPU_NAMES.get(name, name) for name in code.co_names)
    constants = tuple(renamed(constant) for constant in code.co_consts)
    return code.replace(co_names=names, co_consts=constants)


def _install_cpu_random_states() -> None:
    """Replace Megatron's tracker of CUDA random states, and its functions that read and set CUDA's
    state, by versions for the CPU generator."""
    module = _core("tensor_parallel.random")

    class CpuRNGStatesTracker(module.CudaRNGStatesTracker):  # type: ignore[name-defined, misc]
        """Named random states of the CPU generator, with Megatron's interface."""

        _current_state_name: str

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_:
                raise ValueError(f"seed {seed} already belongs to a random state")
            if name in self.states_:
                raise ValueError(f"random state {name} already exists")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = module._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer_name = self._current_state_name
            outer_state = torch.get_rng_state()
            if outer_name in self.states_:
                self.states_[outer_name] = outer_state
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(self.states_.get(outer_name, outer_state))
                self._current_state_name = outer_name

    def get_state(*_args: object, **_kwargs: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
        torch.set_rng_state(new_state)

    module.CudaRNGStatesTracker = CpuRNGStatesTracker
    module._get_cuda_rng_state = get_state
    module._set_cuda_rng_state = set_state


def _install_expert_exchange() -> None:
    """Keep the token exchange between experts on the CPU: without Transformer Engine's matrix
    product, and with split sizes left where they are (as a NumPy array if asked for)."""

    def sizes(
        tensor: torch.Tensor | None, as_numpy: bool = False, **_unused: object
    ) -> torch.Tensor | npt.NDArray[Any] | None:
        return tensor.numpy() if as_numpy and tensor is not None else tensor

    _core("transformer.moe.moe_utils").te_general_gemm = None
    _core("transformer.moe.token_dispatcher").maybe_move_tensor_to_cpu = sizes


# Patches for Megatron-Core without Transformer Engine and Apex, and for gloo, on any device.


def prepare_without_transformer_engine() -> None:
    """Make Megatron-Core run without Transformer Engine and Apex. Idempotent, and harmless if both
    are installed.

    Megatron's wrapper of torch's norms, which replaces theirs, refuses sequence parallelism. Here
    it returns torch's norm, with its weights tagged for Megatron's gradient finalization. The
    expert router looks up Transformer Engine's matrix product by a name that is otherwise
    undefined; it becomes None.
    """
    _core("transformer.torch_norm").WrappedTorchNorm.__new__ = _tagged_norm
    experts = _core("transformer.moe.moe_utils")
    experts.te_general_gemm = getattr(experts, "te_general_gemm", None)


def _tagged_norm(
    _cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: object
) -> torch.nn.Module:
    """Replaces `WrappedTorchNorm.__new__`: return torch's LayerNorm or RMSNorm, as configured, with
    Megatron's tag `sequence_parallel` on its parameters."""
    norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    norm: torch.nn.Module = norms[config.normalization](hidden_size, eps=eps)
    parameter: Any  # Megatron sets its tags as attributes that torch's type does not declare
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def reduce_losses_among_several() -> None:
    """Skip the reduction of the loss in tensor-parallel groups of one rank.

    Megatron reduces the loss three times per microbatch even there. With NCCL this is one launch;
    with gloo it wakes up a thread and, on a GPU, waits for it.
    """
    distributed = ModuleType("torch.distributed", torch.distributed.__doc__)
    vars(distributed).update(vars(torch.distributed))

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        if group.size() > 1:
            torch.distributed.all_reduce(tensor, op=op, group=group)

    vars(distributed)["all_reduce"] = all_reduce
    loss_torch = ModuleType("torch", torch.__doc__)
    vars(loss_torch).update(vars(torch))
    vars(loss_torch)["distributed"] = distributed
    _core("tensor_parallel.cross_entropy").torch = loss_torch


def reduce_one_by_one() -> None:
    """Make data parallelism without overlap run a separate collective for each bucket. Megatron
    coalesces them, which gloo does not support for GPU tensors."""
    _core("distributed.param_and_grad_buffer")._coalescing_manager = _one_by_one


@contextlib.contextmanager
def _one_by_one(*_: object, **__: object) -> Iterator[None]:
    """Do nothing; replaces torch's manager that coalesces collectives. Without overlap, its result
    is unused."""
    yield

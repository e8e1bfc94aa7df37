"""CUDA's runtime by `cuda-bindings`: what torch does not offer, with errors that are raised.

Memory that is exported comes from `cudaMalloc` itself. Torch's allocator hands out parts of blocks,
of which CUDA would export the whole, and with expandable segments it has no handles to export.
"""

import ctypes
import os
import runpy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import UUID

from rrfp.errors import first_line
from rrfp.requirements import install_hint
from rrfp.runtime.isolated_call import NoAnswerError, probe

# Whether CUDA can be used here, and if not, why: one sentence, for all who ask.
#
# Torch is imported in a process of its own only: to import it takes seconds, CUDA that has been
# initialised cannot be forked, and a driver that is broken may hang.


_DRIVER = "libcuda.so.1"
_LIMIT_S = 120.0
"""To import torch and initialise CUDA takes 5 to 20 s where many GPUs are."""
_INSTEAD = "or use --device cpu"


@dataclass(frozen=True, slots=True)
class InstalledTorch:
    """The build of torch that an import would take."""

    version: str
    cuda: str | None
    """The release of CUDA that it was built for; None in a build without."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as torch sees it."""

    name: str
    memory_bytes: int
    uuid: str
    """The same in every process, whichever GPUs that sees."""


@dataclass(frozen=True, slots=True)
class CudaPresence:
    """What there is of CUDA."""

    gpus: tuple[Gpu, ...]
    """In torch's order. None if there is a problem."""
    problem: str | None
    """Why CUDA cannot be used: the fact, and what to do."""


def installed_torch() -> InstalledTorch | None:
    """Which torch is installed, without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    told = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return InstalledTorch(str(told["__version__"]), told.get("cuda"))


def cuda_problem() -> str | None:
    """Why CUDA cannot be used here; None if it can."""
    return cuda_presence().problem


def cuda_presence() -> CudaPresence:
    """Try CUDA out: every GPU that torch sees has to calculate."""
    problem = _problem_without_asking()
    if problem is not None:
        return CudaPresence((), problem)
    try:
        gpus = probe(computing_gpus, limit_s=_LIMIT_S)
    except NoAnswerError as error:
        return CudaPresence(
            (), f"CUDA cannot be used here ({error}); see whether nvidia-smi works, {_INSTEAD}"
        )
    return CudaPresence(tuple(Gpu(**each) for each in gpus), None)


def _problem_without_asking() -> str | None:
    """What can be seen without initialising CUDA."""
    if not _has_driver():
        return (
            f"this machine has no NVIDIA driver ({_DRIVER} is not there); start containers with "
            f"--gpus all, {_INSTEAD}"
        )
    torch = installed_torch()
    if torch is None:
        return "torch is not installed; install a build with CUDA"
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA; install a build with it, {_INSTEAD}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is '{hidden}' and hides every GPU; unset it, {_INSTEAD}"
    return None


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def computing_gpus() -> list[dict[str, object]]:
    """The GPUs that torch sees, each of which has added two numbers up. Raises RuntimeError or
    AssertionError, torch's own, where one cannot. Initialises CUDA in this process."""
    import torch

    torch.cuda.current_device()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            total = torch.ones(2, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:
            # Such as a torch that was not built for this generation of GPUs.
            raise RuntimeError(f"{properties.name}: {first_line(str(error))}") from None
        if total != 2:
            raise RuntimeError(f"{properties.name} says that 1 + 1 is {total:g}")
        found.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "uuid": str(properties.uuid),
            }
        )
    return found


HOW_TO_INSTALL = install_hint("cuda")
BLOCK_BYTES = 2 * 2**20
"""Of device memory: what is smaller shares one, and whole blocks are exported."""
HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE."""


class CudaRuntimeError(RuntimeError):
    """A call that failed, with CUDA's own name and words for it; or there is nothing to call."""


def has_bindings() -> bool:
    """Whether there is something to call."""
    try:
        return find_spec("cuda.bindings.runtime") is not None
    except ModuleNotFoundError:
        return False


class CudaRuntime:
    """The calls on one device, for any thread. Makes the device the calling thread's."""

    def __init__(self, device: int) -> None:
        """Raises CudaRuntimeError where there are no bindings, no driver or no such device."""
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise CudaRuntimeError(
                f"cuda-bindings cannot be imported ({error}); {HOW_TO_INSTALL}"
            ) from None
        self.bindings: Any = runtime
        self.device = device
        self.select()

    def call(self, name: str, *arguments: object) -> Any:
        """What a call returns. Raises CudaRuntimeError."""
        error, *values = getattr(self.bindings, name)(*arguments)
        if error != self.bindings.cudaError_t.cudaSuccess:
            _, title = self.bindings.cudaGetErrorName(error)
            _, words = self.bindings.cudaGetErrorString(error)
            raise CudaRuntimeError(f"{name}: {title.decode()}, {words.decode()}")
        return values[0] if values else None

    def select(self) -> None:
        """Make it the calling thread's device."""
        self.call("cudaSetDevice", self.device)

    def allocate(self, num_bytes: int) -> int:
        """The address of so much memory, in blocks of its own."""
        self.select()
        return int(self.call("cudaMalloc", -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES))

    def free(self, address: int) -> None:
        """Give memory back, which nobody has open any more."""
        self.select()
        self.call("cudaFree", address)

    def export(self, address: int) -> bytes:
        """The handle by which another process opens memory of `allocate`."""
        self.select()
        handle = self.call("cudaIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open(self, octets: bytes) -> int:
        """The address at which this process sees what another one exported."""
        if len(octets) != HANDLE_BYTES:
            raise CudaRuntimeError(f"a handle has {HANDLE_BYTES} bytes, and not {len(octets)}")
        handle = self.bindings.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), octets, HANDLE_BYTES)
        self.select()
        lazily = self.bindings.cudaIpcMemLazyEnablePeerAccess
        return int(self.call("cudaIpcOpenMemHandle", handle, lazily))

    def close(self, address: int) -> None:
        """Let go of what was opened; nothing reads it any more."""
        self.select()
        self.call("cudaIpcCloseMemHandle", address)

    @property
    def name(self) -> str:
        """Of the device, the same in every process."""
        return self._name(self.device)

    def lacks_access_to(self, name: str) -> bool:
        """Whether the device is known not to reach another one's memory. Of one that this process
        does not see, only opening it tells."""
        for other in range(self.call("cudaGetDeviceCount")):
            if other != self.device and self._name(other) == name:
                return not self.call("cudaDeviceCanAccessPeer", self.device, other)
        return False

    def _name(self, device: int) -> str:
        """As nvidia-smi has it."""
        properties = self.call("cudaGetDeviceProperties", device)
        return f"GPU-{UUID(bytes=bytes(properties.uuid.bytes))}"

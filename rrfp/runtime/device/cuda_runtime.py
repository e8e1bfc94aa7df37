"""CUDA's runtime by `cuda-bindings`, for calls that torch does not offer.

Memory that is exported comes from `cudaMalloc` itself. Torch's allocator returns parts of blocks,
and CUDA would export the whole block; with expandable segments it has no handles to export.
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
from rrfp.runtime.isolated_call import NoAnswerError, call_isolated

# A check of CUDA before it is used.
#
# It imports torch in a process of its own only: the import takes seconds, a process with an
# initialized CUDA cannot be forked, and a broken driver may hang.

_DRIVER = "libcuda.so.1"
_LIMIT_S = 120.0
"""With many GPUs, importing torch and initializing CUDA takes 5 to 20 s."""
_INSTEAD = "or use --device cpu"


@dataclass(frozen=True, slots=True)
class InstalledTorch:
    """The build of torch that `import torch` would import."""

    version: str
    cuda: str | None
    """The release of CUDA that it was built for; None in a build without CUDA."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as torch sees it."""

    name: str
    memory_bytes: int
    uuid: str
    """The same in every process, whichever GPUs are visible to it."""


@dataclass(frozen=True, slots=True)
class CudaPresence:
    """The usable GPUs, or the reason why CUDA cannot be used."""

    gpus: tuple[Gpu, ...]
    """In torch's order. Empty if there is a problem."""
    problem: str | None
    """One sentence with the reason and the next step; None if CUDA works."""


def installed_torch() -> InstalledTorch | None:
    """Return the version and CUDA release of the installed torch, from its `version.py`, without
    importing torch; None without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return InstalledTorch(str(version["__version__"]), version.get("cuda"))


def check_cuda() -> CudaPresence:
    """Compute something on every GPU that torch sees, in another process, for at most 120 s; return
    the GPUs. If CUDA cannot be used, return the reason instead of raising."""
    problem = _problem_before_initialization()
    if problem is not None:
        return CudaPresence((), problem)
    try:
        gpus = call_isolated(find_working_gpus, limit_s=_LIMIT_S)
    except NoAnswerError as error:
        return CudaPresence(
            (), f"CUDA cannot be used here ({error}); see whether nvidia-smi works, {_INSTEAD}"
        )
    return CudaPresence(tuple(Gpu(**each) for each in gpus), None)


def _problem_before_initialization() -> str | None:
    """Return a problem that shows without initializing CUDA: no driver, no torch, torch without
    CUDA, or CUDA_VISIBLE_DEVICES that hides every GPU; None without one."""
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
    """Load NVIDIA's driver library into this process; return whether that succeeds."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def find_working_gpus() -> list[dict[str, object]]:
    """Return the name, memory and UUID of each GPU that torch sees, after each has added two
    numbers. Raises RuntimeError if one cannot or adds wrongly, and torch's own errors without a
    usable CUDA. Initializes CUDA in this process."""
    import torch

    torch.cuda.current_device()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            total = torch.ones(2, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:
            # For example, torch was not built for this generation of GPUs.
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
"""Granularity of device memory. Smaller allocations share a block, and whole blocks are
exported."""
HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE."""


class CudaRuntimeError(RuntimeError):
    """A call of CUDA failed, with CUDA's own name and text of the error; or cuda-bindings is
    missing."""


def has_bindings() -> bool:
    """Return whether cuda-bindings is installed."""
    try:
        return find_spec("cuda.bindings.runtime") is not None
    except ModuleNotFoundError:
        return False


class CudaRuntime:
    """Calls of CUDA's runtime on one device, for any thread; each raises CudaRuntimeError if CUDA
    fails. Most make it the calling thread's current device."""

    def __init__(self, device: int) -> None:
        """Raises CudaRuntimeError if the bindings, the driver or the device are missing."""
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
        """Call a function of CUDA's runtime by its name, and return its first value, if any. Raises
        CudaRuntimeError if it returns an error."""
        error, *values = getattr(self.bindings, name)(*arguments)
        if error != self.bindings.cudaError_t.cudaSuccess:
            _, title = self.bindings.cudaGetErrorName(error)
            _, reason = self.bindings.cudaGetErrorString(error)
            raise CudaRuntimeError(f"{name}: {title.decode()}, {reason.decode()}")
        return values[0] if values else None

    def select(self) -> None:
        """Make this device the calling thread's current one."""
        self.call("cudaSetDevice", self.device)

    def allocate(self, num_bytes: int) -> int:
        """Allocate device memory in whole blocks of 2 MiB of its own, and return its address."""
        self.select()
        return int(self.call("cudaMalloc", -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES))

    def free(self, address: int) -> None:
        """Free memory of `allocate`, which no process may have open."""
        self.select()
        self.call("cudaFree", address)

    def export(self, address: int) -> bytes:
        """Return the 64-byte IPC handle by which another process opens memory of `allocate`."""
        self.select()
        handle = self.call("cudaIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open(self, octets: bytes) -> int:
        """Map memory that another process exported, and return its address here. Raises
        CudaRuntimeError, also for a handle that does not have 64 bytes."""
        if len(octets) != HANDLE_BYTES:
            raise CudaRuntimeError(f"a handle has {HANDLE_BYTES} bytes, and not {len(octets)}")
        handle = self.bindings.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), octets, HANDLE_BYTES)
        self.select()
        lazily = self.bindings.cudaIpcMemLazyEnablePeerAccess
        return int(self.call("cudaIpcOpenMemHandle", handle, lazily))

    def close(self, address: int) -> None:
        """Unmap memory of `open`; nothing may still read it."""
        self.select()
        self.call("cudaIpcCloseMemHandle", address)

    @property
    def name(self) -> str:
        """Name of the device as nvidia-smi shows it (`GPU-` and its UUID), the same in every
        process."""
        return self._name_of(self.device)

    def lacks_access_to(self, name: str) -> bool:
        """Return True if this device certainly cannot access the memory of the named one. False for
        one that this process does not see: only opening its memory shows that."""
        for other in range(self.call("cudaGetDeviceCount")):
            if other != self.device and self._name_of(other) == name:
                return not self.call("cudaDeviceCanAccessPeer", self.device, other)
        return False

    def _name_of(self, device: int) -> str:
        """Return a device's name as nvidia-smi shows it: `GPU-` and its UUID."""
        properties = self.call("cudaGetDeviceProperties", device)
        return f"GPU-{UUID(bytes=bytes(properties.uuid.bytes))}"

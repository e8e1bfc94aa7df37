"""CUDA's runtime by `cuda-bindings`: what torch does not offer, with errors that are raised.

Memory that is exported comes from `cudaMalloc` itself. Torch's allocator hands out parts of blocks,
of which CUDA would export the whole, and with expandable segments it has no handles to export.
"""

import ctypes
from importlib.util import find_spec
from typing import Any
from uuid import UUID

HOW_TO_INSTALL = "pip install 'rrfp[cuda]'"
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

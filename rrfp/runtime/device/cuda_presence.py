"""Whether CUDA can be used here, and if not, why: one sentence, for all who ask.

Torch is imported in a process of its own only: to import it takes seconds, CUDA that has been
initialised cannot be forked, and a driver that is broken may hang.
"""

import ctypes
import os
import runpy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rrfp.errors import first_line
from rrfp.runtime.probe import NoAnswerError, probe

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

"""Where NIXL's Python is, of which there is one for each release of CUDA. Imports no torch."""

import importlib
from importlib.util import find_spec
from typing import Any

_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The one that finds this machine's CUDA, and each: on the CPU any of them serves."""
HOW_TO_INSTALL = "pip install 'rrfp[nixl]'"


def is_installed() -> bool:
    """Whether there is any, without importing it."""
    return any(find_spec(package) is not None for package in _PACKAGES)


def nixl_api() -> Any:
    """The module that has `nixl_agent`. Raises ImportError, which says what to do."""
    reasons = []
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            reasons.append(str(error))
    raise ImportError(f"NIXL cannot be imported ({reasons[0]}); {HOW_TO_INSTALL}")

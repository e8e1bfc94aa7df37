"""Finds and replaces Megatron's `get_forward_backward_func` in every module that has the name.

Megatron's training loop imports the name from the package `megatron.core.pipeline_parallel`, so a
patch may be there, in the loop's own module, or in the module that defines it. A patch that we
overlook would silently override ours, or be overridden by it.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from rrfp.errors import UsageError
from rrfp.megatron import compatibility
from rrfp.megatron.provenance import (
    described,
    foreign_layer,
    home_of,
    is_function,
    is_ours,
    namespace_of,
    wraps,
)

_NAME = "get_forward_backward_func"
_CORE = "megatron.core.pipeline_parallel"


def megatrons_own(asker: str) -> Callable[..., Any]:
    """Megatron's function, which `asker` (install() or trace_native()) is about to replace.

    Raises UsageError if it has already been replaced, saying by what, where, and what to do.
    """
    schedules = compatibility.schedules()
    places = list(_places())
    ours = None
    for _, value in places:
        foreign = foreign_layer(value)
        if foreign is None:
            continue
        if is_ours(foreign):
            ours = foreign
            continue
        *names, last = (name for name, other in places if other is value)
        where = f"{', '.join(names)} and {last}" if names else last
        if wraps(value, _NAME, vars(schedules)):
            does, next_step = "wraps", f"call {asker} before it does, or switch that patch off"
        else:
            does = "has replaced"
            next_step = f"switch that patch off, or leave out {asker}"
        raise UsageError(f"{described(foreign)} {does} Megatron's {_NAME} in {where}; {next_step}")
    if ours is not None:
        first = "trace_native()" if home_of(ours) == "rrfp.megatron.native.trace" else "install()"
        raise UsageError(
            f"{first} has replaced Megatron's schedule in this process already; call either "
            "install() or trace_native(), and only once"
        )
    found: Callable[..., Any] | None = namespace_of(schedules).get(_NAME)
    if found is None:
        raise UsageError(
            f"{_CORE}.schedules has no {_NAME}; see which patch has removed it, and switch that off"
        )
    return found


def put(function: Callable[..., Any]) -> None:
    """Replace Megatron's own function in every module that has it, under whatever name: a script
    may have imported it before it calls us."""
    home = namespace_of(compatibility.schedules())
    for _, namespace in _loaded():
        for name, value in namespace.copy().items():
            if is_function(value, _NAME, home):
                namespace[name] = function


def _places() -> Iterator[tuple[str, Any]]:
    """The modules that have Megatron's name, and its value there."""
    for module, namespace in _loaded():
        if module.partition(".")[0] == "megatron" and _NAME in namespace:
            value = namespace[_NAME]
            # Skip unrelated modules that define the same name for themselves.
            if module.startswith(_CORE) or home_of(value) != module:
                yield module, value


def _loaded() -> Iterator[tuple[str, dict[Any, Any]]]:
    # Copied, because another thread may import something meanwhile.
    for name, module in sys.modules.copy().items():
        yield str(name), namespace_of(module)

"""Replaces Megatron's schedule functions in every module that has them.

Megatron's training loop imports `get_forward_backward_func` from the package
`megatron.core.pipeline_parallel`, so a patch may be there, in the loop's own module, or in the
module that defines it. A patch that goes unnoticed would silently override rrfp's, or be overridden
by it. Some loops instead import one of the three schedule functions that the getter chooses from.

A loop may have fetched a function before `replace_functions` runs and hold it where no search of
modules finds it: in a local variable, an attribute, a partial, a closure. `replace_functions`
therefore also exchanges the code of the function objects themselves. rrfp's own calls of them run a
copy of the original.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, update_wrapper
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from inspect import signature
from types import FunctionType, ModuleType
from typing import Any

from rrfp.errors import UsageError
from rrfp.megatron.adapters import compatibility
from rrfp.megatron.provenance import (
    defining_module,
    describe_callable,
    foreign_layer,
    is_ours,
    may_call,
    namespace_of,
)

GETTER = "get_forward_backward_func"
NO_PIPELINING = "forward_backward_no_pipelining"
SCHEDULES = (
    NO_PIPELINING,
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
"""The functions that Megatron's getter chooses from."""

HOME = "megatron.core.pipeline_parallel.schedules"
"""The module that defines all of these functions."""

_CORE = "megatron.core.pipeline_parallel"

_originals: dict[str, Callable[..., Any]] = {}
"""The functions of that module, by name, before `replace_functions`."""

_replaced_by = ""
"""The caller of `replace_functions`, such as `install()`."""


def original_function(name: str) -> Callable[..., Any]:
    """Return Megatron's own function of this name in its module `schedules`, even after rrfp has
    replaced it there. A third party's patch is returned as it is. Raise UsageError if the module
    has no such name."""
    home = namespace_of(compatibility.schedules())
    if name not in home:
        raise UsageError(
            f"{HOME} has no {name}; see which patch has removed it, and switch that off"
        )
    found: Callable[..., Any] = home[name]
    return _originals.get(name, found) if is_ours(found) else found


def refuse_unknown_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a call of Megatron's function `name` that rrfp does not know, unless they
    have Megatron's default. Raise TypeError if Megatron does not know one either, and UsageError
    for another value."""
    parameters = inspect.signature(original_function(name)).parameters
    for argument, value in arguments.items():
        if argument not in parameters:
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}")
        if value is not parameters[argument].default:
            raise UsageError(
                f"{argument} {value!r} of Megatron's {name} is unknown to rrfp; leave it out"
            )


def check_not_replaced(asker: str) -> None:
    """Raise UsageError if a third party or an earlier call of rrfp has replaced or wrapped
    Megatron's schedule, which `asker`, such as `install()`, is about to replace. The message names
    the patch, its place and the remedy."""
    schedules = compatibility.schedules()
    home = namespace_of(schedules)
    places = list(_places())
    for _, value in places:
        foreign = foreign_layer(value)
        if foreign is None or is_ours(foreign):
            continue
        *names, last = (name for name, other in places if other is value)
        where = f"{', '.join(names)} and {last}" if names else last
        if may_call(value, GETTER, vars(schedules)):
            does, next_step = "wraps", f"call {asker} before it does, or switch that patch off"
        else:
            does = "has replaced"
            next_step = f"switch that patch off, or leave out {asker}"
        raise UsageError(
            f"{describe_callable(foreign)} {does} Megatron's {GETTER} in {where}; {next_step}"
        )
    if any(is_ours(value) for _, value in places) or is_ours(home.get(SCHEDULES[0])):
        next_step = (
            "call either install() or trace_native(), and only once"
            if _replaced_by.endswith("()")
            else f"leave out {asker}"
        )
        raise UsageError(
            f"{_replaced_by} has replaced Megatron's schedule in this process already; {next_step}"
        )


def replace_functions(
    functions: Mapping[str, Callable[..., Any]],
    asker: str,
    on_bypass: Callable[[str, str, dict[str, Any]], None] | None = None,
) -> None:
    """Replace Megatron's functions by these, keyed by name, in every loaded module, also where a
    script has imported one under another name. `asker`, such as `install()`, appears in later
    messages.

    With `on_bypass`, also change the code of Megatron's own schedule functions (not the getter's):
    a job that still calls one of them first calls `on_bypass` with the function's name, the file
    and line of the call, and its keyword arguments, and then runs the original. Raise UsageError if
    Megatron has no function of such a name.
    """
    global _replaced_by
    home = namespace_of(compatibility.schedules())
    _originals.update((name, original_function(name)) for name in functions)
    _replaced_by = asker
    replaced = {id(home[name]): function for name, function in functions.items()}
    for _, namespace in _loaded_modules():
        for name, value in namespace.copy().items():
            if id(value) in replaced:
                namespace[name] = replaced[id(value)]
    for name in SCHEDULES:
        if name in functions and on_bypass is not None:
            _intercept(_originals[name], partial(on_bypass, name))


def _intercept(function: Any, on_bypass: Callable[[str, dict[str, Any]], None]) -> None:
    """Change this function object in place: a call from outside of rrfp first calls `on_bypass`
    with the caller's `file:line` and the keyword arguments. Every call then runs a copy of the
    original. Do nothing for a closure, whose code cannot be exchanged, and for other callables."""
    if type(function) is not FunctionType or function.__closure__:
        return
    code, defaults = function.__code__, function.__defaults__
    own = FunctionType(code, function.__globals__, function.__name__, defaults)
    update_wrapper(own, function)
    own.__kwdefaults__ = function.__kwdefaults__

    def run(*args: Any, **arguments: Any) -> Any:
        caller = sys._getframe(2)  # behind the function itself
        if not _is_of_rrfp(caller.f_globals):
            on_bypass(f"{caller.f_code.co_filename}:{caller.f_lineno}", arguments)
        return own(*args, **arguments)

    function.__signature__ = signature(function)  # type: ignore[attr-defined]
    function.__code__ = _forward.__code__.replace(
        co_name=code.co_name, co_qualname=code.co_qualname
    )
    function.__defaults__, function.__kwdefaults__ = None, {"_rrfp_run": run}


def _forward(*args: Any, _rrfp_run: Callable[..., Any], **arguments: Any) -> Any:
    """Call `_rrfp_run` with the other arguments: the code that `_intercept` puts into a
    function."""
    return _rrfp_run(*args, **arguments)


def _is_of_rrfp(namespace: Mapping[str, Any]) -> bool:
    """True if this is the namespace of a module of rrfp, judged by its `__name__`."""
    return str(namespace.get("__name__")).partition(".")[0] == "rrfp"


def _places() -> Iterator[tuple[str, Any]]:
    """Yield the name of each loaded module of Megatron's that has the getter, and the getter's
    value there. Skip modules outside of the pipeline package that define a function of this name
    themselves."""
    for module, namespace in _loaded_modules():
        if module.partition(".")[0] == "megatron" and GETTER in namespace:
            value = namespace[GETTER]
            # Skip unrelated modules that define the same name for themselves.
            if module.startswith(_CORE) or defining_module(value) != module:
                yield module, value


def _loaded_modules() -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the name and the namespace of each loaded module, from a copy of `sys.modules`, because
    another thread may import something meanwhile."""
    for name, module in sys.modules.copy().items():
        yield str(name), namespace_of(module)


def call_after_import(name: str, act: Callable[[], None]) -> None:
    """Call `act` at the end of the import of the module `name`, or now if it is imported already.
    Uses a hook at the front of `sys.meta_path`, which stays there until an import succeeds. An
    exception of `act` propagates from the import statement."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _ImportHook(name, act))


class _ImportHook:
    """A finder that finds a module as the other finders do and makes its loader call `act`."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act
        self._is_searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the spec of the awaited module with the other finders, and patch its loader to call
        `act`. Return None for every other module, so that the other finders handle it."""
        if name != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            self._patch_loader(spec.loader)
        return spec

    def _patch_loader(self, loader: Loader) -> None:
        """Patch this loader object: after it has executed the module, it removes the hook and calls
        `act`. After a failed execution the hook stays, because the import may be retried."""
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            del loader.exec_module
            self._act()

        # Patches this loader object only, and not its class or the module's reference to it.
        loader.exec_module = execute_and_act  # type: ignore[method-assign]

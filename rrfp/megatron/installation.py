"""Puts functions in the place of Megatron's schedule, in every module that has it.

Megatron's training loop imports `get_forward_backward_func` from the package
`megatron.core.pipeline_parallel`, so a patch may be there, in the loop's own module, or in the
module that defines it. A patch that we overlook would silently override ours, or be overridden by
it. Some loops import one of the three schedule functions that it chooses from instead.

Megatron's own functions are kept here, for what runs them on purpose.

A loop may have fetched one of them before `put`, and hold it where no search of modules finds it:
in a local variable, an attribute, a partial, a closure. So `put` also gives the function objects
themselves other code, which every holder of one then runs; for callers of rrfp it is a copy of the
function as it was.
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
    namespace_of,
    wraps,
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
"""The module that defines them all."""

_CORE = "megatron.core.pipeline_parallel"

_originals: dict[str, Callable[..., Any]] = {}
"""What stood under each name in that module before `put`."""

_put_by = ""


def original_function(name: str) -> Callable[..., Any]:
    """What runs under this name of Megatron's module without us. Raises UsageError if there is no
    such function."""
    home = namespace_of(compatibility.schedules())
    if name not in home:
        raise UsageError(
            f"{HOME} has no {name}; see which patch has removed it, and switch that off"
        )
    found: Callable[..., Any] = home[name]
    return _originals.get(name, found) if is_ours(found) else found


def refuse_unknown_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise UsageError if these arguments of a call, which rrfp does not know, change what
    Megatron's function of this name would do."""
    parameters = inspect.signature(original_function(name)).parameters
    for argument, value in arguments.items():
        if argument not in parameters:
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}")
        if value is not parameters[argument].default:
            raise UsageError(
                f"{argument} {value!r} of Megatron's {name} is unknown to rrfp; leave it out"
            )


def check_not_replaced(asker: str) -> None:
    """Raise UsageError if Megatron's schedule has already been replaced, saying by what, where, and
    what to do. `asker` (install() or trace_native()) is about to replace it."""
    schedules = compatibility.schedules()
    home = namespace_of(schedules)
    places = list(_places())
    for _, value in places:
        foreign = foreign_layer(value)
        if foreign is None or is_ours(foreign):
            continue
        *names, last = (name for name, other in places if other is value)
        where = f"{', '.join(names)} and {last}" if names else last
        if wraps(value, GETTER, vars(schedules)):
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
            if _put_by.endswith("()")
            else f"leave out {asker}"
        )
        raise UsageError(
            f"{_put_by} has replaced Megatron's schedule in this process already; {next_step}"
        )


def put(
    functions: Mapping[str, Callable[..., Any]],
    asker: str,
    on_bypass: Callable[[str, str, dict[str, Any]], None] | None = None,
) -> None:
    """Put each of these functions, by its name in Megatron's module, in the place of Megatron's own
    in every module that has it, under whatever name: a script may have imported it before. `asker`
    is who asked for it. If a job calls one of Megatron's own schedule functions all the same,
    `on_bypass` is given its name, the file and line of the call, and the arguments, before it runs.
    Raises UsageError if Megatron has no such function."""
    global _put_by
    home = namespace_of(compatibility.schedules())
    _originals.update((name, original_function(name)) for name in functions)
    _put_by = asker
    replaced = {id(home[name]): function for name, function in functions.items()}
    for _, namespace in _loaded():
        for name, value in namespace.copy().items():
            if id(value) in replaced:
                namespace[name] = replaced[id(value)]
    for name in SCHEDULES:
        if name in functions and on_bypass is not None:
            _divert(_originals[name], partial(on_bypass, name))


def _divert(function: Any, on_bypass: Callable[[str, dict[str, Any]], None]) -> None:
    """Let whoever calls this very function outside of rrfp call `on_bypass` first."""
    # The code of a closure cannot be exchanged so; Megatron's functions are none.
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
    function.__code__ = _diverted.__code__.replace(
        co_name=code.co_name, co_qualname=code.co_qualname
    )
    function.__defaults__, function.__kwdefaults__ = None, {"_rrfp_run": run}


def _diverted(*args: Any, _rrfp_run: Callable[..., Any], **arguments: Any) -> Any:
    return _rrfp_run(*args, **arguments)


def _is_of_rrfp(namespace: Mapping[str, Any]) -> bool:
    return str(namespace.get("__name__")).partition(".")[0] == "rrfp"


def _places() -> Iterator[tuple[str, Any]]:
    """The modules that have Megatron's getter, and its value there."""
    for module, namespace in _loaded():
        if module.partition(".")[0] == "megatron" and GETTER in namespace:
            value = namespace[GETTER]
            # Skip unrelated modules that define the same name for themselves.
            if module.startswith(_CORE) or defining_module(value) != module:
                yield module, value


def _loaded() -> Iterator[tuple[str, dict[Any, Any]]]:
    # Copied, because another thread may import something meanwhile.
    for name, module in sys.modules.copy().items():
        yield str(name), namespace_of(module)


# Acts once a certain module has been imported, by whomever.


def call_after_import(name: str, act: Callable[[], None]) -> None:
    """Call `act` right after the module `name` was executed, before whoever imports it goes on; at
    once if it was imported already. What `act` raises, the import raises."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder:
    """Finds the module as the other finders do, and adds the call to its execution."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act
        self._is_asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            self._add_to(spec.loader)
        return spec

    def _add_to(self, loader: Loader) -> None:
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            # Not before: an import that failed may be tried again.
            sys.meta_path.remove(self)
            del loader.exec_module
            self._act()

        # On this loader only. Its class stays, and so does what the module says of its loader.
        loader.exec_module = execute_and_act  # type: ignore[method-assign]

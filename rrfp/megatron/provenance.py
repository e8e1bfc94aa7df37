"""Finds the module that defines a callable's code.

`functools.wraps` copies the name and the module of the wrapped function, so neither is used.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

_MEGATRONS = ("megatron.core", "torch")
"""Packages of Megatron's own functions; torch decorates some of them."""

_MAX_LAYERS = 100
_NAMESPACE: Any = vars(ModuleType)["__dict__"]


def foreign_layer(value: Any) -> Any | None:
    """The outermost layer of a callable (a decorator or wrapper) that is not a plain function of
    Megatron-Core or torch; None if all layers are."""
    for layer in _layers(value):
        if type(layer) is not FunctionType or not _is_in(defining_module(layer), *_MEGATRONS):
            return layer
    return None


def is_ours(value: Any) -> bool:
    """True if a callable, or what a method or partial calls, is defined in rrfp."""
    return _is_in(defining_module(value), "rrfp")


def defining_module(value: Any) -> str:
    """The name of the module that defines a callable's code, ignoring what `functools.wraps`
    copied. For a method or partial: the module of the function that it calls. For a class or
    builtin: its `__module__`. For another object: the module of its class."""
    inner = _inner(value)
    if type(value) is FunctionType:
        return str(value.__globals__.get("__name__"))
    if type(value) is MethodType or (_is_of_functools(value) and inner is not None):
        return defining_module(inner)
    if isinstance(value, type | BuiltinFunctionType):
        return str(value.__module__)
    return type(value).__module__


def describe_callable(value: Any) -> str:
    """Format a callable for a message: module, name and, if known, file. A method is described by
    its function, an object of functools by what it calls, and another object by its class."""
    inner = _inner(value)
    if type(value) is FunctionType:
        code = value.__code__
        where = f"{code.co_filename}:{code.co_firstlineno}"
        return f"{defining_module(value)}.{code.co_qualname} ({where})"
    if type(value) is MethodType:
        return describe_callable(inner)
    if _is_of_functools(value) and inner is not None:
        return f"a functools.{type(value).__name__} of {describe_callable(inner)}"
    if isinstance(value, BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    of = value if isinstance(value, type) else type(value)
    module = sys.modules.get(of.__module__)
    path = None if module is None else namespace_of(module).get("__file__")
    what = "the class" if of is value else "an instance of"
    return f"{what} {of.__module__}.{of.__qualname__}" + ("" if path is None else f" ({path})")


def may_call(value: Any, function: str, home: Mapping[str, Any]) -> bool:
    """True if a callable refers, directly or indirectly, to the function named `function` of the
    module with the namespace `home`, and so may call it. At most 100 objects are searched."""
    seen: dict[int, Any] = {}
    todo = list(_references(value))
    while todo and len(seen) < _MAX_LAYERS:
        each = todo.pop()
        if is_function(each, function, home):
            return True
        if id(each) not in seen:
            seen[id(each)] = each
            todo += _references(each)
    return False


def is_function(value: Any, name: str, home: Mapping[str, Any]) -> bool:
    """True if a value is the plain function `name` that the module with the namespace `home`
    defines, also under another name."""
    return (
        type(value) is FunctionType
        and value.__globals__ is home
        and value.__code__.co_qualname == name
    )


def namespace_of(module: object) -> dict[Any, Any]:
    """The current contents of a module, or of any other object: its `__dict__`, or an empty dict if
    it has none. Bypasses the object's own attribute lookup, which would make a lazy module load
    everything."""
    try:
        if issubclass(type(module), ModuleType):
            found = _NAMESPACE.__get__(module)
        else:  # `sys.modules` may contain anything
            found = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _layers(value: Any) -> Iterator[Any]:
    """Yield a callable and the callables that it visibly wraps, from the outside in, at most
    100."""
    for _ in range(_MAX_LAYERS):
        if value is None:
            return
        yield value
        value = _inner(value)


def _inner(value: Any) -> Any | None:
    """The callable that a partial, a method or a wrapper (by `__wrapped__`) calls; None for
    others."""
    if isinstance(value, partial):
        return value.func
    if type(value) is MethodType:
        return value.__func__
    # Not by `getattr`: a mock has every attribute.
    return namespace_of(value).get("__wrapped__")


def _references(value: Any) -> Iterator[Any]:
    """Yield the objects that a callable refers to: a partial's function and arguments, a method's
    function and object, a function's closure and defaults, and attributes (except a class's or
    module's)."""
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif type(value) is MethodType:
        yield from (value.__func__, value.__self__)
    elif type(value) is FunctionType:
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if not isinstance(value, type | ModuleType):
        yield from namespace_of(value).values()


def _is_of_functools(value: Any) -> bool:
    """True if a value is an object of functools, such as a partial, judged by its class."""
    return type(value).__module__ == "functools"


def _is_in(module: str, *packages: str) -> bool:
    """True if a module is one of these packages or inside one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)

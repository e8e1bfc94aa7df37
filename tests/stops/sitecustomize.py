"""Stops a rank (SIGSTOP) as it calls a function for the nth time: `RRFP_STOP=RANK:MODULE:NAME:N`.
Without a name, as it imports the module. `RRFP_STOP_BY` is Python code to be executed instead; with
`*` for the rank, by every rank.

On the path of a run under test, so that it is imported before anything else.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from functools import reduce
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_rank, _, _where = os.environ.get("RRFP_STOP", "").partition(":")


def _stop() -> None:
    code = os.environ.get("RRFP_STOP_BY")
    if code:
        exec(code, globals())
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


def _stop_in(module: ModuleType, name: str, nth: int) -> None:
    *path, last = name.split(".")
    holder: Any = reduce(getattr, path, module)
    stopped, num_calls = getattr(holder, last), 0

    def stops(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == nth:
            _stop()
        return stopped(*args, **options)

    setattr(holder, last, stops)


class _Finder:
    """Finds the one module as others would, and does its part when that is imported."""

    def __init__(self, module: str, name: str, nth: int) -> None:
        self._module, self._name, self._nth = module, name, nth

    def find_spec(self, name: str, _: Sequence[str] | None, __: object = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if not self._name:
                _stop()
            execute(module)
            if self._name:
                _stop_in(module, self._name, self._nth)

        loader.exec_module = exec_module
        return spec


# What a rank starts has its variables, too.
_is_meant = _rank and _rank in ("*", os.environ.get("RANK"))
if _is_meant and "rrfp.train.launch.rank_process" in sys.orig_argv:
    _module, _name, _nth = _where.split(":")
    if _module in sys.modules:
        _stop_in(sys.modules[_module], _name, int(_nth))
    else:
        sys.meta_path.insert(0, _Finder(_module, _name, int(_nth)))

"""Acts once a certain module has been imported, by whomever."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, act: Callable[[], None]) -> None:
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

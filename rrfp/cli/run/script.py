"""Runs a user's program in this process as `python SCRIPT` or `python -m MODULE` would run it."""

import builtins
import ctypes
import os
import pkgutil
import runpy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from rrfp.errors import RrfpError, UsageError, reason_of

_replaced: list[ModuleType] = []
"""The `__main__` modules that programs replaced. Python still uses their contents without holding a
reference, for example after the traceback of a SyntaxError, and would crash without this one."""


@dataclass(frozen=True)
class Program(ABC):
    """A program and its arguments, as given on the command line."""

    name: str
    arguments: Sequence[str]

    def run(self, fail: Callable[[RrfpError], int]) -> int:
        """Run the program as the module `__main__` of this process and return its exit code, 0 at
        its end.

        Exceptions of the program propagate to the interpreter, whose report leaves out rrfp's
        frames. Errors of rrfp need no traceback: `fail` prints them and returns the exit code.
        """
        main = ModuleType("__main__")
        vars(main)["__builtins__"] = builtins
        # Newer versions of Python do not set these.
        replaced = vars(sys.modules["__main__"])
        if "__annotations__" in replaced:
            vars(main)["__annotations__"] = {}
        if "__cached__" in replaced:
            vars(main)["__cached__"] = None
        _replaced.append(sys.modules["__main__"])
        sys.modules["__main__"] = main
        try:
            self._execute(main)
        except RrfpError as error:
            return fail(error)
        except BaseException:
            _report_below(type(self)._execute)
            raise
        return 0

    @abstractmethod
    def _execute(self, main: ModuleType) -> None:
        """Execute the program as the module `__main__`, and set `sys.argv` and `sys.path` for
        it."""


@dataclass(frozen=True)
class Script(Program):
    """A Python file, or a directory or an archive with a `__main__.py`."""

    source: bytes | None
    """The content of a Python file; None for a directory or an archive."""

    @classmethod
    def read(cls, path: str, arguments: Sequence[str]) -> "Script":
        """Read the file at a path; a directory or an archive is only named. Raises UsageError for a
        file that cannot be read."""
        # Like the interpreter: what can be imported from is a directory or an archive.
        if pkgutil.get_importer(path) is not None:
            return cls(path, arguments, None)
        try:
            return cls(path, arguments, Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the script {path} cannot be read ({reason_of(error)}); name a Python file, and "
                "its arguments after it"
            ) from error

    def _execute(self, main: ModuleType) -> None:
        """Set `sys.argv` and `sys.path` as the interpreter does and execute the file, or the
        `__main__` of a directory or archive. Exceptions of the script propagate, SyntaxError
        too."""
        sys.argv = [self.name, *self.arguments]
        # Like the interpreter: the path becomes absolute and is not normalized.
        file = self.name if self.name.startswith("/") else f"{Path.cwd()}/{self.name}"
        if self.source is None:
            sys.path[:1] = [file, *(sys.path[:1] if sys.flags.safe_path else ())]
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
            return
        vars(main).update(__file__=file, __loader__=SourceFileLoader("__main__", file))
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(self.name).resolve().parent)
        error: Exception | None = None
        try:
            code = compile(self.source, file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as found:
            error = found.with_traceback(None)
        if error is None:
            exec(code, vars(main))
        elif (stream := _stream_of(file)) is not None:
            # The interpreter reports null bytes and unknown encodings differently for bytes than
            # for a file. The C function adds no Python frame to the traceback.
            names = ctypes.py_object(vars(main))
            run = ctypes.pythonapi.PyRun_FileExFlags
            run.restype = ctypes.py_object
            run(stream, os.fsencode(file), _FILE_INPUT, names, names, 1, None)
        else:
            raise error


@dataclass(frozen=True)
class Module(Program):
    """A module that Python finds by name."""

    def _execute(self, main: ModuleType) -> None:
        """Set `sys.argv` and `sys.path` as `python -m` does, find the module and execute it."""
        sys.argv = ["-m", *self.arguments]
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()  # noqa: PTH109 (text, as the interpreter has it)
        # The interpreter calls this for -m. The public run_module() removes the module's names at
        # its end, while threads and atexit functions still need them.
        runpy._run_module_as_main(self.name)  # type: ignore[attr-defined]


_FILE_INPUT = 257
"""Py_file_input of the C API: parse a whole file."""


def _stream_of(file: str) -> ctypes.c_void_p | None:
    """Open a C `FILE *` of a regular file; None for a path that cannot be opened or read a second
    time, such as a pipe."""
    if not Path(file).is_file():
        return None
    fopen = ctypes.CDLL(None).fopen
    fopen.restype = ctypes.c_void_p
    address = fopen(os.fsencode(file), b"rb")
    return None if address is None else ctypes.c_void_p(address)


def _report_below(function: Callable[..., object]) -> None:
    """Replace `sys.excepthook` so that the traceback of an uncaught exception begins below the
    frame of this function. Does nothing if the program removed the hook."""
    report = getattr(sys, "excepthook", None)
    if report is None:  # the program has removed it
        return

    def report_shorter(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        while trace is not None and trace.tb_frame.f_code is not function.__code__:
            trace = trace.tb_next
        below = None if trace is None else trace.tb_next
        sys.last_traceback = below
        report(kind, error.with_traceback(below), below)

    sys.excepthook = report_shorter

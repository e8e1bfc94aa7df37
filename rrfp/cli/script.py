"""Runs somebody's script in this process as `python SCRIPT ARGUMENTS` would run it."""

import builtins
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from rrfp.errors import RrfpError, UsageError


@dataclass(frozen=True, slots=True)
class Script:
    """A script that was read, and its arguments."""

    path: str
    """As given."""
    source: bytes
    arguments: Sequence[str]

    @classmethod
    def read(cls, path: str, arguments: Sequence[str]) -> "Script":
        """Raises UsageError for a script that cannot be read."""
        try:
            return cls(path, Path(path).read_bytes(), arguments)
        except OSError as error:
            raise UsageError(
                f"the script {path} cannot be read ({error.strerror}); name a Python file, and its "
                "arguments after it"
            ) from error

    def run(self, fail: Callable[[RrfpError], int]) -> int:
        """Run the script to its end, and return the exit code of a script that ended well.

        What it raises is raised, for the interpreter to report as it always does, the frames below
        the script's left out. An error of ours is the script's no more than Megatron's place for it
        was: `fail` says it and gives the exit code.
        """
        # As the interpreter does: made absolute, and nothing else.
        file = self.path if self.path.startswith("/") else f"{Path.cwd()}/{self.path}"
        main = ModuleType("__main__")
        replaced = vars(sys.modules["__main__"])
        vars(main).update(
            __file__=file,
            __loader__=SourceFileLoader("__main__", file),
            __builtins__=builtins,
            # What else the interpreter sets depends on its version.
            **{name: None for name in ("__cached__",) if name in replaced},
            **{name: {} for name in ("__annotations__",) if name in replaced},
        )
        sys.modules["__main__"] = main
        sys.argv = [self.path, *self.arguments]
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(self.path).resolve().parent)
        code: CodeType | None = None
        try:
            code = compile(self.source, file, "exec", dont_inherit=True)
            exec(code, vars(main))
        except RrfpError as error:
            return fail(error)
        except BaseException:
            _report_from(code)
            raise
        return 0


def _report_from(code: CodeType | None) -> None:
    """Have the traceback of an uncaught exception begin at the frame of this code; without code,
    have none."""
    report = sys.excepthook

    def report_shorter(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        while trace is not None and trace.tb_frame.f_code is not code:
            trace = trace.tb_next
        sys.last_traceback = trace
        report(kind, error.with_traceback(trace), trace)

    sys.excepthook = report_shorter

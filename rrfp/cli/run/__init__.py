"""`rrfp run`: run a user's own Megatron script with rrfp's schedule, and record it.

This package imports only the standard library and rrfp, because it runs inside the user's job.
"""

import argparse
import atexit
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rrfp.cli import errors
from rrfp.cli.declared_options import (
    COMMON_PANEL,
    HINT_TABLE,
    OUTPUT,
    TIME_OUTS,
    help_of,
    metavar_of,
    panel_of,
    short_help,
)
from rrfp.cli.run.script import Module, Program, Script
from rrfp.errors import RrfpError, UsageError, did_you_mean
from rrfp.inputs import Declared
from rrfp.megatron.job.request import (
    RecordingRequest,
    StepWindow,
    may_be_restarted,
    print_to_stderr,
)
from rrfp.megatron.job.schedule_patches import DropInPatch, SchedulePatch, install_after_import
from rrfp.megatron.native.patch import NativePatch
from rrfp.megatron.settings import DispatchSettings
from rrfp.runtime.exit_hooks import at_end
from rrfp.runtime.launchers import missing_torch_environment
from rrfp.schedule.policy import Dispatch
from rrfp.train.settings import DECLARED

_REQUESTER = "rrfp run"

_RECORDING = ("out", "force", "no_trace", "trace_mb")

_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Environment variables in which launchers state the rank of a process."""

_SCHEDULE_OPTIONS = (
    *(each for each in DECLARED.values() if each.group in ("policy", "step")),
    *(DECLARED[name] for name in ("transport", "outbox_mb", "tls")),
    replace(
        DECLARED["placement"],
        help="Where the job's model chunks are: loop (default: Megatron's interleaving) or v "
        "(there and back, 2 a rank).",
    ),
    Declared(
        flag="connect_s",
        field="connect_s",
        kind=float,
        help="Longest time for ranks to connect at their first step [as the process group].",
        metavar="SECONDS",
        panel=TIME_OUTS,
    ),
    Declared(
        flag="stall_s",
        field="stall_s",
        kind=float,
        help="Longest time without any arrival before a rank gives up [as the process group, at "
        "least 600].",
        metavar="SECONDS",
        panel=TIME_OUTS,
    ),
)
"""Options that are keywords of `DispatchSettings`."""

OPTIONS = (
    *_SCHEDULE_OPTIONS,
    *(DECLARED[name] for name in _RECORDING),
    Declared(
        flag="steps",
        field="steps",
        kind=str,
        help="Record training steps A to B - 1, counted from the process's first training call, "
        "and the evaluations between them [all].",
        metavar="A:B",
        panel=OUTPUT,
        is_common=True,
    ),
)
"""All options of `rrfp run` except -m, --help and --help-all."""

_SEE = "see 'rrfp run --help'"


def parse_command(words: Sequence[str]) -> Callable[[], int] | int:
    """Parse the words after `rrfp run`, read the script, and return a function that runs it. The
    module of -m is not read yet.

    Under srun it also sets the environment variables that torch's process groups need. If help is
    requested, it is printed and the exit code is returned. Raises UsageError for an invalid command
    line.
    """
    options, rest = _split_words(words)
    given, unknown = _parser(OPTIONS).parse_known_args(options)
    if given.help or given.help_all:
        common = [each for each in OPTIONS if each.is_common]
        _parser(OPTIONS if given.help_all else common, is_short=not given.help_all).print_help()
        return 0
    if unknown:
        known = [f"--{each.spelled}" for each in OPTIONS]
        near = did_you_mean(unknown[0], [*known, "--module", "--help", "--help-all"])
        see = f" S{_SEE[1:]}" if near else f"; {_SEE}"
        raise UsageError(f"there is no option {unknown[0]}{near}{see}")
    if not rest:
        raise UsageError(f"the script is missing; name a Python file, or -m and a module; {_SEE}")
    flags = {name: value for name, value in vars(given).items() if not name.startswith("help")}
    return run(rest[0], rest[1:], **flags)


def _split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into rrfp's options and the rest, which begins with SCRIPT and is not parsed.

    An option and its value become one word, `--hint=bf`. A word `--` ends the options and is
    dropped. Raises UsageError for an option without its value.
    """
    valued = {f"--{each.spelled}" for each in OPTIONS if each.kind is not bool}
    options, rest = [], [*words]
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word in valued:
            if not rest:
                raise UsageError(f"{word} needs a value; {_SEE}")
            word = f"{word}={rest.pop(0)}"
        options.append(word)
    return options, rest


def _parser(options: Sequence[Declared], *, is_short: bool = False) -> argparse.ArgumentParser:
    """Make the parser of these options, -m and the help options; options not given are missing from
    its result. The short help has one panel of options and lists hints by name."""
    about = re.sub(r"^ +", "", str(run.__doc__), flags=re.MULTILINE).strip()
    parser = _Parser(
        prog="rrfp run",
        usage="rrfp run [OPTIONS] SCRIPT [ARGS]...",
        description=about,
        formatter_class=_Formatter,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    # Python 3.14 would print colors, which the guarded stream shows as escapes.
    parser.color = False  # type: ignore[attr-defined,unused-ignore]
    first = parser.add_argument_group("Arguments")
    first.add_argument("SCRIPT", nargs="?", help="A Python file, or -m and a module's name.")
    first.add_argument("ARGS", nargs="?", help="Arguments of the script.")
    own = parser.add_argument_group("Options")
    for flags, text in (
        (("-m", "--module"), "SCRIPT is a module, as in python -m."),
        (("--help-all",), "Show every option and exit."),
        (("-h", "--help"), "Show this message and exit."),
    ):
        own.add_argument(*flags, action="store_true", default=False, help=text)
    panels: dict[str, Any] = {}
    for declared in options:
        name = COMMON_PANEL if is_short else str(panel_of(declared))
        if name not in panels:
            panels[name] = parser.add_argument_group(name)
        panel, text = panels[name], help_of(declared)
        text = (short_help(text) if is_short else text).replace("%", "%%")
        if declared.kind is bool:
            panel.add_argument(f"--{declared.spelled}", action="store_true", help=text)
        else:
            is_read = declared.value_type in (int, float, Path)
            panel.add_argument(
                f"--{declared.spelled}",
                metavar=metavar_of(declared),
                type=declared.read if is_read else str,
                help=text,
            )
    return parser


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError for invalid options."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message, in place of printing the usage and exiting."""
        raise UsageError(f"{message.removeprefix('argument ')}; {_SEE}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps help texts but keeps the lines of the table of hints."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Wrap the text before the table of hints, and append the table's lines as they are."""
        about, _, table = text.partition(HINT_TABLE)
        lines = [line for line in table.split("\n") if line]
        return super()._split_lines(about, width) + lines


def run(
    script: str, arguments: list[str] | None = None, *, module: bool = False, **flags: Any
) -> Callable[[], int]:
    """Run your own Megatron script readiness-first, and record it.

    Replaces python in every rank's process; the script, its arguments and its
    exit code do not change. With --dispatch megatron, Megatron's own schedule
    runs and is recorded. Every rrfp command reads the run's directory.

    Example: torchrun --nproc-per-node 8 --no-python rrfp run --hint bfw --out
    runs/ours pretrain_gpt.py --pipeline-model-parallel-size 8 ...
    """
    os.environ.update(missing_torch_environment())
    given = {
        name: value for name, value in flags.items() if value is not None and value is not False
    }
    patch = _schedule_patch(given)
    kind = Module if module else Script.read
    return partial(_run, kind(script, arguments or []), patch)


def _schedule_patch(given: dict[str, Any]) -> SchedulePatch | None:
    """Make the replacement of Megatron's schedule functions; None if they stay as they are and
    nothing is recorded.

    With --dispatch megatron it only records. Raises UsageError for invalid options and for options
    that exclude each other.
    """
    request = _recording_request(given)
    values = {each.flag: given[each.flag] for each in _SCHEDULE_OPTIONS if each.flag in given}
    dispatch = DECLARED["dispatch"].read(values.pop("dispatch", None))
    if dispatch is not Dispatch.MEGATRON:
        chosen = {} if dispatch is None else {"dispatch": dispatch}
        return DropInPatch(DispatchSettings(**chosen, **values), request)
    if values:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in values)
        raise UsageError(
            f"--dispatch megatron leaves Megatron's schedule as it is and {flags} would steer "
            "ours; leave one of them out"
        )
    return None if request is None else NativePatch(request)


def _recording_request(given: dict[str, Any]) -> RecordingRequest | None:
    """Return where and what to record; None for --no-trace.

    Raises UsageError for --no-trace with options about recording, for an invalid --steps, and if
    the directory exists and neither --force nor a restart explains it.
    """
    if "no_trace" in given:
        for name in ("out", "steps", "force", "trace_mb"):
            if name in given:
                raise UsageError(
                    f"--no-trace records nothing; leave out --{name.replace('_', '-')}"
                )
        return None
    window = StepWindow.of(given.get("steps"))
    out = Path(given["out"]) if "out" in given else None
    force = "force" in given
    # The directory of an earlier start of this job is checked when the ranks rendezvous.
    if out is not None and out.exists() and not force and not may_be_restarted():
        raise UsageError(
            f"{out} exists; choose another directory with --out, or replace the run in it with "
            "--force"
        )
    return RecordingRequest(_REQUESTER, out, window, force, trace_mb=given.get("trace_mb"))


def _run(program: Program, patch: SchedulePatch | None) -> int:
    """Run the program with the replaced schedule and return its exit code.

    The patch is installed once the program imports Megatron's schedules. Errors of rrfp are
    printed; exceptions of the program propagate. If it ends well, rank 0 warns at exit if no
    schedule was called.
    """
    if patch is None:
        return program.run(errors.print_error)
    install_after_import(patch, _REQUESTER)

    def fail(error: RrfpError) -> int:
        at_end.note_program_end(error)
        return errors.print_error(error)

    warn_if_unused = partial(_warn_if_unused, patch, program.name, os.getpid())
    # The warning waits until exit, because threads of the program may still call a schedule.
    try:
        code = program.run(fail)
    except BaseException as end:
        at_end.note_program_end(end)
        if isinstance(end, SystemExit) and end.code in (None, 0):
            atexit.register(warn_if_unused)
        raise
    if code == 0:
        at_end.note_program_end(None)
        atexit.register(warn_if_unused)
    return code


def _warn_if_unused(patch: SchedulePatch, program: str, pid: int) -> None:
    """Print on rank 0's stderr that the program called no schedule, if so; forked processes print
    nothing."""
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    if rank == "0" and os.getpid() == pid and not patch.was_called:
        what = "recorded" if isinstance(patch, NativePatch) else "dispatched or recorded"
        print_to_stderr(
            f"{program} called no pipeline schedule of Megatron's, so nothing was {what}"
        )

"""`rrfp run`: run somebody's own Megatron script, with our schedule in place and recorded."""

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
from rrfp.cli.declared_options import OUTPUT, TIME_OUTS, hint_help, metavar_of, panel_of
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

_ASKER = "rrfp run"

_RECORDING = ("out", "force", "no_trace", "trace_mb")

_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Where launchers say which rank a process is."""


_STEERING = (
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
"""The options that are keywords of `DispatchSettings`."""

OPTIONS = (
    *_STEERING,
    *(DECLARED[name] for name in _RECORDING),
    Declared(
        flag="steps",
        field="steps",
        kind=str,
        help="Record training steps A to B - 1, counted from the process's first training call, "
        "and the evaluations between them [all].",
        metavar="A:B",
        panel=OUTPUT,
    ),
)
"""Every option with a name of `rrfp run`, but -m and --help."""

_SEE = "see 'rrfp run --help'"


def parsed(words: Sequence[str]) -> Callable[[], int] | int:
    """Read a command line, the words behind `rrfp run`, and give what runs it; or print its help,
    and give the exit code. Raises UsageError for one that is wrong."""
    parser = _parser()
    options, rest = _cut(words)
    given, unknown = parser.parse_known_args(options)
    if given.help:
        parser.print_help()
        return 0
    if unknown:
        known = [f"--{each.spelled}" for each in OPTIONS]
        near = did_you_mean(unknown[0], [*known, "--module", "--help"])
        see = f" S{_SEE[1:]}" if near else f"; {_SEE}"
        raise UsageError(f"there is no option {unknown[0]}{near}{see}")
    if not rest:
        raise UsageError(f"the script is missing; name a Python file, or -m and a module; {_SEE}")
    flags = {name: value for name, value in vars(given).items() if name != "help"}
    return run(rest[0], rest[1:], **flags)


def _cut(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options, each in one word with its value, and what stands from SCRIPT on: that is the
    script's, whatever it looks like."""
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


def _parser() -> argparse.ArgumentParser:
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
    # Of Python 3.14, whose colors the terminal's guard would show as escapes.
    parser.color = False  # type: ignore[attr-defined,unused-ignore]
    first = parser.add_argument_group("Arguments")
    first.add_argument("SCRIPT", nargs="?", help="A Python file, or -m and a module's name.")
    first.add_argument("ARGS", nargs="?", help="All of the script's.")
    options = parser.add_argument_group("Options")
    options.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m."
    )
    options.add_argument(
        "-h", "--help", action="store_true", default=False, help="Show this message and exit."
    )
    panels: dict[str, Any] = {}
    for declared in OPTIONS:
        name = str(panel_of(declared))
        if name not in panels:
            panels[name] = parser.add_argument_group(name)
        panel, told = panels[name], declared.help_text
        told = (hint_help(told) if declared.flag == "hint" else told).replace("%", "%%")
        if declared.kind is bool:
            panel.add_argument(f"--{declared.spelled}", action="store_true", help=told)
        else:
            is_read = declared.value_type in (int, float, Path)
            panel.add_argument(
                f"--{declared.spelled}",
                metavar=metavar_of(declared),
                type=declared.read if is_read else str,
                help=told,
            )
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; {_SEE}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the table of hints."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        about, _, table = text.partition("\n\n\b\n")
        lines = [line for line in table.split("\n") if line]
        return super()._split_lines(about, width) + lines


def run(
    script: str, arguments: list[str] | None = None, *, module: bool = False, **flags: Any
) -> Callable[[], int]:
    """Run your own Megatron script readiness-first, and record it.

    Takes the place of python in every rank's process: the script, its arguments
    and its exit code stay as they are. --dispatch megatron records Megatron's own
    schedule instead. Every rrfp command reads the run's directory.

    Example: torchrun --nproc-per-node 8 --no-python rrfp run --hint bfw --out
    runs/ours pretrain_gpt.py --pipeline-model-parallel-size 8 ...
    """
    os.environ.update(missing_torch_environment())
    given = {
        name: value for name, value in flags.items() if value is not None and value is not False
    }
    stand_in = _stand_in(given)
    kind = Module if module else Script.read
    return partial(_run, kind(script, arguments or []), stand_in)


def _stand_in(given: dict[str, Any]) -> SchedulePatch | None:
    """What the options put in the place of Megatron's schedule; None if they leave it alone. Raises
    UsageError for options that do not go together."""
    request = _request(given)
    steering = {each.flag: given[each.flag] for each in _STEERING if each.flag in given}
    dispatch = DECLARED["dispatch"].read(steering.pop("dispatch", None))
    if dispatch is not Dispatch.MEGATRON:
        chosen = {} if dispatch is None else {"dispatch": dispatch}
        return DropInPatch(DispatchSettings(**chosen, **steering), request)
    if steering:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in steering)
        raise UsageError(
            f"--dispatch megatron leaves Megatron's schedule as it is and {flags} would steer "
            "ours; leave one of them out"
        )
    return None if request is None else NativePatch(request)


def _request(given: dict[str, Any]) -> RecordingRequest | None:
    """The recording asked for; None for --no-trace. Raises UsageError for a directory that is
    there already."""
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
    # If it may be that of an earlier start of this job, the ranks see to it when they meet.
    if out is not None and out.exists() and not force and not may_be_restarted():
        raise UsageError(
            f"{out} exists; choose another directory with --out, or replace the run in it with "
            "--force"
        )
    return RecordingRequest(_ASKER, out, window, force, trace_mb=given.get("trace_mb"))


def _run(program: Program, stand_in: SchedulePatch | None) -> int:
    if stand_in is None:
        return program.run(errors.tell)
    install_after_import(stand_in, _ASKER)

    def fail(error: RrfpError) -> int:
        at_end.note_program_end(error)
        return errors.tell(error)

    tell_if_unused = partial(_tell_if_unused, stand_in, program.name, os.getpid())
    # When a program has ended well, its threads may still call a schedule: so this waits for them.
    try:
        code = program.run(fail)
    except BaseException as end:
        at_end.note_program_end(end)
        if isinstance(end, SystemExit) and end.code in (None, 0):
            atexit.register(tell_if_unused)
        raise
    if code == 0:
        at_end.note_program_end(None)
        atexit.register(tell_if_unused)
    return code


def _tell_if_unused(stand_in: SchedulePatch, program: str, pid: int) -> None:
    """Say at the end of a program that it has called no schedule, on one rank. The processes that
    it has forked say nothing."""
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    if rank == "0" and os.getpid() == pid and not stand_in.was_called:
        what = "recorded" if isinstance(stand_in, NativePatch) else "dispatched or recorded"
        print_to_stderr(
            f"{program} called no pipeline schedule of Megatron's, so nothing was {what}"
        )

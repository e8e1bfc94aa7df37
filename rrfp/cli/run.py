"""`rrfp run`: run somebody's own Megatron script, with our schedule in place and recorded."""

import atexit
import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rrfp.cli import errors
from rrfp.cli.completion import one_of
from rrfp.cli.declared_options import LAYOUT, OUTPUT, SCHEDULE, option_of
from rrfp.cli.script import Module, Program, Script
from rrfp.errors import UsageError
from rrfp.megatron.job.request import RecordingRequest, StepWindow, may_be_restarted
from rrfp.megatron.job.stand_ins import DropIn, StandIn, put_after_import
from rrfp.megatron.job.telling import tell
from rrfp.megatron.native.stand_in import RecordedNative
from rrfp.megatron.settings import DispatchSettings
from rrfp.runtime.launchers.environment import told_as_torch_reads_it
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Placement
from rrfp.train.settings import DECLARED

_ASKER = "rrfp run"

_STEERING = (
    *("hint", "limit", "hold", "hold_features", "measure_memory"),
    *("w", "agreement", "patience", "grad_order"),
    *("admit", "admit_cost", "plan_ms", "admit_across"),
    *("transport", "outbox_mb", "tls"),
)
"""Settings of a training run that a job takes as they are."""

_RECORDING = ("out", "force", "no_trace", "trace_mb")

_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Where launchers say which rank a process is."""


def _parameter(name: str, kind: Any, panel: str, help_text: str, **more: Any) -> inspect.Parameter:
    option = typer.Option(help=help_text, show_default=False, rich_help_panel=panel, **more)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


_PARAMETERS = [
    _parameter(
        "dispatch",
        str,
        SCHEDULE,
        "ready (default: the hint ranks ready tasks), fixed (its order binds) or megatron "
        "(Megatron-Core's own schedule, recorded).",
        autocompletion=one_of(*Dispatch),
    ),
    *(option_of(DECLARED[name]) for name in _STEERING),
    _parameter(
        "placement",
        str,
        LAYOUT,
        "Where the job's model chunks are: loop (default: Megatron's interleaving) or v (there and "
        "back, 2 a rank).",
        autocompletion=one_of(*Placement),
    ),
    _parameter(
        "connect_s",
        float,
        "Time-outs",
        r"Longest time in s for ranks to connect at their first step \[as the process group].",
    ),
    _parameter(
        "stall_s",
        float,
        "Time-outs",
        r"Longest time in s without any arrival before a rank gives up \[as the process group, at "
        r"least 600].",
    ),
    *(option_of(DECLARED[name]) for name in _RECORDING),
    _parameter(
        "steps",
        str,
        OUTPUT,
        r"Record training steps A to B - 1, counted from the process's first training call, and "
        r"the evaluations between them \[all].",
        metavar="A:B",
    ),
    inspect.Parameter(
        "module",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[
            bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")
        ],
    ),
    inspect.Parameter(
        "script",
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[
            str,
            typer.Argument(
                metavar="SCRIPT",
                help="A Python file, or -m and a module's name.",
                show_default=False,
            ),
        ],
    ),
    inspect.Parameter(
        "arguments",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            list[str] | None,
            typer.Argument(metavar="ARGS", help="All of the script's.", show_default=False),
        ],
    ),
]


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
    os.environ.update(told_as_torch_reads_it())
    given = {
        name: value for name, value in flags.items() if value is not None and value is not False
    }
    stand_in = _stand_in(given)
    kind = Module if module else Script.read
    return partial(_run, kind(script, arguments or []), stand_in)


run.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
run.__annotations__ = {each.name: each.annotation for each in _PARAMETERS}


def _stand_in(given: dict[str, Any]) -> StandIn | None:
    """What the options put in the place of Megatron's schedule; None if they leave it alone. Raises
    UsageError for options that do not go together."""
    request = _request(given)
    dispatch = DECLARED["dispatch"].read(given.get("dispatch"))
    steering = {name: value for name, value in given.items() if name not in _NOT_STEERING}
    if dispatch is not Dispatch.MEGATRON:
        settings = DispatchSettings(
            **steering, **({} if dispatch is None else {"dispatch": dispatch})
        )
        return DropIn(settings, request)
    if steering:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in steering)
        raise UsageError(
            f"--dispatch megatron leaves Megatron's schedule as it is and {flags} would steer "
            "ours; leave one of them out"
        )
    return None if request is None else RecordedNative(request)


_NOT_STEERING = {"dispatch", "steps", *_RECORDING}


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


def _run(program: Program, stand_in: StandIn | None) -> int:
    if stand_in is None:
        return program.run(errors.tell)
    put_after_import(stand_in, _ASKER)
    tell_if_unused = partial(_tell_if_unused, stand_in, program.name, os.getpid())
    # When a program has ended well, its threads may still call a schedule: so this waits for them.
    try:
        code = program.run(errors.tell)
    except SystemExit as end:
        if end.code in (None, 0):
            atexit.register(tell_if_unused)
        raise
    if code == 0:
        atexit.register(tell_if_unused)
    return code


def _tell_if_unused(stand_in: StandIn, program: str, pid: int) -> None:
    """Say at the end of a program that it has called no schedule, on one rank. The processes that
    it has forked say nothing."""
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    if rank == "0" and os.getpid() == pid and not stand_in.was_called:
        what = "recorded" if isinstance(stand_in, RecordedNative) else "dispatched or recorded"
        tell(f"{program} called no pipeline schedule of Megatron's, so nothing was {what}")

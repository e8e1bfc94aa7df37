"""Names of ranges in a profile that identify a pipeline's tasks, and the ranks of files by name.

`rrfp.megatron.trace_native` writes ranges with these names, and import reads them:

    rrfp F3 stage=1 chunk=0 step=7
    rrfp wait transfer 12 step=7
    rrfp schedule step=7 rank=1 pp=1 tp=0 dp=0 stages=1,5

In an evaluation they have `evaluation=0` instead of `step=7`.

torch.distributed.pipelining's schedules for several stages per rank use `PP:1F3` (stage, one of
torch's letters, microbatch; also `PP:1SEND_F3`, `PP:1RECV_F3`, `PP:1REDUCE_GRAD`, ...). Its GPipe
uses `Forward 3` and `Backward 3` for the rank's only stage. Its Schedule1F1B writes no ranges
(torch 2.13, `torch/distributed/pipelining/schedules.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.schedule.tasks import Cause, Kind
from rrfp.trace.records import EVALUATION, STEP, evaluation_step, split_step


class Maker(StrEnum):
    """The program that wrote the ranges."""

    RRFP = "rrfp"
    PIPELINING = "torch.distributed.pipelining"


@dataclass(frozen=True, slots=True)
class TaskRange:
    """A range of a task."""

    maker: Maker
    kind: Kind
    microbatch: int
    stage: int | None
    """None if it is the only stage of its rank."""
    step: int | None
    """None if the range's name does not contain it."""


@dataclass(frozen=True, slots=True)
class WaitRange:
    """A range in which the rank waited, transferred messages or reduced gradients."""

    maker: Maker
    cause: Cause
    step: int | None
    is_receive: bool = False
    """True if it belongs to the next task and not to the previous one."""


@dataclass(frozen=True, slots=True)
class ScheduleRange:
    """A range of one call of the schedule, with the rank that made it."""

    step: int
    rank: int
    pp_rank: int
    tp_rank: int
    dp_rank: int
    stages: tuple[int, ...]


Range = TaskRange | WaitRange | ScheduleRange


def task_range(kind: Kind, stage: int, chunk: int, microbatch: int, step: int) -> str:
    """The name of a task's range."""
    return f"rrfp {kind}{microbatch} stage={stage} chunk={chunk} {_format_step(step)}"


def wait_range(cause: Cause, number: int, step: int) -> str:
    """The name of the range of a wait. `number` makes names unique in a profile, so that the GPU's
    work can be attributed to a range."""
    return f"rrfp wait {cause} {number} {_format_step(step)}"


def schedule_range(schedule: ScheduleRange) -> str:
    """The name of the range of a call of the schedule."""
    stages = ",".join(map(str, schedule.stages))
    return (
        f"rrfp schedule {_format_step(schedule.step)} rank={schedule.rank} pp={schedule.pp_rank} "
        f"tp={schedule.tp_rank} dp={schedule.dp_rank} stages={stages}"
    )


def _format_step(step: int) -> str:
    """Format a step number: `step=7` or `evaluation=0`."""
    sort, number = split_step(step)
    return f"{sort}={number}"


_NUMBER = r"(\d{1,9})"
_OUR_STEP = rf"({STEP}|{EVALUATION})={_NUMBER}"
_OUR_TASK = re.compile(
    rf"rrfp ([FBW]){_NUMBER} stage={_NUMBER} chunk={_NUMBER} {_OUR_STEP}", re.ASCII
)
_OUR_WAIT = re.compile(rf"rrfp wait ([a-z_]+) \d+ {_OUR_STEP}", re.ASCII)
_OUR_SCHEDULE = re.compile(
    rf"rrfp schedule {_OUR_STEP} rank={_NUMBER} pp={_NUMBER} tp={_NUMBER} dp={_NUMBER} "
    r"stages=(\d{1,9}(?:,\d{1,9})*)",
    re.ASCII,
)
_ACTION = re.compile(
    rf"PP:{_NUMBER}(?:([FBIW]){_NUMBER}|(SEND|RECV)_[FB]\d+|(REDUCE_GRAD))", re.ASCII
)
_OF_GPIPE = re.compile(rf"(Forward|Backward) {_NUMBER}", re.ASCII)
_PROFILER_STEP = re.compile(rf"ProfilerStep#{_NUMBER}", re.ASCII)
_OVERLAPPED = re.compile(r"PP:\(.*\)OVERLAP_F_B")


def parse_range(name: str) -> Range | None:
    """Parse the name of a range of rrfp or of torch.distributed.pipelining, whose `I` (input
    gradient) becomes B; None if it does not belong to a pipeline."""
    if name.startswith("rrfp "):
        return _parse_ours(name)
    if match := _ACTION.fullmatch(name):
        stage, letter, microbatch, transfer, reduces = match.groups()
        if letter is None:
            cause = Cause.GRADIENT_SYNC if reduces else Cause.TRANSFER
            return WaitRange(Maker.PIPELINING, cause, None, transfer == "RECV")
        kind = Kind.B if letter == "I" else Kind(letter)
        return TaskRange(Maker.PIPELINING, kind, int(microbatch), int(stage), None)
    if match := _OF_GPIPE.fullmatch(name):
        kind = Kind.F if match[1] == "Forward" else Kind.B
        return TaskRange(Maker.PIPELINING, kind, int(match[2]), None, None)
    return None


def _parse_ours(name: str) -> Range | None:
    """Parse the name of a range of rrfp: a task, a wait or a schedule; None for any other name."""
    if match := _OUR_TASK.fullmatch(name):
        kind, microbatch, stage, _, sort, number = match.groups()
        step = _step(sort, number)
        return TaskRange(Maker.RRFP, Kind(kind), int(microbatch), int(stage), step)
    if (match := _OUR_WAIT.fullmatch(name)) and match[1] in list(Cause):
        return WaitRange(Maker.RRFP, Cause(match[1]), _step(match[2], match[3]))
    if match := _OUR_SCHEDULE.fullmatch(name):
        sort, number, *places, stages = match.groups()
        rank, pp_rank, tp_rank, dp_rank = map(int, places)
        held = tuple(map(int, stages.split(",")))
        return ScheduleRange(_step(sort, number), rank, pp_rank, tp_rank, dp_rank, held)
    return None


def _step(sort: str, number: str) -> int:
    """The step number of a name's sort and number; that of an evaluation is negative."""
    return evaluation_step(int(number)) if sort == EVALUATION else int(number)


def parse_profiler_step(name: str) -> int | None:
    """The number of a step of torch.profiler; None for any other name."""
    match = _PROFILER_STEP.fullmatch(name)
    return int(match[1]) if match else None


def check_separable(path: Path, name: str) -> None:
    """Raise RrfpError if a range in a file contains a forward and a backward at once."""
    if _OVERLAPPED.fullmatch(name):
        raise RrfpError(
            f"{path} has ranges of a forward and a backward at once, such as '{name[:40]}', which "
            "nothing tells apart; profile a schedule without OVERLAP_F_B"
        )


# The ranks of files that state theirs only in their names.


_RANK = re.compile(r"(?<![a-z])rank[_.-]?(\d{1,7})(?!\d)", re.ASCII | re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d+)\D*$", re.ASCII)
_DIGITS = re.compile(r"(\d+)", re.ASCII)


def ranks_by_name(paths: Sequence[Path]) -> tuple[list[int], list[str]]:
    """The rank of each file by its name, and a note if the names do not contain ranks, so that
    files are numbered in the order of their names.

    A number is a rank if it follows the word `rank` in all names, as in `trace_rank3.json`, or if
    the last numbers in the names are 0, 1, 2 and so on. Any other number may be a job's, a
    process's or a count from 1.
    """
    stems = [path.name.removesuffix(".gz").rpartition(".")[0] or path.name for path in paths]
    found = [match for stem in stems if (match := _RANK.search(stem))]
    if len(found) == len(paths):
        return [int(match[1]) for match in found], []
    ends = [int(match[1]) for stem in stems if (match := _LAST_NUMBER.search(stem))]
    if sorted(ends) == list(range(len(paths))):
        return ends, []
    in_order = sorted(paths, key=_by_number)
    return [in_order.index(path) for path in paths], [
        "the files' names do not tell ranks: ranks are numbered from 0 in the order of the names; "
        "call the files rank0, rank1, ... if that is not theirs"
    ]


def _by_number(path: Path) -> list[tuple[int, str]]:
    """A sort key that puts report9 before report10."""
    parts = _DIGITS.split(str(path))
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(parts)]

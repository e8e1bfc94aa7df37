"""The names of ranges in a profile that tell of a pipeline's tasks.

`rrfp.megatron.trace_native` names its ranges so, and import reads them back:

    rrfp F3 stage=1 chunk=0 step=7
    rrfp wait transfer 12 step=7
    rrfp schedule step=7 rank=1 pp=1 tp=0 dp=0 stages=1,5

Those of an evaluation have `evaluation=0` in place of `step=7`.

torch.distributed.pipelining's schedules for several stages a rank name theirs `PP:1F3` (stage, one
of torch's letters, microbatch; also `PP:1SEND_F3`, `PP:1RECV_F3`, `PP:1REDUCE_GRAD`, ...). Its
GPipe says `Forward 3` and `Backward 3` for the rank's only stage. Its Schedule1F1B names no ranges
(torch 2.13, `torch/distributed/pipelining/schedules.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rrfp.schedule.tasks import Cause, Kind
from rrfp.trace.records import EVALUATION, STEP, evaluation_step, told_step


class Maker(StrEnum):
    """Whose ranges they are."""

    RRFP = "rrfp"
    PIPELINING = "torch.distributed.pipelining"


@dataclass(frozen=True, slots=True)
class TaskRange:
    """A task."""

    maker: Maker
    kind: Kind
    microbatch: int
    stage: int | None
    """None for the only stage of its rank."""
    step: int | None
    """None if the range does not tell."""


@dataclass(frozen=True, slots=True)
class WaitRange:
    """Time in which the rank waited, or moved messages or gradients."""

    maker: Maker
    cause: Cause
    step: int | None
    is_receive: bool = False
    """Whether it belongs to the next task rather than the previous one."""


@dataclass(frozen=True, slots=True)
class ScheduleRange:
    """One call of the schedule, and which rank made it."""

    step: int
    rank: int
    pp_rank: int
    tp_rank: int
    dp_rank: int
    stages: tuple[int, ...]


Range = TaskRange | WaitRange | ScheduleRange


def task_range(kind: Kind, stage: int, chunk: int, microbatch: int, step: int) -> str:
    """The name of a task's range."""
    return f"rrfp {kind}{microbatch} stage={stage} chunk={chunk} {_told(step)}"


def wait_range(cause: Cause, number: int, step: int) -> str:
    """The name of the range of a step's wait of that number. Names are unique in a profile, so that
    they tell what the GPU did in a range."""
    return f"rrfp wait {cause} {number} {_told(step)}"


def schedule_range(schedule: ScheduleRange) -> str:
    """The name of the range of a call of the schedule."""
    stages = ",".join(map(str, schedule.stages))
    return (
        f"rrfp schedule {_told(schedule.step)} rank={schedule.rank} pp={schedule.pp_rank} "
        f"tp={schedule.tp_rank} dp={schedule.dp_rank} stages={stages}"
    )


def _told(step: int) -> str:
    """`step=7` or `evaluation=0`."""
    sort, number = told_step(step)
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
    """What a range's name tells; None for a name that tells nothing of a pipeline."""
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
    return evaluation_step(int(number)) if sort == EVALUATION else int(number)


def parse_profiler_step(name: str) -> int | None:
    """The number of a step of torch.profiler; None for any other name."""
    match = _PROFILER_STEP.fullmatch(name)
    return int(match[1]) if match else None


def is_overlapped(name: str) -> bool:
    """Whether a range holds a forward and a backward at once, which cannot be told apart."""
    return _OVERLAPPED.fullmatch(name) is not None


# The rank of each file, by the files' names.


_RANK = re.compile(r"(?<![a-z])rank[_.-]?(\d{1,7})(?!\d)", re.ASCII | re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d+)\D*$", re.ASCII)
_DIGITS = re.compile(r"(\d+)", re.ASCII)


def ranks_by_name(paths: Sequence[Path]) -> tuple[list[int], list[str]]:
    """The rank of each file, and a note if it is no more than the file's place among the others.

    A number is a rank if it follows the word, as in `trace_rank3.json`, or if the files end in 0,
    1, 2 and so on. Any other is a job's, a process's or a count from 1.
    """
    stems = [path.name.removesuffix(".gz").rpartition(".")[0] or path.name for path in paths]
    told = [match for stem in stems if (match := _RANK.search(stem))]
    if len(told) == len(paths):
        return [int(match[1]) for match in told], []
    ends = [int(match[1]) for stem in stems if (match := _LAST_NUMBER.search(stem))]
    if sorted(ends) == list(range(len(paths))):
        return ends, []
    in_order = sorted(paths, key=_by_number)
    return [in_order.index(path) for path in paths], [
        "the files' names do not tell ranks: ranks are numbered from 0 in the order of the names; "
        "call the files rank0, rank1, ... if that is not theirs"
    ]


def _by_number(path: Path) -> list[tuple[int, str]]:
    """A key to sort by that puts report9 before report10."""
    parts = _DIGITS.split(str(path))
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(parts)]

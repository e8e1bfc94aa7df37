"""Which chain of tasks, messages and waits made a step as long as it was, and who owns it.

The chain is followed from the end of the step back to its start. A task began when the last thing
it needed was there. If its message came after its rank was free, that was the message, and the
chain goes on with the task that sent it; otherwise it was the task before it on its rank.

Every nanosecond of the step has an owner: the task that ran, the link (counted for its receiver)
while a message was under way, or what a rank waited for; of overlapping waits, the earlier one. The
rank that synchronises gradients longest owns the time after the last task. The members of a group
run their tasks as one: the last member's message counts for all.

Of transfers that block, a simulated run tells who met whom (`BlockingBacktrace`). Megatron's own
schedule waits for several transfers in one call, and its records do not tell for which: there the
chain goes on with whichever ended last, the task that gave the input or the one before it on the
rank, and what lies between belongs to the rank's wait for the transfer.
"""

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import polars as pl

from rrfp.analyze.frames import Frames
from rrfp.analyze.meetings import is_simulated, transfers_block
from rrfp.analyze.path.backtrace import Backtrace
from rrfp.analyze.path.blocking_backtrace import BlockingBacktrace
from rrfp.analyze.path.segments import Segment
from rrfp.errors import RrfpError, UsageError
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import NS_PER_S
from rrfp.trace.steps import in_order, step_name, told_step


class Owner(NamedTuple):
    """Who owns how much of the step."""

    pp_rank: int
    kind: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The chain of one step, in order of time and without gaps."""

    step: int
    segments: tuple[Segment, ...]
    pp_rank: int | None = None
    """Only this pipeline rank's owners are reported; None reports all."""

    @property
    def length_ns(self) -> int:
        return self.segments[-1].end_ns - self.segments[0].start_ns

    def of_rank(self, pp_rank: int) -> "CriticalPath":
        """The same chain, its owners those of one pipeline rank."""
        return replace(self, pp_rank=pp_rank)

    @property
    def owners(self) -> list[Owner]:
        """The largest first; their times sum to the length."""
        times_ns: defaultdict[tuple[int, str], int] = defaultdict(int)
        for start_ns, end_ns, pp_rank, kind, _ in self.segments:
            if self.pp_rank in (None, pp_rank):
                times_ns[pp_rank, kind] += end_ns - start_ns
        owners = [Owner(*who, time_ns) for who, time_ns in times_ns.items() if time_ns]
        return sorted(owners, key=lambda owner: (-owner.time_ns, owner.pp_rank, owner.kind))

    @property
    def idle_fraction(self) -> float:
        """The share of the whole chain that links and waits own, whoever's owners are reported."""
        idle_ns = sum(
            segment.end_ns - segment.start_ns
            for segment in self.segments
            if segment.kind not in list(Kind)
        )
        return idle_ns / self.length_ns

    @property
    def frame(self) -> pl.DataFrame:
        """A row an owner, the largest first."""
        return pl.DataFrame(
            [(*owner[:2], owner.time_ns / NS_PER_S) for owner in self.owners],
            schema={"pp_rank": pl.Int32, "kind": pl.String, "seconds": pl.Float64},
            orient="row",
        )

    def as_json(self) -> dict[str, object]:
        """The object that `rrfp analyze critical-path --format json` prints."""
        sort, number = told_step(self.step)
        return {
            sort: number,
            "length_s": self.length_ns / NS_PER_S,
            "owners": [
                {"pp_rank": pp_rank, "kind": kind, "seconds": time_ns / NS_PER_S}
                for pp_rank, kind, time_ns in self.owners
            ],
        }


def critical_path(frames: Frames, step: int | None = None) -> CriticalPath:
    """The chain of a step; by default, of the longest one.

    Raises RrfpError when no step was finished by every rank or the step takes no time, and
    UsageError for a step that some rank did not finish.
    """
    spans = {step: (start, end) for step, start, end in frames.windows.iter_rows()}
    if not spans:
        raise RrfpError("the trace has no step that every rank finished; see 'rrfp trace check'")
    if step is None:
        step = max(spans, key=lambda each: spans[each][1] - spans[each][0])
    if step not in spans:
        nearest = sorted(spans, key=lambda each: abs(each - step))[:2]
        raise UsageError(
            f"{step_name(step)} was not finished by every rank; choose another one, such as "
            f"{' or '.join(map(step_name, in_order(nearest)))}"
        )
    start_ns, end_ns = spans[step]
    if start_ns >= end_ns:
        raise RrfpError(f"{step_name(step)} takes no time in this trace; see 'rrfp trace check'")
    of_step = frames.of_steps(range(step, step + 1))
    back = Backtrace(of_step, step, spans[step])
    if transfers_block(of_step) and is_simulated(of_step):
        # Without whole groups nobody can tell who met whom.
        with suppress(RrfpError):
            back = BlockingBacktrace(of_step, step, spans[step])
    return CriticalPath(step, back.segments())

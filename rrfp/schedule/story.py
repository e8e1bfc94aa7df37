"""A dispatcher's account of itself: what each task still lacks, and who withholds it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rrfp.schedule.books import Books
from rrfp.schedule.bounds import Bounds
from rrfp.schedule.causes import Cause
from rrfp.schedule.order import OrderProgress
from rrfp.schedule.stimuli import Stimulus
from rrfp.schedule.tasks import Task
from rrfp.schedule.values import Value

_NUM_LISTED = 6
"""Tasks that the text lists; it counts the rest."""


class TaskStory(NamedTuple):
    """What holds up a task that has not been dispatched."""

    task: Task
    lacks: tuple[Task, ...]
    """The tasks whose output it still needs on this rank."""
    missing_members: int
    """The members of the group at which its input has yet to arrive (bit i: member i; bit 0: this
    rank)."""
    withheld_by: Cause | None
    """What withholds it although all its inputs are here: a bound, the order, or the group's
    agreement. None if nothing does, or if an input is missing."""

    def __str__(self) -> str:
        if self.lacks:
            return f"{self.task} lacks {', '.join(map(str, self.lacks))}"
        if self.withheld_by is not None:
            return f"{self.task} is here, withheld by {self.withheld_by}"
        return f"{self.task} may run"


@dataclass(frozen=True, slots=True)
class Story(Value):
    """What a dispatcher knows at one moment; `str` gives it as text."""

    rank: int
    """The pipeline rank."""
    depth: int
    """D: chunk-forwards minus chunk-backwards run."""
    held: int
    """Activations held, in slots of one chunk and one microbatch."""
    tasks: tuple[TaskStory, ...]
    """The tasks not yet dispatched, by kind, chunk and microbatch."""
    best_waiting: TaskStory | None
    """The hint's best task among those that lack an input on this rank."""
    recent: tuple[tuple[int, Stimulus], ...]
    """The last stimuli, each with its time in ns, the latest last."""

    @property
    def ready(self) -> tuple[TaskStory, ...]:
        """The tasks with all inputs on this rank, withheld ones included."""
        return tuple(each for each in self.tasks if not each.lacks)

    def __str__(self) -> str:
        """A line for each of the first tasks, those with all inputs here first, then the last
        stimuli."""
        tasks = sorted(self.tasks, key=lambda each: bool(each.lacks))
        lines = [
            f"pipeline rank {self.rank} has {len(self.tasks)} tasks left, D {self.depth}, "
            f"{self.held} held"
        ]
        lines += [f"  {each}" for each in tasks[:_NUM_LISTED]]
        if len(tasks) > _NUM_LISTED:
            lines.append(f"  and {len(tasks) - _NUM_LISTED} more")
        lines.append("  it last took in")
        lines += [f"    {time_ns} ns: {_text_of(stimulus)}" for time_ns, stimulus in self.recent]
        return "\n".join(lines)


class Account:
    """What a dispatcher's story is told from."""

    def __init__(
        self,
        books: Books,
        bounds: Bounds,
        order: OrderProgress | None,
        *,
        binds: bool,
        follows: bool,
    ) -> None:
        """`binds` says that the order binds, and `follows` that another rank decides."""
        self._books = books
        self._bounds = bounds
        self._order = order
        self._binds = binds
        self._follows = follows

    def story(self, recent: Iterable[tuple[int, Stimulus]]) -> Story:
        """What each task lacks, who withholds it, and the last stimuli."""
        books, bounds = self._books, self._bounds
        numbers = range(books.num_tasks)
        by_hint = numbers if self._order is None else self._order.left()
        waiting = [n for n in by_hint if books.is_left(n) and not books.is_here(n)]
        return Story(
            books.rank,
            bounds.depth,
            bounds.held,
            tuple([self._story_of(n) for n in numbers if books.is_left(n)]),
            self._story_of(waiting[0]) if waiting else None,
            tuple(recent),
        )

    def _story_of(self, number: int) -> TaskStory:
        books = self._books
        lacks = books.lacking(number)
        withheld_by = None if lacks else self._withheld_by(number)
        return TaskStory(books.lanes.task(number), lacks, books.missing[number], withheld_by)

    def _withheld_by(self, number: int) -> Cause | None:
        """What withholds a task that has all its inputs here."""
        if self._binds:
            assert self._order is not None
            if number != self._order.best:
                return Cause.ORDER
        elif not self._bounds.permits(number):
            return self._bounds.cause
        return Cause.COORDINATION if self._books.missing[number] or self._follows else None

    def contradiction(self) -> str | None:
        """What contradicts the rest of the books, in a few words; None if all agree. Takes time
        linear in the tasks of the step."""
        books, bounds = self._books, self._bounds
        if bounds.has_budget and bounds.used > bounds.budget:
            return f"a hold of {bounds.budget}, of which {bounds.used} is in use"
        if bounds.depth != books.depth():
            return "D"
        return books.contradiction()


def _text_of(stimulus: Stimulus) -> str:
    return " ".join([type(stimulus).__name__, *map(str, stimulus)])

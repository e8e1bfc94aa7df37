"""Announcements in virtual time: what ranks expect of their tasks, and make of what they hear."""

from collections.abc import Sequence

from rrfp.schedule.patience.punctuality import Durations, Punctuality
from rrfp.schedule.shape import Shape
from rrfp.schedule.stimuli import Announced
from rrfp.schedule.tasks import Task
from rrfp.simulate.world import World


class Announcing:
    """The announcements of steps of the same costs. As in the runtime, ranks learn from what came
    how punctual announcements are."""

    def __init__(self, shape: Shape, world: World, heard: Sequence[Punctuality]) -> None:
        """`heard` is what each rank makes of announcements."""
        self._shape = shape
        self._known_ns = (
            None if world.expected is None else world.expected.by_kind(split=shape.splits_backward)
        )
        self._durations = [Durations() for _ in range(shape.num_ranks)]
        self._heard = heard
        self._left_ns: dict[Task, int] = {}

    def taking_ns(self, rank: int, task: Task, time_ns: int) -> int | None:
        """How long a rank expects the task to take that it begins; None: it has no idea. It will
        learn from the time that it takes, `time_ns`."""
        stage, kind, microbatch = task
        if self._known_ns is not None:
            return self._known_ns[kind][stage][microbatch]
        chunk = self._shape.chunk_of(stage)
        mean_ns = self._durations[rank].expected_ns(kind, chunk)
        self._durations[rank].took(kind, chunk, time_ns)
        return None if mean_ns is None else int(mean_ns)

    def announce(self, task: Task, left_ns: int) -> None:
        """Tell a task's rank that its input will come `left_ns` after the announcement."""
        self._left_ns[task] = left_ns

    def heard(self, rank: int, task: Task, now_ns: int) -> Announced:
        """The announcement of a task has reached its rank."""
        return self._heard[rank].announced(task, now_ns, self._left_ns.pop(task))

    def arrived(self, rank: int, task: Task, now_ns: int) -> None:
        """The input of a task has reached its rank."""
        self._heard[rank].arrived(task, now_ns)

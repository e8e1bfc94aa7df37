"""The tree of tracks in a trace: pipeline > stage > compute, hint, wait, send, receive, ...

Every track has an explicit place among its siblings. Slices of one Perfetto track must nest, so
each link has its own track below `send` and `receive`. Slices that would still overlap go to
another lane: a sibling of the same name, which the viewer shows as a further row of the track.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from rrfp.schedule.tasks import Kind
from rrfp.trace.kept_bytes import are_known, held_for_w
from rrfp.trace.perfetto.format import HINT, RANK
from rrfp.trace.records import Phase, RankInfo, RankRecords

Node = tuple[int, str]
"""One step of a path in the tree: a place among siblings, and a name."""

COUNTERS = (7, "counters")
_DETAILS = (9, "details")

PATH_OF_CATEGORY: dict[str, tuple[Node, ...]] = {
    "task": ((0, "compute"),),
    HINT: ((1, "hint"),),
    "wait": ((2, "wait"),),
    "begun": ((3, "never ended"),),
    "agreement": ((4, "agreement"),),
    "send": ((5, "send"),),
    "receive": ((6, "receive"),),
    "phase": ((8, "phases"),),
    "stimulus": (_DETAILS, (0, "stimuli")),
    "cost": (_DETAILS, (1, "recording")),
    "loss": (_DETAILS, (1, "recording")),
    RANK: (_DETAILS, (2, "rank")),
}
"""Where the events of each category are shown below their stage. Events that only a replay or an
audit of the recording needs are in a group that the viewer keeps closed."""

_COUNTED_FIELDS = {
    "D": "depth",
    "held": "held",
    "ready forwards": "ready_forwards",
    "ready backwards": "ready_backwards",
}


Points = list[tuple[int, int]]
"""Of a counter: times in ns, and the value from each on."""


def counters_of(records: RankRecords) -> dict[str, Points]:
    """The counter tracks of a rank: what its tasks' records count, and where sizes are known, bytes
    of memory: held, held for W alone, gradients and messages that wait, and the budget."""
    tasks = records.tasks
    starts_ns = [task.start_ns for task in tasks]

    def by_task(values: Iterable[int]) -> Points:
        return list(zip(starts_ns, values, strict=True))

    counters = {
        name: by_task(getattr(task, field) for task in tasks)
        for name, field in _COUNTED_FIELDS.items()
    }
    if not are_known(tasks):
        return counters
    counters["bytes held"] = by_task(task.held_bytes for task in tasks)
    for_w = held_for_w(tasks)
    if any(for_w):
        counters["bytes held for W"] = by_task(for_w)
    if any(task.waiting_bytes for task in tasks):
        counters["bytes of waiting gradients"] = by_task(t.waiting_bytes for t in tasks)
    if records.sends:
        counters["bytes in outbox"] = _outbox(records)
    budgets = {p.step: p.budget_bytes for p in records.phases if p.phase == Phase.SCHEDULE}
    if any(budgets.values()):
        counters["budget of bytes"] = by_task(budgets.get(task.step, 0) for task in tasks)
    return counters


def _outbox(records: RankRecords) -> Points:
    """The bytes of messages from the end of the task that made them to their last byte sent."""
    ends_ns = {
        (task.step, task.kind, task.stage, task.microbatch): task.end_ns for task in records.tasks
    }
    changes: defaultdict[int, int] = defaultdict(int)
    for send in records.sends:
        made_on = send.stage + (-1 if send.kind == Kind.F else 1)
        made_ns = ends_ns.get((send.step, send.kind, made_on, send.microbatch), send.start_ns)
        changes[min(made_ns, send.end_ns)] += send.num_bytes
        changes[send.end_ns] -= send.num_bytes
    times_ns = sorted(changes)
    return list(zip(times_ns, accumulate(changes[each] for each in times_ns), strict=True))


@dataclass(frozen=True, slots=True)
class Track:
    """A track as its descriptor states it; `parent` is 0 at the top."""

    uuid: int
    parent: int
    name: str
    place: int
    """Its place among its siblings."""
    is_counter: bool = False


class Tracks:
    """Hands out tracks by path, and keeps new ones until they are described."""

    def __init__(self, first: int = 1) -> None:
        self._first = first
        self._tracks: dict[tuple[tuple[int, str, int], ...], Track] = {}
        self._new: list[Track] = []

    def get(self, *path: Node, lane: int = 0, is_counter: bool = False) -> int:
        """The uuid of the track at a path of (place, name) from the top; makes missing tracks."""
        key: tuple[tuple[int, str, int], ...] = ()
        parent = 0
        for depth, (place, name) in enumerate(path, start=1):
            is_leaf = depth == len(path)
            key = (*key, (place, name, lane if is_leaf else 0))
            track = self._tracks.get(key)
            if track is None:
                uuid = self._first + len(self._tracks)
                track = Track(uuid, parent, name, place, is_counter and is_leaf)
                self._tracks[key] = track
                self._new.append(track)
            parent = track.uuid
        return parent

    def take_new(self) -> Iterator[Track]:
        """The tracks made since the last call, parents first."""
        new, self._new = self._new, []
        yield from new


def stage_name(info: RankInfo) -> str:
    """`stage 0`, or `stages 0 7` on a rank with chunks."""
    label = "stage" if len(info.stages) == 1 else "stages"
    return " ".join((label, *map(str, info.stages)))


def stage_path(info: RankInfo, ranks: Sequence[RankInfo]) -> tuple[Node, ...]:
    """The path of a rank's stage: pipelines ordered by replica, stages by model order."""
    pipelines = sorted({(other.dp_rank, other.tp_rank) for other in ranks})
    name = "pipeline"
    if len(pipelines) > 1:
        name = f"pipeline dp{info.dp_rank} tp{info.tp_rank}"
    place = pipelines.index((info.dp_rank, info.tp_rank))
    return (place, name), (info.pp_rank, stage_name(info))


def assign_lanes(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """A lane for each (start, end), so that no two on one lane overlap; uses as few as possible."""
    lanes = [0] * len(intervals)
    free: list[int] = []
    running: list[tuple[int, int]] = []
    num_lanes = 0
    ordered = sorted((*interval, index) for index, interval in enumerate(intervals))
    for start_ns, end_ns, index in ordered:
        while running and running[0][0] <= start_ns:
            heappush(free, heappop(running)[1])
        if free:
            lane = heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        lanes[index] = lane
        heappush(running, (end_ns, lane))
    return lanes

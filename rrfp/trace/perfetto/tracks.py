"""The tree of tracks in a trace: pipeline > stage > compute, hint, wait, send, receive, ...

Every track has an explicit place among its siblings. Slices of one Perfetto track must nest, so
each link has its own track below `send` and `receive`. Slices that would still overlap go to
another lane: a sibling of the same name, which the viewer shows as a further row of the track.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rrfp.trace.perfetto.format import HINT, RANK
from rrfp.trace.records import RankInfo

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


class Lanes:
    """Hands out the lanes of a track: no two slices on one lane overlap."""

    def __init__(self) -> None:
        self._ends_ns: list[int] = []

    def assign(self, intervals: Sequence[tuple[int, int]]) -> list[int]:
        """A lane for each (start, end), after those of earlier calls; uses as few as possible."""
        lanes = [0] * len(intervals)
        ends_ns = self._ends_ns
        ordered = sorted((*interval, index) for index, interval in enumerate(intervals))
        for start_ns, end_ns, index in ordered:
            for lane, lane_end_ns in enumerate(ends_ns):
                if lane_end_ns <= start_ns:
                    ends_ns[lane] = end_ns
                    break
            else:
                lane = len(ends_ns)
                ends_ns.append(end_ns)
            lanes[index] = lane
        return lanes


def assign_lanes(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """A lane for each (start, end), so that no two on one lane overlap; uses as few as possible."""
    return Lanes().assign(intervals)

"""Where the ranks of a run with blocking transfers met, from the run's tables."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rrfp.analyze.frames import Frames, recording_of
from rrfp.errors import RrfpError
from rrfp.replay.meetings import BlockingRank, meet
from rrfp.replay.recorded_layout import RecordedLayout
from rrfp.replay.recorded_policy import RecordedSettings
from rrfp.trace.records import Recording
from rrfp.trace.steps import Window


class MetReplica(NamedTuple):
    """One replica's step."""

    ranks: list[BlockingRank]
    """By pipeline rank."""
    members: list[list[int]]
    """The ranks that run each pipeline rank's tasks together; the first one leads."""


def transfers_block(frames: Frames) -> bool:
    """Whether the run's transfers lay on the compute path, as far as it tells."""
    try:
        return RecordedSettings(Recording(frames.settings, [])).is_blocking
    except RrfpError:
        return False


def is_simulated(frames: Frames) -> bool:
    """Whether the run took place in virtual time."""
    return bool(frames.settings.get("simulated"))


def is_imported(frames: Frames) -> bool:
    """Whether the run's messages follow from its tasks and waits, as nothing recorded them."""
    return "imported" in frames.settings


def met_replicas(
    frames: Frames, windows: Mapping[int, Window]
) -> Iterator[tuple[int, list[MetReplica]]]:
    """The replicas of each step, with the meetings of their ranks.

    Raises RrfpError when the trace does not tell who ran what.
    """
    layout = RecordedLayout(recording_of(frames.of_steps(list(windows))))
    for records in layout.steps(dict(windows)):
        shape = layout.shape_of(records)
        found = []
        for replica in records.replicas:
            # An imported run does not tell when a rank was there.
            entries_ns = [
                records.window[0]
                if is_imported(frames)
                else max(member.entry_ns for member in members)
                for members in replica
            ]
            members = [[member.info.rank for member in members] for members in replica]
            met = meet(shape, replica, entries_ns, are_recorded=not is_imported(frames))
            found.append(MetReplica(met, members))
        yield records.step, found

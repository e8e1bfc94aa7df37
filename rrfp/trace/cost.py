"""What recording cost a run, by the run's own records."""

from rrfp.trace.records import Phase, RankRecords, Recording


def recording_fraction(recording: Recording) -> float | None:
    """The time spent recording over the time of the steps, on the rank where that is largest.

    None if no rank has both finished a step and recorded its cost.
    """
    fractions = [
        records.costs[-1].cost_ns / steps_ns
        for records in recording.ranks
        if records.costs and (steps_ns := _steps_ns(records))
    ]
    return max(fractions, default=None)


def _steps_ns(records: RankRecords) -> int:
    return sum(
        phase.end_ns - phase.start_ns for phase in records.phases if phase.phase == Phase.SCHEDULE
    )

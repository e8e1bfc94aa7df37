"""What recording a run cost it, as the run's own records state it."""

from rrfp.trace.records import Phase, RankRecords, Recording


def recording_fraction(recording: Recording) -> float | None:
    """The time that recording took over the time of the steps, on the rank where it is largest.

    None where no rank has both finished a step and stated its cost.
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

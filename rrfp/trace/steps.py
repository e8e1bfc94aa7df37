"""The window of a step: from the first rank's entry into the schedule to the last one's return."""

from rrfp.trace.records import Phase, Recording

Window = tuple[int, int]
"""From and to, in nanoseconds of the trace."""


def step_windows(recording: Recording) -> dict[int, Window]:
    """The window of each step that every rank finished, by step."""
    schedules = [
        {phase.step: phase[:2] for phase in records.phases if phase.phase == Phase.SCHEDULE}
        for records in recording.ranks
    ]
    finished: set[int] = set.intersection(*map(set, schedules)) if schedules else set()
    return {
        step: (
            min(steps[step][0] for steps in schedules),
            max(steps[step][1] for steps in schedules),
        )
        for step in sorted(finished)
    }

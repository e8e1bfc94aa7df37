"""The window of a step: from the first rank's entry into the schedule to the last one's return."""

from collections import Counter

from rrfp.trace.records import Phase, Recording

Window = tuple[int, int]
"""From and to, in nanoseconds of the trace."""


def step_windows(recording: Recording) -> dict[int, Window]:
    """The window of each step that every rank finished, by step."""
    num_ranks: Counter[int] = Counter()
    windows: dict[int, Window] = {}
    for records in recording.ranks:
        schedules = [phase for phase in records.phases if phase.phase == Phase.SCHEDULE]
        num_ranks.update({phase.step for phase in schedules})
        for start_ns, end_ns, step, _ in schedules:
            first_ns, last_ns = windows.get(step, (start_ns, end_ns))
            windows[step] = min(first_ns, start_ns), max(last_ns, end_ns)
    return {
        step: windows[step]
        for step, count in sorted(num_ranks.items())
        if count == len(recording.ranks)
    }

"""The counter tracks of a rank: what its tasks' records count, and where sizes are known, bytes of
memory: held, held for W alone, gradients and messages that wait, and the budget."""

from collections import defaultdict
from collections.abc import Iterable

from rrfp.schedule.tasks import Kind
from rrfp.trace.kept_bytes import are_known, held_for_w
from rrfp.trace.records import Phase, RankRecords, SendRecord, TaskRecord

_COUNTED_FIELDS = {
    "D": "depth",
    "held": "held",
    "ready forwards": "ready_forwards",
    "ready backwards": "ready_backwards",
}
_BYTES, _BYTES_FOR_W, _WAITING = "bytes held", "bytes held for W", "bytes of waiting gradients"
_OUTBOX, _BUDGET = "bytes in outbox", "budget of bytes"

COUNTERS_IN_ORDER = (*_COUNTED_FIELDS, _BYTES, _BYTES_FOR_W, _WAITING, _OUTBOX, _BUDGET)

Points = list[tuple[int, int]]
"""Of a counter: times in ns, and the value from each on."""

_Task = tuple[int, str, int, int]


def counters_of(records: RankRecords) -> dict[str, Points]:
    """The counters of all that a rank recorded."""
    return Counters().add(records, is_last=True)


class Counters:
    """The counters of a rank, from its records a part at a time. A counter begins with the part
    that first has something to count."""

    def __init__(self) -> None:
        self._begun: set[str] = set()
        self._outbox = _Outbox()

    def add(self, records: RankRecords, *, is_last: bool) -> dict[str, Points]:
        """The points that the next part adds. The tasks of a step come in one part."""
        tasks = records.tasks
        starts_ns = [task.start_ns for task in tasks]

        def by_task(values: Iterable[int]) -> Points:
            return list(zip(starts_ns, values, strict=True))

        found = {
            name: by_task(getattr(task, field) for task in tasks)
            for name, field in _COUNTED_FIELDS.items()
        }
        if not self._has_begun(_BYTES, are_known(tasks)):
            return found
        found[_BYTES] = by_task(task.held_bytes for task in tasks)
        for_w = held_for_w(tasks)
        if self._has_begun(_BYTES_FOR_W, any(for_w)):
            found[_BYTES_FOR_W] = by_task(for_w)
        if self._has_begun(_WAITING, any(task.waiting_bytes for task in tasks)):
            found[_WAITING] = by_task(task.waiting_bytes for task in tasks)
        if self._has_begun(_OUTBOX, bool(records.sends)):
            found[_OUTBOX] = self._outbox.add(tasks, records.sends, is_last=is_last)
        budgets = {p.step: p.budget_bytes for p in records.phases if p.phase == Phase.SCHEDULE}
        if self._has_begun(_BUDGET, any(budgets.values())):
            found[_BUDGET] = by_task(budgets.get(task.step, 0) for task in tasks)
        return found

    def _has_begun(self, name: str, begins: bool) -> bool:
        if begins:
            self._begun.add(name)
        return name in self._begun


class _Outbox:
    """The bytes of messages from the end of the task that made them to their last byte sent."""

    def __init__(self) -> None:
        self._ends_ns: dict[_Task, int] = {}
        self._changes: defaultdict[int, int] = defaultdict(int)
        """Those that a message of the next part may still precede."""
        self._total = 0

    def add(
        self, tasks: Iterable[TaskRecord], sends: Iterable[SendRecord], *, is_last: bool
    ) -> Points:
        ends_ns = {(t.step, t.kind, t.stage, t.microbatch): t.end_ns for t in tasks}
        # A message of a part's last step may be recorded with the part after it.
        known_ns = self._ends_ns | ends_ns
        self._ends_ns = ends_ns
        changes = self._changes
        for send in sends:
            made_on = send.stage + (-1 if send.kind == Kind.F else 1)
            made_ns = known_ns.get((send.step, send.kind, made_on, send.microbatch), send.start_ns)
            changes[min(made_ns, send.end_ns)] += send.num_bytes
            changes[send.end_ns] -= send.num_bytes
        settled_ns = min(ends_ns.values(), default=0)
        points: Points = []
        for time_ns in sorted(changes):
            if time_ns >= settled_ns and not is_last:
                break
            self._total += changes.pop(time_ns)
            points.append((time_ns, self._total))
        return points

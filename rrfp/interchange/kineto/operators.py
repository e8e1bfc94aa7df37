"""Tasks of torch.distributed.pipelining on the CPU, timed by the operators in their ranges.

Its ranges hold the wait for a task's input, and GPipe's the send of its output too. A task lasts
from the first operator in its range that autograd numbers to the last; what comes before it is the
wait for its input.
"""

from bisect import bisect_left, bisect_right

from rrfp.interchange.kineto.host import HostProfile
from rrfp.interchange.kineto.rank import FoundRange, ProfiledRank
from rrfp.interchange.ranges import Maker, TaskRange, WaitRange
from rrfp.schedule.causes import Cause
from rrfp.schedule.tasks import Kind


def time_by_operators(rank: ProfiledRank, host: HostProfile) -> None:
    """Put each task of a rank, whose steps are known, at the time of its operators. A rank whose
    profile lacks the operators of a forward stays as it is."""
    operators = sorted([*host.forwards, *host.backwards])
    starts_ns = [operator.start_ns for operator in operators]
    received_ns = sorted(transfer.end_ns for transfer in host.transfers)
    timed: list[tuple[FoundRange, TaskRange, int, int]] = []
    for found, task in rank.tasks:
        first = bisect_left(starts_ns, found.start_ns)
        last = bisect_left(starts_ns, found.end_ns)
        if first == last:
            if task.kind is Kind.F:
                return
            # The first stage has no input whose gradient it could compute.
            received = bisect_right(received_ns, found.end_ns) - 1
            start_ns = (
                max(received_ns[received], found.start_ns) if received >= 0 else found.start_ns
            )
            timed.append((found, task, start_ns, found.end_ns))
            continue
        end_ns = min(found.end_ns, max(each.end_ns for each in operators[first:last]))
        timed.append((found, task, operators[first].start_ns, end_ns))
    for found, task, start_ns, end_ns in timed:
        if start_ns == found.start_ns:
            continue
        wait = WaitRange(Maker.PIPELINING, Cause.TRANSFER, task.step, is_receive=True)
        rank.found.append(FoundRange(wait, found.launched_ns, found.start_ns, start_ns))
        found.start_ns, found.end_ns = start_ns, end_ns
    rank.is_timed_by_operators = True

"""Plans of many steps, by as many processes as there are cores."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from rrfp.cores import num_cores
from rrfp.errors import RrfpError, UsageError
from rrfp.simulate.plan.known import Known
from rrfp.simulate.plan.process import PlannerProcess
from rrfp.simulate.plan.search import Plan, plan_entry

_LEAST_SIMULATIONS = 500
"""Of all plans together; for fewer, starting a process takes longer than it saves."""


def plan_all(
    steps: Sequence[Known],
    num_simulations: int,
    finished: Callable[[], None] = lambda: None,
    num_processes: int | None = None,
) -> list[Plan]:
    """A plan for each step, whatever the number of processes (by default, one a core). `finished`
    is called after each. Raises as `plan_entry` does."""
    num_processes = min(num_processes or num_cores(), len(steps))
    if num_processes < 2 or num_simulations * len(steps) < _LEAST_SIMULATIONS:
        plans = []
        for known in steps:
            plans.append(plan_entry(known, num_simulations))
            finished()
        return plans
    processes = [PlannerProcess("rrfp.simulate.plan.worker") for _ in range(num_processes)]
    free: SimpleQueue[PlannerProcess] = SimpleQueue()
    for process in processes:
        free.put(process)

    def plan(known: Known) -> Plan:
        process = free.get()
        try:
            found = _plan_in(process, known, num_simulations)
        finally:
            # Whoever waits for a process must get one, if only to see that it has failed.
            free.put(process)
        finished()
        return found

    try:
        with ThreadPoolExecutor(num_processes) as pool:
            futures = [pool.submit(plan, known) for known in steps]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                # Those that plan end at once, and so do the threads that wait for them.
                for process in processes:
                    process.kill()
                raise
    finally:
        for process in processes:
            process.close()


def _plan_in(process: PlannerProcess, known: Known, num_simulations: int) -> Plan:
    process.send((known, num_simulations), waits=True)
    told, *_ = process.wait()
    if "error" in told:
        error = UsageError if told["kind"] == UsageError.__name__ else RrfpError
        raise error(told["error"])
    return Plan(tuple(told["order"]), told["candidates"], told["predicted_ns"], told["pyramid_ns"])

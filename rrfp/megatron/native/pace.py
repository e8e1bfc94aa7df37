"""The pace of a step under Megatron's own schedule, whose transfers block the compute path.

Megatron's `_communicate` does not say which microbatches it exchanges. But in each direction a rank
sends and receives in the order of its tasks, so the calls are counted.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from rrfp.runtime.pace import StepPace, sleep_until
from rrfp.schedule.hints.table import hint_named
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task


class NativePace:
    """Paces what one rank does in one step."""

    def __init__(self, pace: StepPace, shape: Shape, pp_rank: int) -> None:
        self._pace = pace
        self._messages = _messages(shape, pp_rank)

    def task(self, stage: int, kind: Kind, microbatch: int) -> AbstractContextManager[None]:
        """Wrap a task's work."""
        return self._pace.task(Task(stage, kind, microbatch))

    def transfer(self, communicate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `_communicate` so that both ends return only when the modelled time has
        passed since the exchange; for concurrent messages, the longest time."""

        def paced(*args: Any, **kwargs: Any) -> Any:
            result = communicate(*args, **kwargs)
            now_ns = time.monotonic_ns()
            exchanged = [
                next(messages)
                for name, messages in self._messages.items()
                # Arguments are tensors to send, or whether to receive one.
                if kwargs[name] is not None and kwargs[name] is not False
            ]
            sleep_until(now_ns + max(map(self._pace.message_ns, exchanged), default=0))
            return result

        return paced


def _messages(shape: Shape, pp_rank: int) -> dict[str, Iterator[Task]]:
    """By argument of `_communicate`: the messages that it requests, in order, named by the tasks
    that consume them."""
    if shape.num_ranks == 1:
        return {}
    name = "1f1b" if shape.num_chunks == 1 else "interleaved"
    row = order_of(hint_named(name).on(shape), shape).rows[pp_rank]
    forwards = [task for task in row if task.kind is Kind.F]
    backwards = [task for task in row if task.kind is Kind.B]
    return {
        "tensor_send_next": _sent(shape, forwards),
        "tensor_send_prev": _sent(shape, backwards),
        "recv_prev": _received(shape, forwards),
        "recv_next": _received(shape, backwards),
    }


def _sent(shape: Shape, tasks: Iterable[Task]) -> Iterator[Task]:
    return (receiver for task in tasks if (receiver := shape.receiver(task)) is not None)


def _received(shape: Shape, tasks: Iterable[Task]) -> Iterator[Task]:
    return (task for task in tasks if shape.sender(task) is not None)

"""The pace of a step under Megatron's own schedule, whose transfers lie on the compute path.

Megatron's `_communicate` does not say which microbatches it exchanges. In each direction a rank
sends, and receives, in the sequence in which its order has the tasks; so the calls are counted.
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
        """Around a task's work."""
        return self._pace.task(Task(stage, kind, microbatch))

    def transfer(self, communicate: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `_communicate`, which both ends leave when the modelled time has passed since
        it was done; of messages that pass at once, the longest."""

        def paced(*args: Any, **kwargs: Any) -> Any:
            result = communicate(*args, **kwargs)
            now_ns = time.monotonic_ns()
            exchanged = [
                next(messages)
                for name, messages in self._messages.items()
                # Tensors that are sent, and whether one is received.
                if kwargs[name] is not None and kwargs[name] is not False
            ]
            sleep_until(now_ns + max(map(self._pace.message_ns, exchanged), default=0))
            return result

        return paced


def _messages(shape: Shape, pp_rank: int) -> dict[str, Iterator[Task]]:
    """The messages, named by the tasks that they are for, by the argument of `_communicate` that
    asks for them."""
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

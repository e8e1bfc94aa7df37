"""Megatron-Core's own schedule function, run unchanged and recorded.

For the duration of a call its `forward_step` and `backward_step`, its blocking transfers and its
gradient finalisation are timed where the schedule looks them up, and put back afterwards. Its tasks
come in a known order, so counting tells which task runs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from rrfp.runtime.protocols import Clock, monotonic
from rrfp.runtime.worker import StepSummary
from rrfp.schedule.causes import Cause
from rrfp.schedule.order import Order
from rrfp.schedule.orders import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import Phase, PhaseRecord, Record, TaskRecord, WaitRecord


class NativeSchedule:
    """Called as Megatron's function is, once a step; keeps what the last step came to."""

    def __init__(
        self, pp_rank: int, record: Callable[[Record], None], clock: Clock = monotonic
    ) -> None:
        self._pp_rank = pp_rank
        self._record = record
        self._clock = clock
        self._step = 0
        self.last_step: StepSummary | None = None
        """What the last step came to on this rank."""

    def __call__(
        self,
        *,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        **arguments: Any,
    ) -> list[Any]:
        """One step by Megatron's own schedule; its arguments and what it gives are Megatron's."""
        chunks = model if isinstance(model, list) else [model]
        num_ranks = parallel_state.get_pipeline_model_parallel_world_size()
        schedule = _schedule(num_ranks, len(chunks))
        order = _order(Shape(num_ranks, num_microbatches, len(chunks)))
        if forward_only:
            order = order.forwards()
        tally = _Tally(self._step, order, self._pp_rank, self._record, self._clock)
        start_ns = self._clock()
        with _recorded(get_model_config(chunks[0]), tally):
            data: list[Any] = schedule(
                model=model,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                **arguments,
            )
        end_ns = self._clock()
        self._record(PhaseRecord(start_ns, end_ns, self._step, Phase.SCHEDULE))
        peak_held = tally.peak_depth / len(chunks)
        self.last_step = StepSummary(start_ns, end_ns, tally.busy_ns, peak_held)
        self._step += 1
        return data

    def close(self) -> None:
        """Nothing to close: the transfers are those of torch's process group."""


def _schedule(num_ranks: int, num_chunks: int) -> Callable[..., list[Any]]:
    """Megatron's function, by its own name: what looks it up may have been replaced by ours."""
    if num_ranks == 1:
        return schedules.forward_backward_no_pipelining  # type: ignore[no-any-return]
    if num_chunks == 1:
        return schedules.forward_backward_pipelining_without_interleaving  # type: ignore[no-any-return]
    return schedules.forward_backward_pipelining_with_interleaving  # type: ignore[no-any-return]


def _order(shape: Shape) -> Order:
    """The order that Megatron's function for this shape runs its tasks in."""
    return ORDERS["1f1b" if shape.num_chunks == 1 else "interleaved"](shape)


class _Tally:
    """Counts the tasks of one step and records them as they end."""

    def __init__(
        self,
        step: int,
        order: Order,
        pp_rank: int,
        record: Callable[[Record], None],
        clock: Clock,
    ) -> None:
        self._step = step
        self._shape = order.shape
        self._tasks = order.rows[pp_rank]
        self._record = record
        self._clock = clock
        self._num_run = 0
        self._depth = 0
        self.busy_ns = 0
        self.peak_depth = 0

    def task(self, kind: Kind, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, recorded as a task of that kind."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            start_ns = self._clock()
            result = function(*args, **kwargs)
            self._ran(kind, start_ns, self._clock())
            return result

        return recorded

    def transfer(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, recorded as a wait for a blocking transfer."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            cause = Cause.TRANSFER
            if self._num_run == 0:
                cause = Cause.WARMUP
            elif self._num_run == len(self._tasks):
                cause = Cause.DRAIN
            return self.wait(cause, function)(*args, **kwargs)

        return recorded

    def wait(self, cause: Cause, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, recorded as a wait of that cause."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            start_ns = self._clock()
            result = function(*args, **kwargs)
            self._record(WaitRecord(start_ns, self._clock(), self._step, cause))
            return result

        return recorded

    def _ran(self, kind: Kind, start_ns: int, end_ns: int) -> None:
        task = self._tasks[self._num_run]
        assert task.kind is kind
        self._depth += 1 if kind is Kind.F else -1
        self.busy_ns += end_ns - start_ns
        self.peak_depth = max(self.peak_depth, self._depth)
        self._record(
            TaskRecord(
                start_ns,
                end_ns,
                self._step,
                kind,
                task.stage,
                self._shape.chunk_of(task.stage),
                task.microbatch,
                hint_position=self._num_run,
                # A fixed schedule looks at one task only, and skips none.
                ready=1,
                skipped=0,
                depth=self._depth,
                held=self._depth,
                ready_forwards=int(kind is Kind.F),
                ready_backwards=int(kind is Kind.B),
            )
        )
        self._num_run += 1


@contextmanager
def _recorded(config: Any, tally: _Tally) -> Iterator[None]:
    with ExitStack() as restored:
        _replace(restored, schedules, "forward_step", partial(tally.task, Kind.F))
        _replace(restored, schedules, "backward_step", partial(tally.task, Kind.B))
        # Every transfer of every schedule passes through this method, and nothing else does.
        _replace(restored, P2PCommunicator, "_communicate", tally.transfer)
        if config.finalize_model_grads_func is not None:
            _replace(
                restored,
                config,
                "finalize_model_grads_func",
                partial(tally.wait, Cause.GRADIENT_SYNC),
            )
        yield


def _replace(
    restored: ExitStack, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]
) -> None:
    original = getattr(owner, name)
    restored.callback(setattr, owner, name, original)
    setattr(owner, name, wrap(original))

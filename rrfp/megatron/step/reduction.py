"""When the data-parallel reduction of a step's gradients starts, chunk by chunk.

Replicas must start their reductions in one order, though each of them runs its tasks in its own.
The order is that of the chunks from the largest down, in which backwards end; a chunk's reduction
starts once its gradients are complete and the larger chunks' have started. Where replicas run their
backwards alike, Megatron's hooks may start it inside a chunk's last backward, bucket by bucket.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any


class Reduction:
    """Starts the reductions of one training step on this rank; Megatron's `no_sync_func` holds
    them back until then."""

    def __init__(
        self,
        models: Sequence[Any],
        config: Any,
        *,
        is_first_rank: bool,
        follows_hooks: bool,
        starts_early: bool,
    ) -> None:
        """`follows_hooks` says that replicas run their backwards alike, so that Megatron's hooks
        may start reductions; without `starts_early` all of them wait for `finish`. Every replica
        must choose the same."""
        self._models = models
        no_sync = config.no_sync_func or nullcontext
        self._no_sync: Sequence[Callable[[], AbstractContextManager[Any]]] = (
            no_sync if isinstance(no_sync, list) else [no_sync]
        )
        self._grad_sync = each(config.grad_sync_func, len(models))
        # As Megatron has it (schedules.py): a function of the user's goes before the hooks, but
        # for the first rank of a pipeline of one chunk a rank, whose backward ends last.
        self._follows_hooks = (
            follows_hooks
            and starts_early
            and (self._grad_sync is None or (is_first_rank and len(models) == 1))
        )
        self._starts_early = starts_early
        self._complete: set[int] = set()
        self._started: set[int] = set()
        self._next = len(models) - 1
        self._held = ExitStack()
        self._hold()

    def around_last_backward(self, chunk: int) -> AbstractContextManager[None]:
        """Run inside the backward that completes a chunk's gradients: Megatron's hooks may start
        the reduction there."""
        if not self._follows_hooks:
            return nullcontext()
        self._started.add(chunk)
        return self._released()

    def complete(self, chunk: int) -> None:
        """All gradients of the chunk are in."""
        self._complete.add(chunk)
        if self._starts_early:
            self._start_due()

    def finish(self) -> None:
        """Start what has not started, after the step's last task."""
        self._start_due()
        self._held.close()

    def abandon(self) -> None:
        """Hold nothing back any more, and start nothing."""
        self._held.close()

    def _start_due(self) -> None:
        while self._next in self._complete:
            if self._next not in self._started:
                self._start(self._next)
            self._next -= 1

    def _start(self, chunk: int) -> None:
        model = self._models[chunk]
        if self._grad_sync is not None:
            with self._released():
                self._grad_sync[chunk](model.parameters())
        elif _reduces_early(model):
            # As its hooks do; its own `start_grad_sync` would forget about the flag.
            for buckets in model.bucket_groups + model.expert_parallel_bucket_groups:
                buckets.start_grad_sync(force_all_reduce=model.force_all_reduce)

    def _hold(self) -> None:
        for no_sync in self._no_sync:
            self._held.enter_context(no_sync())

    @contextmanager
    def _released(self) -> Iterator[None]:
        self._held.close()
        try:
            yield
        finally:
            self._hold()


def each(function: Any, num_chunks: int) -> list[Any] | None:
    """A chunk's function for each chunk, of what Megatron takes bare or in a list."""
    if function is None or isinstance(function, list):
        return function
    return [function] * num_chunks


def _reduces_early(model: Any) -> bool:
    """Whether Megatron's finalisation expects a reduction that was started before it."""
    ddp_config = getattr(model, "ddp_config", None)
    return ddp_config is not None and ddp_config.overlap_grad_reduce

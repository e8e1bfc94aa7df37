"""When the data-parallel reduction of a step's gradients starts, chunk by chunk.

All replicas must start their reductions in the same order, though each runs its tasks in its own.
That order is from the largest chunk down, in which backwards end. A chunk's reduction starts once
its gradients are complete and the larger chunks' reductions have started. If replicas run their
backwards in the same order, Megatron's hooks may start it inside a chunk's last backward, bucket by
bucket.
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
        """`follows_hooks` says that replicas run their backwards in the same order, so that
        Megatron's hooks may start reductions. Without `starts_early` all reductions wait for
        `finish`. Every replica must choose the same."""
        self._models = models
        no_sync = config.no_sync_func or nullcontext
        self._no_sync: Sequence[Callable[[], AbstractContextManager[Any]]] = (
            no_sync if isinstance(no_sync, list) else [no_sync]
        )
        self._grad_sync = each(config.grad_sync_func, len(models))
        # As in Megatron's schedules.py: a user's function takes precedence over the hooks, except
        # on the first rank of a pipeline with one chunk per rank, whose backward ends last.
        has_hooks = self._grad_sync is None or (is_first_rank and len(models) == 1)
        self._follows_hooks = follows_hooks and starts_early and has_hooks
        if has_hooks and hasattr(models[0], "ddp_config"):
            # Where they are not followed, the buckets are started as they would start them.
            self._grad_sync = None
        self._starts_early = starts_early
        self._is_finalized = config.finalize_model_grads_func is not None
        self._complete: set[int] = set()
        self._started: set[int] = set()
        self._next = len(models) - 1
        self._held = ExitStack()
        self._hold()

    def around_last_backward(self, chunk: int) -> AbstractContextManager[None]:
        """Wrap the backward that completes a chunk's gradients: Megatron's hooks may start the
        reduction there."""
        if not self._follows_hooks:
            return nullcontext()
        self._started.add(chunk)
        return self._released()

    def complete(self, chunk: int) -> None:
        """All gradients of the chunk are complete."""
        self._complete.add(chunk)
        if self._starts_early:
            self._start_due()

    def finish(self) -> None:
        """Start all reductions that have not started, after the step's last task."""
        self._start_due()
        self._held.close()

    def abandon(self) -> None:
        """Stop holding reductions back, without starting any."""
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
            # As Megatron's hooks do; `start_grad_sync` itself would ignore the flag.
            for buckets in model.bucket_groups + model.expert_parallel_bucket_groups:
                if not (buckets.is_first_batch and self._is_left_to_megatron(model)):
                    buckets.start_grad_sync(force_all_reduce=model.force_all_reduce)

    def _is_left_to_megatron(self, model: Any) -> bool:
        """Whether Megatron's `finish_grad_sync` must start the reductions that it starts by itself:
        those of buckets for which no hook has counted gradients yet. It cannot see that one was
        started where that left no handle, as with several optimizer instances; and where the call
        finalizes nothing, the loop may add the gradients of further calls before it does."""
        return model.ddp_config.num_distributed_optimizer_instances > 1 or not self._is_finalized

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
    """The function for each chunk; Megatron takes it bare or in a list."""
    if function is None or isinstance(function, list):
        return function
    return [function] * num_chunks


def _reduces_early(model: Any) -> bool:
    """Whether Megatron's finalisation expects a reduction that was started before it."""
    ddp_config = getattr(model, "ddp_config", None)
    return ddp_config is not None and ddp_config.overlap_grad_reduce

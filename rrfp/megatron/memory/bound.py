"""The memory bound of a rank in bytes: predicted activation sizes and the budget of each step.

Before a step, `SizeModel` bounds the size of every microbatch on every chunk by the sizes measured
in earlier steps. A microbatch without a bound counts as all of the remaining budget, so that it
runs alone. In the first step no size is known, and microbatches run one at a time.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rrfp.errors import RrfpError
from rrfp.megatron.memory.activation_bytes import ActivationBytes
from rrfp.megatron.step_groups import device_for
from rrfp.planning.forecast import Bound, SizeModel
from rrfp.planning.item_costs import Features, with_group
from rrfp.runtime.protocols import PeerLostError
from rrfp.runtime.rendezvous import count_rank, num_ranks_counted
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.policy import Auto, Bytes

# The free memory of a device, for `--hold auto`. It is measured after a first step, when
# parameters, gradients and optimizer states exist.

_MARGIN = 0.1
"""The share of the device's memory left free for temporary tensors, waiting messages, and the
allocator's fragmentation."""

_MEMORY_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def activation_headroom(device: torch.device) -> int:
    """Return the bytes that activations may use on this device, measured between two steps: this
    rank's even share of the memory that is free above a margin of 10% of the device's. On a GPU,
    all ranks on it must have run `register_gpu_rank`, and the unused blocks of this rank's
    allocator are added. Raise RrfpError if no memory is left."""
    headroom = _gpu_headroom(device) if device.type == "cuda" else _host_headroom()
    if headroom <= 0:
        raise RrfpError(
            f"{device} has no memory left for activations after a margin of {_MARGIN:.0%}; use "
            "fewer layers a rank, or more ranks"
        )
    return headroom


def register_gpu_rank(device: torch.device) -> None:
    """Count this rank, once per job, among the ranks on its GPU, in the job's store. Do nothing on
    other devices.

    The GPUs that a rank sees do not show which ranks share them: srun may show each task only its
    own. Each rank registers one step before any rank reads the count, so that the step's messages
    and gradient sums separate the two.
    """
    if device.type == "cuda":
        count_rank(_gpu_counter(device))


def _gpu_counter(device: torch.device) -> str:
    """The name of the counter of ranks on a GPU. torchrun's restart after a failure starts a new
    counter. If it restarts because hosts have joined or left, ranks with new numbers count twice
    and get less than their share."""
    uuid = torch.cuda.get_device_properties(device).uuid
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"rrfp/ranks-of-gpu/{uuid}/{start}"


def _gpu_headroom(device: torch.device) -> int:
    """An even share of the GPU's free memory above the margin, plus the unused blocks of this
    rank's allocator. Also registers this rank, because the process groups and their store may be
    new."""
    register_gpu_rank(device)
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free - int(_MARGIN * total)) // num_ranks_counted(_gpu_counter(device)) + unused


def _host_headroom() -> int:
    """An even share, among `LOCAL_WORLD_SIZE` ranks (without it, one), of the free memory of the
    host, or of a control group with a lower limit, above the margin."""
    available, total = _meminfo()
    for limit_file, used_file in _MEMORY_CGROUPS:
        try:
            limit, used = (int(file.read_text()) for file in (limit_file, used_file))
        except (OSError, ValueError):  # no such control group, or no limit
            continue
        if limit < total:
            available, total = min(available, limit - used), limit
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return (available - int(_MARGIN * total)) // num_ranks


def _meminfo() -> tuple[int, int]:
    """Available and total memory of the host in bytes, from `/proc/meminfo`."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = 1024 * int(value.split()[0])
    return fields["MemAvailable"], fields["MemTotal"]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory plan of a step: the dispatcher's sizes and budget."""

    sizes: ActivationSizes | None = None
    """Expected bytes by chunk and microbatch."""
    budget: int | None = None
    """The budget in bytes; None: that of the policy."""
    bound: "MemoryBound | None" = None
    """The author of this plan, which learns from the step."""
    measures: bool = False
    """True if the step must be measured."""
    unknown_sizes: int = 0
    """The number of sizes that have no bound yet."""


_MEASURES_EVERY = 32
"""Steps between measurements. Measuring takes a few percent of a step, and sizes may change."""

_EXPERT_MARGIN = 0.3
"""Added to the bounds with expert parallelism, because the number of tokens from other replicas is
known only after routing. The largest measured excess was 0.28 (docs/memory.md)."""


class MemoryBound:
    """Plans the sizes and the budget of one rank's steps, equal on all ranks of a group."""

    def __init__(self, hold: Bytes | Auto, num_chunks: int, device: torch.device) -> None:
        self._models = [SizeModel() for _ in range(num_chunks)]
        self._device = device
        self._hold = hold
        self.budget: int | None = hold.num if isinstance(hold, Bytes) else None
        """The budget in bytes; None until `auto` has measured it."""
        if hold is Auto.AUTO:
            register_gpu_rank(device)
        self._features: Sequence[Features] = ()
        self._num_planned = 0
        self._waiting_gradients = 0
        """The peak bytes of gradients that waited for those of earlier microbatches."""

    def plan(
        self, features: Sequence[Features], groups: Sequence[Any], experts: Any = None
    ) -> StepMemory:
        """Plan a step whose microbatches have these features: a bound of each one's activation
        bytes on each chunk, and the budget. A microbatch without a bound gets all of the remaining
        budget. Before `auto` has measured a budget, one microbatch runs at a time. The budget
        leaves space for waiting gradients if one microbatch at a time still fits.

        The ranks of `groups`, which dispatch tasks together, call this together. They plan with the
        largest size and the smallest budget among them. If a rank cannot measure its budget, or has
        no memory left, it raises that error, and the others raise PeerLostError. If the
        expert-parallel group `experts` has several ranks, features get sums over it, bounds grow by
        30%, and every step is measured.
        """
        is_spread = experts is not None and experts.size() > 1
        if is_spread:
            features = _with_group(features, experts)
        self._features = features
        bounds = [[model.bound(each) for each in features] for model in self._models]
        is_known = all(bound is not None for row in bounds for bound in row)
        is_fitted = all(model.is_fitted for model in self._models)
        is_due = self._num_planned % _MEASURES_EVERY == 0
        self._num_planned += 1
        measures = is_spread or is_due or not (is_known and is_fitted)
        num_unknown = sum(row.count(None) for row in bounds)
        if is_spread:
            bounds = [[_with_expert_margin(bound) for bound in row] for row in bounds]
        failure: Exception | None = None
        is_first = self._hold is Auto.AUTO and self.budget is None
        if is_first and any(bound is not None for row in bounds for bound in row):
            try:
                self.budget = activation_headroom(self._device)
            except Exception as error:  # raised when all ranks of the groups know
                failure = error
        if self.budget is None:
            # Sizes of 1, so that one microbatch runs at a time.
            ones = [[1] * len(features) for _ in bounds]
            sizes, (_, budget) = _reduce_over(ones, ones, (0, len(bounds)), groups, failure)
            return StepMemory(sizes, budget, self, True, num_unknown)
        largest = [max((bound.kept for bound in row if bound), default=0) for row in bounds]
        unknown = [None in row for row in bounds]
        if any(unknown):
            # A microbatch without a bound runs alone, with all that is left.
            share = max(0, self.budget - sum(largest)) // sum(unknown)
            largest = [size + share * lacks for size, lacks in zip(largest, unknown, strict=True)]
        kept = [
            [most if bound is None else bound.kept for bound in row]
            for row, most in zip(bounds, largest, strict=True)
        ]
        pending = [
            [most if bound is None else bound.owed for bound in row]
            for row, most in zip(bounds, largest, strict=True)
        ]
        budgets = (self.budget - self._waiting_gradients, self.budget)
        sizes, (free, budget) = _reduce_over(kept, pending, budgets, groups)
        # Even if waiting gradients need more, one microbatch at a time must fit.
        budget = max(free, min(sizes.least_budget, budget))
        return StepMemory(sizes, budget, self, measures, num_unknown)

    def reserve_for_gradients(self, waiting_gradient_bytes: int) -> None:
        """Reserve memory in later steps for waiting gradients: the largest peak in bytes of all
        steps so far."""
        self._waiting_gradients = max(self._waiting_gradients, waiting_gradient_bytes)

    def learn(self, measured: Sequence[Sequence[ActivationBytes]]) -> None:
        """Fit the size models to the measured sizes of the planned step, by chunk and
        microbatch."""
        for model, row in zip(self._models, measured, strict=True):
            for features, found in zip(self._features, row, strict=True):
                model.take(features, found.until_b, found.until_w)


def _with_expert_margin(bound: Bound | None) -> Bound | None:
    """A bound raised by 30%; None for an unknown one."""
    if bound is None:
        return None
    return Bound(*(math.ceil(size * (1 + _EXPERT_MARGIN)) for size in bound))


def _with_group(features: Sequence[Features], group: Any) -> list[Features]:
    """The features of each microbatch, followed by the sums of all but the first over the ranks of
    a group, which call this together."""
    own = torch.tensor(features, dtype=torch.float64, device=device_for(group))
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    members = [[tuple(row) for row in each.tolist()] for each in found]
    return [with_group(each, others) for each, *others in zip(features, *members, strict=True)]


_NO_RANK = -1
"""In place of the number of a rank that failed."""


def _reduce_over(
    kept: list[list[int]],
    pending: list[list[int]],
    budgets: tuple[int, int],
    groups: Sequence[Any],
    failure: Exception | None = None,
) -> tuple[ActivationSizes, tuple[int, int]]:
    """The largest sizes and the smallest budgets over the ranks of these process groups, which call
    this together. Without a group of several ranks, this rank's own. A rank with a `failure` raises
    it after all have learned of it, and the others raise PeerLostError."""
    shared = [group for group in groups if group.size() > 1]
    if not shared:
        if failure is not None:
            raise failure
        return ActivationSizes(kept, pending), budgets
    num_microbatches = len(kept[0])
    failed = _NO_RANK if failure is None else dist.get_rank()
    numbers = failed, *(-budget for budget in budgets)
    table = torch.tensor([*([each] * num_microbatches for each in numbers), *kept, *pending])
    for group in shared:
        on_device = table.to(device_for(group))
        dist.all_reduce(on_device, dist.ReduceOp.MAX, group=group)
        table = on_device.cpu()
    if failure is not None:
        raise failure
    failing, free, budget, *found = table.tolist()
    if failing[0] != _NO_RANK:
        raise PeerLostError(
            f"rank {failing[0]} could not measure the memory that activations may use; its own "
            "error says why"
        )
    sizes = ActivationSizes(found[: len(kept)], found[len(kept) :])
    return sizes, (-free[0], -budget[0])

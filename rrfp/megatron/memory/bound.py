"""A rank's bound in bytes from step to step: the sizes to reckon with, and the budget.

Before a step, every microbatch's size on every chunk is bounded by what earlier steps kept there
(`SizeModel`). A size that nothing bounds yet takes all of the budget that the known ones leave, so
that such a microbatch runs alone. In the first step no size is known, and microbatches pass one by
one.
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
from rrfp.runtime.rendezvous import count_rank, num_ranks_counted
from rrfp.schedule.bounds import Sizes
from rrfp.schedule.knobs import Auto, Bytes

# What a device has left for activations, for `--hold auto`.
#
# Asked after a first step, when parameters, gradients and optimizer states are there.


_MARGIN = 0.1
"""The share of the device that is left free: for temporary tensors, messages that wait to be sent
or taken up, and what an allocator loses between its blocks."""

_MEMORY_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def activation_headroom(device: torch.device) -> int:
    """Return the bytes that activations may use on this device, measured between two steps.
    On a GPU, `register_gpu_rank` must run first. Raises RrfpError if no memory is left."""
    room = _room_on_gpu(device) if device.type == "cuda" else _room_on_host()
    if room <= 0:
        raise RrfpError(
            f"{device} has no memory left for activations after a margin of {_MARGIN:.0%}; use "
            "fewer layers a rank, or more ranks"
        )
    return room


def register_gpu_rank(device: torch.device) -> None:
    """Count this rank among those of its GPU; elsewhere than on a GPU, do nothing.

    How many GPUs a rank sees does not tell who else takes them: srun may show each of its tasks one
    of its own. Each rank does this a step before any asks for its room. By then its pipeline has
    passed messages to and fro, and replicas have added up gradients.
    """
    if device.type == "cuda":
        count_rank(_ranks_of(device))


def _ranks_of(device: torch.device) -> str:
    """The name under which the ranks of a GPU are counted, anew when torchrun starts them again
    after a failure. Where it does so because hosts have come or gone, ranks that got other numbers
    are counted twice, and take less than their share."""
    uuid = torch.cuda.get_device_properties(device).uuid
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"rrfp/ranks-of-gpu/{uuid}/{start}"


def _room_on_gpu(device: torch.device) -> int:
    """This rank's even share of what the ranks on its GPU have left, and its allocator's blocks."""
    register_gpu_rank(device)  # in case the process groups, and their store, were made anew since
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free - int(_MARGIN * total)) // num_ranks_counted(_ranks_of(device)) + unused


def _room_on_host() -> int:
    """This rank's even share of what the host, or its control group, has left."""
    available, total = _meminfo()
    for limit_file, used_file in _MEMORY_CGROUPS:
        try:
            limit, used = (int(file.read_text()) for file in (limit_file, used_file))
        except (OSError, ValueError):  # there is no such group, or it has no limit
            continue
        if limit < total:
            available, total = min(available, limit - used), limit
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return (available - int(_MARGIN * total)) // num_ranks


def _meminfo() -> tuple[int, int]:
    """Available and total memory of the host in bytes."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = 1024 * int(value.split()[0])
    return fields["MemAvailable"], fields["MemTotal"]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What a dispatcher is told of a step's memory."""

    sizes: Sizes | None = None
    """By chunk."""
    budget: int | None = None
    """In bytes, where it is not the policy's."""
    bound: "MemoryBound | None" = None
    """What made the plan, to learn from the step."""
    measures: bool = False
    """Whether it needs to learn from the step."""
    unknown_sizes: int = 0
    """How many of the sizes nothing bounds yet."""


_MEASURES_EVERY = 32
"""Steps: measuring a step takes some percent of it, and sizes may come to differ."""

_EXPERT_MARGIN = 0.3
"""How many tokens experts get from other replicas is known only once they are routed. The largest
size in our runs exceeded its bound by 0.28 (docs/memory.md)."""


class MemoryBound:
    """The sizes and the budget of one rank's steps; the ranks of a group have the same."""

    def __init__(self, hold: Bytes | Auto, num_chunks: int, device: torch.device) -> None:
        self._models = [SizeModel() for _ in range(num_chunks)]
        self._device = device
        self._hold = hold
        self.budget: int | None = hold.num if isinstance(hold, Bytes) else None
        """In bytes; None until `auto` has found it."""
        if hold is Auto.AUTO:
            register_gpu_rank(device)
        self._features: Sequence[Features] = ()
        self._num_planned = 0
        self._waiting_gradients = 0
        """The most bytes of a step's gradients that waited for those of earlier microbatches."""

    def plan(
        self, features: Sequence[Features], groups: Sequence[Any], experts: Any = None
    ) -> StepMemory:
        """The plan of a step whose microbatches have these features.

        The ranks of `groups`, which dispatch their tasks together, call this together; they reckon
        with the largest size of any of them, and the smallest budget. `experts` is the group over
        which experts are spread, if they are.
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
            bounds = [[_widened(bound) for bound in row] for row in bounds]
        is_first = self._hold is Auto.AUTO and self.budget is None
        if is_first and any(bound is not None for row in bounds for bound in row):
            self.budget = activation_headroom(self._device)
        if self.budget is None:
            # Sizes of 1: whatever they are, one microbatch at a time.
            ones = [[1] * len(features) for _ in bounds]
            sizes, (_, budget) = _agreed(ones, ones, (0, len(bounds)), groups)
            return StepMemory(sizes, budget, self, True, num_unknown)
        largest = [max((bound.kept for bound in row if bound), default=0) for row in bounds]
        unknown = [None in row for row in bounds]
        if any(unknown):
            # Alone, a microbatch without a bound may take what is left.
            share = max(0, self.budget - sum(largest)) // sum(unknown)
            largest = [size + share * lacks for size, lacks in zip(largest, unknown, strict=True)]
        kept = [
            [most if bound is None else bound.kept for bound in row]
            for row, most in zip(bounds, largest, strict=True)
        ]
        owed = [
            [most if bound is None else bound.owed for bound in row]
            for row, most in zip(bounds, largest, strict=True)
        ]
        budgets = (self.budget - self._waiting_gradients, self.budget)
        sizes, (free, budget) = _agreed(kept, owed, budgets, groups)
        # Where only one microbatch at a time is left, waiting gradients take what they take.
        budget = max(free, min(sizes.least_budget, budget))
        return StepMemory(sizes, budget, self, measures, num_unknown)

    def reserve_for_gradients(self, waiting_gradient_bytes: int) -> None:
        """Leave room in later steps for as many bytes of waiting gradients as a step has had."""
        self._waiting_gradients = max(self._waiting_gradients, waiting_gradient_bytes)

    def learn(self, kept: Sequence[Sequence[ActivationBytes]]) -> None:
        """Take in what the microbatches of the planned step kept, by chunk and microbatch."""
        for model, row in zip(self._models, kept, strict=True):
            for features, found in zip(self._features, row, strict=True):
                model.take(features, found.until_b, found.until_w)


def _widened(bound: Bound | None) -> Bound | None:
    if bound is None:
        return None
    return Bound(*(math.ceil(size * (1 + _EXPERT_MARGIN)) for size in bound))


def _with_group(features: Sequence[Features], group: Any) -> list[Features]:
    """The features with their sums over a group's ranks."""
    own = torch.tensor(features, dtype=torch.float64, device=device_for(group))
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    members = [[tuple(row) for row in each.tolist()] for each in found]
    return [with_group(each, others) for each, *others in zip(features, *members, strict=True)]


def _agreed(
    kept: list[list[int]], owed: list[list[int]], budgets: tuple[int, int], groups: Sequence[Any]
) -> tuple[Sizes, tuple[int, int]]:
    """The largest sizes and the smallest budgets in these process groups."""
    shared = [group for group in groups if group.size() > 1]
    if not shared:
        return Sizes(kept, owed), budgets
    num_microbatches = len(kept[0])
    table = torch.tensor([*([-budget] * num_microbatches for budget in budgets), *kept, *owed])
    for group in shared:
        on_device = table.to(device_for(group))
        dist.all_reduce(on_device, dist.ReduceOp.MAX, group=group)
        table = on_device.cpu()
    free, budget, *found = table.tolist()
    sizes = Sizes(found[: len(kept)], found[len(kept) :])
    return sizes, (-free[0], -budget[0])

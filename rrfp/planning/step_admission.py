"""Decides which items a replica's step has, and in which order they enter, before it begins, and
writes the decisions to the run's files.

The first rank of a replica looks at its items and decides, and the other ranks take over its
decision. Where costs are modeled, every rank computes the same order from them; only a plan is
still broadcast.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rrfp.errors import UsageError
from rrfp.inputs import resolve_admission, resolve_balancing
from rrfp.planning.collectives import (
    broadcast_decision,
    broadcast_order,
    broadcast_over_replicas,
    gather_weights,
)
from rrfp.planning.item_costs import Features, features_of, resolve_cost, resolve_features
from rrfp.planning.modeled_costs import ModeledSteps
from rrfp.planning.order_planner import OrderPlanner, StepItems
from rrfp.schedule.admission import (
    Admit,
    AdmitAcross,
    Assignment,
    ListedAssignments,
    ListedOrders,
    admission_order,
    balance_batch,
    check_replicas,
    equal_times,
    format_step,
)
from rrfp.trace.records import Record
from rrfp.trace.safe_files import ReportFile, open_whole

_MOST_FEATURES = 32


class AdmissionSettings(Protocol):
    """The settings of a step that decide on its items."""

    @property
    def admit(self) -> str: ...
    @property
    def admit_cost(self) -> str | Callable[[Any], Any] | None: ...
    @property
    def admit_across(self) -> str: ...
    @property
    def plan_ms(self) -> float | None: ...
    @property
    def hold_features(self) -> str | Callable[[Any], Any] | None: ...


class StepAdmission:
    """Decides on the items of one run's steps. All ranks of a replica call the same methods
    together; `assign` is called by all ranks of all replicas."""

    def __init__(
        self,
        settings: AdmissionSettings,
        num_microbatches: int | None = None,
        modeled: ModeledSteps | None = None,
    ) -> None:
        """Each line of an admission file must list `num_microbatches` (None: as many as its first
        line). With `modeled` steps, their costs decide. Raises UsageError for an unknown name, an
        invalid file, and a function that cannot be imported."""
        self._settings = settings
        self._modeled = modeled
        self._admission = resolve_admission(settings.admit, num_microbatches)
        self._across = resolve_balancing(settings.admit_across)
        self._cost = resolve_cost(settings.admit_cost)
        self._features = resolve_features(settings.hold_features)
        self.assignment: Assignment | None = None
        """The items of each replica in the step that began last, in the order in which they enter;
        None if nothing is balanced."""

    @property
    def plans(self) -> bool:
        """True with `--admit plan`: a planner searches for the order of each step."""
        return self._admission is Admit.PLAN

    @property
    def balances(self) -> bool:
        """True if `--admit-across` assigns the global batch to the replicas, by weights or by a
        file."""
        return self._across is not AdmitAcross.NONE

    @property
    def admits_given(self) -> bool:
        """True if every replica's items enter in the order of the data: `--admit given` without
        balancing."""
        return self._admission is Admit.GIVEN and not self.balances

    def planner(
        self, record: Callable[[Record], None], num_simulations: int | None = None
    ) -> OrderPlanner:
        """Make the `OrderPlanner` of one pipeline's steps. Its own `record` measures the records
        that it gets and passes them on to `record`. Without `admit_cost` it gets no cost, so that
        items that cannot be weighed cause a warning instead of an error."""
        return OrderPlanner(
            record,
            None if self._settings.admit_cost is None else self._cost,
            plan_ms=self._settings.plan_ms,
            num_simulations=num_simulations,
            features=self._features,
            modeled=self._modeled,
        )

    def order(
        self,
        step: int,
        items: StepItems,
        num_microbatches: int,
        groups: Any,
        replicas: Callable[[], Any],
        device: torch.device,
    ) -> Sequence[int]:
        """Return the order in which the items of a step enter; with `--admit plan`, the planner
        does this.

        Modeled costs give the same order on every rank, and `--admit given` is the order of the
        data. Otherwise the ranks of a replica call this together: its first rank makes the pyramid
        of its items' weights, or reads the order of the admission file, and broadcasts it. Raises
        as `broadcast_decision` does.

        `replicas` returns the process group of all replicas; it is called only for an admission
        file with orders for several replicas.
        """
        if self._modeled is not None:
            return self._modeled.order(step)
        if self._admission is Admit.GIVEN:
            return range(num_microbatches)

        def decide() -> Sequence[int]:
            found = items.items()  # Also without need: a missing iterator is reported first.
            replica = 0
            if isinstance(self._admission, ListedOrders) and self._admission.num_replicas > 1:
                check_replicas(self._admission, replicas().size())
                replica = replicas().rank()
            return admission_order(
                self._admission, step, num_microbatches, lambda: self._cost.weigh(found), replica
            )

        return broadcast_order(decide, num_microbatches, groups, device)

    def assign(
        self,
        step: int,
        items: Callable[[], Sequence[Any]],
        num_microbatches: int,
        groups: Any,
        replicas: Any,
        device: torch.device,
    ) -> Assignment:
        """Balance the global batch of a step over the replicas. Returns the numbers of each
        replica's items in the order in which they enter, and remembers them as `assignment`.
        Modeled steps give their assignment without communication.

        `items` returns this replica's own items; it is called on the first rank of each replica,
        unless a file lists the assignments. If a first rank cannot weigh its items it raises that
        error, and all others raise PeerLostError. Raises UsageError for a file with assignments to
        another number of replicas or microbatches, and if there is only one replica.
        """
        if self._modeled is not None:
            self.assignment = self._modeled.assignment(step)
            return self.assignment
        if replicas.size() == 1:
            raise UsageError(
                "admit_across balances microbatches over data-parallel replicas and there is 1; "
                "leave it out"
            )
        like = torch.empty(replicas.size(), num_microbatches, dtype=torch.int64)
        task = "balance the step's microbatches over the replicas"

        def weigh() -> Sequence[float]:
            is_listed = isinstance(self._across, ListedAssignments)
            return [0.0] * num_microbatches if is_listed else self._cost.weigh(items())

        def decide() -> torch.Tensor:
            weights = gather_weights(weigh, num_microbatches, replicas, device)
            return broadcast_over_replicas(
                lambda: torch.tensor(self._balanced(step, weights, groups.pp.size())),
                like,
                replicas,
                device,
                task,
            )

        found = broadcast_decision(decide, like, groups, device, task)
        self.assignment = found.tolist()
        assert self.assignment is not None
        return self.assignment

    def _balanced(self, step: int, weights: torch.Tensor, num_ranks: int) -> Assignment:
        """Return a step's assignment: the file's, or items balanced over the replicas by their
        weights (a row per replica), with each replica's items in admission order."""
        num_replicas, num_microbatches = weights.shape
        if isinstance(self._across, ListedAssignments):
            return self._across.of_step(step, num_replicas, num_microbatches)
        by_number = weights.flatten().tolist()

        def in_order(numbers: Sequence[int]) -> list[int]:
            own = [by_number[number] for number in numbers]
            order = admission_order(self._admission, step, len(numbers), lambda: own)
            return [numbers[index] for index in order]

        return [
            in_order(each)
            for each in balance_batch(equal_times(by_number, num_ranks), num_replicas)
        ]

    def features(
        self,
        items: Callable[[], Sequence[Any]],
        order: Sequence[int],
        groups: Any,
        device: torch.device,
    ) -> list[Features]:
        """Return the features of each microbatch, in admission order, on all ranks of the replica,
        which call this together. `items` returns the step's items in the order of the data, on the
        replica's first rank.

        That rank raises UsageError if an item has no features, or if they differ in their number of
        features or have more than 32; the others raise PeerLostError then.
        """

        def decide() -> torch.Tensor:
            rows = [features_of(item, self._features) for item in items()]
            if len({len(row) for row in rows}) > 1 or len(rows[0]) > _MOST_FEATURES:
                raise UsageError(
                    f"hold_features gives {len(rows[0]) - 1} numbers for the first microbatch; "
                    f"give as many for each, at most {_MOST_FEATURES - 1}"
                )
            table = torch.zeros(1 + len(rows), _MOST_FEATURES, dtype=torch.float64)
            table[0, 0] = len(rows[0])
            table[1:, : len(rows[0])] = torch.tensor(rows, dtype=torch.float64)
            return table

        like = torch.empty(1 + len(order), _MOST_FEATURES, dtype=torch.float64)
        table = broadcast_decision(decide, like, groups, device, "measure the step's microbatches")
        rows = table[1:, : int(table[0, 0])].tolist()
        return [tuple(rows[number]) for number in order]


# Files of a run with a line per step: `admission.csv` and `dealing.csv`. A line lists, for each
# replica, the numbers of its microbatches in the order in which they enter. `--admit` or
# `--admit-across` with such a file repeats the run.


Orders = Sequence[Sequence[int]]
"""By replica: the numbers of microbatches in the order in which they enter."""


class StepFile:
    """Writes a file with a line per step, on one rank."""

    def __init__(self, path: Path, given: Orders, first_step: int = 0) -> None:
        """Keep the lines of the steps before `first_step` and drop all others. Those without a line
        get `given`, the line of a step that enters as the data give it."""
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        # An interrupted write leaves half a line.
        complete = [line for line in lines if line.endswith("\n")][:first_step]
        complete += [format_step(given)] * (first_step - len(complete))
        with open_whole(path) as file:
            file.write("".join(complete).encode())
        self._file = ReportFile(path)

    def write(self, orders: Orders) -> None:
        """Append the line of the next step, which has ended. A full disk causes only a warning."""
        self._file.write(format_step(orders))

    def close(self) -> None:
        self._file.close()


def part_of(path: Path, replica: int) -> Path:
    """Return the path of one replica's file, such as `admission-0.csv`, until `join_parts` joins
    all."""
    return path.with_name(f"{path.stem}-{replica}{path.suffix}")


def join_parts(path: Path) -> None:
    """Join the files of all replicas into `path`, up to the last step that all of them have, and
    delete them. Does nothing without files."""
    parts: list[Path] = []
    while (part := part_of(path, len(parts))).exists():
        parts.append(part)
    if not parts:
        return
    lines = [part.read_text("utf-8").splitlines() for part in parts]
    with open_whole(path) as file:
        for orders in zip(*lines, strict=False):
            file.write(f"{'; '.join(orders)}\n".encode())
    for part in parts:
        part.unlink()

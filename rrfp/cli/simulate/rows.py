"""Converts the rows of `rrfp simulate` into settings of the simulator."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from rrfp.cli.simulate.row_options import LinkMode, RowOptions, prefix_row
from rrfp.errors import RrfpError, UsageError
from rrfp.inputs import admission_file, resolve_admission
from rrfp.planning.modeled_costs import BalancedCosts
from rrfp.planning.trials import Setting, check_fits
from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admission, AdmitAcross, check_replicas
from rrfp.schedule.named_hints import AutoHint
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.layer_costs import check_divided
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.jitter import parse_jitter
from rrfp.simulate.transfers import check_blocking_transfers

_MAX_FORWARDS = 2**22
"""The largest number of forwards: four times 1,024 stages and microbatches, which need 6 GB."""


def settings_of(rows: Sequence[RowOptions], *, recorded: bool) -> list[Setting]:
    """Make the simulator's setting of each row.

    Positions in the order of a hint that alternates are computed only for `recorded` steps, because
    for a million tasks they take as long as the step. Raises UsageError or RrfpError for the first
    invalid row, with its settings. Whether the costs of a single row fit is left to its
    simulation unless `recorded`.
    """
    sources = _Sources()
    settings = []
    for row in rows:
        try:
            setting = _setting(row, sources, needs_order=recorded)
            # A single row is checked by its own simulation, without drawing the costs twice.
            if recorded or len(rows) > 1:
                sources.check_fits(row, setting)
            settings.append(setting)
        except RrfpError as error:
            raise prefix_row(row.own, error) from None
    return settings


def with_limits(rows: Sequence[RowOptions], settings: Sequence[Setting]) -> list[RowOptions]:
    """Return copies of the rows with the limits of the policies in `settings`."""
    return [
        replace(row, policy=replace(row.policy, limit=setting.policy.limit))
        for row, setting in zip(rows, settings, strict=True)
    ]


class _Sources:
    """Reads each hint, costs and jitter once; rows that name the same share it."""

    def __init__(self) -> None:
        self._fitting: set[tuple[str, str, AdmitAcross, int, Admission, Shape]] = set()
        self.fitted = cache(fitted)
        self.costs = cache(resolve_costs)
        self.admission = cache(resolve_admission)
        self.balanced = cache(
            lambda text, num_replicas: BalancedCosts(self.costs(text), num_replicas)
        )
        self.jitter = cache(parse_jitter)
        self.check_blocking_transfers = cache(check_blocking_transfers)

    def costs_of(self, row: RowOptions) -> Costs:
        """Return the costs of a row, balanced over the replicas if requested. Raises UsageError for
        invalid costs, for costs of another --tp, and for balancing with one replica or with an
        admission file."""
        costs = self.costs(row.costs)
        check_divided(costs, row.costs, row.tp)
        if row.admit_across is AdmitAcross.NONE:
            return costs
        if row.dp == 1:
            raise UsageError(
                "--admit-across replicas balances over data-parallel replicas and there is 1; add "
                "--dp"
            )
        if admission_file(row.admit) is not None:
            raise UsageError(
                f"--admit {row.admit} lists microbatches as the data give them, and --admit-across "
                "replicas assigns a replica others; leave one of them out"
            )
        return self.balanced(row.costs, row.dp)

    def check_fits(self, row: RowOptions, setting: Setting) -> None:
        """Raise UsageError if the costs or the jitter do not fit the row's shape. Each combination
        is checked once."""
        key = row.costs, row.jitter, row.admit_across, row.dp, setting.admit, setting.shape
        if key not in self._fitting:
            check_fits(setting)
            self._fitting.add(key)


def _setting(row: RowOptions, sources: _Sources, *, needs_order: bool) -> Setting:
    """Make the simulator's setting of one row. Raises UsageError if its options exclude each other
    or do not fit, and for more than 2**22 forwards over all ranks. --hint auto keeps its hint,
    which the simulation chooses."""
    if row.links is LinkMode.BLOCKING and row.policy.dispatch is not Dispatch.FIXED:
        raise UsageError(
            "--links blocking has both ranks wait for a message, which only an order that binds "
            "can plan for; add --dispatch fixed or leave --links out"
        )
    shape = Shape(row.pp, row.microbatches, row.chunks, row.placement)
    num_forwards = row.num_processes * row.chunks * row.microbatches
    if num_forwards > _MAX_FORWARDS:
        raise UsageError(
            f"{row.num_processes} processes with --chunks {row.chunks} and --microbatches "
            f"{row.microbatches} run {num_forwards} forwards, more than the {_MAX_FORWARDS} that "
            "are simulated; choose smaller ones"
        )
    asked = row.policy
    policy, shape = sources.fitted(asked, shape, counts_places=needs_order)
    if isinstance(asked.hint, AutoHint):
        # The simulation of its steps chooses the hint.
        policy = asked.of_shape(shape)
    if row.links is LinkMode.BLOCKING:
        assert policy.order is not None
        sources.check_blocking_transfers(policy.order)
    admission = sources.admission(row.admit, row.microbatches)
    check_replicas(admission, row.dp)
    return Setting(
        shape=shape,
        policy=policy,
        costs=sources.costs_of(row),
        jitter=sources.jitter(row.jitter),
        admit=admission,
        blocking=row.links is LinkMode.BLOCKING,
        num_members=row.tp,
        num_replicas=row.dp,
    )

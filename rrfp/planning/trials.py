"""Trials: settings to compare, each simulated under the same seeds.

A seed stands for one step's data and jitter. Draws have keys that do not depend on the order in
which they are made, so under one seed every setting meets the same costs and jitter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rrfp.planning.candidates import (
    MakeWorld,
    MeasuredSteps,
    candidates_of,
    choose,
    fits,
    unbound_of,
)
from rrfp.planning.modeled_costs import BalancedCosts, forecast_step
from rrfp.planning.order_search import NUM_SIMULATIONS, plan_all
from rrfp.schedule.admission import Admission, Admit, ListedOrders
from rrfp.schedule.named_hints import BF, BFW, AutoHint
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Shape
from rrfp.simulate.conditions import Conditions, conditions, world_of
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.jitter import NO_JITTER, Jitter
from rrfp.simulate.memory_budgets import resolved
from rrfp.simulate.step import simulate_step
from rrfp.simulate.time_bounds import Floor, paper_bound_ns
from rrfp.trace.records import NS_PER_S, Recording

NUM_KNOWN = 8
"""Steps by which a hint is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that defines a row of a comparison."""

    shape: Shape
    """With the kinds of the policy's hint."""
    policy: Policy
    """With the hint `auto`, the policy is chosen by other steps."""
    unbound: Policy | None = None
    """The policy of steps that would exceed the hold under a policy that binds an order; None: such
    steps keep the binding policy."""
    costs: Costs
    jitter: Jitter = NO_JITTER
    admit: Admission = Admit.GIVEN
    num_plan_simulations: int = NUM_SIMULATIONS
    """Simulations of the search for each step's order, with `Admit.PLAN`."""
    blocking: bool = False
    """Transfers block the compute path, as in Megatron's own schedules."""
    num_members: int = 1
    """Ranks that run each pipeline rank's tasks together (tensor parallelism)."""
    num_replicas: int = 1
    """Pipelines that meet at the end of the step (data parallelism)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated step of a setting."""

    makespan_ns: int
    """From the start until the last replica ends, gradient reduction included."""
    floor_ns: int
    """The lower bound: no schedule is faster (`rrfp.simulate.time_bounds.floor`)."""
    load_ns: int
    """The work of the most loaded rank, plus the gradient reduction."""
    bound_ns: int | None
    """The paper's upper bound (`rrfp.simulate.time_bounds.paper_bound_ns`), where it applies."""
    bubble_fraction: float
    peak_held: tuple[int, ...]
    """The most activations held, by pipeline rank, in slots of one chunk and one microbatch."""
    peak_held_bytes: tuple[int, ...] | None
    """The most bytes held, by pipeline rank; None if the costs have no sizes."""
    policy: Policy
    """The policy of the step."""


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of a setting over all seeds. Ratios are ratios of means."""

    trials: tuple[Trial, ...]
    num_chunks: int

    @property
    def makespans_s(self) -> list[float]:
        return [trial.makespan_ns / NS_PER_S for trial in self.trials]

    @property
    def mean_s(self) -> float:
        """The mean time of a step over the seeds."""
        return fmean(self.makespans_s)

    @property
    def min_s(self) -> float:
        return min(self.makespans_s)

    @property
    def max_s(self) -> float:
        return max(self.makespans_s)

    @property
    def spread(self) -> float:
        """The difference between the slowest and the fastest step, as a share of the mean."""
        return (self.max_s - self.min_s) / self.mean_s

    @property
    def floor_s(self) -> float:
        """The mean of the lower bounds that no schedule can beat."""
        return fmean(trial.floor_ns / NS_PER_S for trial in self.trials)

    @property
    def load_s(self) -> float:
        """The mean of the work of the most loaded rank."""
        return fmean(trial.load_ns / NS_PER_S for trial in self.trials)

    @property
    def bound_s(self) -> float | None:
        """The mean of the paper's upper bound; None where it does not apply."""
        bounds_ns = [trial.bound_ns for trial in self.trials if trial.bound_ns is not None]
        return fmean(bound_ns / NS_PER_S for bound_ns in bounds_ns) if bounds_ns else None

    @property
    def ratio_to_floor(self) -> float:
        return self.mean_s / self.floor_s

    @property
    def ratio_to_load(self) -> float:
        return self.mean_s / self.load_s

    def ratio_to(self, other: "Row") -> float:
        """Return the ratio of this row's mean step time to that of another row."""
        return self.mean_s / other.mean_s

    @property
    def peak_held(self) -> tuple[float, ...]:
        """The most that each pipeline rank held under any seed, in microbatches of the whole
        rank."""
        by_rank = zip(*(trial.peak_held for trial in self.trials), strict=True)
        return tuple(max(slots) / self.num_chunks for slots in by_rank)

    @property
    def peak_held_bytes(self) -> tuple[int, ...] | None:
        """The most bytes that each pipeline rank held under any seed; None if the costs have no
        sizes."""
        peaks = [trial.peak_held_bytes for trial in self.trials]
        known = [each for each in peaks if each is not None]
        return tuple(map(max, zip(*known, strict=True))) if len(known) == len(peaks) else None

    @property
    def bubble_fraction(self) -> float:
        """The mean of the steps' bubble fractions."""
        return fmean(trial.bubble_fraction for trial in self.trials)


def run_settings(
    settings: Sequence[Setting],
    seeds: Sequence[int],
    *,
    recordings: Sequence[Recording] | None = None,
    finished: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Simulate a step of every setting under every seed. Returns a row per setting.

    Shares of 1F1B's peak, the hint `auto` and planned orders are resolved first. Each setting's
    recording, if given, gets a step per seed. `finished` is called after each trial, and after each
    plan (`num_plans`). Raises UsageError if costs do not fit a setting's shape, and RrfpError if a
    binding order deadlocks over its links.
    """
    trials: list[list[Trial]] = [[] for _ in settings]
    settings = [with_choice(with_budget(setting, seeds), seeds) for setting in settings]
    settings = _planned(settings, seeds, finished)
    for step, seed in enumerate(seeds):
        # Draws that settings share are made once, and dropped after their seed: they may be large.
        drawn: dict[object, _Drawn] = {}
        for number, setting in enumerate(settings):
            recording = None if recordings is None else recordings[number]
            trials[number].append(_run(setting, seed, drawn, recording, step))
            finished()
    return [
        Row(tuple(of_setting), setting.shape.num_chunks)
        for setting, of_setting in zip(settings, trials, strict=True)
    ]


def with_budget(setting: Setting, seeds: Sequence[int]) -> Setting:
    """Return the setting with a hold that is a multiple of 1F1B's peak converted to a number, for
    these seeds; any other setting unchanged. Raises UsageError for a hold in bytes that is too
    small for some step, or with costs without sizes."""
    steps = [(seed, replica) for seed in seeds for replica in range(setting.num_replicas)]
    policy, costs = setting.policy, setting.costs
    if isinstance(costs, BalancedCosts):
        # The same multiple must be the same memory with and without balancing.
        policy = resolved(policy, setting.shape, costs.given, steps)
    policy = resolved(policy, setting.shape, costs, steps)
    return setting if policy is setting.policy else replace(setting, policy=policy)


def with_choice(setting: Setting, seeds: Sequence[int], *, counts_places: bool = False) -> Setting:
    """Return the setting with a chosen policy in the place of the hint `auto`; any other setting
    unchanged.

    The choice is made by steps of other seeds than these, as a run learns from earlier steps. The
    hold, if any, must be a number. If it is in bytes and the chosen policy binds an order,
    `unbound` is set. With `counts_places` the chosen policy has an order, which recordings need.
    """
    asked = setting.policy
    if not isinstance(asked.hint, AutoHint):
        return setting
    candidates = candidates_of(asked, setting.shape)
    first = max(seeds) + 1
    draws = [
        [_draw(setting, seed, replica, step).conditions for replica in range(setting.num_replicas)]
        for step, seed in enumerate(range(first, first + NUM_KNOWN))
    ]

    def maker(drawn: Conditions) -> MakeWorld:
        return lambda policy: world_of(
            drawn, policy, setting.num_members, blocking=setting.blocking
        )

    budget = asked.hold_bytes
    steps = MeasuredSteps(
        [[maker(drawn) for drawn in replicas] for replicas in draws],
        () if budget is None else (budget,) * setting.shape.num_ranks,
    )
    choice = choose(candidates, steps.play, len(steps))
    assert choice is not None, "a policy that binds nothing always runs"
    chosen = choice.chosen.candidate
    policy, shape = fitted(chosen.policy, chosen.shape, counts_places=counts_places)
    unbound = None
    if policy.dispatch is Dispatch.FIXED and budget is not None:
        unbound = unbound_of(policy, asked)
    return replace(setting, policy=policy, shape=shape, unbound=unbound)


def num_plans(settings: Sequence[Setting], seeds: Sequence[int]) -> int:
    """Count the steps that are planned in trials of these settings: one for each seed and replica
    of those with `Admit.PLAN`."""
    plan = [setting.num_replicas for setting in settings if setting.admit is Admit.PLAN]
    return sum(plan) * len(seeds)


def _planned(
    settings: Sequence[Setting], seeds: Sequence[int], finished: Callable[[], None]
) -> list[Setting]:
    """Return the settings with planned orders in the place of `Admit.PLAN`, and the others
    unchanged. A plan knows the costs and the amount of jitter, but not the jitter itself.
    `finished` is called after each plan."""
    found = []
    for setting in settings:
        if setting.admit is Admit.PLAN:
            steps = [
                forecast_step(
                    setting.costs,
                    setting.jitter,
                    setting.policy,
                    setting.shape,
                    seed,
                    replica,
                    setting.num_members,
                    blocking=setting.blocking,
                )
                for seed in seeds
                for replica in range(setting.num_replicas)
            ]
            plans = plan_all(steps, setting.num_plan_simulations, finished)
            orders = tuple(plan.order for plan in plans)
            setting = replace(setting, admit=ListedOrders("plan", orders, setting.num_replicas))
        found.append(setting)
    return found


def check_fits(setting: Setting) -> None:
    """Raise UsageError if the costs or the jitter do not fit the shape, or if the setting's
    admission order cannot be made of these costs."""
    _draw(setting, seed=0, replica=0, step=0)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A replica's conditions under a seed, and their lower bound."""

    conditions: Conditions
    floor: Floor


def _draw(setting: Setting, seed: int, replica: int, step: int) -> _Drawn:
    """Draw a replica's conditions of a step, and compute their lower bound."""
    drawn = conditions(
        setting.costs, setting.jitter, setting.admit, setting.shape, seed, replica, step
    )
    return _Drawn(drawn, drawn.floor())


def _run(
    setting: Setting,
    seed: int,
    drawn: dict[object, _Drawn],
    recording: Recording | None,
    step: int,
) -> Trial:
    """Simulate a step of a setting in all replicas, into `recording` if it is given. Draws that
    settings share are made once, in `drawn`."""
    replicas = []
    for replica in range(setting.num_replicas):
        # Settings keep these two objects alive, so their ids stay unique.
        key = (id(setting.costs), id(setting.jitter), setting.admit, setting.shape, replica)
        if key not in drawn:
            drawn[key] = _draw(setting, seed, replica, step)
        replicas.append(drawn[key])
    met = [each.conditions for each in replicas]
    sync_ns = max(each.costs.gradient_sync_ns for each in met) if len(met) > 1 else 0
    policy = _policy_of(setting, met)
    done = simulate_step(
        setting.shape,
        policy,
        [world_of(each, policy, setting.num_members, blocking=setting.blocking) for each in met],
        gradient_sync_ns=sync_ns,
        recording=recording,
        step=step,
    )
    return Trial(
        done.makespan_ns,
        max(each.floor.ns for each in replicas) + sync_ns,
        max(each.floor.load_ns for each in replicas) + sync_ns,
        _bound_ns(setting, replicas, sync_ns),
        done.bubble_fraction,
        done.peak_held,
        None if met[0].costs.sizes is None else done.peak_held_bytes,
        policy,
    )


def _policy_of(setting: Setting, replicas: Sequence[Conditions]) -> Policy:
    """Return the policy of a step: `unbound` if the step would exceed the hold on a replica,
    otherwise the setting's own."""
    unbound, shape = setting.unbound, setting.shape
    if unbound is None or unbound.hold_bytes is None:
        return setting.policy
    budgets = (unbound.hold_bytes,) * shape.num_ranks
    sizes = [drawn.costs.sizes for drawn in replicas]
    is_within = all(each is None or fits(setting.policy, shape, each, budgets) for each in sizes)
    return setting.policy if is_within else unbound


def _bound_ns(setting: Setting, replicas: Sequence[_Drawn], sync_ns: int) -> int | None:
    """Return the paper's upper bound on the slowest replica, with the gradient reduction. None if
    it does not apply: it holds for `bf` and `bfw` with readiness-driven dispatch, one chunk per
    rank, no tensor parallelism, free links, no bounds, and no jitter that delays tasks."""
    shape, policy = setting.shape, setting.policy
    applies = (
        policy.hint in (BF, BFW)
        and policy.dispatch is Dispatch.READY
        and policy.hold is None
        and (policy.limit is None or policy.limit >= shape.num_microbatches)
        and shape.num_chunks == setting.num_members == 1
        and all(each.conditions.links.is_free for each in replicas)
        and not setting.jitter.delays_tasks
    )
    if not applies:
        return None
    return max(paper_bound_ns(shape, each.conditions.times) for each in replicas) + sync_ns

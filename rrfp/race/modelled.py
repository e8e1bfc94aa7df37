"""The model of each entry of a race: the floor and the load of its steps, and their simulated
times.

A turn and its model have the same costs and jitter. The simulator knows the tasks of peers
but not their order, so those have a floor and no simulated time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from rrfp.race.entries import Entry, append_object, read_objects
from rrfp.replay.cost_files import resolve_costs
from rrfp.schedule.admission import Admit
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.rehearsal import fitted
from rrfp.simulate.costs.flops import check_divided
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.costs.scaled import ScaledCosts
from rrfp.simulate.jitter import Jitter, parse_jitter
from rrfp.simulate.trial import Setting, check_fits, run_settings
from rrfp.trace.records import NS_PER_S


@dataclass(frozen=True, slots=True)
class Modelled:
    """An entry's modelled times by round, in seconds."""

    floor_s: tuple[float, ...]
    """The lower bound: no schedule is faster (`rrfp.simulate.bounds.floor`)."""
    load_s: tuple[float, ...]
    """The work of the most loaded rank."""
    simulated_s: tuple[float, ...] | None
    """The simulated times; None if the simulator does not know this order."""

    @property
    def times_s(self) -> tuple[float, ...]:
        """Roughly what the rounds take."""
        return self.floor_s if self.simulated_s is None else self.simulated_s


def model_entries(
    entries: Iterable[Entry], kept_in: Path, finished: Callable[[], None] = lambda: None
) -> dict[str, Modelled]:
    """The models of all entries, by name; `kept_in` caches them.

    `finished` is called once per entry.
    """
    found = _read(kept_in)
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        if entry.name in found:
            finished()
            continue
        settings = entry.settings
        # What these share is drawn only once.
        key = (
            settings.run.pace,
            settings.run.jitter,
            entry.time_factor,
            settings.run.seed,
            settings.num_steps,
        )
        groups.setdefault(key, []).append(entry)
    for group in groups.values():
        for entry, model in zip(group, _model(group), strict=True):
            append_object(kept_in, {"entry": entry.name, **asdict(model)})
            found[entry.name] = model
            finished()
    return found


def _read(path: Path) -> dict[str, Modelled]:
    names = {"entry", *(field.name for field in fields(Modelled))}
    return {
        values.pop("entry"): Modelled(**values)
        for values in read_objects(path)
        if values.keys() == names
    }


def _model(entries: Sequence[Entry]) -> list[Modelled]:
    """The models of entries that have the same conditions in every round."""
    costs = _costs(entries[0])
    jitter = parse_jitter(entries[0].settings.run.jitter)
    seed, steps = entries[0].settings.run.seed, entries[0].settings.num_steps
    rows = run_settings(
        [_setting(entry, costs, jitter) for entry in entries], range(seed, seed + steps)
    )
    return [
        Modelled(
            _seconds(trial.floor_ns for trial in row.trials),
            _seconds(trial.load_ns for trial in row.trials),
            None if entry.peer is not None else _seconds(trial.makespan_ns for trial in row.trials),
        )
        for entry, row in zip(entries, rows, strict=True)
    ]


def _seconds(times_ns: Iterable[int]) -> tuple[float, ...]:
    return tuple(time_ns / NS_PER_S for time_ns in times_ns)


def _costs(entry: Entry) -> Costs:
    assert entry.settings.run.pace is not None
    return ScaledCosts(resolve_costs(entry.settings.run.pace), entry.time_factor)


def check_model(entry: Entry) -> None:
    """Raise UsageError if an entry's costs or jitter do not fit its ranks."""
    settings = entry.settings
    setting = _setting(entry, _costs(entry), parse_jitter(settings.run.jitter))
    assert settings.run.pace is not None
    check_divided(resolve_costs(settings.run.pace), settings.run.pace, settings.layout.tp)
    check_fits(setting)


def _setting(entry: Entry, costs: Costs, jitter: Jitter) -> Setting:
    settings = entry.settings
    is_native = settings.policy.dispatch == Dispatch.MEGATRON
    policy = settings.effective_policy
    if is_native:
        # Megatron's own schedule binds as a fixed order does.
        policy = replace(policy, dispatch=Dispatch.FIXED)
    policy, shape = fitted(policy, settings.shape, counts_places=False)
    return Setting(
        shape=shape,
        policy=policy,
        costs=costs,
        jitter=jitter,
        admit=Admit(settings.policy.admit),
        blocking=is_native,
        num_members=settings.layout.tp,
    )

"""The lineup of a race: rows and entries, made from presets and the user's flags.

A row is a system in a case. Equal rows of one or several presets share an entry, which runs once.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from rrfp.errors import UsageError
from rrfp.inputs import sha256_of
from rrfp.race.entries import Entry
from rrfp.race.presets import PAPER_BOUND, Contest, Measure, Preset, Scale
from rrfp.race.systems import MEGATRON, PEERS, SYSTEMS, Project, System, peer_problem
from rrfp.replay.cost_sources import DRAWN, costs_file, resolve_costs, stable_costs_name
from rrfp.schedule.admission import Admit
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import PAPER_LIMIT, Dispatch, Hold, Policy, parse_hold
from rrfp.schedule.shape import Shape
from rrfp.simulate.conditions import weights_ns
from rrfp.simulate.costs.toml_files import PRESETS as COST_PRESETS
from rrfp.simulate.memory_budgets import resolved
from rrfp.trace.run_json import versions
from rrfp.train.settings import ModelKind, TrainSettings

_PRESET_MS = 20.0
"""Mean time of a rank's F, B and W in the simulator's profiles."""

_LAYERS_A_RANK = 2
"""Layers per rank: enough for two chunks."""
_HIDDEN, _HEADS, _SEQ_LENGTH = 32, 4, 16


@dataclass(frozen=True, slots=True)
class Case:
    """The conditions under which systems are compared."""

    profile: str
    """Costs and jitter, such as `language+lognormal:0.5`."""
    pp: int
    tp: int
    microbatches: int
    seed: int
    task_ms: float | None = None
    """Mean time of a rank's F, B and W; None for unscaled costs."""

    @property
    def costs(self) -> str:
        """The costs in `profile`: a preset, or a file, whose path may contain plus signs. It is the
        longest beginning up to a plus sign, or the whole, that names an existing file, or else the
        text before the first plus sign."""
        parts = self.profile.split("+")
        for count in range(len(parts), 1, -1):
            costs = "+".join(parts[:count])
            if os.path.exists(costs.removeprefix(DRAWN)):  # noqa: PTH110 - it takes any text
                return costs
        return parts[0]

    @property
    def jitter(self) -> str:
        """The jitter in `profile`, after its costs; `none` without any."""
        return self.profile[len(self.costs) + 1 :] or "none"

    @property
    def name(self) -> str:
        """The case in words: its profile, ranks, microbatches, seed and task time."""
        ranks = f"PP {self.pp}" + (f" x TP {self.tp}" if self.tp > 1 else "")
        task = "" if self.task_ms is None else f", {self.task_ms:g} ms a task"
        return f"{self.profile}, {ranks}, {self.microbatches} microbatches, seed {self.seed}{task}"

    @property
    def time_factor(self) -> float:
        """Factor between the task times of the race and those of the costs; 1 for unscaled
        costs."""
        return 1.0 if self.task_ms is None else self.task_ms / _PRESET_MS


@dataclass(frozen=True, slots=True)
class LineupRow:
    """A system in a case, as one row of a preset."""

    preset: str
    case: Case
    system: System
    limit: int | None
    hold: Hold | None
    """The hold as the user wrote it; a fraction of 1F1B's peak is not converted."""
    admit: Admit
    entry: str
    """Name of the entry that runs it."""
    megatron: str
    """Name of the entry of Megatron's 1F1B in the same case."""
    against: str | None
    """Name of the entry that the slowdown is relative to; None if the preset shows no slowdown."""

    @property
    def bound(self) -> str:
        """Memory bound for tables, such as `limit 4`; empty for systems that rrfp does not dispatch
        by readiness."""
        if not self.system.is_ours:
            return ""
        return f"limit {self.limit}" if self.hold is None else f"hold {self.hold}"


@dataclass(frozen=True, slots=True)
class RaceOptions:
    """The user's options besides presets and scale; None and empty keep the presets' values."""

    peers: tuple[Project, ...] = tuple(Project)
    """The projects whose schedules race; peers that cannot run here are skipped."""
    holds: tuple[str, ...] = ()
    admits: tuple[Admit, ...] = ()
    profiles: tuple[str, ...] = ()
    systems: tuple[System, ...] = ()
    steps: int | None = None
    task_ms: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Lineup:
    """The rows of all presets, and the entries behind them."""

    presets: tuple[Preset, ...]
    rows: tuple[LineupRow, ...]
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def races(self) -> dict[tuple[int, int], list[Entry]]:
        """The entries by launch: by (pipeline ranks, tensor-parallel ranks)."""
        found: dict[tuple[int, int], list[Entry]] = {}
        for entry in self.entries.values():
            found.setdefault((entry.settings.layout.pp, entry.settings.layout.tp), []).append(entry)
        return found

    def to_json(self) -> str:
        """Format the entries, the versions of the software and the number of cores. Equal lineups
        give equal texts if the costs files, the software and the machine are the same."""
        projects = {PEERS[entry.peer].project for entry in self.entries.values() if entry.peer}
        lineup = {
            "versions": versions(*sorted(projects - {Project.TORCH})),
            "cores": os.cpu_count(),
            "entries": [entry.to_json() for entry in self.entries.values()],
        }
        return json.dumps(lineup, indent=1)


def line_up(presets: Sequence[Preset], scale: Scale, asked: RaceOptions) -> Lineup:
    """Make the lineup of these presets. An entry that several presets share has the most steps that
    one of them asks for. Raises UsageError for options that cannot be raced, and if no system is
    left to compare with megatron-1f1b."""
    for bound in asked.holds:
        read_bound(bound)
    rows: list[LineupRow] = []
    entries: dict[str, Entry] = {}
    for preset in presets:
        for row, entry in _rows_of(preset, scale, asked):
            known = entries.get(entry.name)
            if known is None or known.settings.num_steps < entry.settings.num_steps:
                entries[entry.name] = entry
            if row not in rows:
                rows.append(row)
    for system in asked.systems:
        if all(row.system != system for row in rows):
            raise UsageError(
                f"--system {system.name} makes no row of these presets and flags; choose another "
                "--system"
            )
    if all(row.system == MEGATRON for row in rows):
        raise UsageError(
            "no system of these presets is left to compare with megatron-1f1b; choose another "
            "--system"
        )
    return Lineup(tuple(presets), tuple(rows), entries)


def _rows_of(preset: Preset, scale: Scale, asked: RaceOptions) -> Iterator[tuple[LineupRow, Entry]]:
    """Yield the rows of a preset, each with its entry. Raises UsageError for costs that do not fit
    a case."""
    for contest in preset.contests:
        steps = min(asked.steps or scale.steps, contest.most_steps or math.inf)
        for case in _cases(contest, scale, asked):
            varies = _microbatches_differ(case)
            pace, file = stable_costs_name(case.costs), costs_file(case.costs)
            sha256 = None if file is None else sha256_of(file)
            for system, limit, hold, admit in _combinations(contest, case, asked, varies):
                most = None if hold is None else _absolute_hold(hold, case, system, int(steps))
                settings = _settings(case, system, limit, most, admit, int(steps), pace)
                name = _name(case, system, limit, hold, admit)
                entry = Entry(name, settings, system.peer, case.time_factor, sha256)
                yield (
                    LineupRow(
                        preset.name,
                        case,
                        system,
                        limit,
                        hold,
                        admit,
                        name,
                        _name(case, MEGATRON, None, None, Admit.GIVEN),
                        _slowdown_baseline(preset, case, system, limit, hold, admit),
                    ),
                    entry,
                )


def _task_ms(case: Case, scale: Scale, asked: RaceOptions) -> float | None:
    """Return the mean task time of a case; None for costs from a file, which say it themselves.
    Raises UsageError for --task-ms with such costs."""
    if case.costs in COST_PRESETS:
        return asked.task_ms or scale.task_ms
    if asked.task_ms is not None:
        raise UsageError(
            f"--task-ms scales {', '.join(COST_PRESETS)}, and {case.costs} itself says how long "
            "tasks take; leave --task-ms out"
        )
    return None


def _cases(contest: Contest, scale: Scale, asked: RaceOptions) -> Iterator[Case]:
    """Yield the cases of a contest: each seed, size, profile and level of jitter. The user's seed
    and profiles replace the contest's."""
    if asked.seed is not None:
        seeds: tuple[int, ...] = (asked.seed,)
    else:
        seeds = contest.seeds or (TrainSettings().run.seed,)
    for seed in seeds:
        for pp, tp, microbatches in contest.sizes(scale):
            for profile in asked.profiles or contest.profiles:
                for level in contest.levels:
                    text = f"{profile}+{level}" if level else profile
                    case = Case(text, pp, tp, microbatches, seed)
                    yield replace(case, task_ms=_task_ms(case, scale, asked))


def _combinations(
    contest: Contest, case: Case, asked: RaceOptions, varies: bool
) -> Iterator[tuple[System, int | None, Hold | None, Admit]]:
    """Yield the systems that race in a case, each with the limits, holds and admission orders that
    it races under. Only systems that rrfp dispatches by readiness have any; others than the given
    order need microbatches that differ (`varies`). Systems that were not asked for, other than
    megatron-1f1b, or that cannot run are left out."""
    for name in contest.systems:
        system = SYSTEMS[name]
        # Megatron's 1F1B always runs, because all others are compared with it.
        is_asked = not asked.systems or system in asked.systems or system == MEGATRON
        if not is_asked or not _fits(system, case):
            continue
        if system.peer is not None and not _peer_races(system, case, asked):
            continue
        if not system.is_ours:
            yield system, None, None, Admit.GIVEN
            continue
        for admit in asked.admits or contest.admits:
            if admit is Admit.GIVEN or varies:
                for bound in asked.holds or contest.bounds:
                    limit, hold = read_bound(bound)
                    yield system, limit, hold, admit


def _fits(system: System, case: Case) -> bool:
    """Return whether a system can run in a case. On gloo, Megatron interleaves only over 3 or more
    ranks; peers run here without tensor parallelism."""
    if system.dispatch is Dispatch.MEGATRON and system.chunks > 1:
        return case.pp >= 3
    return system.dispatch is not None or case.tp == 1


def _peer_races(system: System, case: Case, asked: RaceOptions) -> bool:
    """Return whether a peer races: if its project is asked for, and it can run here or the user
    names it. A later check raises the reason why a named one cannot run."""
    assert system.peer is not None
    project = PEERS[system.peer].project
    if project not in asked.peers:
        return False
    can_run = project.is_installed and peer_problem(system.peer, case.pp, case.microbatches) is None
    return can_run or system in asked.systems


def _microbatches_differ(case: Case) -> bool:
    """Return whether the microbatches' times are known before the step and differ, so that the
    admission order matters.

    Raises UsageError for costs that do not fit the case.
    """
    shape = Shape(case.pp, case.microbatches)
    try:
        costs = resolve_costs(case.costs).step(shape, seed=case.seed, replica=0)
    except UsageError as error:
        raise cannot_race(case.name, error) from None
    return costs.is_known and len(set(weights_ns(costs.times))) > 1


def cannot_race(name: str, error: UsageError) -> UsageError:
    """Return the error, to be raised, for a case or an entry that cannot run, with the flags to
    change."""
    return UsageError(
        f"{name} cannot race: {error}; or choose others with --system, --profile or --scale"
    )


def read_bound(text: str) -> tuple[int | None, Hold | None]:
    """Parse `paper`, `limit 4`, `hold 8`, `hold 40GiB`, or `hold 1.5x` (of the largest peak, in
    bytes, that 1F1B has over the ranks and the rounds) into limit and hold. Raises UsageError for a
    text of another form."""
    if text == PAPER_BOUND:
        return PAPER_LIMIT, None
    kind, _, value = text.partition(" ")
    if kind == "limit" and re.fullmatch(r"[1-9]\d{0,5}", value, re.ASCII):
        return int(value), None
    if kind != "hold":
        raise UsageError(
            f"the memory bound is '{text:.40}'; write {PAPER_BOUND}, a limit such as 'limit 4', or "
            "a hold such as 'hold 8' or 'hold 40GiB'"
        )
    try:
        return None, parse_hold(value, "--hold", auto=False)
    except UsageError as error:
        raise UsageError(f"{error}, or {PAPER_BOUND} for its limit") from None


def _absolute_hold(hold: Hold, case: Case, system: System, steps: int) -> Hold:
    """Convert a hold that is a fraction of 1F1B's peak to a number, which is the same for all
    systems of a case; other holds are returned unchanged. Raises UsageError if a step needs more,
    or for bytes with costs without sizes."""
    shape = Shape(case.pp, case.microbatches, system.chunks, system.placement)
    rounds = [(case.seed + number, 0) for number in range(steps)]
    try:
        found = resolved(Policy(HINTS["bf"], hold=hold), shape, resolve_costs(case.costs), rounds)
    except UsageError as error:
        raise cannot_race(case.name, error) from None
    # Costs without sizes give a hold in microbatches, which may be fractional.
    most = found.hold
    assert most is not None
    return max(1, int(most)) if isinstance(most, Fraction) else most


def _slowdown_baseline(
    preset: Preset, case: Case, system: System, limit: int | None, hold: Hold | None, admit: Admit
) -> str | None:
    """Name of the entry that a slowdown is relative to: for jitter the same system at the first
    level, for hints `bf` under the same bound. None if the preset measures no slowdown, and with
    hints for a system that rrfp does not dispatch by readiness."""
    if preset.measure is not Measure.SLOWDOWN:
        return None
    levels = preset.contests[0].levels
    if len(levels) > 1:
        profile = re.sub(r"\+J\d$", f"+{levels[0]}", case.profile)
        return _name(replace(case, profile=profile), system, limit, hold, admit)
    if not system.is_ours:
        return None
    return _name(case, SYSTEMS["bf"], limit, hold, admit)


def _name(case: Case, system: System, limit: int | None, hold: Hold | None, admit: Admit) -> str:
    """Return the unique name of an entry: case, system, bound and admission order."""
    words = [case.name + ":", system.name]
    if limit is not None:
        words.append(f"limit {limit}")
    if hold is not None:
        words.append(f"hold {hold}")
    if admit is not Admit.GIVEN:
        words.append(admit)
    return " ".join(words)


def _settings(
    case: Case,
    system: System,
    limit: int | None,
    hold: Hold | None,
    admit: Admit,
    steps: int,
    pace: str,
) -> TrainSettings:
    """Make the training settings of an entry: a small MLP with two layers per rank, without trace,
    under the system's policy with these bounds."""
    policy = replace(system.policy, limit=limit, hold=hold)
    return TrainSettings(
        **policy.values(),
        model=ModelKind.MLP,
        pp=case.pp,
        tp=case.tp,
        chunks=system.chunks,
        placement=system.placement,
        microbatches=case.microbatches,
        seq_length=_SEQ_LENGTH,
        layers=_LAYERS_A_RANK * case.pp,
        hidden=_HIDDEN,
        heads=_HEADS,
        steps=steps,
        seed=case.seed,
        pace=pace,
        jitter=case.jitter,
        admit=admit,
        no_trace=True,
    )

"""Races without ranks, for tests: lineups, turns as they might have gone, and a launch that makes
them up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rrfp.errors import RrfpError
from rrfp.race.entries import Entry, Failure, RaceFiles, Turn, rounds
from rrfp.race.lineup import Lineup, RaceOptions, line_up
from rrfp.race.presets import PRESETS, SCALES
from rrfp.race.results import ResultRow, results
from rrfp.race.runner import ModeledTimes
from rrfp.race.systems import system_named
from rrfp.trace.run_dir import RunDir
from rrfp.train.settings import TrainSettings


def tiny_lineup(
    *names: str,
    systems: Sequence[str] = (),
    profiles: tuple[str, ...] = (),
    holds: tuple[str, ...] = ("hold 1x",),
    steps: int = 2,
    **others: Any,
) -> Lineup:
    scale = SCALES["tiny"]
    asked = RaceOptions(
        holds=holds,
        profiles=profiles,
        systems=tuple(system_named(name) for name in systems),
        steps=steps,
        **others,
    )
    return line_up([PRESETS[name] for name in names], scale, asked)


def turn(
    entry: str, number: int, seconds: float = 1.0, difference: float = 0.0, over: int = 0
) -> Turn:
    """A turn with this step time."""
    return Turn(
        entry,
        number,
        step_time_s=seconds,
        compute_s=seconds / 2,
        blocking_s=seconds / 4,
        coordination_s=0.0,
        peak_held=3.0,
        num_tasks=100,
        num_over=over,
        gradient_difference=difference if number == 0 else None,
        gradients_same=difference == 0 if number == 0 else None,
    )


@dataclass(slots=True)
class MadeUp:
    """A launch that takes every turn at once; `fails` says with what one does not end, and
    `turned` what one is like."""

    fails: Callable[[Entry, int], RrfpError | KeyboardInterrupt | None] = lambda _entry, _: None
    turned: Callable[[str, int], Turn] = turn
    launched: list[tuple[int, int]] = field(default_factory=list)
    """Pipeline and tensor-parallel ranks of every launch."""
    taken: list[tuple[str, int]] = field(default_factory=list)
    """Every turn that ended, in order."""

    def __call__(self, settings: TrainSettings, run: RunDir) -> None:
        self.launched.append((settings.layout.pp, settings.layout.tp))
        files = RaceFiles(run.path)
        for number, entry in rounds(files.read_entries(), files.ended()):
            files.write_current_turn(entry, number)
            error = self.fails(entry, number)
            if error is not None:
                raise error
            files.append(self.turned(entry.name, number))
            self.taken.append((entry.name, number))


def rows_of(lineup: Lineup, ended: list[Turn | Failure]) -> list[ResultRow]:
    """The rows of a lineup whose models are made up: floor 0.5 s, load 0.25 s, simulated 0.8 s."""
    models = dict.fromkeys(lineup.entries, ModeledTimes((0.5,) * 4, (0.25,) * 4, (0.8,) * 4))
    return results(lineup, ended, models)

"""What a check has found."""

from dataclasses import dataclass
from enum import StrEnum

from rrfp.train.setting_groups import DeviceKind


class State(StrEnum):
    """How good it is."""

    OK = "ok"
    SLOW = "slow"
    """It works, and a run will wait for it, or soon have too little of it."""
    ABSENT = "absent"
    FAILS = "fails"
    """It is here and does not work."""


NO_RUN: frozenset[DeviceKind] = frozenset()
CUDA_RUNS = frozenset({DeviceKind.CUDA})
EVERY_RUN = frozenset(DeviceKind)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried out."""

    name: str
    state: State
    figure: float | None
    """What was measured; None if nothing could be."""
    unit: str
    advice: str
    """What was found, and unless all is well what to do."""
    needed_by: frozenset[DeviceKind] = NO_RUN
    """The devices on which a run fails without it."""

    def ends_runs_on(self, device: DeviceKind) -> bool:
        """Whether a run on this device would fail."""
        return device in self.needed_by and self.state in (State.ABSENT, State.FAILS)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "state": self.state,
            "figure": self.figure,
            "unit": self.unit,
            "advice": self.advice,
        }


def absent(name: str, advice: str, needed_by: frozenset[DeviceKind] = NO_RUN) -> Check:
    """A thing that this machine lacks."""
    return Check(name, State.ABSENT, None, "", advice, needed_by)


def fails(name: str, advice: str, needed_by: frozenset[DeviceKind] = NO_RUN) -> Check:
    """A thing that does not work."""
    return Check(name, State.FAILS, None, "", advice, needed_by)

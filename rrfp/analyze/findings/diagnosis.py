"""What `rrfp analyze` says of a run: its findings, and the figures that they are shares of."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.chosen import step_time_ns
from rrfp.analyze.findings.blame import blame
from rrfp.analyze.findings.findings import Finding, findings
from rrfp.analyze.findings.replays import replays
from rrfp.analyze.findings.shares import headline
from rrfp.analyze.frames import Frames
from rrfp.trace.records import NS_PER_S


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of a run's steps."""

    headline: str
    step_time_s: float
    """The mean."""
    bubble_fraction: float
    findings: tuple[Finding, ...]
    why_not_replayed: str
    """In a sentence; empty when the run was replayed."""
    num_replayed: int
    """So many steps were, spread evenly over the run."""
    replay_error: float
    """How far a step's replay as it was is off, as a share of it; the median."""

    def as_note(self) -> dict[str, Any]:
        """What `of_note` reads."""
        return asdict(self)

    @classmethod
    def of_note(cls, note: dict[str, Any]) -> Self:
        """Raises TypeError, KeyError or ValueError for what `as_note` has not given."""
        found = [
            Finding(**{**each, "link": None if each["link"] is None else tuple(each["link"])})
            for each in note["findings"]
        ]
        return cls(**{**note, "findings": tuple(found)})

    def as_json(self, run: str, steps: str | None = None) -> dict[str, object]:
        """The object that `rrfp analyze --format json` prints for a run of that name: `findings`
        were replayed, `owned` were not."""
        told = [each.as_json(run, steps) for each in self.findings]
        return {
            "run": run,
            "step_time_s": self.step_time_s,
            "bubble_fraction": self.bubble_fraction,
            "findings": [each for each in told if each["saving_fraction"] is not None],
            "owned": [each for each in told if each["saving_fraction"] is None],
            "why_not_replayed": self.why_not_replayed or None,
            "steps_replayed": self.num_replayed,
            "replay_error_fraction": self.replay_error,
        }


def diagnose(frames: Frames) -> Diagnosis:
    """Find out what makes these steps long. Raises RrfpError when no step was finished by every
    rank, or one has no tasks."""
    found = blame(frames)
    replayed = replays(frames)
    return Diagnosis(
        headline(frames, found),
        step_time_ns(frames) / NS_PER_S,
        bubbles(frames).bubble_fraction,
        tuple(findings(frames, found, replayed.run, replayed.culprits)),
        replayed.why_not,
        replayed.num_steps,
        replayed.error,
    )

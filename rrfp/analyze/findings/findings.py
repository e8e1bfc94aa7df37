"""The findings of a run: what mending each would save, the largest saving first.

Where a run cannot be replayed, and for what no replay can mend (a rank that enters late, a group
whose members wait for each other), a finding says what it owns of a step instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

from rrfp.analyze.findings.blame import Blame, Fault
from rrfp.analyze.findings.culprit_words import CulpritWords
from rrfp.analyze.findings.shares import Share, shares
from rrfp.analyze.frames import Frames
from rrfp.replay.culprits import Culprit
from rrfp.replay.recorded import RecordedRun
from rrfp.schedule.causes import Cause

NUM_FINDINGS = 3

_NO_REPLAY_MENDS = (Cause.COORDINATION, Cause.GRADIENT_SYNC, Fault.ENTRY, Fault.OVERHEAD)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that makes a step long."""

    kind: str
    """A `CulpritKind`; of what was not replayed, a `Fault` or the cause of a wait."""
    title: str
    told: str
    advice: str
    saving: float | None
    """The share of a step that mending it saves in a replay; None if it was not replayed."""
    share: float | None
    """The share of a step that it owns, where it was not replayed."""
    pp_rank: int | None = None
    rank: int | None = None
    link: tuple[int, int] | None = None
    """The pipeline ranks that send and take its messages."""
    flags: str = ""
    """Those of `rrfp analyze whatif` that replay the run with it mended."""

    def command(self, run: str, steps: str | None = None) -> str:
        """A command that replays this run, or these steps of it, with it mended, or that shows
        where it is."""
        if not self.flags:
            return f"rrfp trace view {quote(run)}"
        chosen = "" if steps is None else f" --steps {steps}"
        return f"rrfp analyze whatif {quote(run)} {self.flags}{chosen}"

    def as_json(self, run: str, steps: str | None = None) -> dict[str, object]:
        """The object that `rrfp analyze --format json` prints."""
        return {
            "kind": self.kind,
            "pp_rank": self.pp_rank,
            "rank": self.rank,
            "link": None if self.link is None else list(self.link),
            "saving_fraction": self.saving,
            "share_fraction": self.share,
            "text": f"{self.title}. {self.told} {self.advice}",
            "command": self.command(run, steps),
        }


def findings(
    frames: Frames,
    found: Blame,
    run: RecordedRun | None = None,
    culprits: Sequence[Culprit] = (),
) -> list[Finding]:
    """The findings: those that a replay has mended, by their savings, among those that none can, by
    what they own. `run` is None if it could not be replayed."""
    owned = shares(frames, found)
    if run is None:
        return [_of_share(each) for each in owned]
    words = CulpritWords(frames, run)
    mended = [_of_culprit(words, each) for each in culprits]
    mended += [_of_share(each) for each in owned if each.what in _NO_REPLAY_MENDS]
    return sorted(mended, key=lambda each: -(each.saving or each.share or 0.0))


def _of_share(owned: Share) -> Finding:
    link = None if owned.sender is None else (owned.sender, owned.pp_rank)
    return Finding(
        str(owned.what),
        owned.title,
        owned.told,
        owned.advice,
        None,
        owned.share,
        owned.pp_rank,
        link=link,
    )


def _of_culprit(words: CulpritWords, culprit: Culprit) -> Finding:
    change = culprit.change
    return Finding(
        str(culprit.kind),
        *words.tell(culprit),
        culprit.saving,
        None,
        culprit.pp_rank,
        change.usual_rank,
        change.usual_link,
        change.flags,
    )

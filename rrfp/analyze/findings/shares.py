"""What owns most of a step, in words, and what to try.

`blame` says who owns how much. Here the owners are gathered by what they are, the largest first,
each with a sentence of figures and one of advice. What mending one would save, this cannot tell.
"""

from dataclasses import dataclass
from typing import Any

import polars as pl

from rrfp.analyze.chosen import step_time_ns
from rrfp.analyze.findings.blame import Blame, Fault, Owner
from rrfp.analyze.frames import Frames
from rrfp.analyze.misalignment import timed_messages
from rrfp.analyze.settings import run_settings
from rrfp.analyze.units import tell
from rrfp.schedule.causes import Cause
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.tasks import Kind
from rrfp.trace.steps import is_evaluation

_LEAST_SHARE = 0.01
"""Of a step; a smaller share is not worth a word."""


@dataclass(frozen=True, slots=True)
class Share:
    """One thing that makes a step long."""

    what: str
    """A `Fault`, or the cause of a wait."""
    pp_rank: int
    """Where most of it is; the receiver of a link."""
    sender: int | None
    """The sender of a link."""
    time_ns: float
    """The time that it owns of a step, in the mean."""
    share: float
    """The share that it owns of a step."""
    title: str
    told: str
    advice: str


def shares(frames: Frames, found: Blame) -> list[Share]:
    """What owns at least 1% of a step, the largest first."""
    gathered: dict[str, dict[Owner, float]] = {}
    for owner, time_ns in found.owners_ns.items():
        if owner.what != Fault.WORK:
            gathered.setdefault(owner.what, {})[owner] = time_ns
    told = _Teller(frames, found)
    largest = sorted(gathered.values(), key=lambda owners: -sum(owners.values()))
    return [
        told.share(owners)
        for owners in largest
        if sum(owners.values()) >= _LEAST_SHARE * found.step_ns
    ]


def headline(frames: Frames, found: Blame) -> str:
    """How long a step takes, and how much of it no schedule can save."""
    step_ns, busy = step_time_ns(frames), found.busiest_ns / found.step_ns
    return (
        f"{_a_step(frames)} takes {tell(step_ns)}, the mean of {frames.windows.height}. "
        f"{_Teller(frames, found).place(found.busiest).capitalize()}, the busiest, works "
        f"{tell(busy * step_ns)} of it ({busy:.0%}): no order of the "
        "same tasks makes a step shorter than that."
    )


def _a_step(frames: Frames) -> str:
    return "An evaluation" if all(map(is_evaluation, frames.steps)) else "A step"


class _Teller:
    """Puts the owners of one run into words."""

    def __init__(self, frames: Frames, found: Blame) -> None:
        self._frames = frames
        self._found = found
        work = frames.tasks.group_by("pp_rank", "stage").agg(
            (
                (pl.col("end_ns") - pl.col("start_ns")).sum()
                / (pl.col("rank").n_unique() * pl.col("step").n_unique())
            ).alias("ns")
        )
        self._work_ns: dict[int, float] = dict(work.select("stage", "ns").iter_rows())
        self._stages: dict[int, list[int]] = {
            pp_rank: sorted(stages)
            for pp_rank, stages in work.group_by("pp_rank").agg("stage").iter_rows()
        }
        kinds = set(frames.tasks["kind"].unique())
        self._can_split = Kind.B in kinds and Kind.W not in kinds
        self._is_bound = frames.waits["cause"].is_in([Cause.LIMIT, Cause.HOLD]).any()
        self._settings = run_settings(frames)

    def place(self, pp_rank: int) -> str:
        """A pipeline rank by its stages."""
        stages = self._stages.get(pp_rank, [])
        if len(stages) == 1:
            return f"stage {stages[0]}"
        return f"rank {pp_rank} (stages {', '.join(map(str, stages))})"

    def share(self, owners: dict[Owner, float]) -> Share:
        """The share that owners of one kind amount to."""
        most = max(owners, key=lambda owner: owners[owner])
        time_ns = sum(owners.values())
        share = time_ns / self._found.step_ns
        stage = max(
            self._stages.get(most.pp_rank, [most.pp_rank]), key=lambda s: self._work_ns.get(s, 0)
        )
        at = self.place(most.pp_rank)
        amount = f"{tell(time_ns)} ({share:.0%})"
        part = "" if len(owners) == 1 else f", {tell(owners[most])} of it there"
        title, told, advice = self._words(most, stage, at, amount, part)
        return Share(most.what, most.pp_rank, most.sender, time_ns, share, title, told, advice)

    def _words(
        self, owner: Owner, stage: int, at: str, amount: str, part: str
    ) -> tuple[str, str, str]:
        """Title, figures, and advice."""
        match owner.what:
            case Fault.SLOW_STAGE:
                return (
                    f"{at.capitalize()} has more work than the others",
                    f"Its tasks take {amount} of a step longer than those of the stage in the "
                    "middle, and the others wait for it.",
                    f"Give stage {stage} less of the model, or a faster device.",
                )
            case Fault.SERIES:
                return (
                    "Stages work one after another",
                    f"For {amount} of a step they wait in a row, each for the one before it: while "
                    "the pipeline fills, while it drains, and on the way there and back.",
                    self._advice_on_series(),
                )
            case Fault.UNEVEN:
                return self._on_uneven(at, amount, part)
            case Fault.LINK:
                sender = self.place(owner.sender if owner.sender is not None else owner.pp_rank)
                return (
                    f"Messages from {sender} to {at} take long",
                    f"{amount} of a step wait for messages that are under way{part}. One takes "
                    f"{self._message_time(owner)} there, the median.",
                    f"Look at the link from {sender} to {at}: its bandwidth, and what else it "
                    "carries. Forwards that run ahead (a higher --limit or --hold) hide latency.",
                )
            case Cause.LIMIT | Cause.HOLD:
                return self._on_bound(owner, at, amount, part)
            case Cause.ORDER:
                return (
                    f"The order keeps ready work of {at} waiting",
                    f"The order binds, and {amount} of a step pass while something else was ready"
                    f"{part}.",
                    "Try --dispatch ready: the same hint then ranks what is ready.",
                )
            case Cause.PATIENCE:
                return (
                    f"{at.capitalize()} waits for better tasks than it could run",
                    f"They were announced, and {amount} of a step pass before they come while "
                    f"something else was ready{part}.",
                    "See what 'rrfp analyze whatif RUN --patience 0' saves.",
                )
            case Cause.COORDINATION:
                return (
                    f"The members of {at} wait for each other",
                    f"Ranks that run tasks together were not ready for the same ones for {amount} "
                    f"of a step{part}.",
                    f"See 'rrfp analyze misalignment RUN --stage {stage}' for whose messages are "
                    "late."
                    + (
                        " Try --agreement intersection."
                        if self._settings.get("agreement") == "unanimous"
                        else ""
                    ),
                )
            case Cause.TRANSFER:
                return (
                    f"Blocking transfers hold up {at}",
                    f"Transfers that lie on the compute path own {amount} of a step{part}.",
                    "Try --dispatch ready: messages then pass beside the work.",
                )
            case Cause.GRADIENT_SYNC:
                return (
                    "Gradients are summed while nothing runs",
                    f"That takes {amount} of a step.",
                    "More --microbatches a step make it a smaller share.",
                )
            case Fault.ENTRY:
                return (
                    f"{at.capitalize()} enters the step late",
                    f"The others wait {amount} of a step for its entry into the schedule{part}.",
                    f"See what it does before, its data and optimizer phases, in 'rrfp trace "
                    f"view'; {at} loads more or shares its cores.",
                )
            case _:
                return (
                    f"Between its tasks {at} idles without a recorded reason",
                    f"The runtime's own work, and waiting for a core, own {amount} of a step"
                    f"{part}.",
                    "Where ranks share cores, give each its own, with OMP_NUM_THREADS to match. A "
                    "larger --micro-batch-size makes tasks longer, and the gaps a smaller share.",
                )

    def _advice_on_series(self) -> str:
        words = ["More --microbatches a step make it a smaller share."]
        if self._can_split:
            words.append("Try --hint bfw: weight gradients then fill the drain.")
        if all(len(stages) == 1 for stages in self._stages.values()):
            words.append("--chunks 2 shortens the way.")
        return " ".join(words)

    def _on_uneven(self, at: str, amount: str, part: str) -> tuple[str, str, str]:
        title = "Task times are uneven"
        told = (
            f"The tasks that a step waits for take {amount} of it longer than the mean of their "
            f"stage and kind, most of all those of {at}{part}."
        )
        if self._settings.get("dispatch", Dispatch.READY) != Dispatch.READY:
            return (
                title,
                told,
                "Try --dispatch ready: what is ready then runs in the meantime.",
            )
        if self._can_split:
            return (
                title,
                told,
                "Try --hint bfw: weight gradients then wait for such gaps.",
            )
        if self._is_bound:
            return (
                title,
                told,
                "A higher --limit or --hold keeps more work at hand for such gaps.",
            )
        return (
            title,
            told,
            "See what makes them long: their microbatches, or what else ran on the machine.",
        )

    def _on_bound(self, owner: Owner, at: str, amount: str, part: str) -> tuple[str, str, str]:
        flag = f"--{owner.what}"
        value = self._settings.get(owner.what)
        is_given = type(value) is int
        doubled = 2 * value if type(value) is int else None
        return (
            f"The {owner.what} withholds forwards of {at}",
            f"Forwards were there and {flag}{f' {value}' if is_given else ''} withheld them for "
            f"{amount} of a step{part}.",
            f"Try {flag} {doubled or 'with a higher number'}, if memory allows.",
        )

    def _message_time(self, owner: Owner) -> str:
        of_link = timed_messages(self._frames).filter(
            (pl.col("from_pp_rank") == owner.sender) & (pl.col("to_pp_rank") == owner.pp_rank)
        )
        middle_ns: Any = (of_link["came_ns"] - of_link["left_ns"]).median()
        return tell(middle_ns or 0)

"""The title, figures and advice of each bottleneck of a run."""

from statistics import median

import polars as pl

from rrfp.analyze.frames import Frames
from rrfp.analyze.memory import memory
from rrfp.analyze.misalignment import median_flight_ns
from rrfp.analyze.table import format_time
from rrfp.replay.bottlenecks import LEAST_SAVING, Bottleneck, BottleneckKind
from rrfp.replay.measured import even_split
from rrfp.replay.recorded import RecordedRun
from rrfp.schedule.policy import Auto, format_bytes
from rrfp.trace.records import step_name

_MOST_OF_THEM = 0.8
"""The share of steps in which a rank must be slow to count as slow throughout, or since a step."""


class Adviser:
    """Describes the bottlenecks of one run by title, figures and advice."""

    def __init__(self, frames: Frames, run: RecordedRun) -> None:
        self._frames = frames
        self._run = run

    def describe(self, culprit: Bottleneck) -> tuple[str, str, str]:
        """Return the title, the figures and the advice of a bottleneck, one text each."""
        return self._describe_place(culprit) or self._describe_whole(culprit)

    def _describe_place(self, culprit: Bottleneck) -> tuple[str, str, str] | None:
        """Describe a slow stage, rank, replica or link; None for other kinds of bottlenecks."""
        change = culprit.change
        longer = f"{culprit.excess:.0%} longer" if culprit.excess < 10 else "many times longer"
        match culprit.kind:
            case BottleneckKind.SLOW_STAGE:
                stage = change.median_stage
                assert stage is not None
                return (
                    f"Stage {stage} is slower than the median stage",
                    f"Its tasks take {longer} than the median stage's, and the other stages wait "
                    "for it.",
                    f"{self._advise_layers(culprit)} Or give stage {stage} a faster device.",
                )
            case BottleneckKind.SLOW_RANK:
                assert change.usual_rank is not None
                return (
                    f"Rank {change.usual_rank} is slower than its peers",
                    f"Its tasks{self._on_host(change.usual_rank)} take {longer} than those of "
                    f"{self._peers()}, "
                    f"{self._since(change.usual_rank, culprit.excess)}.",
                    "Check that device and its host: clocks, temperature, other processes.",
                )
            case BottleneckKind.REPLICA:
                return (
                    f"Replica {change.usual_replica} is slower than the others",
                    f"Its tasks take {longer}, and the others wait for it at the end of a step.",
                    "Check its hosts, and the cost of its share of the data: longer sequences take "
                    "longer.",
                )
            case BottleneckKind.SLOW_LINK:
                assert change.usual_link is not None
                sender, receiver = change.usual_link
                flight = format_time(median_flight_ns(self._frames, change.usual_link))
                return (
                    f"Messages from pipeline rank {sender} to {receiver} are slower than others",
                    f"The median message takes {flight} there, {longer} than on the median link.",
                    "Check that link: its bandwidth, and other traffic.",
                )
        return None

    def _describe_whole(self, culprit: Bottleneck) -> tuple[str, str, str]:
        """Describe a bottleneck of the whole run, such as its order or its bound.

        Kinds without a text of their own count as stages that fill and drain.
        """
        change = culprit.change
        match culprit.kind:
            case BottleneckKind.UNEVEN_MICROBATCHES:
                return (
                    "Some microbatches are heavier than others",
                    "All stages take longer for them, and light microbatches do not compensate.",
                    "Pack sequences to one length, or try --admit pyramid, which puts light "
                    f"microbatches first and last{_alone(culprit)}.",
                )
            case BottleneckKind.UNEVEN_LAYERS:
                return (
                    "The stages differ in work",
                    "No single stage stands out; a step waits for all that have more than average.",
                    self._advise_layers(culprit),
                )
            case BottleneckKind.LINKS:
                most = "" if self._run.knows_arrivals else "at most "
                flight = format_time(median_flight_ns(self._frames))
                return (
                    "Messages take long on all links",
                    f"The median message takes {most}{flight}, and all links are similar.",
                    "Check the transport, and other traffic in the network; larger microbatches "
                    "send fewer messages.",
                )
            case BottleneckKind.ORDER:
                return (
                    "The fixed order makes ranks wait although work is ready",
                    "Each rank waits for the next task of its order while another task is ready"
                    + (", and its transfers block it." if self._run.is_blocking else "."),
                    f"Try {change.flags}: each rank then takes any ready task."
                    + self._readiness_alone(culprit),
                )
            case BottleneckKind.BOUND:
                return (
                    f"The memory bound withholds forwards ({self._run.policy_description})",
                    "They were ready and would have filled gaps.",
                    "The device has no more memory: recompute activations, or use smaller "
                    f"microbatches. {change.flags} shows the saving of twice as much memory."
                    if self._run.policy.hold is Auto.AUTO
                    else f"Try {change.flags}, if memory allows.",
                )
            case BottleneckKind.MEMORY:
                found = memory(self._frames)
                worst, freest = found.worst, found.freest
                return (
                    "Ranks have unused memory, because their bound counts microbatches",
                    f"Rank {worst.rank} held {format_bytes(worst.peak_held_bytes)} at most; rank "
                    f"{freest.rank} could have held {format_bytes(freest.headroom_bytes)} more "
                    "before it held as much.",
                    f"Try {change.flags}: at that bound a step takes {culprit.saving:.0%} less, "
                    "without more memory on the rank that held most.",
                )
            case BottleneckKind.UNEVEN_TASKS:
                return (
                    "Task times vary",
                    "Tasks of one stage and kind take different times, and a step waits for the "
                    "long ones.",
                    "Check what makes them long: their data, or other processes on the machine.",
                )
            case _:
                return (
                    "Stages work one after another while the pipeline fills and drains",
                    f"{self._run.shape.num_microbatches} microbatches per step fill "
                    f"{self._run.shape.num_stages} stages.",
                    f"Try {change.flags}: weight gradients then fill the drain. More microbatches "
                    "per step make it a smaller share.",
                )

    def _advise_layers(self, culprit: Bottleneck) -> str:
        """Advise the split of the layers that evens out the stages, by their measured work.

        Assumes that the run had an even split. Without the number of layers the advice is general;
        if the even split is the best, it says so.
        """
        shape, layers = self._run.shape, self._run.layers
        if layers is None:
            return "Move layers from the stages that take longest to those that take least."
        by_stage = self._frames.tasks.group_by("stage").agg(
            (pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns")
        )
        work_ns = dict(by_stage.select("stage", "ns").iter_rows())
        split = [layers // shape.num_stages] * shape.num_stages
        even = even_split([work_ns[stage] for stage in range(shape.num_stages)], split, shape)
        if list(even) == split:
            return f"No other split of the {layers} layers is more even."
        counts = " ".join(map(str, even))
        return f"Split the {layers} layers as {counts} over the stages{_alone(culprit)}."

    @staticmethod
    def _readiness_alone(culprit: Bottleneck) -> str:
        """Return a sentence with the saving of the bottleneck's remedy alone; empty without a
        remedy."""
        if culprit.remedy is None:
            return ""
        return f" {culprit.remedy.flags} alone saves {culprit.remedy_saving:.0%}."

    def _peers(self) -> str:
        """Describe the ranks with which a slow rank is compared: in other replicas, or else in its
        group."""
        several = len(self._run.steps[0].replicas) > 1
        return (
            "the same stages in other replicas"
            if several
            else "the ranks that run the same tasks with it"
        )

    def _on_host(self, rank: int) -> str:
        """Return ` on HOST` for a rank; empty if its host is `unknown` or `simulated`."""
        host = self._frames.run.filter(pl.col("rank") == rank)["host"][0]
        return "" if host in ("unknown", "simulated") else f" on {host}"

    def _since(self, rank: int, excess: float) -> str:
        """State in which steps a rank exceeds its peers' median by half of its mean `excess`.

        All or most (80%) of them, since a step (if most later ones exceed, and at least two), or
        some steps. Peers run the same tasks: in other replicas, or without any in its group.
        """
        run = self._frames.run
        own = run.filter(pl.col("rank") == rank).row(0, named=True)
        several = len(self._run.steps[0].replicas) > 1
        peers = run.filter(
            (pl.col("pp_rank") == own["pp_rank"])
            & ((pl.col("tp_rank") == own["tp_rank"]) | (not several))
        )
        busy = (
            self._frames.tasks.filter(pl.col("rank").is_in(peers["rank"].implode()))
            .group_by("step", "rank")
            .agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns"))
            .sort("step")
        )
        excesses = [
            (step, _excess(dict(of_step.select("rank", "ns").iter_rows()), rank))
            for (step,), of_step in busy.group_by("step", maintain_order=True)
        ]
        slow = [of_step > excess / 2 for _, of_step in excesses]
        if sum(slow) >= _MOST_OF_THEM * len(slow):
            return "in all steps" if all(slow) else "in most steps"
        first = slow.index(True) if True in slow else len(slow)
        is_since = 1 < sum(slow[first:]) >= _MOST_OF_THEM * len(slow[first:])
        return f"since {step_name(excesses[first][0])}" if is_since else "in some steps"


def _alone(culprit: Bottleneck) -> str:
    """Return a clause with the saving of the remedy alone; empty below 1% of a step."""
    is_worth = culprit.remedy_saving >= LEAST_SAVING
    return f": that alone saves {culprit.remedy_saving:.0%}" if is_worth else ""


def _excess(busy_ns: dict[int, int], rank: int) -> float:
    """Return by which share a rank works longer than the median of its peers; negative if shorter.

    0 without peers.
    """
    others = [ns for each, ns in busy_ns.items() if each != rank]
    return busy_ns.get(rank, 0) / max(1, median(others)) - 1 if others else 0.0

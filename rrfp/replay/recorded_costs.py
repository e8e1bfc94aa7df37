"""A recorded run as costs: what its tasks and messages took, for simulations and paced runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median_low

from rrfp.errors import UsageError
from rrfp.replay.measured import measure
from rrfp.replay.measured_step import MeasuredStep
from rrfp.replay.recorded import read_run
from rrfp.replay.replayed import W_SHARE, task_times
from rrfp.schedule.shape import Shape
from rrfp.schedule.sizes import Rows, Sizes
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.model import Links, StepCosts
from rrfp.simulate.draws import uniforms
from rrfp.trace.records import Recording


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """The costs of a recorded run (`rrfp.simulate.costs.model.Costs`).

    Seed s takes step s of the run, modulo its number of steps, with each task's own time. With
    `drawn` each task's time is drawn from those of its stage and kind in all steps, for any number
    of microbatches. A message takes the run's median. The runtime's own time between tasks does not
    count.
    """

    shape: Shape
    steps: Sequence[MeasuredStep]
    left_out: tuple[int, ...] = ()
    """The run's steps that are not whole training steps."""
    without_sizes: tuple[int, ...] = ()
    """Those that are left out because the bytes of their microbatches were not known yet."""
    drawn: bool = False
    w_share: float = W_SHARE

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Raises UsageError when the shape is not that of the run."""
        self._check(shape)
        recorded = self.steps[seed % len(self.steps)]
        durations_ns: Mapping[Task, int]
        if self.drawn:
            durations_ns = self._draw(shape, seed, replica)
        else:
            durations_ns = recorded.replicas[replica % len(recorded.replicas)].durations_ns
        return StepCosts(
            task_times(durations_ns, shape, self.w_share),
            Links(latency_ns=self._message_ns()),
            gradient_sync_ns=recorded.tail_ns,
            is_known=not self.drawn,
            sizes=self._sizes(shape, seed, replica),
        )

    def _sizes(self, shape: Shape, seed: int, replica: int) -> Sizes | None:
        """What microbatches keep; drawn ones keep what one recorded microbatch did everywhere. None
        where the run does not tell."""
        if not self.drawn:
            recorded = self.steps[seed % len(self.steps)].replicas
            return recorded[replica % len(recorded)].sizes
        of_replicas = [each.sizes for step in self.steps for each in step.replicas]
        known = [sizes for sizes in of_replicas if sizes is not None]
        if len(known) < len(of_replicas):
            return None
        draws = uniforms(shape.num_microbatches, seed, replica, "recorded sizes").tolist()

        def rows(found: Sequence[Rows]) -> Rows:
            whole = [[*chain.from_iterable(of_stage)] for of_stage in zip(*found, strict=True)]
            return [[row[int(draw * len(row))] for draw in draws] for row in whole]

        owed = [sizes.owed for sizes in known if sizes.owed is not None]
        return Sizes(rows([sizes.kept for sizes in known]), rows(owed) if owed else None)

    def _check(self, shape: Shape) -> None:
        own = self.shape
        needed = (
            ("pp", shape.num_ranks, own.num_ranks),
            ("chunks", shape.num_chunks, own.num_chunks),
            ("placement", shape.placement, own.placement),
            ("microbatches", shape.num_microbatches, own.num_microbatches),
        )
        for name, value, recorded in needed[:3] if self.drawn else needed:
            if value != recorded:
                raise UsageError(
                    f"the costs are of a run with --{name} {recorded}, not {value}; choose "
                    f"--{name} {recorded} or other costs"
                )

    def _draw(self, shape: Shape, seed: int, replica: int) -> dict[Task, int]:
        recorded_ns: dict[tuple[int, Kind], list[int]] = {}
        for step in self.steps:
            for each in step.replicas:
                for task, time_ns in each.durations_ns.items():
                    recorded_ns.setdefault((task.stage, task.kind), []).append(time_ns)
        return {
            Task(stage, kind, microbatch): found_ns[int(draw * len(found_ns))]
            for (stage, kind), found_ns in sorted(recorded_ns.items())
            for microbatch, draw in enumerate(
                uniforms(shape.num_microbatches, seed, replica, "recorded", stage, kind).tolist()
            )
        }

    def _message_ns(self) -> int:
        found_ns = [
            time_ns
            for step in self.steps
            for replica in step.replicas
            for time_ns in replica.transfers_ns.values()
        ]
        return median_low(found_ns) if found_ns else 0


def costs_of(recording: Recording, *, drawn: bool = False) -> RecordedCosts:
    """The costs of a recorded run, from its whole steps that train.

    Raises RrfpError when it has no such step, or the trace does not tell what was run.
    """
    run = read_run(recording)
    return RecordedCosts(run.shape, measure(run), run.left_out, run.without_sizes, drawn)

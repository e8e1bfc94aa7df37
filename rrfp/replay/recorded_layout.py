"""Who ran what in a recorded run, together with whom, and the shape of its pipeline."""

from collections import defaultdict

from rrfp.errors import RrfpError
from rrfp.replay.recorded_policy import RecordedSettings
from rrfp.replay.step_records import StepRecords, split_by_step
from rrfp.schedule.shape import FORWARD_ONLY, SPLIT_BACKWARD, WHOLE_BACKWARD, Shape, shape_of_stages
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import RankRecords, Recording, TaskRecord
from rrfp.trace.rundir import expected_ranks
from rrfp.trace.steps import Window


class RecordedLayout:
    """The ranks of a run, arranged by replica, pipeline rank and group."""

    def __init__(self, recording: Recording) -> None:
        if not recording.ranks:
            raise RrfpError("the trace has no ranks; see 'rrfp trace check'")
        self._settings = RecordedSettings(recording)
        infos = [records.info for records in recording.ranks]
        missing = sorted(expected_ranks(recording.settings) - {info.rank for info in infos})
        if missing:
            raise RrfpError(
                f"the trace lacks ranks of its run, rank {missing[0]} for one, and only whole runs "
                "are replayed; see 'rrfp trace check'"
            )
        self._num_ranks = 1 + max(info.pp_rank for info in infos)
        self._stages = {info.pp_rank: info.stages for info in infos}
        hosts = [info.host for info in infos]
        self.shares_hosts = len(set(hosts)) < len(hosts)
        # Replicas that share experts run in step: as many neighbouring ones as experts span.
        num_coupled = self._settings.number("ep") or 1
        replicas: defaultdict[int, defaultdict[int, list[RankRecords]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for records in recording.ranks:
            info = records.info
            replicas[info.dp_rank // num_coupled][info.pp_rank].append(records)
        self._replicas = [
            [
                sorted(replica[pp_rank], key=lambda records: records.info.rank)
                for pp_rank in range(self._num_ranks)
            ]
            for _, replica in sorted(replicas.items())
        ]
        sizes = {len(members) for replica in self._replicas for members in replica}
        self.num_members = max(sizes)
        if len(sizes) > 1:
            raise RrfpError(
                f"the trace lacks ranks: some stages have {min(sizes)} and some "
                f"{max(sizes)} of them; see 'rrfp trace check'"
            )

    def steps(self, windows: dict[int, Window]) -> list[StepRecords]:
        """The records of the steps with these windows."""
        by_step = [
            [[split_by_step(records) for records in members] for members in replica]
            for replica in self._replicas
        ]
        return [
            StepRecords(
                step,
                window,
                tuple(
                    tuple(tuple(rank[step] for rank in members) for members in replica)
                    for replica in by_step
                ),
            )
            for step, window in windows.items()
        ]

    def shape(self, steps: list[StepRecords]) -> Shape:
        """The shape of the step with the most tasks, among those with a backward: traces of earlier
        versions number evaluations among the steps that train.

        Raises RrfpError when the tasks or the stages are of no shape.
        """
        tasks = max(
            ([task for members in each.replicas[0] for task in members[0].tasks] for each in steps),
            key=lambda tasks: (any(task.kind == Kind.B for task in tasks), len(tasks)),
        )
        if not tasks:
            raise RrfpError("no step of the trace has any task; see 'rrfp trace check'")
        if all(task.kind == Kind.F for task in tasks):
            raise RrfpError("the steps of the trace have no backward; choose a run that trains")
        return self._shape(tasks)

    def shape_of(self, step: StepRecords) -> Shape:
        """The shape of a step, which may be an evaluation. Raises RrfpError when the tasks or the
        stages are of no shape."""
        return self._shape([task for members in step.replicas[0] for task in members[0].tasks])

    def _shape(self, tasks: list[TaskRecord]) -> Shape:
        found = {task.kind for task in tasks}
        kinds = next(
            (k for k in (FORWARD_ONLY, WHOLE_BACKWARD, SPLIT_BACKWARD) if found == set(k)), None
        )
        if kinds is None:
            raise RrfpError(
                f"the steps of the trace have tasks of kind {', '.join(sorted(found))}, which are "
                "not F, F B or F B W; see 'rrfp trace check'"
            )
        num_microbatches = 1 + max(task.microbatch for task in tasks)
        shape = shape_of_stages(self._stages, num_microbatches, kinds)
        if shape is None:
            raise RrfpError(
                f"the stages of pipeline rank 0 are {', '.join(map(str, self._stages[0]))}: the "
                "chunks of the trace lie neither in a loop nor in a V"
            )
        return shape

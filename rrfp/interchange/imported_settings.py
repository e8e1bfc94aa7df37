"""The description of an imported run, in the form of our own `run.json`."""

from rrfp.interchange.imported_order import AS_RECORDED, order_name
from rrfp.interchange.run_spans import RunSpans
from rrfp.interchange.spans import Source
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Shape, shape_of_stages
from rrfp.schedule.tasks import Kind
from rrfp.trace.records import RankRecords
from rrfp.trace.run_policy import POLICY, unbound_policy


def settings_of(run: RunSpans, ranks: list[RankRecords], source: Source) -> dict[str, object]:
    """What `run.json` holds of an imported run."""
    shape = _shape(run)
    # What no dispatcher steered is replayed as an order that binds; without stimuli with transfers
    # that block, as those of Megatron's own schedules.
    dispatch = Dispatch.FIXED if any(rank.stimuli for rank in ranks) else Dispatch.MEGATRON
    hint = AS_RECORDED if shape is None else order_name(shape, ranks)
    return {
        "settings": {
            "dispatch": str(dispatch),
            "hint": hint,
            "device": source.device,
            "pp": 1 + max(rank.info.pp_rank for rank in ranks),
            "chunks": len(ranks[0].info.stages),
        },
        POLICY: unbound_policy(hint, dispatch),
        "imported": {
            "source": source.name,
            "files": source.num_files,
            "tells_waits": all(rank.tells_waits for rank in run.ranks),
            "transfers_block": source.transfers_block,
        },
        **({} if source.world_size is None else {"world": source.world_size}),
        "ranks": [
            {
                "stages": list(rank.info.stages),
                **{
                    name: getattr(rank.info, name)
                    for name in ("rank", "pp_rank", "tp_rank", "dp_rank", "host", "pid")
                },
            }
            for rank in ranks
        ],
    }


def _shape(run: RunSpans) -> Shape | None:
    """The shape of the run's pipeline; None if its stages lie neither in a loop nor in a V."""
    stages = {rank.info.pp_rank: rank.info.stages for rank in run.ranks}
    tasks = [task for rank in run.ranks for task in rank.tasks]
    splits = any(task.kind is Kind.W for task in tasks)
    # Evaluation has no backwards, and may have more microbatches.
    last = max((task.microbatch for task in tasks if task.kind is Kind.B), default=0)
    return shape_of_stages(stages, 1 + last, SPLIT_BACKWARD if splits else WHOLE_BACKWARD)

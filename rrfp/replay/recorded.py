"""What a recording tells of its run: the pipeline's shape, what steered it, and who ran together.

The shape is that of the records themselves (`recorded_layout`); what steered the run stands in its
description (`recorded_policy`).
"""

from dataclasses import dataclass

from rrfp.errors import RrfpError, UsageError
from rrfp.replay.memory.kept import knows_sizes, sizes_of_replica
from rrfp.replay.recorded_layout import RecordedLayout
from rrfp.replay.recorded_policy import RecordedSettings, policy_of
from rrfp.replay.step_records import StepRecords
from rrfp.schedule.hold import Bytes, Hold, counts_microbatches, told_bytes
from rrfp.schedule.policy import PAPER_LIMIT, Dispatch, Policy, usual_limit
from rrfp.schedule.shape import Shape
from rrfp.simulate.budgets import by_rank, widest_of_1f1b
from rrfp.trace.records import Recording
from rrfp.trace.sessions import description_of_steps, last_policy_begins
from rrfp.trace.steps import is_evaluation, step_windows


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run whose steps can be replayed."""

    shape: Shape
    policy: Policy
    hint_name: str
    is_blocking: bool
    """Its transfers lay on the compute path, like Megatron's own."""
    is_imported: bool
    """Its messages are not recorded: they follow from its tasks and waits."""
    may_share_cores: bool
    """Several ranks computed on one host's CPU; traces do not tell how many cores it has."""
    num_members: int
    steps: tuple[StepRecords, ...]
    """The steps that every rank finished and that have all tasks of the shape."""
    left_out: tuple[int, ...]
    """The other steps asked for; not those of `without_sizes`."""
    without_sizes: tuple[int, ...] = ()
    """Whole steps that are left out because the bytes of their microbatches were not known yet."""
    layers: int | None = None
    """Of the whole model, where the stages share them evenly; None where the run does not tell."""

    @property
    def tells_arrivals(self) -> bool:
        """Whether it is known when messages came. Of an imported run whose transfers do not block
        it is only known when each left, and when it was taken up."""
        return self.is_blocking or not self.is_imported

    @property
    def told(self) -> str:
        """Its policy in a few words: `bf ready, limit 32`."""
        policy = self.policy
        words = [f"{self.hint_name} {policy.dispatch}"]
        if self.is_blocking:
            words.append("blocking transfers")
        if policy.limit is not None:
            words.append(f"limit {policy.limit}")
        if policy.hold is not None:
            words.append(f"hold {told_hold(policy.hold)}")
        return ", ".join(words)

    def peak_of_1f1b(self) -> int | None:
        """The largest sum of bytes, over ranks and steps, that 1F1B would have kept at once with
        the chunks of each rank as one; None where the run does not tell its sizes."""
        sizes = [
            sizes_of_replica(self.shape, replica)
            for step in self.steps
            for replica in step.replicas
        ]
        known = [by_rank(each, self.shape) for each in sizes if each is not None]
        return max(map(widest_of_1f1b, known), default=None)

    def place_of(self, rank: int) -> tuple[int, int]:
        """The replica and the pipeline rank of a rank. Raises UsageError if the run has no such
        rank."""
        for number, replica in enumerate(self.steps[0].replicas):
            for pp_rank, members in enumerate(replica):
                if rank in (member.info.rank for member in members):
                    return number, pp_rank
        raise UsageError(f"the run has no rank {rank}; see 'rrfp trace check' for those it has")

    def bounds_under(self, dispatch: Dispatch) -> tuple[int | None, Hold | None]:
        """The limit and the hold that the run keeps under another dispatch. The usual limit, or the
        paper's, belongs to `ready` dispatch: an order that binds is not held to it."""
        own = self.policy
        if own.hold is not None:
            return None, own.hold
        if dispatch is own.dispatch:
            return own.limit, None
        if dispatch is Dispatch.FIXED:
            is_usual = own.limit in (PAPER_LIMIT, usual_limit(own.hint, self.shape))
            return None if is_usual else own.limit, None
        return own.limit, None


def told_hold(hold: Hold) -> str:
    """A hold in words; one in bytes is rounded."""
    return told_bytes(hold.num) if isinstance(hold, Bytes) else str(hold)


def read_run(recording: Recording, steps: range | None = None) -> RecordedRun:
    """Find out what a recording's run was. `steps` chooses among its steps that train; None takes
    all, or those under the policy that was chosen last. Evaluations are not replayed, as they have
    no backward.

    Raises RrfpError when the trace does not tell, or no step is whole or has a backward, and
    UsageError when the run has none of the steps asked for.
    """
    layout = RecordedLayout(recording)
    windows = step_windows(recording)
    chosen_in = last_policy_begins(recording.settings)
    begun = {task.step for records in recording.ranks for task in records.tasks}
    found = begun | windows.keys()
    if found and all(map(is_evaluation, found)):
        raise RrfpError("the trace has evaluations only, and only steps that train are replayed")
    begun = {step for step in begun if not is_evaluation(step)}
    if steps is None and any(step >= chosen_in for step in windows):
        # Under the hint `auto` the first steps have another policy.
        found = {step for step in found if is_evaluation(step) or step >= chosen_in}
    asked = sorted(
        step for step in found if not is_evaluation(step) and (steps is None or step in steps)
    )
    if not asked:
        if steps is None or not begun:
            raise RrfpError("the trace has no steps; the run ended before its first one did")
        raise UsageError(
            "the trace has none of the steps asked for; it has those from "
            f"{min(begun)} to {max(begun)}"
        )
    finished = [step for step in asked if step in windows]
    if not finished:
        raise RrfpError(f"none of the steps {asked[0]}:{asked[-1] + 1} was finished by every rank")
    # Of a run that was resumed, only steps under one policy can be replayed together.
    recording = Recording(description_of_steps(recording.settings, finished), recording.ranks)
    by_step = layout.steps({step: windows[step] for step in finished})
    shape = layout.shape(by_step)
    whole = [step for step in by_step if step.is_whole(shape)]
    if not whole:
        raise RrfpError("no step of the trace has all of its tasks; see 'rrfp trace check'")
    settings = RecordedSettings(recording)
    policy = policy_of(settings, shape, whole[0])
    without_sizes: tuple[int, ...] = ()
    if not counts_microbatches(policy.hold):
        told = [step for step in whole if all(knows_sizes(each) for each in step.replicas)]
        # Their microbatches ran one by one, as later ones do not.
        if told:
            without_sizes = tuple(step.step for step in whole if step not in told)
            whole = told
    kept = {each.step for each in whole}.union(without_sizes)
    return RecordedRun(
        shape,
        policy,
        settings.text("hint"),
        settings.is_blocking,
        "imported" in recording.settings,
        settings.computes_on_cpu and layout.shares_hosts,
        layout.num_members,
        tuple(whole),
        tuple(step for step in asked if step not in kept),
        without_sizes,
        settings.even_layers(shape),
    )

"""One pipeline's step whose messages travel while ranks compute.

They travel one at a time on a directed link, in the order in which they were sent.
`rrfp.simulate.blocking` models transfers that block.

The members of a group (tensor parallelism) run each task together, because it contains collectives;
only their messages arrive at different times. The leader's dispatcher counts them all. It decides
on the next task while one runs, just early enough for the round of agreement to be over when that
task ends. If nothing was ready by then, the group waits for a decision and its round.

Where a device works beside its host and launches take time, every rank decides on its next task
while one runs, as late as it dares, and again with every arrival from then on. At most one task
waits behind the running one.
"""

from collections import defaultdict

from rrfp.schedule.causes import Cause
from rrfp.schedule.instructions import Waited
from rrfp.schedule.lanes import KINDS, NO_RANK, NOTHING
from rrfp.schedule.patience.announcements import NEVER
from rrfp.schedule.patience.just_in_time import JustInTime
from rrfp.schedule.policy import Policy
from rrfp.schedule.shape import Shape
from rrfp.simulate.announcing import Announcing
from rrfp.simulate.engine import (
    ANNOUNCED,
    CAME,
    DECIDES_AHEAD,
    ENDED,
    IDLE,
    LOSES_PATIENCE,
    Log,
    PipelineRun,
    Step,
)
from rrfp.simulate.world import World


class TravellingStep(Step):
    """A step whose messages travel while ranks compute."""

    deadlock = "its order deadlocks as a binding one; reorder it or choose --dispatch ready"

    def __init__(
        self,
        shape: Shape,
        policy: Policy,
        world: World,
        log: Log | None,
        announcing: Announcing | None = None,
    ) -> None:
        """With `announcing`, ranks tell each other when to expect their output."""
        super().__init__(shape, policy, world, log)
        self._agreement_ns = world.agreement_ns if world.num_members > 1 else 0
        self._launch_ns = world.launch_ns
        # By rank, where launches take time: what it knows, when it may decide on its next task, and
        # when its device began what it runs.
        num_deciding = shape.num_ranks if world.launch_ns else 0
        self._in_time = [JustInTime(world.launch_risk) for _ in range(num_deciding)]
        self._due_ns = [NEVER] * shape.num_ranks
        self._began_ns = [0] * shape.num_ranks
        self._is_busy = [False] * shape.num_ranks
        # Ranks that something happened to, each once.
        self._to_decide = list(range(shape.num_ranks))
        self._is_to_decide = [True] * shape.num_ranks
        # By group: its next task, decided ahead, and when that round is over.
        self._ahead: dict[int, tuple[int, int]] = {}
        self._announcing = announcing
        # By rank: when it decides anew at the latest, although nothing came.
        self._deadline_ns = [NEVER] * shape.num_ranks
        # By link, and by link and member.
        self._free_ns: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._last_came_ns: defaultdict[tuple[int, int, int], int] = defaultdict(int)

    def play(self) -> PipelineRun:
        now_ns = 0
        while True:
            self._decide_all(now_ns)
            now_ns = self.next_ns()
            if now_ns == NEVER:
                return self.result()
            while self.next_ns() == now_ns:
                what, rank, member, number = self.take()
                if what == ENDED:
                    self._is_busy[rank] = False
                    self._ask(rank)
                    if self._launch_ns:
                        self._ran(rank, now_ns, number)
                    self._send_output(rank, now_ns, number)
                elif what == CAME:
                    self._came(rank, member, now_ns, number)
                elif what == DECIDES_AHEAD:
                    # It may be over, if the task took less than was expected.
                    if self._is_busy[rank] and rank not in self._ahead:
                        self._decide_ahead(rank, now_ns)
                elif what == ANNOUNCED:
                    self._heard(rank, now_ns, number)
                elif self._deadline_ns[rank] == now_ns:
                    self._ask(rank)

    def _ask(self, rank: int) -> None:
        """Let a rank decide, if it is free, once everything of this instant has happened."""
        if not self._is_to_decide[rank]:
            self._is_to_decide[rank] = True
            self._to_decide.append(rank)

    def _decide_all(self, now_ns: int) -> None:
        for rank in self._to_decide:
            self._is_to_decide[rank] = False
            if not self._is_busy[rank]:
                self._decide(rank, now_ns)
            elif NEVER < self._due_ns[rank] <= now_ns and rank not in self._ahead:
                self._decide_ahead(rank, now_ns)
        self._to_decide.clear()

    def _decide(self, rank: int, now_ns: int) -> None:
        """Let a free rank begin a task, if one may run."""
        if self._ahead and rank in self._ahead:
            number, agreed_ns = self._ahead.pop(rank)
        else:
            number = self.decide(rank, now_ns)
            if number == NOTHING:
                deadline_ns = self.leaders[rank].deadline_ns
                if deadline_ns != NEVER:
                    self._deadline_ns[rank] = deadline_ns
                    self.push(deadline_ns, LOSES_PATIENCE, rank, 0, 0)
                self._idle_followers(rank, now_ns)
                return
            agreed_ns = now_ns + self._agreement_ns
            self._log_round(rank, now_ns, agreed_ns, number)
        if agreed_ns > now_ns and self.log is not None:
            self.log.waited(rank, 0, Waited(Cause.COORDINATION, now_ns, agreed_ns))
            # The followers have the task's input too, and wait for the decision.
            self._idle_followers(rank, now_ns)
        self._is_busy[rank] = True
        start_ns = max(now_ns, agreed_ns + self._launch_ns)
        end_ns = self.run(rank, start_ns, number)
        if self._announcing is not None:
            self._deadline_ns[rank] = NEVER
            self._announce(self._announcing, rank, start_ns, end_ns, number)
        if self._launch_ns:
            self._decide_in_time(rank, start_ns, end_ns, number)
        elif self._agreement_ns:
            self.push(max(start_ns, end_ns - self._agreement_ns), DECIDES_AHEAD, rank, 0, number)

    def _decide_in_time(self, rank: int, start_ns: int, end_ns: int, number: int) -> None:
        """Let a rank decide on its next task while its device runs this one."""
        lanes, in_time = self.lanes[rank], self._in_time[rank]
        lane = number // lanes.num_microbatches
        kind, chunk = KINDS[lanes.kinds[lane]], lanes.chunks[lane]
        self._began_ns[rank] = start_ns
        in_time.launched(kind, chunk, self._launch_ns + self._agreement_ns)
        due_ns = in_time.due_ns(kind, chunk, start_ns)
        self._due_ns[rank] = NEVER
        if due_ns is not None and due_ns < end_ns:
            self._due_ns[rank] = due_ns
            self.push(due_ns, DECIDES_AHEAD, rank, 0, number)

    def _ran(self, rank: int, now_ns: int, number: int) -> None:
        """The device of a rank has ended a task."""
        lanes = self.lanes[rank]
        lane = number // lanes.num_microbatches
        taken_ns = now_ns - self._began_ns[rank]
        self._in_time[rank].ran(KINDS[lanes.kinds[lane]], lanes.chunks[lane], taken_ns)

    def _idle_followers(self, rank: int, now_ns: int) -> None:
        # Without a log there are none.
        for member in range(1, len(self.members[rank])):
            self.handle(rank, member, now_ns, IDLE)

    def _decide_ahead(self, rank: int, now_ns: int) -> None:
        number = self.decide(rank, now_ns, is_idle=False)
        if number != NOTHING:
            agreed_ns = now_ns + self._agreement_ns
            self._ahead[rank] = (number, agreed_ns)
            self._log_round(rank, now_ns, agreed_ns, number)

    def _log_round(self, rank: int, start_ns: int, end_ns: int, number: int) -> None:
        if self.log is not None and self.world.num_members > 1:
            self.log.agreed(rank, start_ns, end_ns, self.lanes[rank].task(number))

    def _announce(
        self, announcing: Announcing, rank: int, start_ns: int, end_ns: int, number: int
    ) -> None:
        """Tell the rank of the task that takes this one's output when to expect it."""
        lanes = self.lanes[rank]
        taking_ns = announcing.taking_ns(rank, lanes.task(number), end_ns - start_ns)
        lane, microbatch = divmod(number, lanes.num_microbatches)
        to_rank = lanes.to_rank[lane]
        if to_rank == NO_RANK or taking_ns is None:
            return
        takes = lanes.to_lane[lane] * lanes.num_microbatches + microbatch
        receiver = self.lanes[to_rank].task(takes)
        transfer = self.world.transfer
        hop_ns = 0 if transfer is None else transfer(rank, to_rank, receiver)
        # It overtakes messages and takes as long as one, so that its hop is the output's, too.
        announcing.announce(receiver, taking_ns)
        self.push(start_ns + hop_ns, ANNOUNCED, to_rank, 0, takes)

    def _heard(self, rank: int, now_ns: int, number: int) -> None:
        """An announcement has reached a rank."""
        assert self._announcing is not None
        announced = self._announcing.heard(rank, self.lanes[rank].task(number), now_ns)
        if self.log is None:
            self.leaders[rank].handle(now_ns, announced)
        else:
            self.handle(rank, 0, now_ns, announced)

    def _came(self, rank: int, member: int, now_ns: int, number: int) -> None:
        """The input of a task has reached a member of its rank."""
        if self._announcing is not None and member == 0:
            self._announcing.arrived(rank, self.lanes[rank].task(number), now_ns)
        self.came(rank, member, now_ns, number)
        self._ask(rank)

    def _send_output(self, rank: int, now_ns: int, number: int) -> None:
        """Deliver a task's output to the rank of the task that takes it."""
        lanes, world = self.lanes[rank], self.world
        lane = number // lanes.num_microbatches
        to_rank = lanes.to_rank[lane]
        if to_rank == NO_RANK:
            return
        takes = number + (lanes.to_lane[lane] - lane) * lanes.num_microbatches
        start_ns = end_ns = now_ns
        if world.transfer is not None:
            link = rank, to_rank
            start_ns = max(now_ns, self._free_ns[link])
            receiver = self.lanes[to_rank].task(takes)
            end_ns = start_ns + world.transfer(rank, to_rank, receiver)
            self._free_ns[link] = end_ns
        for member in range(world.num_members):
            came_ns = end_ns
            if member and world.lateness is not None:
                # A member's own link stays in order too.
                end = rank, to_rank, member
                late_ns = world.lateness(member, self.lanes[to_rank].task(takes))
                came_ns = max(self._last_came_ns[end], end_ns + late_ns)
                self._last_came_ns[end] = came_ns
            if self.log is not None:
                task = self.lanes[to_rank].task(takes)
                self.log.passed(rank, to_rank, member, start_ns, came_ns, task)
            if came_ns == now_ns:
                # It arrives at this instant, before any rank decides, so it needs no event.
                self._came(to_rank, member, now_ns, takes)
            else:
                self.push(came_ns, CAME, to_rank, member, takes)

"""One rank's profile: its ranges at the times of the device that did the work."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from rrfp.errors import RrfpError
from rrfp.interchange.kineto.file import Event, Profile
from rrfp.interchange.ranges import Maker, Range, ScheduleRange, TaskRange, parse_range
from rrfp.interchange.spans import RankSpans, TaskSpan, TransferSpan
from rrfp.schedule.causes import Cause
from rrfp.trace.records import Phase, PhaseRecord, RankInfo, WaitRecord


@dataclass(slots=True)
class FoundRange:
    """A range that tells of the pipeline, and when its work ran."""

    tells: Range
    launched_ns: int
    start_ns: int
    end_ns: int


class ProfiledRank:
    """The ranges of one profile, and which rank they are of."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.path = profile.path
        self.world_size = profile.world_size
        self.host, self.pid = profile.host, profile.pid
        self.steps = profile.steps
        self.found, self.is_gpu, num_idle = _found(profile)
        self.notes: list[str] = []
        if num_idle:
            self.notes.append(
                f"{self.path} has {num_idle} tasks for which the GPU did nothing; they are left out"
            )
        makers = {found.tells.maker for found in self.found if isinstance(found.tells, TaskRange)}
        if not makers:
            raise RrfpError(
                f"{self.path} has no ranges of pipeline tasks; call rrfp.megatron.trace_native() "
                "in a script of Megatron, or elsewhere put each task into "
                'torch.profiler.record_function(f"PP:{stage}F{microbatch}") (B for its backward)'
            )
        # Ours are exact. A profile with both kinds has ours around or inside the others.
        self.maker = Maker.RRFP if Maker.RRFP in makers else Maker.PIPELINING
        self.calls = [found for found in self.found if isinstance(found.tells, ScheduleRange)]
        self.number = profile.number
        self.is_timed_by_operators = False
        self.is_of_gpipe = any(task.stage is None for _, task in self.tasks)
        self.info: RankInfo | None = None
        if self.calls:
            call = self.calls[0].tells
            assert isinstance(call, ScheduleRange)
            self.number = call.rank
            place = call.pp_rank, call.tp_rank, call.dp_rank, call.stages
            self.info = RankInfo(call.rank, *place, self.host, self.pid)

    @property
    def tasks(self) -> list[tuple[FoundRange, TaskRange]]:
        return [
            (found, found.tells)
            for found in self.found
            if isinstance(found.tells, TaskRange) and found.tells.maker is self.maker
        ]

    def spans(self) -> RankSpans:
        """Everything, once the stage and step of every task are known."""
        assert self.info is not None
        ours = self.maker is Maker.RRFP
        holds_waits = not (ours or self.is_gpu or self.is_timed_by_operators)
        rank = RankSpans(self.info, tells_waits=ours, receives_inside=holds_waits)
        rank.sends_inside = holds_waits and self.is_of_gpipe
        for found in self.found:
            tells, span = found.tells, (found.start_ns, found.end_ns)
            if isinstance(tells, ScheduleRange):
                rank.phases.append(PhaseRecord(*span, tells.step, Phase.SCHEDULE))
                continue
            if tells.maker is not self.maker or tells.step is None:
                continue
            if isinstance(tells, TaskRange):
                assert tells.stage is not None
                of = tells.step, tells.kind, tells.stage, tells.microbatch
                rank.tasks.append(TaskSpan(found.start_ns, found.end_ns, *of))
            elif ours or tells.cause is Cause.GRADIENT_SYNC:
                rank.waits.append(WaitRecord(*span, tells.step, tells.cause))
            else:
                rank.transfers.append(TransferSpan(*span, tells.step))
        if not ours:
            rank.phases = rank.schedules()
        return rank


def _found(profile: Profile) -> tuple[list[FoundRange], bool, int]:
    """The ranges of a profile, at the GPU's times if the GPU ran the tasks; whether it did; and how
    many tasks have no such time."""
    worked: defaultdict[tuple[str, int | None], list[Event]] = defaultdict(list)
    for event in profile.on_gpu:
        worked[event.name, event.external_id].append(event)
    is_gpu = any(isinstance(parse_range(name), TaskRange) for name, _ in worked)
    num_launched = Counter(event[2:] for event in profile.on_cpu)
    ranges = []
    num_idle = 0
    for event in profile.on_cpu:
        tells = parse_range(event.name)
        assert tells is not None
        start_ns, end_ns = event[:2]
        if is_gpu:
            on_gpu = worked[event[2:]]
            if on_gpu:
                if num_launched[event[2:]] > 1:
                    raise _unnumbered(profile, event.name)
                start_ns = min(each.start_ns for each in on_gpu)
                end_ns = max(each.end_ns for each in on_gpu)
            elif not isinstance(tells, ScheduleRange):
                # The GPU had nothing to do there, and the time of the CPU's launch does not count.
                num_idle += isinstance(tells, TaskRange)
                continue
        ranges.append(FoundRange(tells, event.start_ns, start_ns, end_ns))
    if num_idle and not any(isinstance(found.tells, TaskRange) for found in ranges):
        raise _unnumbered(profile, next(iter(worked))[0])
    return ranges, is_gpu, num_idle


def _unnumbered(profile: Profile, name: str) -> RrfpError:
    return RrfpError(
        f"{profile.path} does not tell which of its ranges '{name[:40]}' the GPU worked for; "
        "profile with a torch that writes their External id"
    )

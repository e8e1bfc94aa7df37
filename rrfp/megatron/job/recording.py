"""Records a job's steps on one rank, whoever's schedule runs them.

Recording begins at the first step, when the job has certainly set up its process groups, and ends
with the process. If anything fails here, the training goes on.
"""

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store

from rrfp import requirements
from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.megatron.adapters.groups import replica_group
from rrfp.megatron.adapters.models import may_have_experts
from rrfp.megatron.job.description import (
    DispatchDescription,
    by_stage,
    layout_of,
    model_of,
    num_parameters,
    program,
)
from rrfp.megatron.job.request import RecordingRequest, num_restarts, print_to_stderr
from rrfp.megatron.job.transport_log import TransportLog
from rrfp.megatron.step_groups import (
    Place,
    device_of,
    place_in,
    ranks_of,
    step_groups,
    timeout_s_of,
)
from rrfp.megatron.step_report import StepReport
from rrfp.planning.step_admission import StepFile, join_parts, part_of
from rrfp.runtime.exit_hooks import at_end
from rrfp.runtime.net.transport import make_device
from rrfp.runtime.protocols import PeerLostError, monotonic
from rrfp.runtime.recorder import Recorder
from rrfp.runtime.rendezvous import (
    Rendezvous,
    default_store,
    publish_rank_info,
    wait_for_rank_infos,
)
from rrfp.schedule.balance import Hands
from rrfp.schedule.shape import Shape
from rrfp.strict_json import instance, integers
from rrfp.trace.locate import encode_apart
from rrfp.trace.outcome import JobOutcome
from rrfp.trace.records import (
    BegunRecord,
    Phase,
    PhaseRecord,
    RankInfo,
    Record,
    count_of,
    evaluation_step,
    is_evaluation,
)
from rrfp.trace.run_dir import RunDir, create_run_dir, empty, own_files
from rrfp.trace.run_json import PolicyLog, describe_run
from rrfp.trace.spill import is_being_written, records_bytes

T = TypeVar("T")

_END_S = 60.0
"""How long the leader waits for the other ranks to close their records."""
_LOOK_S = 0.05

_PREFIX = "rrfp/recording"
_USED_STORE = (
    "the job's store holds what an earlier start of the job left there; set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every node, so that each start has a "
    "store of its own"
)


@dataclass(frozen=True, slots=True)
class _Presence:
    """What a rank says when it comes, or instead of coming."""

    linked: tuple[int, ...] = ()
    """The ranks that share a process group with it."""
    num_restarts: int = 0
    failure: str = ""
    """Why it cannot record; empty if it can."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a rank knows once it has read the presence of all others."""

    ranks: tuple[int, ...]
    num_restarts: int
    """Of all of them together."""


class RecordingRendezvous:
    """The meeting of a recording's ranks, as one of them sees it; all of them call it together.

    One deadline holds for all of it. As a context manager, it tells the other ranks of an exception
    raised inside, so that none of them waits for this one.
    """

    def __init__(self, store: Store, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._prefix = _PREFIX
        self._rendezvous = Rendezvous(store, _PREFIX, rank, timeout_s)
        self._num_restarts = 0
        self.ranks: Sequence[int] = ()
        """Those of the recording, once they are known."""
        self.is_leader = False
        """Whether this rank does what is done once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        failure = first_line(str(error))
        if self.ranks:
            self._rendezvous.fail(failure)
        else:
            # Only those linked to this rank learn of it; another pipeline may go on meeting.
            with suppress(RrfpError):
                self._say(_Presence(failure=failure))

    def gather(self, linked: Iterable[int]) -> None:
        """Find the ranks of the recording. `linked` are those that share a process group with this
        one. Raises PeerLostError naming a rank that does not come in time or cannot record, and
        RrfpError if an earlier start of the job has used the store: torchrun keeps its own."""
        if self._rendezvous.has(f"presence/{self._rank}"):
            raise self._used_store()
        self._say(_Presence(tuple(sorted(linked)), num_restarts()))
        found: set[int] = set()
        num_started_again = 0
        new = {self._rank}
        while new:
            self._rendezvous.awaited = sorted(new)
            told = [self._presence_of(rank) for rank in self._rendezvous.awaited]
            num_started_again += sum(each.num_restarts for each in told)
            found |= new
            new = {rank for each in told for rank in each.linked} - found
        self._confirm(_Found(tuple(sorted(found)), num_started_again))
        self._num_restarts = num_started_again
        self.ranks = sorted(found)
        self.is_leader = self._rank == self.ranks[0]
        # From here on a failure concerns these ranks only.
        self._prefix = f"{_PREFIX}/{self.ranks[0]}"
        remaining_s = self._rendezvous.remaining_s
        self._rendezvous = Rendezvous(self._store, self._prefix, self._rank, remaining_s)

    def run(self, request: RecordingRequest, label: str) -> RunDir:
        """The run's directory, which the leader makes. Raises RrfpError if it cannot, or if another
        pipeline of the job is recorded already: a recording has one."""
        if self.is_leader:
            self._rendezvous.publish("run", str(self._make(request, label).path))
        return RunDir(Path(self._rendezvous.wait_text("run", self.ranks[0])))

    def introduce(self, own: RankInfo, device: torch.device) -> RankInfo:
        """Introduce this rank to the others; returns it with its clocks, that of its device too,
        compared to the leader's."""
        placed = publish_rank_info(
            self._store,
            self._prefix,
            replace(own, rank=self._index),
            len(self.ranks),
            make_device(device),
            timeout_s=self._rendezvous.remaining_s,
        )
        return replace(placed, rank=self._rank)

    def introduced(self) -> list[RankInfo]:
        """All ranks, once they have introduced themselves."""
        found = wait_for_rank_infos(
            self._store,
            self._prefix,
            self._index,
            len(self.ranks),
            timeout_s=self._rendezvous.remaining_s,
        )
        return [replace(info, rank=rank) for info, rank in zip(found, self.ranks, strict=True)]

    def settle(self) -> None:
        """The leader calls this when all that it does once is done; the others wait for it. Raises
        PeerLostError with the reason if a rank has failed before."""
        if self.is_leader:
            self._rendezvous.publish("settled", "")
        self._rendezvous.wait("settled", self.ranks[0])

    def share(self, name: str, value: object) -> None:
        """Publish a JSON value about this rank."""
        self._rendezvous.publish(f"{name}/{self._rank}", json.dumps(value))

    def shared(self, name: str, decode: Callable[[object], T]) -> list[T]:
        """What all ranks have published under this name, by rank."""
        return [self._rendezvous.wait_json(f"{name}/{rank}", rank, decode) for rank in self.ranks]

    @property
    def _index(self) -> int:
        return self.ranks.index(self._rank)

    def _say(self, presence: _Presence) -> None:
        self._rendezvous.publish(f"presence/{self._rank}", json.dumps(asdict(presence)))

    def _presence_of(self, rank: int) -> _Presence:
        found = self._rendezvous.wait_json(f"presence/{rank}", rank, partial(instance, _Presence))
        if found.failure:
            raise PeerLostError(f"rank {rank} cannot record: {found.failure}")
        return found

    def _confirm(self, own: _Found) -> None:
        """See that all ranks have found the same.

        A presence may be left from an earlier start in which this rank did not come so far. What
        others have found cannot: if it names this rank, they have read the presence that this rank
        published just now.
        """
        self._rendezvous.publish(f"found/{self._rank}", json.dumps(asdict(own)))
        for rank in own.ranks:
            decode = partial(instance, _Found)
            if self._rendezvous.wait_json(f"found/{rank}", rank, decode) != own:
                raise self._used_store()

    def _used_store(self) -> RrfpError:
        """The error to raise. Told to every rank of the job: none can trust what it reads."""
        self._rendezvous.fail(_USED_STORE)
        return RrfpError(_USED_STORE)

    def _make(self, request: RecordingRequest, label: str) -> RunDir:
        own = str(self._rank)
        first = self._store.compare_set(f"{_PREFIX}/leader", "", own).decode()
        if first != own:
            raise RrfpError(
                f"rank {first} and others record a pipeline, and a run has one; record this one in "
                "a job of its own"
            )
        out, force = request.out, request.force
        if self._num_restarts and out is not None and out.exists():
            out, force = _free_beside(out), False
            print_to_stderr(
                f"{request.out} holds the run of an earlier start of this job, so this one is "
                f"recorded in {out}"
            )
        with own_files():
            return create_run_dir(out, force, label, request.runs)


def _free_beside(out: Path) -> Path:
    """The first of `OUT-restart-1`, `OUT-restart-2` and so on that does not exist."""
    candidates = (out.with_name(f"{out.name}-restart-{number}") for number in itertools.count(1))
    return next(path for path in candidates if not path.exists())


class JobRecording:
    """This process' recording of its job.

    A recording has one pipeline, that of the first call. A second model, such as a critic, may have
    other groups or chunks; its steps are left out.
    """

    def __init__(self, request: RecordingRequest, steering: DispatchDescription) -> None:
        self._request = request
        self._window = request.window
        self._steering = steering
        self._layout: tuple[Place, int] | None = None
        self._recorder: Recorder | None = None
        self._run: RunDir | None = None
        """The run's directory, on the leader."""
        self._directory: RunDir | None = None
        """Likewise, on every rank."""
        self._outcome: JobOutcome | None = None
        self._policies: PolicyLog | None = None
        self._orders: StepFile | None = None
        self._assignments: StepFile | None = None
        self._transport: TransportLog | None = None
        self._is_off = False
        self._has_given_up = False
        self._num_trained = 0
        self._num_evaluated = 0
        self._recorded: list[int] = []
        self._lock = threading.Lock()
        # Guarded by the lock, because other threads record what arrives.
        self._evaluations: set[int] = set()
        """Those that are to be recorded, as steps."""
        self._last_evaluation = evaluation_step(-1)
        """The last one that has begun on this rank, as a step."""
        self._early: list[Record] = []
        """What ranks that have begun an evaluation before this one have sent of it."""
        self._is_in_step = False
        """Whether a recorded call has begun and not returned."""
        self._script_step: int | None = None
        """The recorded step after which the script runs; None during a step, and after others."""
        self._script_since_ns: int | None = None
        """Since when, if no unrecorded call is under way."""
        self.info: RankInfo | None = None
        """Who this rank is; None before the first step."""
        self.is_on_gpu = False
        """Whether calls return before their work is done; known from the first step on."""
        self.before_close: Callable[[], object] = lambda: None
        """Called before the records are closed, for those that come late."""
        # Registered before the links of a drop-in are, and so called after their end.
        at_end.register(self.close)

    def record(self, record: Record) -> None:
        """Take a record if its step is in the window. Any thread may call this."""
        recorder, step = self._recorder, record.step
        if recorder is None:
            return
        if not is_evaluation(step):
            if self._window.has_step(step):
                recorder.record(record)
            return
        with self._lock:
            # Evaluations count downwards.
            if step < self._last_evaluation:
                self._early.append(record)
            elif step in self._evaluations:
                recorder.record(record)

    @property
    def num_pipeline_ranks(self) -> int:
        """Of the recorded pipeline; known from the first step on."""
        assert self._layout is not None
        return len(self._layout[0].pipeline)

    def begin(self, arguments: Mapping[str, Any]) -> int | None:
        """A call of the schedule with these arguments begins. Returns the number of its step; None
        if that is not recorded."""
        return self.safely(lambda: self._begin(arguments))

    def end(self, step: int | None, report: StepReport | None = None) -> None:
        """The call for which `begin` gave this step, or None, has returned; the report is that of
        a drop-in."""
        if report is not None:
            self.safely(lambda: self._take(step, report))
        self.safely(lambda: self._end(step))

    def _take(self, step: int | None, report: StepReport) -> None:
        """Keep what a drop-in reports of a step, recorded as this one or not."""
        if report.planes is not None and self._transport is not None:
            self._transport.publish(report.planes)
        if report.is_evaluation:
            return
        if report.policy is not None and step is not None and self._run is not None:
            if self._policies is None:
                self._policies = PolicyLog(self._run.run_json)
            self._policies.steered(step, report.policy.policy.described())
        if report.order is not None:
            self._write_order(report.order)
        if report.assignment is not None:
            self._write_assignment(report.assignment)

    def _write_order(self, order: Sequence[int]) -> None:
        info, directory = self.info, self._directory
        # The first rank of the replica's pipeline; others have the same order.
        if info is None or directory is None or info.pp_rank or info.tp_rank:
            return
        if self._orders is None:
            self._orders = StepFile(part_of(directory.admission, info.dp_rank), ())
        self._orders.write([order])

    def _write_assignment(self, assignment: Hands) -> None:
        if self._run is None:
            return
        if self._assignments is None:
            self._assignments = StepFile(self._run.dealing, ())
        self._assignments.write(assignment)

    def safely(self, record: Callable[[], T]) -> T | None:
        """Do a part of the recording. If it fails, recording ends and the training goes on."""
        if self._is_off:
            return None
        try:
            return record()
        except Exception as error:  # whatever it is
            self._is_off = True
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        recorder, self._recorder = self._recorder, None
        if not self._has_given_up:
            self._has_given_up = True
            what = "the run is not recorded" if recorder is None else "recording is switched off"
            print_to_stderr(f"{what}, the training goes on: {error}")
        if recorder is not None:
            # Whoever reads the run is told by the file that this rank writes no more.
            with suppress(Exception):
                recorder.close()

    def close(self) -> None:
        """Write the remaining records; the leader makes the trace once every rank has done so."""
        self.safely(self._close_records)
        run, self._run = self._run, None
        outcome, self._outcome = self._outcome, None
        if outcome is not None and self.info is not None:
            outcome.close(at_end.make_ending(self.info.rank), has_lost_peer=at_end.has_lost_peer)
        if run is None:
            return
        try:
            self._conclude(run)
        except Exception as error:  # the process ends well all the same
            print_to_stderr(f"the trace is made when 'rrfp analyze' opens the run: {error}")

    def _begin(self, arguments: Mapping[str, Any]) -> int | None:
        now_ns = monotonic()
        model = arguments["model"]
        chunks = [*model] if isinstance(model, list | tuple) else [model]
        has_experts = may_have_experts(chunks[0])
        groups = step_groups(arguments.get("p2p_communicator"), arguments.get("pg_collection"))
        place = place_in(groups, has_experts=has_experts)
        layout = place, len(chunks)
        if self._layout is None:
            self._layout = layout
            try:
                self._join(place, groups, chunks, arguments, has_experts=has_experts)
            except Exception as error:  # whatever it is
                # Steps go on being counted: a profile may have their ranges.
                self._give_up(error)
        self._leave_script(now_ns)
        if layout != self._layout or self.info is None:
            return None
        self._script_step = None
        if self._window.is_over(self._num_trained):
            self._close_records()
            self._is_off = True
            return None
        step = self._next_step(forward_only=bool(arguments.get("forward_only", False)))
        if step is not None:
            self._is_in_step = True
            self.record(BegunRecord(now_ns, now_ns, step, Phase.SCHEDULE))
        return step

    def _leave_script(self, now_ns: int) -> None:
        """A call begins, whether of the recorded pipeline or of another."""
        if self._script_step is not None and self._script_since_ns is not None:
            times_ns = self._script_since_ns, now_ns
            self.record(PhaseRecord(*times_ns, self._script_step, Phase.SCRIPT))
        self._script_since_ns = None

    def _end(self, step: int | None) -> None:
        if step is not None:
            self._is_in_step = False
            if self._recorder is not None:
                self._recorder.flush(step)
                if self._recorder.is_on:
                    self._recorded.append(step)
            self._script_step = step
        now_ns = monotonic()
        if step is not None:
            self.record(BegunRecord(now_ns, now_ns, step, Phase.SCRIPT))
        if not self.is_on_gpu:
            self._script_since_ns = now_ns

    def _next_step(self, *, forward_only: bool) -> int | None:
        # Counted as the drop-in counts: a call that fails counts too.
        if forward_only:
            step = evaluation_step(self._num_evaluated)
            self._num_evaluated += 1
            is_recorded = self._window.has_evaluation(self._num_trained)
            with self._lock:
                self._last_evaluation = step
                if is_recorded:
                    self._evaluations.add(step)
                early, self._early = self._early, []
            for record in early:
                self.record(record)
            return step if is_recorded else None
        step = self._num_trained
        self._num_trained += 1
        return step if self._window.has_step(step) else None

    def _identify(self, place: Place, groups: Any, num_microbatches: int) -> RankInfo:
        assert self._layout is not None
        num_chunks = self._layout[1]
        shape = Shape(len(place.pipeline), num_microbatches, num_chunks, self._steering.placement)
        return RankInfo(
            rank=place.rank,
            pp_rank=place.pp_rank,
            tp_rank=groups.tp.rank(),
            # Ranks that share a sequence run the same tasks, like replicas.
            dp_rank=replica_group(groups).rank(),
            stages=shape.stages_of(place.pp_rank),
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def _join(
        self,
        place: Place,
        groups: Any,
        chunks: Sequence[Any],
        arguments: Mapping[str, Any],
        *,
        has_experts: bool,
    ) -> None:
        """Meet the other ranks and open the records. Raises RrfpError if they do not come, and if
        the run's directory cannot be made; the others learn why this rank cannot record."""
        timeout_s = self._steering.connect_s or timeout_s_of(groups.pp)
        with RecordingRendezvous(default_store(), place.rank, timeout_s) as meeting:
            device = device_of(chunks, groups)
            self.is_on_gpu = device.type == "cuda"
            own = self.info = self._identify(place, groups, arguments["num_microbatches"])
            settings = {
                **self._steering.settings(chunks, groups.pp.size()),
                **layout_of(groups, len(chunks), has_experts=has_experts),
                **model_of(chunks, device, arguments),
                "recorded_by": self._request.by,
                "recorded_steps": str(self._window),
                **program(),
            }
            try:
                policy = self._steering.policy(settings)
            except UsageError:
                self._has_given_up = True  # without a word: the schedule refuses the step itself
                raise
            replicas = ranks_of(replica_group(groups))
            meeting.gather({*place.pipeline, *place.sharers, *replicas})
            run = meeting.run(self._request, self._steering.label)
            own = meeting.introduce(own, device)
            most_bytes = records_bytes(self._request.trace_mb, dist.get_world_size())
            recorder = Recorder(run.rank_records(own.rank), own, most_bytes=most_bytes)
            ranks: Sequence[RankInfo] = ()
            try:
                meeting.share("parameters", num_parameters(chunks))
                if meeting.is_leader:
                    ranks = meeting.introduced()
                    parameters = meeting.shared("parameters", integers)
                    settings["parameters"] = by_stage(ranks, parameters)
                    describe_run(run.run_json, settings, policy, len(ranks), ranks)
                # Records without a description are of no use to anybody.
                meeting.settle()
            except BaseException:
                with suppress(Exception):
                    recorder.close()
                raise
            self._recorder, self._directory = recorder, run
            numbers = [each.rank for each in ranks]
            self._transport = TransportLog(default_store(), run.path.name, run, own.rank, numbers)
            if meeting.is_leader:
                self._run = run
            self._outcome = JobOutcome(run, leads=meeting.is_leader)

    def _close_records(self) -> None:
        recorder, files = self._recorder, (self._orders, self._assignments)
        self._orders = self._assignments = None
        for file in files:
            if file is not None:
                file.close()
        if recorder is not None:
            self.before_close()
            self._recorder = None
            if self._is_in_step:
                recorder.abandon()
            else:
                recorder.close()

    def _conclude(self, run: RunDir) -> None:
        """Have the trace made, once every rank has closed its records, and say where it is."""
        if not self._recorded:
            if isinstance(at_end.program_error, UsageError):
                empty(run)
                run.path.rmdir()  # fails where its script has put something there
            elif not self._has_given_up:
                why = self._window.without_steps(self._num_trained)
                print_to_stderr(f"{run.path} has no steps: {why}")
            return
        deadline_s = time.monotonic() + _END_S
        while any(is_being_written(spill) for spill in run.records.glob("rank-*.jsonl")):
            if time.monotonic() > deadline_s:
                raise RrfpError(f"some rank still writes in {run.records}")
            time.sleep(_LOOK_S)
        join_parts(run.admission)
        told = f"{count_of(self._recorded)} recorded in {run.path}"
        if lacking := requirements.lacking(requirements.OF_TRACES):
            print_to_stderr(
                f"{told}; this environment lacks {lacking}, so the first rrfp command that opens "
                "the run in another one makes its trace"
            )
            return
        # Where the window ended before the job, another command may have made the trace.
        if run.records.is_dir():
            encode_apart(run.path)
        print_to_stderr(f"{told}; open it with: rrfp trace view {run.path}")

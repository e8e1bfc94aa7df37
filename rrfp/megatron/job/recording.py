"""Records a job's steps on one rank, under rrfp's or Megatron's schedule.

Recording starts at the first step, when the job has set up its process groups, and ends with the
process. If recording fails, the training continues.

Not every process of a job need be in a pipeline. The ranks of a recording are therefore those that
share process groups with each other, directly or through others.
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
from rrfp.megatron.adapters.models import chunks_of, may_have_experts
from rrfp.megatron.job.description import (
    DispatchDescription,
    describe_layout,
    describe_model,
    describe_program,
    num_parameters,
    parameters_by_stage,
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
from rrfp.schedule.admission import Assignment
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
    evaluation_step,
    format_step_counts,
    is_evaluation,
)
from rrfp.trace.run_dir import RunDir, create_run_dir, empty, own_files
from rrfp.trace.run_json import PolicyLog, describe_run
from rrfp.trace.spill import is_being_written, records_bytes

T = TypeVar("T")

_END_S = 60.0
"""The time that the leader waits for the other ranks to close their records."""
_POLL_S = 0.05

_PREFIX = "rrfp/recording"
_REUSED_STORE = (
    "the job's store holds what an earlier start of the job left there; set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every node, so that each start has a "
    "store of its own"
)


@dataclass(frozen=True, slots=True)
class _Presence:
    """A rank's announcement that it records, or why it cannot."""

    linked: tuple[int, ...] = ()
    """The ranks that share a process group with it."""
    num_restarts: int = 0
    failure: str = ""
    """The reason why it cannot record; empty if it can."""


@dataclass(frozen=True, slots=True)
class _Membership:
    """The ranks of a recording, as one of them has found them."""

    ranks: tuple[int, ...]
    num_restarts: int
    """The sum over these ranks."""


class RecordingRendezvous:
    """The rendezvous of a recording's ranks. All ranks call the same methods in the same order.

    One deadline applies to all calls together. As a context manager, it publishes an exception
    raised inside, so that the other ranks do not wait for this one.
    """

    def __init__(self, store: Store, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._prefix = _PREFIX
        self._rendezvous = Rendezvous(store, _PREFIX, rank, timeout_s)
        self._num_restarts = 0
        self.ranks: Sequence[int] = ()
        """The ranks of the recording; empty before `find_ranks`."""
        self.is_leader = False
        """True on the rank that creates the directory and writes `run.json`."""

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
            # Only ranks linked to this one read it; another pipeline may still record.
            with suppress(RrfpError):
                self._publish_presence(_Presence(failure=failure))

    def find_ranks(self, linked: Iterable[int]) -> None:
        """Find the ranks of the recording: those linked to this one, directly or through others.
        `linked` are the ranks that share a process group with this one. Sets `ranks`, and
        `is_leader` on the lowest rank.

        Raise PeerLostError naming a rank that does not come in time or cannot record, and RrfpError
        if an earlier start of the job has used the store, which torchrun keeps.
        """
        if self._rendezvous.has(f"presence/{self._rank}"):
            raise self._reused_store_error()
        self._publish_presence(_Presence(tuple(sorted(linked)), num_restarts()))
        found: set[int] = set()
        new = {self._rank}
        while new:
            self._rendezvous.awaited = sorted(new)
            presences = [self._wait_presence(rank) for rank in self._rendezvous.awaited]
            self._num_restarts += sum(each.num_restarts for each in presences)
            found |= new
            new = {rank for each in presences for rank in each.linked} - found
        self._check_agreement(_Membership(tuple(sorted(found)), self._num_restarts))
        self.ranks = sorted(found)
        self.is_leader = self._rank == self.ranks[0]
        # From here on, only these ranks read a failure.
        self._prefix = f"{_PREFIX}/{self.ranks[0]}"
        remaining_s = self._rendezvous.remaining_s
        self._rendezvous = Rendezvous(self._store, self._prefix, self._rank, remaining_s)

    def run_directory(self, request: RecordingRequest, label: str) -> RunDir:
        """Return the run's directory. The leader creates it; the other ranks wait for its path.
        Raise RrfpError if the leader cannot create it, or if the job already records another
        pipeline: a recording has one."""
        if self.is_leader:
            self._rendezvous.publish("run", str(self._create_directory(request, label).path))
        return RunDir(Path(self._rendezvous.wait_text("run", self.ranks[0])))

    def publish_info(self, own: RankInfo, device: torch.device) -> RankInfo:
        """Publish this rank's info with its clock's offset to the leader's host and the largest
        error of its times, and return it. All ranks call it. Synchronizes the device's clock."""
        placed = publish_rank_info(
            self._store,
            self._prefix,
            replace(own, rank=self._index),
            len(self.ranks),
            make_device(device),
            timeout_s=self._rendezvous.remaining_s,
        )
        return replace(placed, rank=self._rank)

    def wait_infos(self) -> list[RankInfo]:
        """Wait until all ranks have published their infos and return them by rank."""
        found = wait_for_rank_infos(
            self._store,
            self._prefix,
            self._index,
            len(self.ranks),
            timeout_s=self._rendezvous.remaining_s,
        )
        return [replace(info, rank=rank) for info, rank in zip(found, self.ranks, strict=True)]

    def wait_for_leader(self) -> None:
        """Wait until the leader calls this too, after it has written the run's description. Raises
        PeerLostError at the deadline, or with the reason if a rank has failed before."""
        if self.is_leader:
            self._rendezvous.publish("settled", "")
        self._rendezvous.wait("settled", self.ranks[0])

    def publish(self, name: str, value: object) -> None:
        """Publish a JSON value about this rank under this name."""
        self._rendezvous.publish(f"{name}/{self._rank}", json.dumps(value))

    def collect(self, name: str, decode: Callable[[object], T]) -> list[T]:
        """Wait for the values that all ranks publish under this name, and return `decode` of each,
        by rank. Raise PeerLostError for a rank that does not publish in time."""
        return [self._rendezvous.wait_json(f"{name}/{rank}", rank, decode) for rank in self.ranks]

    @property
    def _index(self) -> int:
        """The position of this rank among the recording's ranks."""
        return self.ranks.index(self._rank)

    def _publish_presence(self, presence: _Presence) -> None:
        """Publish that this rank records, or why it cannot."""
        self._rendezvous.publish(f"presence/{self._rank}", json.dumps(asdict(presence)))

    def _wait_presence(self, rank: int) -> _Presence:
        """Wait until a rank publishes its presence, and return it. Raise PeerLostError if the rank
        does not come in time or cannot record."""
        found = self._rendezvous.wait_json(f"presence/{rank}", rank, partial(instance, _Presence))
        if found.failure:
            raise PeerLostError(f"rank {rank} cannot record: {found.failure}")
        return found

    def _check_agreement(self, own: _Membership) -> None:
        """Publish this rank's membership and raise RrfpError unless all of its ranks have found the
        same one.

        A presence may be left over from an earlier start in which this rank failed earlier. A
        membership that names this rank cannot: its author has read the presence that this rank
        published just now.
        """
        self._rendezvous.publish(f"found/{self._rank}", json.dumps(asdict(own)))
        for rank in own.ranks:
            decode = partial(instance, _Membership)
            if self._rendezvous.wait_json(f"found/{rank}", rank, decode) != own:
                raise self._reused_store_error()

    def _reused_store_error(self) -> RrfpError:
        """Return the error about a store that an earlier start of the job has used. Also publish it
        to every rank, because none can trust the store."""
        self._rendezvous.fail(_REUSED_STORE)
        return RrfpError(_REUSED_STORE)

    def _create_directory(self, request: RecordingRequest, label: str) -> RunDir:
        """Create the run's directory on the leader, readable by this user only. If a restarted
        job's `out` exists, create the next free `OUT-restart-N` instead and print that. Raise
        RrfpError if another pipeline of the job is recorded already."""
        own = str(self._rank)
        first = self._store.compare_set(f"{_PREFIX}/leader", "", own).decode()
        if first != own:
            raise RrfpError(
                f"rank {first} and others record a pipeline, and a run has one; record this one in "
                "a job of its own"
            )
        out, force = request.out, request.force
        if self._num_restarts and out is not None and out.exists():
            out, force = _next_free_path(out), False
            print_to_stderr(
                f"{request.out} holds the run of an earlier start of this job, so this one is "
                f"recorded in {out}"
            )
        with own_files():
            return create_run_dir(out, force, label, request.runs)


def _next_free_path(out: Path) -> Path:
    """The first of `OUT-restart-1`, `OUT-restart-2` and so on that does not exist."""
    candidates = (out.with_name(f"{out.name}-restart-{number}") for number in itertools.count(1))
    return next(path for path in candidates if not path.exists())


class JobRecording:
    """This process's recording of its job.

    A recording has one pipeline, that of the first call. A second model, such as a critic, may have
    other groups or chunks; its steps are not recorded.
    """

    def __init__(self, request: RecordingRequest, dispatch: DispatchDescription) -> None:
        self._request = request
        self._window = request.window
        self._dispatch = dispatch
        self._layout: tuple[Place, int] | None = None
        self._recorder: Recorder | None = None
        self._run: RunDir | None = None
        """The run's directory on the leader, None on other ranks."""
        self._directory: RunDir | None = None
        """The run's directory on every rank."""
        self._outcome: JobOutcome | None = None
        self._policies: PolicyLog | None = None
        self._order_file: StepFile | None = None
        self._assignments: StepFile | None = None
        self._transport: TransportLog | None = None
        self._is_off = False
        self._has_failed = False
        self._num_trained = 0
        self._num_evaluated = 0
        self._recorded: list[int] = []
        self._lock = threading.Lock()
        # Guarded by the lock, because other threads record messages as they arrive.
        self._evaluations: set[int] = set()
        """The step numbers of the evaluations to record."""
        self._last_evaluation = evaluation_step(-1)
        """The step number of the last evaluation started on this rank."""
        self._early: list[Record] = []
        """Records of an evaluation that other ranks have started before this one."""
        self._is_in_step = False
        """True during a recorded call."""
        self._script_step: int | None = None
        """The last recorded step while the script runs; None in a call or after an unrecorded
        one."""
        self._script_since_ns: int | None = None
        """The time at which the script started to run; None during an unrecorded call."""
        self.info: RankInfo | None = None
        """This rank's place; None before the first step."""
        self.is_on_gpu = False
        """True if calls return before their work is done; set at the first step."""
        self.before_close: Callable[[], object] = lambda: None
        """Called before the records are closed, to record late times."""
        # Registered before a drop-in's links, and so called after they are closed.
        at_end.register(self.close)

    def record(self, record: Record) -> None:
        """Write a record if its step is in the window, and drop it otherwise or while no records
        are open. Thread-safe. A record of an evaluation that this rank has not started yet is kept
        until it starts."""
        recorder, step = self._recorder, record.step
        if recorder is None:
            return
        if not is_evaluation(step):
            if self._window.has_step(step):
                recorder.record(record)
            return
        with self._lock:
            # Step numbers of evaluations count downwards.
            if step < self._last_evaluation:
                self._early.append(record)
            elif step in self._evaluations:
                recorder.record(record)

    @property
    def num_pipeline_ranks(self) -> int:
        """The size of the recorded pipeline; call it after the first step has begun."""
        assert self._layout is not None
        return len(self._layout[0].pipeline)

    def begin(self, arguments: Mapping[str, Any]) -> int | None:
        """Record that a call of the schedule with these arguments begins. Return its step number,
        or None if the step is not recorded. The first call opens the recording together with the
        other ranks. A failure ends the recording only."""
        return self.safely(lambda: self._begin(arguments))

    def end(self, step: int | None, report: StepReport | None = None) -> None:
        """Record that a call has returned; `step` is what `begin` returned for it. First write the
        drop-in's `report`, if given, to its files. A failure ends the recording only."""
        if report is not None:
            self.safely(lambda: self._write_report(step, report))
        self.safely(lambda: self._end(step))

    def _write_report(self, step: int | None, report: StepReport) -> None:
        """Publish the data planes, and write a training step's policy, order and assignment to
        their files. Only the leader writes policies, of recorded steps; orders and assignments are
        also written for steps that are not recorded (`step` is None)."""
        if report.planes is not None and self._transport is not None:
            self._transport.publish(report.planes)
        if report.is_evaluation:
            return
        if report.policy is not None and step is not None and self._run is not None:
            if self._policies is None:
                self._policies = PolicyLog(self._run.run_json)
            self._policies.record(step, report.policy.policy.described())
        if report.order is not None:
            self._write_order(report.order)
        if report.assignment is not None:
            self._write_assignment(report.assignment)

    def _write_order(self, order: Sequence[int]) -> None:
        """Append the step's order of entry to this replica's file, which the first call creates.
        Only the first rank of the replica writes, because the others have the same order."""
        info, directory = self.info, self._directory
        if info is None or directory is None or info.pp_rank or info.tp_rank:
            return
        if self._order_file is None:
            self._order_file = StepFile(part_of(directory.admission, info.dp_rank), ())
        self._order_file.write([order])

    def _write_assignment(self, assignment: Assignment) -> None:
        """Append the step's assignment of items to replicas to the run's file, which the first call
        creates. Only the leader writes."""
        if self._run is None:
            return
        if self._assignments is None:
            self._assignments = StepFile(self._run.assignments, ())
        self._assignments.write(assignment)

    def safely(self, record: Callable[[], T]) -> T | None:
        """Run a part of the recording and return its result, or None if the recording is off or the
        part fails. An exception switches the recording off, closes the records and is printed,
        unless one was printed before; the training continues."""
        if self._is_off:
            return None
        try:
            return record()
        except Exception as error:  # any failure ends the recording only
            self._is_off = True
            self._stop_recording(error)
            return None

    def _stop_recording(self, error: Exception) -> None:
        """Close the records and step files after a failure. Print the failure to stderr, unless one
        was printed before or the schedule raises it itself."""
        recorder, self._recorder = self._recorder, None
        if not self._has_failed:
            self._has_failed = True
            what = "the run is not recorded" if recorder is None else "recording is switched off"
            print_to_stderr(f"{what}, the training goes on: {error}")
        # A closed file shows readers that this rank writes no more.
        with suppress(Exception):
            self._close_step_files()
        if recorder is not None:
            with suppress(Exception):
                recorder.close()

    def close(self) -> None:
        """Write the remaining records and how this process ended. The leader then waits for all
        ranks to close their records and makes the trace; a failure there is printed, not raised."""
        self.safely(self._close_records)
        run, self._run = self._run, None
        outcome, self._outcome = self._outcome, None
        if outcome is not None and self.info is not None:
            outcome.close(at_end.make_ending(self.info.rank), has_lost_peer=at_end.has_lost_peer)
        if run is None:
            return
        try:
            self._make_trace(run)
        except Exception as error:  # a failure must not change the process's exit
            print_to_stderr(f"the trace is made when 'rrfp analyze' opens the run: {error}")

    def _begin(self, arguments: Mapping[str, Any]) -> int | None:
        """Do the work of `begin`. The first call sets the recorded layout and joins the recording;
        if that fails, it is printed, and steps are only counted. Return None for another layout and
        for a step outside the window; after the window's end, also close the records and switch the
        recording off."""
        now_ns = monotonic()
        chunks = chunks_of(arguments["model"])
        has_experts = may_have_experts(chunks[0])
        groups = step_groups(arguments.get("p2p_communicator"), arguments.get("pg_collection"))
        place = place_in(groups, has_experts=has_experts)
        layout = place, len(chunks)
        if self._layout is None:
            self._layout = layout
            try:
                self._join(place, groups, chunks, arguments, has_experts=has_experts)
            except Exception as error:  # any failure ends the recording only
                # Steps are still counted, because a profile may have their ranges.
                self._stop_recording(error)
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
        """Record the time that the script has taken since the last call returned, as a phase of
        that call's step. Do nothing on a GPU, and if that step was not recorded."""
        if self._script_step is not None and self._script_since_ns is not None:
            times_ns = self._script_since_ns, now_ns
            self.record(PhaseRecord(*times_ns, self._script_step, Phase.SCRIPT))
        self._script_since_ns = None

    def _end(self, step: int | None) -> None:
        """Do the work of `end`: flush the step's records, count the step as recorded if records are
        still written, and record that the script begins. With None, only note the time (not on a
        GPU)."""
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
        """Count a call and return its step number, or None if the window excludes it. A failed call
        counts too, as in the drop-in. For an evaluation, also write the records that arrived before
        it started."""
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

    def _rank_info(self, place: Place, groups: Any, num_microbatches: int) -> RankInfo:
        """Return this rank's identity in the run: ranks in its groups, stages, host and process id.
        `dp_rank` counts context-parallel ranks as replicas."""
        assert self._layout is not None
        num_chunks = self._layout[1]
        shape = Shape(len(place.pipeline), num_microbatches, num_chunks, self._dispatch.placement)
        return RankInfo(
            rank=place.rank,
            pp_rank=place.pp_rank,
            tp_rank=groups.tp.rank(),
            # Context-parallel ranks run the same tasks, so they count as replicas.
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
        """Find the other ranks, open this rank's records and, on the leader, create the directory
        and describe the run in `run.json`. Raise RrfpError if ranks do not come or the directory
        cannot be created, and UsageError for a policy that does not fit the step. The other ranks
        get the reason if this rank fails."""
        timeout_s = self._dispatch.connect_s or timeout_s_of(groups.pp)
        with RecordingRendezvous(default_store(), place.rank, timeout_s) as rendezvous:
            device = device_of(chunks, groups)
            self.is_on_gpu = device.type == "cuda"
            own = self.info = self._rank_info(place, groups, arguments["num_microbatches"])
            settings = {
                **self._dispatch.settings(chunks, groups.pp.size()),
                **describe_layout(groups, len(chunks), has_experts=has_experts),
                **describe_model(chunks, device, arguments),
                "recorded_by": self._request.by,
                "recorded_steps": str(self._window),
                **describe_program(),
            }
            try:
                policy = self._dispatch.policy(settings)
            except UsageError:
                self._has_failed = True  # not printed: the schedule refuses the step itself
                raise
            replicas = ranks_of(replica_group(groups))
            rendezvous.find_ranks({*place.pipeline, *place.sharers, *replicas})
            run = rendezvous.run_directory(self._request, self._dispatch.label)
            own = rendezvous.publish_info(own, device)
            most_bytes = records_bytes(self._request.trace_mb, dist.get_world_size())
            recorder = Recorder(run.rank_records(own.rank), own, most_bytes=most_bytes)
            ranks: Sequence[RankInfo] = ()
            try:
                rendezvous.publish("parameters", num_parameters(chunks))
                if rendezvous.is_leader:
                    ranks = rendezvous.wait_infos()
                    parameters = rendezvous.collect("parameters", integers)
                    settings["parameters"] = parameters_by_stage(ranks, parameters)
                    describe_run(run.run_json, settings, policy, len(ranks), ranks)
                # Records without the run's description would be useless.
                rendezvous.wait_for_leader()
            except BaseException:
                with suppress(Exception):
                    recorder.close()
                raise
            self._recorder, self._directory = recorder, run
            numbers = [each.rank for each in ranks]
            self._transport = TransportLog(default_store(), run.path.name, run, own.rank, numbers)
            if rendezvous.is_leader:
                self._run = run
            self._outcome = JobOutcome(run, leads=rendezvous.is_leader)

    def _close_records(self) -> None:
        """Close the order and assignment files and this rank's records, after `before_close`.
        During a step, which has then failed, write only the latest records."""
        self._close_step_files()
        if (recorder := self._recorder) is not None:
            self.before_close()
            self._recorder = None
            if self._is_in_step:
                recorder.abandon()
            else:
                recorder.close()

    def _close_step_files(self) -> None:
        """Close the order and assignment files that are open."""
        files = self._order_file, self._assignments
        self._order_file = self._assignments = None
        for file in files:
            if file is not None:
                file.close()

    def _make_trace(self, run: RunDir) -> None:
        """Wait until every rank has closed its records, join the replicas' orders, make the trace
        in a subprocess and print the run's path. Raise RrfpError after 60 s. If no step was
        recorded, only print why; if the program failed with a UsageError, remove the run instead.
        Without the packages for traces, leave the trace to a later rrfp command."""
        if not self._recorded:
            if isinstance(at_end.program_error, UsageError):
                empty(run)
                run.path.rmdir()  # fails if the script has written files there
            elif not self._has_failed:
                reason = self._window.without_steps(self._num_trained)
                print_to_stderr(f"{run.path} has no steps: {reason}")
            return
        deadline_s = time.monotonic() + _END_S
        while any(is_being_written(spill) for spill in run.records.glob("rank-*.jsonl")):
            if time.monotonic() > deadline_s:
                raise RrfpError(f"some rank still writes in {run.records}")
            time.sleep(_POLL_S)
        join_parts(run.admission)
        summary = f"{format_step_counts(self._recorded)} recorded in {run.path}"
        if lacking := requirements.lacking(requirements.OF_TRACES):
            print_to_stderr(
                f"{summary}; this environment lacks {lacking}, so the first rrfp command that "
                "opens the run in another one makes its trace"
            )
            return
        # If the window ended before the job, another command may have made the trace.
        if run.records.is_dir():
            encode_apart(run.path)
        print_to_stderr(f"{summary}; open it with: rrfp trace view {run.path}")

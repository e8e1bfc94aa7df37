"""The ranks that take part in the recording of a job, its messages, and the recorded steps."""

import errno
import io
import os
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.frames import choose_steps, frames_of
from rrfp.errors import RrfpError
from rrfp.megatron.job.recording import RecordingRendezvous
from rrfp.megatron.job.request import RecordingRequest
from rrfp.megatron.job.transport_log import TransportLog
from rrfp.runtime.planes.registry import TransportName
from rrfp.runtime.planes.selection import AcceptedPlanes
from rrfp.trace.check import check_contents
from rrfp.trace.locate import resolve_trace
from rrfp.trace.perfetto.reader import read_contents
from rrfp.trace.records import Phase, PhaseRecord, Record, TaskRecord, evaluation_step
from rrfp.trace.run_dir import RunDir
from tests.e2e.ranks import run_ranks
from tests.megatron.native_runs import read_whole, steps_of

pytestmark = pytest.mark.timeout(400)


class Model(SimpleNamespace):
    """The part of a model chunk that a recording uses."""

    def parameters(self) -> list[Any]:
        return []


def model() -> Model:
    return Model(config=SimpleNamespace(num_layers=2))


def record_some(
    out: Path,
    pipelines: list[list[int]],
    restarted: int | None = None,
    broken: int | None = None,
    full: bool = False,
    fails: bool = False,
) -> tuple[list[int | None], list[str]]:
    """On this rank of a job: the steps of its calls that were recorded, and what was said. Each
    pipeline in turn is called twice by its ranks, and by no others. The launcher of rank
    `restarted` says that it has started the job again, and rank `broken` cannot describe it. With
    `full`, the disk has no room for the run's description. With `fails`, the second call raises."""
    import torch.distributed as dist

    from rrfp.megatron.job import recording as module
    from rrfp.megatron.job.description import describe_native_dispatch

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == restarted:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    if rank == broken:
        vars(module)["describe_program"] = lambda: 1 // 0  # pyright: ignore[reportIndexIssue]
    if full:
        vars(module)["describe_run"] = no_room  # pyright: ignore[reportIndexIssue]
    alone = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    steps: list[int | None] = []
    with redirect_stderr(io.StringIO()) as said:
        recording = module.JobRecording(RecordingRequest("test", out), describe_native_dispatch())
        for ranks in pipelines:
            group = dist.new_group(ranks)
            if rank not in ranks:
                continue
            groups = SimpleNamespace(tp=alone, cp=alone, dp_cp=alone)
            for number in range(2):
                arguments = {
                    "model": model(),
                    "num_microbatches": 1,
                    "pg_collection": groups,
                    "p2p_communicator": SimpleNamespace(pp_group=group),
                }
                step = recording.begin(arguments)
                steps.append(step)
                if step is not None:
                    stage, now_ns = ranks.index(rank), time.monotonic_ns()
                    times = now_ns, now_ns + 1
                    task = TaskRecord(*times, step, "F", stage, 0, 0, 0, 1, 0, 1, 1, 1, 0)
                    recording.record(task)
                    if fails and number == 1:
                        break
                    recording.record(PhaseRecord(*times, step, Phase.SCHEDULE))
                recording.end(step)
        dist.barrier()
        recording.close()
    dist.destroy_process_group()
    return steps, said.getvalue().splitlines()


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def recorded_in(run: Path, told: str = "2 steps") -> list[str]:
    return [f"rrfp: {told} recorded in {run}; open it with: rrfp trace view {run}"]


def test_ranks_that_are_in_no_pipeline_are_no_part_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = run_ranks(3, record_some, run, [[1, 2]], timeout_s=100)
    assert found == [([], []), ([0, 1], recorded_in(run)), ([0, 1], [])]
    recording = read_whole(run).recording
    assert [rank.info.rank for rank in recording.ranks] == [1, 2]
    frames = choose_steps(frames_of(recording))
    assert bubbles(frames).steps == (0, 1)


def test_of_a_job_that_fails_amid_a_step_the_trace_has_that_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(2, record_some, run, [[0, 1]], None, None, False, True, timeout_s=100)
    contents = read_contents(resolve_trace(run))
    for rank in contents.recording.ranks:
        assert [task.step for task in rank.tasks] == [0, 1]
        assert [(each.doing, each.step) for each in rank.begun] == [("schedule", 1)]
    *_, told = check_contents(contents)
    assert told == (
        "unfinished: 2 ranks ended amid something (rank 0: schedule in step 1; rank 1: schedule "
        "in step 1)"
    )


def test_a_second_model_is_no_part_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = run_ranks(2, record_some, run, [[0, 1], [0], [1], [0, 1]], timeout_s=100)
    steps = [0, 1, None, None, 2, 3]
    assert found == [(steps, recorded_in(run, "4 steps")), (steps, [])]
    recording = read_whole(run).recording
    assert steps_of(recording) == {(0, 1, 2, 3)}
    for rank in recording.ranks:
        script = Counter(phase.step for phase in rank.phases if phase.phase == Phase.SCRIPT)
        # Before, between and after the calls of the second model, and not during them.
        assert script == {0: 1, 1: 3, 2: 1}


def test_a_second_pipeline_is_trained_and_not_recorded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = run_ranks(2, record_some, run, [[0], [1]], timeout_s=100)
    (recorded,) = [rank for rank, (_, said) in enumerate(found) if said == recorded_in(run)]
    (sentence,) = found[1 - recorded][1]
    assert "the run is not recorded, the training goes on" in sentence
    assert f"rank {recorded} and others record a pipeline" in sentence
    ranks = read_whole(run).recording.ranks
    assert [rank.info.rank for rank in ranks] == [recorded]


@pytest.mark.timeout(50)  # less than ranks wait for each other
@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_record_notifies_the_others(tmp_path: Path, broken: int) -> None:
    found = run_ranks(2, record_some, tmp_path / "run", [[0, 1]], None, broken, timeout_s=45)
    beginning = "rrfp: the run is not recorded, the training goes on: "
    for rank, (steps, (sentence,)) in enumerate(found):
        assert steps == [0, 1]
        reason = "integer division or modulo by zero"
        told = reason if rank == broken else f"rank {broken} cannot record: {reason}"
        assert sentence == f"{beginning}{told}"
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(50)  # less than ranks wait for each other
def test_nobody_records_a_run_that_cannot_be_described(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = run_ranks(2, record_some, run, [[0, 1]], None, None, True, timeout_s=45)
    reason = "[Errno 28] No space left on device"
    beginning = "rrfp: the run is not recorded, the training goes on: "
    assert found == [
        ([0, 1], [f"{beginning}{reason}"]),
        ([0, 1], [f"{beginning}rank 0 failed while the ranks met: {reason}"]),
    ]
    # Each file has its header and no record.
    for rank in range(2):
        assert len((run / "records" / f"rank-{rank}.jsonl").read_text().splitlines()) <= 1


Linked = dict[int, tuple[int, ...]]


def gathered(store: Store, linked: Linked, timeout_s: float = 60.0) -> list[Any]:
    """Run the rendezvous of some ranks of one start of a job, each linked to the given others.
    Returns the ranks that each finds, or its error's text."""

    def one(rank: int) -> Any:
        try:
            with RecordingRendezvous(store, rank, timeout_s) as rendezvous:
                rendezvous.find_ranks(linked[rank])
        except RrfpError as error:
            return str(error)
        return rendezvous.ranks

    with ThreadPoolExecutor(len(linked)) as threads:
        return [*threads.map(one, linked)]


@pytest.mark.timeout(50)  # less than ranks wait for each other
@pytest.mark.parametrize(
    ("first", "again"),
    [
        pytest.param({0: (1,), 1: (0,)}, {0: (1,), 1: (0,)}, id="the same ranks"),
        pytest.param({0: (1,)}, {0: (1,), 1: (0,)}, id="one had not come to its first step"),
        pytest.param(
            {0: (1,), 1: (0,)}, {0: (1,), 1: (0, 2), 2: (1,)}, id="a rank more, a late one"
        ),
        pytest.param({0: (1,), 1: (0,)}, {2: (1,)}, id="a rank more, which comes first"),
    ],
)
def test_starts_that_share_a_store_are_not_mixed(first: Linked, again: Linked) -> None:
    """As torchrun's do on several nodes, where rrfp cannot keep them apart."""
    store = HashStore()
    is_whole = len(first) > 1
    said = gathered(store, first, 60.0 if is_whole else 0.05)
    assert said == [[0, 1]] * 2 if is_whole else "waited 0.05 s for rank 1" in said[0]
    used = (
        "the job's store holds what an earlier start of the job left there; "
        "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )
    told = gathered(store, again)
    # A rank that reads why another failed in the earlier start, before that one comes, knows no
    # better than to repeat it. The other does.
    left = used if is_whole else f"rank 0 cannot record: {said[0]}"
    assert all(used in each or left in each for each in told), told
    assert any(used in each for each in told), told


def test_a_job_that_was_started_again_is_recorded_beside(tmp_path: Path) -> None:
    run, beside = tmp_path / "run", tmp_path / "run-restart-1"
    first = run_ranks(2, record_some, run, [[0, 1]], timeout_s=100)
    # Nothing is of an earlier start yet, so the directory is free for any.
    assert first == [([0, 1], recorded_in(run)), ([0, 1], [])]
    before = (run / "trace.pftrace").read_bytes()
    again = run_ranks(2, record_some, run, [[0, 1]], 1, timeout_s=100)
    told = f"rrfp: {run} holds the run of an earlier start of this job, so this one is recorded in "
    assert again == [([0, 1], [f"{told}{beside}", *recorded_in(beside)]), ([0, 1], [])]
    assert (run / "trace.pftrace").read_bytes() == before
    # Another job is no restart.
    (_, (refused,)), (_, (learned,)) = run_ranks(2, record_some, run, [[0, 1]], timeout_s=100)
    assert f"{run} exists; choose another directory with --out" in refused
    assert f"rank 0 failed while the ranks met: {run} exists; choose another" in learned


def test_early_records_of_an_evaluation_are_recorded() -> None:
    from rrfp.megatron.job.description import describe_native_dispatch
    from rrfp.megatron.job.recording import JobRecording

    num = 3000
    recording = JobRecording(RecordingRequest("test"), describe_native_dispatch())
    kept: list[Record] = []
    recording._recorder = SimpleNamespace(record=kept.append)  # type: ignore[assignment]

    def arrive() -> None:
        for number in range(num):
            recording.record(PhaseRecord(0, 1, evaluation_step(number), Phase.SCHEDULE))

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=arrive)
        thread.start()
        for _ in range(num):
            recording._next_step(forward_only=True)
        thread.join()
    finally:
        sys.setswitchinterval(interval_s)
        recording._recorder = None
    assert {record.step for record in kept} == {evaluation_step(number) for number in range(num)}
    assert len(kept) == num


# What carries the tensors of each link, told in `run.json`.


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_description_that_cannot_be_read_ends_no_training(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path)
    run.run_json.write_text(content)
    taken = AcceptedPlanes(TransportName.AUTO, 256, {}, 0)
    TransportLog(HashStore(), "run", run, 0, [0]).publish(taken)
    assert f"{run.run_json} does not say what carries the tensors" in caplog.text

"""Measurements of training runs, of `rrfp train` and of `rrfp verify`'s ranks.

Each function runs in a process of its own and returns JSON. The first argument has the flags of the
device, so that tests can run the same function on the CPU.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

Flags = dict[str, Any]

SHARED: Flags = {"device": "cuda", "share_gpu": True}
"""Several ranks on a GPU."""
OWN: Flags = {"device": "cuda"}

_SMALL: Flags = {"layers": 8, "hidden": 64, "heads": 4, "seq_length": 64, "steps": 3}
_LARGE: Flags = {"layers": 8, "hidden": 1024, "heads": 16, "seq_length": 1024, "steps": 4}
_DROPOUT = 0.1
_WARM_STEPS = 2
_OUTBOX_MB = 8
"""Outbox size of each rank, for two messages of the large model; not part of the comparison."""


def differences(where: Flags, num_stages: int, model: str) -> list[str]:
    """How `bf`, `bfw` and `zb-v` ready differ from `1f1b` as a fixed order, in bf16.

    With and without dropout a chain of ranks is held against `1f1b`, and a V of half as many
    against `zb-v` as a fixed order: losses, norms, gradients and parameters. Without dropout, which
    each layout draws for itself, the V's first loss and all its gradients are held against the
    chain's, too. Empty: the same to the bit.
    """
    chain = {"pp": num_stages, "model": model, "dtype": "bf16", **_SMALL, **where}
    fold = {**chain, "pp": num_stages // 2, "chunks": 2, "placement": "v"}
    found = []
    first: dict[str, list[Any]] = {}
    for layout, fixed, ready in ((chain, "1f1b", ("bf", "bfw")), (fold, "zb-v", ("zb-v",))):
        runs = [
            {"dropout": dropout, **how}
            for dropout in (0.0, _DROPOUT)
            for how in (
                {"hint": fixed, "dispatch": "fixed"},
                *({"hint": hint, "dispatch": "ready"} for hint in ready),
            )
        ]
        learned = _learned(layout, runs)
        first[fixed] = [of_rank[0] for of_rank in learned]
        num = 1 + len(ready)
        for index, run in enumerate(runs):
            reference = index - index % num
            found += [
                f"{run} on rank {rank}: {difference}"
                for rank, of_rank in enumerate(learned)
                if (difference := of_rank[reference].difference(of_rank[index])) is not None
            ]
    return found + _across(first["1f1b"], first["zb-v"], "zb-v")


def one_process(where: Flags, num_stages: int, model: str) -> list[str]:
    """How one rank with all the stages differs from as many ranks as there are stages: the first
    loss and all gradients. Empty: the same to the bit."""
    base = {"model": model, "dtype": "bf16", **_SMALL, **where}
    several, alone = (
        [of_rank[0] for of_rank in _learned(base | layout, [{"hint": "bf"}])]
        for layout in ({"pp": num_stages}, {"pp": 1, "chunks": num_stages})
    )
    return _across(several, alone, "one process")


def _learned(layout: Flags, runs: Sequence[Flags]) -> list[list[Any]]:
    """The results of each rank of a layout, by rank, then by run."""
    from rrfp.train.launch.launcher import launch
    from rrfp.train.settings import TrainSettings
    from rrfp.verify.sameness import RANK_MODULE, learn

    base = TrainSettings(**layout, no_trace=True)
    with tempfile.TemporaryDirectory() as directory:
        return learn(
            base,
            [base.changed(**run) for run in runs],
            Path(directory),
            lambda settings, run: launch(settings, run, RANK_MODULE),
        )


def _across(several: Sequence[Any], others: Sequence[Any], name: str) -> list[str]:
    """How two layouts of the same model differ after one step, from what each of their ranks has
    learned."""
    ours, theirs = (
        {key: digest for of_rank in ranks for key, digest in of_rank.gradients_sha256.items()}
        for ranks in (several, others)
    )
    found = [
        f"{name}: gradient of {key}"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    ]
    if several[0].losses[0] != others[0].losses[0]:
        found.append(f"{name}: first loss {others[0].losses[0]!r}, not {several[0].losses[0]!r}")
    return found


def own_time(where: Flags) -> dict[str, float]:
    """Measure steps with tasks of 5 ms, in which the device only waits, on one rank with four
    stages: the fraction of time in which no task runs, and the median time between two tasks, in
    us. On one rank the next task is always ready, and a simulated step is the sum of its tasks."""
    from rrfp.trace.perfetto.reader import read_trace

    with tempfile.TemporaryDirectory() as directory:
        flags = _SMALL | {"pp": 1, "chunks": 4, "model": "mlp", "hint": "bfw", "steps": 8}
        # 20 ms a rank, which its chunks divide.
        run = _train(directory, flags | {"pace": "uniform"} | where)
        (rank,) = read_trace(run / "trace.pftrace").ranks
    steps: dict[int, list[tuple[int, int]]] = {}
    for task in rank.tasks:
        steps.setdefault(task.step, []).append((task.start_ns, task.end_ns))
    shares, gaps_ns = [], []
    for step, spans in steps.items():
        if step < _WARM_STEPS:
            continue
        spans.sort()
        gaps_ns += [later[0] - earlier[1] for earlier, later in pairwise(spans)]
        taken_ns = spans[-1][1] - spans[0][0]
        shares.append(1 - sum(end_ns - start_ns for start_ns, end_ns in spans) / taken_ns)
    return {"share": median(shares), "gap_us": median(gaps_ns) / 1e3}


def growth(where: Flags, num_steps: int) -> dict[str, list[float]]:
    """Least tensor memory at the end of a step, in the first and in the last tenth of a run, in MB
    by pipeline rank."""
    with tempfile.TemporaryDirectory() as directory:
        flags = _SMALL | {"pp": 2, "layers": 2, "microbatches": 2, "no_trace": True}
        run = _train(directory, flags | {"steps": num_steps} | where)
        ended = [line["allocated_bytes"] for line in _metrics(run)]
    tenth = num_steps // 10
    # The minimum, because a message may be in flight as a step ends. Adam allocates its state in
    # the first step.
    return {
        name: [min(of_rank) / 1e6 for of_rank in zip(*lines, strict=True)]
        for name, lines in (("first", ended[1 : 1 + tenth]), ("last", ended[-tenth:]))
    }


def most_memory(where: Flags, num_ranks: int) -> dict[str, list[float]]:
    """Peak tensor memory under Megatron's own schedule and under rrfp with the same fixed order, in
    MB by pipeline rank."""
    found = {}
    for dispatch in ("megatron", "fixed"):
        with tempfile.TemporaryDirectory() as directory:
            flags = {"pp": num_ranks, "dispatch": dispatch, "hint": "1f1b", "no_trace": True}
            if dispatch == "fixed":
                flags["outbox_mb"] = _OUTBOX_MB
            run = _train(directory, flags | _LARGE | {"dtype": "bf16"} | where)
            *_, last = _metrics(run)
        found[dispatch] = [each / 1e6 for each in last["peak_allocated_bytes"]]
    return found


def sanitized(where: Flags, tool: str) -> int:
    """The exit code of `compute-sanitizer` around a short run; 99 where it has found something."""
    sanitizer = ("compute-sanitizer", "--tool", tool, "--target-processes", "all")
    with tempfile.TemporaryDirectory() as directory:
        flags = _SMALL | {"layers": 2, "pp": 2, "steps": 1, "microbatches": 2} | where
        command = (*sanitizer, "--error-exitcode", "99", *_command(directory, flags))
        return subprocess.run(command, stdout=sys.stderr, check=False).returncode


def _train(directory: str, flags: Flags) -> Path:
    """Run `rrfp train`, and return the run's directory. What it prints goes to stderr."""
    subprocess.run(_command(directory, flags), stdout=sys.stderr, check=True)
    return Path(directory, "run")


def _command(directory: str, flags: Flags) -> list[str]:
    command = [sys.executable, "-m", "rrfp", "train", "--out", str(Path(directory, "run"))]
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)]
    return command


def _metrics(run: Path) -> Iterator[dict[str, Any]]:
    with (run / "metrics.jsonl").open(encoding="utf-8") as file:
        yield from map(json.loads, file)

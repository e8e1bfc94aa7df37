"""Starts runs as a user does, and compares what they wrote."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.ranks import HOST, loopback_store
from tests.megatron_lm.cases import NATIVE, RECORDED, Case

ROOT = Path(__file__).parent.parent.parent

LIMIT_S = 240.0
"""For one run; it takes 2 to 8 s on two calm cores."""

OF_A_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""Variables that a launcher sets."""

_NUM_BEFORE = 2
"""Steps before a checkpoint."""

Records = list[list[dict[str, Any]]]
"""By rank, what the recorder wrote."""


class RunFailedError(AssertionError):
    """A run ended otherwise than with 0, or not in time."""


@dataclass(frozen=True)
class Run:
    """The results of a run."""

    records: Records
    recorded: list[tuple[Path, str]]
    """The run directories of `rrfp run`, each with its schedule."""


class Ranks:
    """A server that has imported the checkout's Megatron and forks ranks. Close it after use."""

    def __init__(self, checkout: Path, bytecode: Path) -> None:
        self.checkout = checkout.resolve()
        self._bytecode = bytecode
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py"))],
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.communicate()

    def run(
        self, command: list[str], num_ranks: int, folder: Path, asked_for: dict[str, str]
    ) -> None:
        """Run `command`, Python's arguments, on ranks in `folder`; raises RunFailedError.
        `asked_for`: see `rank.begin`."""
        store = loopback_store()
        environment = {
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks,
            "MASTER_ADDR": HOST,
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
            **_variables(folder, asked_for),
        }
        job = {
            "command": command,
            "num_ranks": num_ranks,
            "folder": str(folder),
            "log": str(folder / "log"),
            "limit_s": LIMIT_S,
            "environment": {name: str(value) for name, value in environment.items()},
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        try:
            self._server.stdin.write(json.dumps(job) + "\n")
            self._server.stdin.flush()
        except BrokenPipeError:
            raise RunFailedError(f"Megatron of {self.checkout} cannot be imported") from None
        answer = self._server.stdout.readline()
        if not answer:
            raise RunFailedError(f"Megatron of {self.checkout} cannot be imported")
        codes = json.loads(answer)
        if any(codes):
            raise RunFailedError(f"{folder} ended with {codes}: {_why(folder / 'log')}")

    def torchrun(self, command: list[str], num_ranks: int, folder: Path) -> None:
        """The same by torchrun, each rank in an interpreter of its own."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        python = ["--no-python", sys.executable]
        with (folder / "log").open("w") as log:
            finished = subprocess.run(
                [*launcher, "--nproc-per-node", str(num_ranks), *python, *command],
                cwd=folder,
                env={**self._environment(), **_variables(folder, {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            )
        if finished.returncode:
            raise RunFailedError(f"{folder} ended badly: {_why(folder / 'log')}")

    def _environment(self) -> dict[str, str]:
        startup = Path(__file__).parent / "startup"
        return {
            **{name: value for name, value in os.environ.items() if name not in OF_A_RANK},
            "PYTHONPATH": os.pathsep.join(map(str, (startup, self.checkout, ROOT))),
            # Nothing is written into the checkout, and nothing is compiled twice.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(self._bytecode),
            "PYTHONWARNINGS": "ignore",
            "RRFP_LM_TESTS": str(ROOT),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # No kernel is compiled: a compiler may be missing, and ranks share two cores.
            "TORCHDYNAMO_DISABLE": "1",
        }


def _variables(folder: Path, asked_for: dict[str, str]) -> dict[str, str]:
    return {
        f"RRFP_LM_{name}": value for name, value in {"RECORDS": str(folder), **asked_for}.items()
    }


class Runs:
    """The runs of one case; `folder` takes what they write."""

    def __init__(self, ranks: Ranks, case: Case, folder: Path) -> None:
        self._ranks = ranks
        self._case = case
        self._folder = folder.resolve()
        self._script = ranks.checkout / case.script

    def run(self, schedules: Sequence[str], *, torchrun: bool = False) -> Run:
        """One schedule, or one before and one after a checkpoint."""
        name = "-".join(schedules)
        legs: list[list[str]] = [[]]
        if len(schedules) == 2:
            saved = str(self._folder / name / "saved")
            interval = str(100 if self._case.by_signal else _NUM_BEFORE)
            ends = [] if self._case.by_signal else ["--exit-interval", interval]
            saves = ["--save", saved, "--save-interval", interval, *ends]
            legs = [saves, ["--load", saved]]
        records: Records = [[] for _ in range(self._case.num_ranks)]
        recorded = []
        for number, (schedule, arguments) in enumerate(zip(schedules, legs, strict=True)):
            folder = self._folder / name / str(number)
            folder.mkdir(parents=True)
            is_ended = self._case.by_signal and number < len(legs) - 1
            self._start(schedule, folder, arguments, torchrun=torchrun, is_ended=is_ended)
            for rank, lines in enumerate(records):
                text = (folder / f"{rank}.jsonl").read_text()
                lines += map(json.loads, text.splitlines())
            if schedule != NATIVE:
                recorded.append((folder / "run", schedule))
        return Run(records, recorded)

    def _start(
        self, schedule: str, folder: Path, arguments: list[str], *, torchrun: bool, is_ended: bool
    ) -> None:
        case = self._case
        dispatch = ["--dispatch", "megatron"] if schedule == RECORDED else ["--hint", schedule]
        rrfp = ["-m", "rrfp", "run", *dispatch, "--out", str(folder / "run")]
        command = [
            *([] if schedule == NATIVE else rrfp),
            *(str(self._script), *case.all_arguments, *arguments),
            *("--tensorboard-dir", str(folder)),
        ]
        if torchrun:
            self._ranks.torchrun(command, case.num_ranks, folder)
            return
        patches = schedule in (NATIVE, RECORDED) and case.needs_gloo_patch
        self._ranks.run(
            command,
            case.num_ranks,
            folder,
            {"NATIVE_GLOO": str(int(patches)), "SIGTERM_AT": str(_NUM_BEFORE * is_ended)},
        )


def _why(log: Path) -> str:
    """The first error in a log that is not of a rank's peers, and what leads to it."""
    lines = log.read_text().splitlines()
    errors = [
        number
        for number, line in enumerate(lines)
        if re.match(r"(\[rank\d+\]: )?(rrfp: |[\w.]*(Error|Exception)\b)", line)
    ]
    first = [number for number in errors if "closed by peer" not in lines[number]] or errors
    end = first[0] + 1 if first else len(lines)
    return "\n".join([*lines[max(0, end - 8) : end], f"(in {log})"])


def differences(reference: Records, records: Records) -> list[str]:
    """Describe the first difference between two runs on each rank."""
    found = []
    for rank, (expected, given) in enumerate(zip(reference, records, strict=True)):
        if len(expected) != len(given):
            found.append(f"rank {rank} wrote {len(given)} lines instead of {len(expected)}")
        for number, (one, other) in enumerate(zip(expected, given, strict=False)):
            if one != other:
                keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
                told = ", ".join(f"{key}: {other.get(key)} and not {one.get(key)}" for key in keys)
                found.append(f"rank {rank}, line {number}: {told}")
                break
    return found


_EXPLAIN = """
import contextlib, io, json, sys
from rrfp.cli.main import main
commands = json.loads(sys.argv[1])
said = []
for command in commands:
    sys.argv = ["rrfp", *command]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main()
    said.append(output.getvalue() if code else "")
sys.stdout.write(json.dumps(said))
"""


def explain(runs: Sequence[tuple[Path, str]]) -> list[str]:
    """What `rrfp trace check` and the analyses say against each of some recorded runs, which come
    with their schedules; nothing if they say nothing."""
    verbs = [
        ("trace", "check"),
        *(("analyze", name) for name in ("bubbles", "deviations", "critical-path")),
    ]
    # Megatron's messages are not recorded, only the waits for them.
    of_ours = [*verbs, ("analyze", "misalignment")]
    commands = [
        [*verb, str(path)]
        for path, schedule in runs
        for verb in (verbs if schedule == RECORDED else of_ours)
    ]
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _EXPLAIN, json.dumps(commands)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert not finished.returncode, finished.stderr
    said = dict.fromkeys([str(path) for path, _ in runs], "")
    for command, output in zip(commands, json.loads(finished.stdout), strict=True):
        if output:
            said[command[-1]] += f"rrfp {' '.join(command)}: {output}"
    return [*said.values()]


@dataclass(frozen=True)
class Outcome:
    """One schedule of a case, held against the reference."""

    schedules: tuple[str, ...]
    failures: list[str]

    def __str__(self) -> str:
        return "differs" if self.failures else "same"


def compare(
    ranks: Ranks,
    case: Case,
    folder: Path,
    only: Sequence[str] | None = None,
    *,
    torchrun: bool = False,
) -> list[Outcome]:
    """Run a case under the reference and under all its schedules, or those that name one of
    `only`. Raises RunFailedError for the reference."""
    runs = Runs(ranks, case, folder)
    reference = runs.run([case.reference], torchrun=torchrun)
    assert all("step" in of_rank[0] for of_rank in reference.records), "nothing was recorded"
    failures: dict[tuple[str, ...], list[str]] = {}
    recorded: list[tuple[Path, str]] = []
    of: list[tuple[str, ...]] = []
    for schedules in case.schedules:
        if only is not None and not {*only} & {*schedules}:
            continue
        try:
            run = runs.run(schedules, torchrun=torchrun)
        except RunFailedError as error:
            failures[schedules] = [str(error)]
            continue
        failures[schedules] = differences(reference.records, run.records)
        recorded += run.recorded
        of += [schedules] * len(run.recorded)
    for schedules, said in zip(of, explain(recorded), strict=True):
        failures[schedules] += [said] if said else []
    return [Outcome(*each) for each in failures.items()]

"""Runs Megatron's tests on forked CPU ranks; a script of its own process, where the package named
`tests` is Megatron's.

Megatron's tests are written for torchrun, NCCL and eight GPUs. `prepare_cpu` makes Megatron-Core
run on the CPU; what is left for the shims here is what the tests and `megatron.training` name
themselves: `.cuda()`, `device="cuda"`, the nccl backend, Transformer Engine's layers, packages that
`megatron.training` imports and these tests have no use for, and a download of test data.

Megatron is imported once; then every test gets ranks forked from here, so that one that fails or
hangs leaves nothing behind for the next. A line of JSON on stdout tells what became of each.
"""

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import json
import math
import os
import re
import signal
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rrfp.runtime.exit_hooks import at_end

FILES = (
    "tests/unit_tests/pipeline_parallel/test_schedules.py",
    "tests/unit_tests/pipeline_parallel/test_pipeline_layout.py",
    "tests/unit_tests/pipeline_parallel/test_multimodule_schedules.py",
)
"""Tests that call a schedule. Some versions lack some of them."""

TOGETHER = ("test_get_pipeline_parallel_order",)
"""Tests of many items that call no schedule: all items of one share their ranks."""

ON_TWO = "_2gpu"
"""How the names end of tests that ask for two ranks instead of all."""

LARGE, TIMES_AS_LONG = "_8gpu", 5
"""Timeouts of tests that multiply matrices sized for GPUs."""

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)

_CREATORS = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros")

_GRACE_S = 10.0
"""How long the other ranks may go on once one has failed: they may wait for it in a collective."""

_INI = """[pytest]
python_files = test_*.py
markers =
    internal
    flaky
    flaky_in_dev
"""


@dataclass(frozen=True, slots=True)
class Job:
    """The tests to run. The launcher sends it as JSON."""

    checkout: str
    schedule: str
    """`native`, `install` or `names`: which schedule the tests find."""
    num_ranks: int
    limit_s: float
    """For each test."""
    port: int
    """The port of the store, which the launcher serves."""
    logs: str
    only_file: str = ""
    """Leaves out the files of other names."""
    pytest_args: list[str] = field(default_factory=list)


def main(job: Job) -> None:
    _end_with_parent()
    # The script's own folder, from which nothing is imported, gives way to the checkout.
    sys.path[0] = job.checkout
    logs = Path(job.logs)
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "pytest.ini").write_text(_INI)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _prepare(job)
    for number, (name, items) in enumerate(_units(_collected(job))):
        outcome = _run(job, number, items)
        sys.stderr.write(f"{job.schedule}: {name}: {outcome['outcome']}\n")
        sys.stdout.write(json.dumps({"test": name, "num_items": len(items), **outcome}) + "\n")
        sys.stdout.flush()


# What the tests find in place of GPUs.


def _prepare(job: Job) -> None:
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    _put_cpu_in_place_of_cuda(job.num_ranks)
    _put_local_layers_in_place_of_transformer_engines()
    _put_stubs(job.checkout)
    if job.schedule == "native":
        return
    import megatron.core.pipeline_parallel.schedules as schedules

    import rrfp.megatron

    rrfp.megatron.install()
    if job.schedule == "names":
        for name in _SCHEDULES:
            setattr(schedules, name, rrfp.megatron.get_forward_backward_func())


def _put_cpu_in_place_of_cuda(num_ranks: int) -> None:
    def itself(tensor_or_module: Any, *_args: object, **_kwargs: object) -> Any:
        return tensor_or_module

    def nothing(*_args: object, **_kwargs: object) -> None:
        pass

    cuda: Any = torch.cuda
    cuda.current_device = torch.cpu.current_device
    cuda.device_count = lambda: num_ranks
    cuda.set_device = cuda.synchronize = cuda.empty_cache = nothing
    cuda.get_rng_state, cuda.set_rng_state = torch.get_rng_state, torch.set_rng_state
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = module.cuda = itself
    for name in _CREATORS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return create(*args, **kwargs)

    return created


def _put_local_layers_in_place_of_transformer_engines() -> None:
    from megatron.core import utils
    from megatron.core.models.gpt import gpt_layer_specs as specs

    utils.is_te_min_version = lambda *_args, **_kwargs: False

    def without(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{**kwargs, "use_transformer_engine": False})

        return called

    local = specs.get_gpt_layer_local_spec

    def layer(config: Any = None, **_options: object) -> Any:
        return local(num_experts=getattr(config, "num_moe_experts", None))

    specs.get_gpt_layer_with_transformer_engine_spec = layer
    specs.get_gpt_decoder_block_spec = without(specs.get_gpt_decoder_block_spec)
    specs.get_gpt_mtp_block_spec = without(specs.get_gpt_mtp_block_spec)


def _put_stubs(checkout: str) -> None:
    def stub(name: str, **members: Any) -> Any:
        module: Any = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
        return module

    @pytest.fixture
    def mocker() -> Iterator[Any]:
        with contextlib.ExitStack() as patches:

            def patch(target: str, **options: Any) -> Any:
                return patches.enter_context(mock.patch(target, **options))

            yield types.SimpleNamespace(patch=patch)

    def rearrange(array: Any, pattern: str, **sizes: int) -> Any:
        """einops's, for the one kind of pattern that Megatron's grids use: (a b c) -> (b) (a c)."""
        before, after = pattern.split(" -> ")
        names = before.strip("()").split()
        groups = [group.split() for group in re.findall(r"\(([^)]*)\)", after)]
        parted = array.reshape([sizes[name] for name in names])
        moved = parted.transpose([names.index(name) for group in groups for name in group])
        return moved.reshape([math.prod(sizes[name] for name in group) for group in groups])

    grids: Any = importlib.import_module("megatron.core.hyper_comm_grid")
    grids.einops, grids.HAVE_EINOPS = types.SimpleNamespace(rearrange=rearrange), True
    stub("pytest_mock", mocker=mocker)
    stub(
        "tests.test_utils.python_scripts.download_unit_tests_dataset",
        download_and_extract_asset=lambda assets_dir: None,
    )
    # The package itself imports all of Megatron's training, with a dozen packages that only other
    # tests need.
    training = stub("megatron.training", __path__=[f"{checkout}/megatron/training"])
    stub("megatron.training.tokenizer", build_tokenizer=None)
    stub("megatron.training.training", get_model=None)
    stub("megatron.training.arguments", parse_args=None)
    variables = importlib.import_module("megatron.training.global_vars")
    vars(training).update({k: v for k, v in vars(variables).items() if k.startswith("get_")})
    for name in ("megatron.training.checkpointing", "megatron.core.optimizer.muon"):
        importlib.import_module(name)
    # It asks psutil, for the log.
    strategies = "megatron.core.dist_checkpointing.strategies"
    writer: Any = importlib.import_module(f"{strategies}.filesystem_async")
    writer._process_memory = lambda: 0


class _AsIfWithCuda:
    """A pytest plugin: tests that ask for CUDA while they are imported are not skipped."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Iterator[None]:
        with mock.patch("torch.cuda.is_available", return_value=True):
            return (yield)


# Forked ranks.


def _collected(job: Job) -> list[str]:
    """The ids of the tests, collected in a process of its own, for the import leaves traces."""
    path = Path(job.logs) / "collected.json"

    def collect() -> None:
        class Keep:
            def pytest_collection_finish(self, session: pytest.Session) -> None:
                ids = [f"{job.checkout}/{item.nodeid}" for item in session.items]
                path.write_text(json.dumps(ids))

        named = [Path(job.checkout, name) for name in FILES if name.endswith(job.only_file)]
        files = [str(file) for file in named if file.is_file()]
        _pytest(job, ["--collect-only", "-q", *job.pytest_args, *files], Keep())

    log = Path(job.logs) / "collect.log"
    pid = _fork(collect, log)
    _wait([pid], time.monotonic() + job.limit_s)
    if not path.exists():
        raise SystemExit(f"nothing was collected; see {log}")
    ids: list[str] = json.loads(path.read_text())
    return ids


def _units(ids: list[str]) -> list[tuple[str, list[str]]]:
    """The names of the units that run on separate ranks: a test, or all items of a test."""
    units: dict[str, list[str]] = {}
    for item in ids:
        name = item.rpartition("::")[2]
        function = name.partition("[")[0]
        units.setdefault(function if function in TOGETHER else name, []).append(item)
    return list(units.items())


def _run(job: Job, number: int, items: list[str]) -> dict[str, Any]:
    logs = Path(job.logs) / f"{number:02}"
    logs.mkdir()
    function = items[0].rpartition("::")[2].partition("[")[0]
    num_ranks = 2 if function.endswith(ON_TWO) else job.num_ranks
    limit_s = job.limit_s * (TIMES_AS_LONG if function.endswith(LARGE) else 1)
    files = [logs / f"rank{rank}.json" for rank in range(num_ranks)]

    def run(rank: int) -> None:
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks,
        }
        os.environ.update({name: str(value) for name, value in variables.items()})
        if function in TOGETHER:
            _meet_nobody()
        else:
            _meet_at(job, f"{job.schedule}/{number}", rank, num_ranks)
        if function.endswith((ON_TWO, LARGE)):
            # They make their groups themselves; Transformer Engine's layers need no more.
            importlib.import_module("megatron.core.parallel_state")._set_global_memory_buffer()
        faulthandler.enable()
        faulthandler.dump_traceback_later(0.9 * limit_s)
        temporary = f"--basetemp={logs}/temp/rank{rank}"
        (logs / "temp").mkdir(exist_ok=True)
        _pytest(job, ["-s", temporary, *items], _Outcomes(files[rank]))
        at_end.run()

    start_s = time.monotonic()
    deadline_s = start_s + limit_s
    pids = [
        _fork(functools.partial(run, rank), logs / f"rank{rank}.log") for rank in range(num_ranks)
    ]
    try:
        _wait(pids, deadline_s, files)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    outcomes = [_read(path) for path in files]
    seconds = round(time.monotonic() - start_s, 1)
    return {**_together(outcomes), "num_ranks": num_ranks, "seconds": seconds}


def _meet_at(job: Job, name: str, rank: int, num_ranks: int) -> None:
    """Have torch's rendezvous give the launcher's store; the name parts the keys of one test's
    ranks from those of another's."""

    init: Any = torch.distributed.init_process_group
    num_made: Counter[tuple[int, ...]] = Counter()

    def init_gloo(**options: Any) -> None:
        init(**{**options, "backend": "gloo"})

    def named_after_members(ranks: Sequence[int], **_options: object) -> str:
        num_made[tuple(ranks)] += 1
        return f"{'-'.join(map(str, ranks)) or 'all'}/{num_made[tuple(ranks)]}"

    def rendezvous(*_args: object, **_kwargs: object) -> Iterator[Any]:
        store = torch.distributed.TCPStore("127.0.0.1", job.port, is_master=False)
        yield torch.distributed.PrefixStore(name, store), rank, num_ranks

    def of_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: create(*args, **{**options, "backend": "gloo"})

    distributed: Any = torch.distributed
    for function in ("new_group", "new_subgroups_by_enumeration"):
        setattr(distributed, function, of_gloo(getattr(distributed, function)))
    distributed.rendezvous = rendezvous
    distributed.init_process_group = init_gloo
    # Some of the tests make groups on their members only, each rank its own. torch numbers groups,
    # so two of them meet in the store under one name: NCCL connects at the first use only, gloo at
    # once, and now and then to the wrong rank.
    distributed.distributed_c10d._process_group_name = named_after_members


def _meet_nobody() -> None:
    """Give torch's stand-in for process groups, which sends nothing: these tests ask for ranks and
    sizes only, in a hundred groups each."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init: Any = torch.distributed.init_process_group
    new_group: Any = torch.distributed.new_group

    def init_fake(*, rank: int, world_size: int, **_options: object) -> None:
        init(backend="fake", rank=rank, world_size=world_size, store=FakeStore())

    def new_fake_group(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": "fake"})

    distributed: Any = torch.distributed
    distributed.init_process_group = init_fake
    distributed.new_group = new_fake_group


def _together(outcomes: list[dict[str, str] | None]) -> dict[str, Any]:
    """One outcome for all ranks, with a reason: of those that failed one that is no other's."""
    failed = {rank: one["reason"] for rank, one in _of("failed", outcomes)}
    lost = [rank for rank, one in enumerate(outcomes) if one is None]
    if failed:
        first = {rank: why for rank, why in failed.items() if "PeerLostError" not in why} or failed
        return {"outcome": "failed", "reason": min(first.values()), "ranks": sorted(first)}
    if lost:
        return {"outcome": "hung", "reason": "it did not end in time", "ranks": lost}
    for outcome in ("passed", "skipped"):
        of = _of(outcome, outcomes)
        if of:
            reason = min(one["reason"] for _, one in of)
            return {"outcome": outcome, "reason": reason, "ranks": [rank for rank, _ in of]}
    raise AssertionError("there is a rank, and it is lost or has an outcome")


def _of(outcome: str, outcomes: list[dict[str, str] | None]) -> list[tuple[int, dict[str, str]]]:
    return [(rank, one) for rank, one in enumerate(outcomes) if one and one["outcome"] == outcome]


def _read(path: Path) -> dict[str, str] | None:
    if not path.exists():
        return None
    outcome: dict[str, str] = json.loads(path.read_text())
    return outcome


class _Outcomes:
    """A pytest plugin that writes the outcomes of a rank's tests. It writes a failure at once,
    because later tests may wait indefinitely for another rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcome = ("failed", "pytest ran nothing")
        self._has_failed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._has_failed:
            return
        if report.failed:
            self._has_failed = True
            crash = getattr(report.longrepr, "reprcrash", None)
            what = crash.message.splitlines()[0] if crash else str(report.longrepr)
            where = f" ({Path(crash.path).name}:{crash.lineno})" if crash else ""
            self._outcome = ("failed", re.sub(" at 0x[0-9a-f]+", "", what) + where)
            sys.stdout.write(f"{report.longreprtext}\n")
            self._write()
        elif report.skipped:
            if isinstance(report.longrepr, tuple) and self._outcome[0] != "passed":
                self._outcome = ("skipped", report.longrepr[2])
        elif report.when == "call":
            self._outcome = ("passed", "")

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        outcome, reason = self._outcome
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"outcome": outcome, "reason": reason}))
        unfinished.replace(self._path)


def _pytest(job: Job, arguments: list[str], plugin: object) -> None:
    options = ["-c", f"{job.logs}/pytest.ini", "--rootdir", job.checkout, "-p", "no:cacheprovider"]
    pytest.main(
        [*options, "-W", "ignore", "--tb=short", *arguments], plugins=[_AsIfWithCuda(), plugin]
    )


def _fork(target: Callable[[], None], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        _end_with_parent()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        target()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _wait(pids: list[int], deadline_s: float, files: list[Path] | None = None) -> None:
    """Until all have ended, or the deadline, which comes nearer when one has failed."""
    left = set(pids)
    has_failed = False
    while left and time.monotonic() < deadline_s:
        left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
        if not has_failed and any(
            (_read(path) or {}).get("outcome") == "failed" for path in files or ()
        ):
            has_failed = True
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        time.sleep(0.05)


def _end_with_parent() -> None:
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before it was asked about.
        os._exit(1)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))

"""The core does the same compiled and interpreted, and says which it is."""

import os
import pickle
import shutil
import subprocess
import sys
from copy import copy, deepcopy
from fractions import Fraction
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from rrfp import compiled
from rrfp.compiled import Core
from rrfp.schedule.admission import ListedOrders
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.named_hints import HINTS, AutoHint
from rrfp.schedule.policy import Bytes, Policy, ShareOf1F1B
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import Shape
from rrfp.simulate.engine import TaskTimes

PACKAGE = Path(compiled.__file__).parent
TIMEOUT_S = 100

needs_compiled = pytest.mark.skipif(
    not (PACKAGE / compiled.DIGEST_FILE).exists()
    or compiled.digest(PACKAGE) != (PACKAGE / compiled.DIGEST_FILE).read_text().strip(),
    reason="the core is not compiled here (make setup compiles it where a C compiler is)",
)

STEPS = """
from random import Random

from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Bytes
from rrfp.schedule.policy import AutoPatience
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.bounds import ActivationSizes
from rrfp.errors import RrfpError
from rrfp.simulate.step import play
from rrfp.simulate.step import new_recording
from rrfp.simulate.step import simulate_step
from rrfp.simulate.engine import TaskTimes, StepConditions

draw = Random(20)


def rows(shape, most):
    stages, microbatches = range(shape.num_stages), range(shape.num_microbatches)
    return [[draw.randrange(1, most) for _ in microbatches] for _ in stages]


for hint in HINTS.values():
    for shape in (Shape(4, 8), Shape(2, 6, 2), Shape(3, 9, 2, Placement.V)):
        for bound in ({}, {"limit": 3}, {"hold": 4}, {"hold": Bytes(500)}, {"dispatch": "fixed"}):
            bound = {name: Dispatch(x) if name == "dispatch" else x for name, x in bound.items()}
            for num_members in (1, 2):
                patience = 0 if "dispatch" in bound else draw.choice((0, 5000, AutoPatience.AUTO))
                times = TaskTimes(*(rows(shape, 20_000) for _ in range(3)))
                sizes = ActivationSizes(rows(shape, 200))
                try:
                    policy = Policy(hint.for_shape(shape), patience=patience, **bound)
                    policy, fitting = fitted(policy, shape)
                except RrfpError as error:
                    print(type(error).__name__, error)
                    continue
                world = lambda: StepConditions(
                    times,
                    transfer=lambda sender, receiver, task: 500 + task.microbatch,
                    num_members=num_members,
                    lateness=lambda member, task: 70 * member,
                    agreement_ns=300,
                    sizes=sizes,
                )
                print(play(fitting, policy, world()))
                recording = new_recording(fitting, num_members, 1, {})
                simulate_step(fitting, policy, [world()], recording=recording)
                for rank in recording.ranks:
                    print(rank.tasks, rank.waits, rank.sends, rank.agreements, rank.stimuli)
"""


def printed(code: str, path: Path = PACKAGE.parent, *, interpreted: bool = False) -> str:
    """Run code in a new Python with the package in this directory; returns its output."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    environment.pop(compiled.VARIABLE, None)
    if interpreted:
        environment[compiled.VARIABLE] = "0"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CORE = "from rrfp.compiled import core; print(core())"


@needs_compiled
def test_compiled_and_interpreted_steps_are_the_same() -> None:
    of_compiled = printed(STEPS)
    assert of_compiled.count("PipelineRun") > 200
    assert of_compiled == printed(STEPS, interpreted=True)


@needs_compiled
def test_all_of_the_core_is_compiled() -> None:
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in compiled.sources(PACKAGE)
    ]
    files = printed(
        f"import importlib\nfor name in {names}: print(importlib.import_module(name).__file__)"
    ).split()
    assert len(files) == len(names)
    assert all(name.endswith(tuple(EXTENSION_SUFFIXES)) for name in files)


@pytest.mark.parametrize(
    "value",
    [
        Shape(2, 3),
        ActivationSizes([[1, 2]], [[0, 1]]),
        TaskTimes([[1]], [[2]], [[3]]),
        ListedOrders("entry.csv", ((1, 0),)),
        Bytes(5),
        ShareOf1F1B(Fraction(1, 2)),
        AutoHint(every=7),
        *HINTS.values(),
        HINTS["zb-h1"].for_shape(Shape(2, 3)),
        order_of(HINTS["bf"], Shape(2, 3)),
        Policy(order_of(HINTS["1f1b"], Shape(2, 3)), hold=Fraction(3, 2)),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'name', '')}",
)
def test_values_travel_between_processes(value: object) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    assert deepcopy(value) == value
    assert copy(value) == value


def test_sources_run_where_they_are_asked_for() -> None:
    assert printed(CORE, interpreted=True).strip() == Core.INTERPRETED
    code = "import rrfp.schedule.ready_tracker as module; print(module.__file__)"
    assert printed(code, interpreted=True).strip().endswith("ready_tracker.py")


@needs_compiled
def test_sources_run_once_they_have_changed(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "rrfp")
    assert printed(CORE, tmp_path).strip() == Core.COMPILED
    shape = tmp_path / "rrfp" / "schedule" / "shape.py"
    shape.write_text(shape.read_text() + "\nCHANGED = True\n")
    assert printed(CORE, tmp_path).strip() == Core.STALE
    assert printed("from rrfp.schedule.shape import CHANGED; print(CHANGED)", tmp_path) == "True\n"


def test_without_extensions_the_sources_run(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("*.so", "*.sha256", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "rrfp", ignore=ignored)
    assert printed(CORE, tmp_path).strip() == Core.INTERPRETED
    code = "import rrfp.simulate.engine as engine; print(engine.__file__)"
    assert printed(code, tmp_path).strip() == str(tmp_path / "rrfp" / "simulate" / "engine.py")

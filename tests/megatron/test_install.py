"""`rrfp.megatron.install()`: the one line that a Megatron training script adds, and what it says
where somebody else has been there first."""

import gc
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from rrfp.errors import UsageError
from rrfp.megatron import (
    DispatchSettings,
    get_forward_backward_func,
    install,
    installation,
    trace_native,
)
from rrfp.megatron.installation import SCHEDULES, original_function
from rrfp.megatron.job import schedule_patches as stand_ins
from rrfp.megatron.job.request import RecordingRequest
from rrfp.megatron.job.schedule_patches import DropInPatch
from rrfp.megatron.native.patch import NativePatch
from rrfp.megatron.provenance import is_ours
from rrfp.runtime.exit_hooks import at_end
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks
from tests.megatron.training import SMALL, Rig, on_rigs

NAME = "get_forward_backward_func"
HOME = "megatron.core.pipeline_parallel.schedules"


def test_a_training_loop_finds_ours_and_learns_the_same() -> None:
    for found_names, native, ours in run_ranks(2, train_before_and_after_installing, timeout_s=110):
        assert found_names == ["ForwardBackward"] * 3
        assert ours == native


def train_before_and_after_installing() -> tuple[list[str], list[float], list[float]]:
    """The classes of what the known places give once installed, and a run's losses before and
    after."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core import pipeline_parallel
    from megatron.core.pipeline_parallel import schedules

    import rrfp.megatron
    from rrfp.train.launch.process_groups import parallel_groups
    from rrfp.train.settings import TrainSettings

    # Megatron-LM's loop has imported the name by the time its user's script runs.
    loop: Any = ModuleType("megatron.training.training")
    loop.get_forward_backward_func = schedules.get_forward_backward_func
    sys.modules[loop.__name__] = loop

    settings = TrainSettings(**{**SMALL, "pp": 2})
    with parallel_groups(settings, timeout_s=60.0) as layout:
        native = _losses(settings, layout, loop.get_forward_backward_func())
        rrfp.megatron.install(rrfp.megatron.DispatchSettings(hint="fb"))
        found = [
            place.get_forward_backward_func() for place in (pipeline_parallel, schedules, loop)
        ]
        ours = _losses(settings, layout, found[-1])
        found[-1].close()
    return [type(function).__name__ for function in found], native, ours


def _losses(settings: Any, layout: Any, schedule: Any) -> list[float]:
    from rrfp.train.data.batches import open_data
    from rrfp.train.loop import Trainer
    from rrfp.train.models.model import build_model
    from rrfp.train.ordered_batches import OrderedBatches

    data = open_data(settings)
    gpt = build_model(settings, layout, data)
    batches = OrderedBatches(settings, layout, data)
    trainer = Trainer(settings, layout, gpt, batches, schedule, lambda _: None)
    return [trainer.train_step(step).loss for step in range(settings.num_steps)]


HOLDERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "variable": lambda fetched: fetched,
    "partial": lambda fetched: partial(fetched, forward_only=True),
    "attribute": lambda fetched: SimpleNamespace(run=fetched).run,
    "closure": lambda fetched: lambda **arguments: fetched(**arguments),
    "wrapper": lambda fetched: wraps(fetched)(lambda **arguments: fetched(**arguments)),
}
"""In what a loop holds the schedule function that it has fetched."""


def test_a_loop_that_has_fetched_megatrons_function_before_is_refused() -> None:
    (raised,) = run_ranks(
        1, on_rigs, call_what_was_fetched_before, {**SMALL, "pp": 1}, timeout_s=110
    )
    for name in (*SCHEDULES, *HOLDERS):
        called = name if name in SCHEDULES else SCHEDULES[0]
        assert re.fullmatch(
            rf".*/tests/megatron/\w+\.py:\d+ calls Megatron's {called}, which it has fetched "
            r"before install\(\) replaced it; call install\(\) before the loop calls "
            r"get_forward_backward_func\(\)",
            raised[name],
        ), name


def call_what_was_fetched_before(layout: Any, settings: dict[str, Any]) -> dict[str, str]:
    """By function, or by what holds the first one, what the first call says after install()."""
    from megatron.core.pipeline_parallel import schedules

    fetched = {name: getattr(schedules, name) for name in SCHEDULES}
    fetched |= {name: hold(fetched[SCHEDULES[0]]) for name, hold in HOLDERS.items()}
    rig = Rig(settings, layout)
    expected = rig.run(fetched["variable"])
    native = _losses(TrainSettings(**settings), layout, fetched["variable"])
    install()
    raised = {}
    for name, function in fetched.items():
        try:
            rig.run(function)
        except UsageError as error:
            raised[name] = str(error)
    # What is fetched now is ours, and what of rrfp runs Megatron's own on purpose goes on.
    ours = schedules.get_forward_backward_func()
    assert rig.run(ours) == expected
    ours.close()
    assert _losses(TrainSettings(**settings), layout, original_function(SCHEDULES[0])) == native
    return raised


def test_a_loop_that_was_traced_too_late_is_warned_and_trains(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_ranks(
        1, on_rigs, trace_what_was_fetched_before, {**SMALL, "pp": 1}, str(tmp_path), timeout_s=110
    )
    assert (
        capfd.readouterr().err.count("trace_native() replaced it; call trace_native() before") == 1
    )


def trace_what_was_fetched_before(layout: Any, settings: dict[str, Any], out: str) -> None:
    from megatron.core.pipeline_parallel import schedules

    fetched = schedules.forward_backward_no_pipelining
    rig = Rig(settings, layout)
    expected = rig.run(fetched)
    trace_native(f"{out}/run")
    for _ in range(2):
        assert rig.run(fetched) == expected


PATCHES = """
from functools import wraps

def zero_bubble(pp_size=None, vp_size=None):
    return None

def replacement():
    return zero_bubble

def decorate(function):
    @wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

def enclose(function):
    def enclosed(*args, **kwargs):
        return function(*args, **kwargs)
    return enclosed

class Chooser:
    def __init__(self, function=None):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def choose(self, *args, **kwargs):
        return self(*args, **kwargs)

shortest = lambda *args: None
"""
FILE = "/opt/primus/pipeline.py"


@pytest.fixture
def primus() -> Iterator[Any]:
    """A module of somebody else's, that patches Megatron."""
    module = ModuleType("primus.pipeline")
    module.__file__ = FILE
    exec(compile(PATCHES, FILE, "exec"), vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules that have Megatron's function; whatever is put there, it is back in the end."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core import pipeline_parallel
    from megatron.core.pipeline_parallel import schedules

    found = {module.__name__: module for module in (schedules, pipeline_parallel)}
    # In Megatron-LM's loop, and in another one.
    for name in ("megatron.training.training", "megatron.bridge.training.train"):
        found[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, found[name])
    for module in found.values():
        monkeypatch.setattr(module, NAME, getattr(schedules, NAME), raising=False)
    for name in SCHEDULES:
        function = getattr(schedules, name)
        monkeypatch.setattr(schedules, name, function)
        for part in ("__defaults__", "__kwdefaults__", "__code__"):
            monkeypatch.setattr(function, part, getattr(function, part))
    return found


REPLACES = "has replaced"
WRAPS = "wraps"
MEGATRONS = rf"{HOME}\.{NAME} \(.*schedules\.py:\d+\)"

FOREIGN: dict[str, tuple[Callable[[Any, Any], Any], str, str]] = {
    "function": (
        lambda primus, _: primus.zero_bubble,
        rf"^primus\.pipeline\.zero_bubble \({FILE}:4\)",
        REPLACES,
    ),
    "lambda": (
        lambda primus, _: primus.shortest,
        rf"^primus\.pipeline\.<lambda> \({FILE}:\d+\)",
        REPLACES,
    ),
    "what says that it is Megatron's": (
        lambda primus, own: primus.decorate(own),
        rf"^primus\.pipeline\.decorate\.<locals>\.wrapper \({FILE}:\d+\)",
        WRAPS,
    ),
    "a name put on by hand": (
        lambda primus, own: wraps(own, updated=())(primus.replacement),
        rf"^primus\.pipeline\.replacement \({FILE}:\d+\)",
        WRAPS,
    ),
    "closure": (
        lambda primus, own: primus.enclose(own),
        rf"^primus\.pipeline\.enclose\.<locals>\.enclosed \({FILE}:\d+\)",
        WRAPS,
    ),
    "partial of Megatron's": (
        lambda _, own: partial(own, pp_size=4),
        rf"^a functools\.partial of {MEGATRONS}",
        WRAPS,
    ),
    "partial of another": (
        lambda primus, _: partial(primus.zero_bubble, pp_size=4),
        rf"^a functools\.partial of primus\.pipeline\.zero_bubble \({FILE}:4\)",
        REPLACES,
    ),
    "cache": (
        lambda _, own: lru_cache(own),
        rf"^a functools\._lru_cache_wrapper of {MEGATRONS}",
        WRAPS,
    ),
    "instance": (
        lambda primus, own: primus.Chooser(own),
        rf"^an instance of primus\.pipeline\.Chooser \({FILE}\)",
        WRAPS,
    ),
    "class": (
        lambda primus, _: primus.Chooser,
        rf"^the class primus\.pipeline\.Chooser \({FILE}\)",
        REPLACES,
    ),
    "bound method": (
        lambda primus, _: primus.Chooser().choose,
        rf"^primus\.pipeline\.Chooser\.choose \({FILE}:\d+\)",
        REPLACES,
    ),
    "built in": (lambda *_: print, r"^builtins\.print", REPLACES),
    "mock": (
        lambda *_: MagicMock(),
        r"^an instance of unittest\.mock\.MagicMock \(.*mock\.py\)",
        REPLACES,
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_who_has_replaced_megatrons_schedule_is_named(
    kind: str, primus: Any, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, who, does = FOREIGN[kind]
    own = getattr(places[HOME], NAME)
    patch = make(primus, own)
    monkeypatch.setattr(places[HOME], NAME, patch)
    next_step = "switch that patch off, or leave out install()"
    if does == WRAPS:
        next_step = "call install() before it does, or switch that patch off"
    with pytest.raises(UsageError, match=rf"{who} {does} Megatron's {NAME} in {HOME}; ") as told:
        install()
    assert str(told.value).endswith(next_step)
    # Nothing was replaced.
    assert [getattr(place, NAME) is own for place in places.values()] == [False, True, True, True]
    assert getattr(places[HOME], NAME) is patch


@pytest.mark.parametrize("asker", [install, trace_native])
@pytest.mark.parametrize(
    "patched",
    [
        ["megatron.core.pipeline_parallel"],
        ["megatron.training.training"],
        ["megatron.bridge.training.train"],
        # As Primus does.
        ["megatron.core.pipeline_parallel", "megatron.training.training"],
    ],
)
def test_a_patch_in_any_place_is_seen(
    asker: Callable[[], None],
    patched: list[str],
    primus: Any,
    places: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in patched:
        monkeypatch.setattr(places[name], NAME, primus.zero_bubble)
    with pytest.raises(UsageError) as told:
        asker()
    assert str(told.value) == (
        f"primus.pipeline.zero_bubble ({FILE}:4) has replaced Megatron's {NAME} in "
        f"{' and '.join(patched)}; switch that patch off, or leave out {asker.__name__}()"
    )


def test_a_function_of_another_module_is_not_megatrons(
    places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other: Any = ModuleType("megatron.other")
    exec(f"def {NAME}(): pass", vars(other))
    monkeypatch.setitem(sys.modules, other.__name__, other)
    kept = getattr(other, NAME)
    install()
    assert getattr(other, NAME) is kept
    assert all(is_ours(getattr(place, NAME)) for place in places.values())


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("first", [install, trace_native])
def test_it_is_called_once(first: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    # Or this process would say in the end that no step has passed by.
    monkeypatch.setattr(at_end, "register", lambda _: None)
    first()
    sentence = rf"^{first.__name__}\(\) has replaced Megatron's schedule .* once"
    for asker in (install, trace_native):
        with pytest.raises(UsageError, match=sentence):
            asker()


class SelfLoading(ModuleType):
    """As some libraries' modules: a look at what they hold loads all that they stand for."""

    loaded = False

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        type(self).loaded = True
        return {}


def test_looking_for_the_name_loads_nothing(
    places: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_one.py").write_text("raise AssertionError('it was loaded')")
    spec = importlib.util.spec_from_file_location("lazy_one", tmp_path / "lazy_one.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_one", lazy)
    spec.loader.exec_module(lazy)
    for name, strange in {"self_loading": SelfLoading("self_loading"), "slots": object()}.items():
        monkeypatch.setitem(sys.modules, name, strange)
    monkeypatch.setitem(sys.modules, "nothing", None)

    installation.replace_functions({NAME: print}, "a test")
    assert [getattr(place, NAME) for place in places.values()] == [print] * 4
    assert not SelfLoading.loaded


def test_modules_may_change_meanwhile(
    places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = ModuleType("growing")
    vars(growing).update({f"name_{number}": number for number in range(3000)})
    monkeypatch.setitem(sys.modules, "growing", growing)

    def grow(*_: object) -> None:
        # As a finalizer may do that imports something.
        if len(vars(growing)) < 10_000:
            setattr(growing, f"more_{len(vars(growing))}", 0)

    gc.callbacks.append(grow)
    thresholds = gc.get_threshold()
    gc.set_threshold(5)
    try:
        installation.replace_functions({NAME: print}, "a test")
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(grow)
    assert [getattr(place, NAME) for place in places.values()] == [print] * 4


def test_another_name_for_it_is_replaced_too(
    places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Any = ModuleType("script")
    script.schedule_of = getattr(places[HOME], NAME)
    monkeypatch.setitem(sys.modules, "script", script)
    installation.replace_functions({NAME: print}, "a test")
    assert script.schedule_of is print


@pytest.mark.parametrize("by_name", SCHEDULES)
@pytest.mark.parametrize("asker", [install, trace_native])
def test_a_schedule_that_a_loop_imports_by_name_is_replaced(
    asker: Callable[[], None],
    by_name: str,
    places: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(at_end, "register", lambda _: None)
    own = getattr(places[HOME], by_name)
    loop = places["megatron.bridge.training.train"]
    setattr(loop, by_name, own)
    asker()
    for module in (loop, places[HOME]):
        assert is_ours(getattr(module, by_name))
        assert getattr(module, by_name).__wrapped__ is own
    # What runs Megatron's own on purpose still finds it.
    assert original_function(by_name) is own


def test_a_model_that_each_rank_has_whole_is_left_to_megatron(
    places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(**arguments: Any) -> Any:
        return arguments

    monkeypatch.setattr(places[HOME], SCHEDULES[0], own)
    # Or that would be a patch that we refuse.
    monkeypatch.setattr(stand_ins, "check_for_drop_in", lambda _: None)
    pipeline = SimpleNamespace(pp=SimpleNamespace(size=lambda: 2))
    for stand_in in (
        DropInPatch(DispatchSettings(), None),
        NativePatch(RecordingRequest("a test")),
    ):
        teacher = stand_in.functions()[SCHEDULES[0]]
        # Without process groups of its own, in no pipeline at all.
        for groups in (pipeline, SimpleNamespace()):
            assert teacher(pg_collection=groups) == {"pg_collection": groups}
        assert not stand_in.was_called


def test_whoever_only_asks_for_a_schedule_has_called_none() -> None:
    stand_in = DropInPatch(DispatchSettings(), RecordingRequest("a test"))
    schedule = stand_in.functions()[NAME](1)
    assert not stand_in.was_called
    with pytest.raises(IndexError):
        schedule(
            forward_step_func=print,
            data_iterator=None,
            model=[],
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
        )
    assert stand_in.was_called


def test_without_a_recording_a_loop_gets_the_drop_in_itself() -> None:
    settings = DispatchSettings(hint="bfw")
    own = get_forward_backward_func(1, settings=settings)
    assert DropInPatch(settings, None).get(1) is own


def test_it_waits_for_an_import_that_has_been(
    primus: Any, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`at_import` in a process that has imported Megatron replaces it at once."""
    from megatron.core import pipeline_parallel

    with monkeypatch.context() as patched:
        patched.setattr(places["megatron.training.training"], NAME, primus.zero_bubble)
        with pytest.raises(UsageError, match=r"^primus\.pipeline\.zero_bubble .* has replaced"):
            install(at_import=True)
    assert not is_ours(pipeline_parallel.get_forward_backward_func)
    install(at_import=True)
    assert is_ours(pipeline_parallel.get_forward_backward_func)
    for at_import in (False, True):
        with pytest.raises(UsageError, match=r"^install\(\) has replaced Megatron's schedule"):
            install(at_import=at_import)

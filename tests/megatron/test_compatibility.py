"""A Megatron-Core that rrfp does not know is refused before anything of it is used."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from rrfp.errors import UsageError
from rrfp.megatron import DispatchSettings, get_forward_backward_func, install
from rrfp.megatron.adapters import compatibility
from rrfp.megatron.adapters.compatibility import Needs, check_for_drop_in, check_for_trace

ROOT = Path(__file__).parents[2]
MEGATRON = ROOT / "rrfp" / "megatron"
SPLITS = DispatchSettings(hint="bfw")
LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"


@pytest.fixture(autouse=True)
def look_anew() -> Iterator[None]:
    """Clears the cached results of checks in earlier tests."""
    check_for_drop_in.cache_clear()
    yield
    check_for_drop_in.cache_clear()


@pytest.fixture(autouse=True)
def schedules(monkeypatch: pytest.MonkeyPatch) -> Any:
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    found = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    # Back in the end, should an install() succeed that must not.
    for place in (found, sys.modules["megatron.core.pipeline_parallel"]):
        monkeypatch.setattr(place, "get_forward_backward_func", found.get_forward_backward_func)
    return found


def written_in(module: ModuleType, function: Any) -> FunctionType:
    """The function, as if that module of Megatron's had it."""
    code = function.__code__
    return FunctionType(
        code.replace(co_qualname=function.__name__), vars(module), None, function.__defaults__
    )


def without_config(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any) -> None:
    pass


def needs_more(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any, x: Any
) -> None:
    pass


def turned(output_tensor: Any, input_tensor: Any, output_tensor_grad: Any, config: Any) -> None:
    pass


def takes_any(*args: Any, **kwargs: Any) -> None:
    pass


STEP = "pipeline_parallel.schedules.backward_step"
RELEASES = "megatron-core 0.16.1 to 0.20"


def in_newest_form(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any
) -> None:
    pass


def in_oldest_form(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any
) -> None:
    pass


@pytest.mark.parametrize("form", [in_newest_form, in_oldest_form])
def test_either_form_is_known(form: Any, schedules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "backward_step", written_in(schedules, form))
    check_for_drop_in(SPLITS, installs=True)


@pytest.mark.parametrize("ask", [install, get_forward_backward_func])
@pytest.mark.parametrize(
    ("function", "differs"),
    [
        (without_config, "has no parameter config"),
        (needs_more, "has a parameter x"),
        (
            turned,
            "takes its parameters in the order output_tensor, input_tensor, output_tensor_grad, "
            "config",
        ),
    ],
)
def test_another_signature_is_refused(
    ask: Callable[[], object],
    function: Any,
    differs: str,
    schedules: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = schedules.get_forward_backward_func
    monkeypatch.setattr(schedules, "backward_step", written_in(schedules, function))
    core = sys.modules["megatron.core"]
    with pytest.raises(UsageError) as told:
        ask()
    assert str(told.value) == (
        f"Megatron-Core {core.__version__} in {core.__path__[0]} is not one that rrfp knows: "
        f"{STEP} {differs}; use {RELEASES}"
    )
    assert schedules.get_forward_backward_func is own


TRACKERS = [
    ("transformer.multi_token_prediction", "MTPLossLoggingHelper.tracker"),
    ("transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper.tracker"),
]


@pytest.mark.parametrize(("module", "path"), TRACKERS)
def test_another_tracker_is_refused(
    module: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = importlib.import_module(f"megatron.core.{module}")
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, object())
    with pytest.raises(UsageError, match=rf"knows: {module}\.{path} is not a dict; "):
        install()
    monkeypatch.delattr(owner, name)
    with pytest.raises(UsageError, match=rf"knows: {module}\.{path} is missing; "):
        install()


def test_one_tracker_of_experts_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either: the module came when the dict went."""
    older = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    newer = "transformer.moe.moe_logging"
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, f"megatron.core.{newer}", None)
        patched.setattr(older, "_MOE_LAYER_WISE_LOGGING_TRACKER", {}, raising=False)
        check_for_drop_in(SPLITS)
    check_for_drop_in.cache_clear()
    monkeypatch.setitem(sys.modules, f"megatron.core.{newer}", None)
    monkeypatch.delattr(older, "_MOE_LAYER_WISE_LOGGING_TRACKER", raising=False)
    with pytest.raises(UsageError, match=rf"knows: the module {newer} is missing; use"):
        install()


def test_a_module_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "transformer.experimental_attention_variant.dsa"
    monkeypatch.setitem(sys.modules, f"megatron.core.{module}", None)
    with pytest.raises(UsageError, match=rf"knows: the module {module} is missing; use"):
        install()


def test_parameters_with_defaults_may_be_new(
    schedules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown arguments are refused only if a call sets them."""

    def getter(pp_size: Any = None, vp_size: Any = None, x: Any = None) -> None:
        pass

    def step(*, forward_step_func: Any, x: Any = 3, **arguments: Any) -> None:
        pass

    getter.__name__ = "get_forward_backward_func"
    step.__name__ = "forward_backward_no_pipelining"
    for function in (getter, step):
        later = written_in(schedules, function)
        later.__kwdefaults__ = function.__kwdefaults__
        for place in (schedules, sys.modules["megatron.core.pipeline_parallel"]):
            monkeypatch.setattr(place, function.__name__, later, raising=False)
    check_for_drop_in(DispatchSettings(), installs=True)
    given = get_forward_backward_func(x=None)
    with pytest.raises(UsageError, match=r"^x 1 of Megatron's get_forward_backward_func is"):
        get_forward_backward_func(x=1)
    arguments: Any = {"forward_step_func": None, "data_iterator": None, "model": None}
    arguments |= {"num_microbatches": 1, "seq_length": 1, "micro_batch_size": 1}
    with pytest.raises(UsageError, match=r"^x 4 of Megatron's forward_.* to rrfp; leave it out$"):
        given(**arguments, x=4)
    with pytest.raises(RuntimeError, match="attribute config"):  # there is no model
        given(**arguments, x=3)


def test_a_linear_function_of_any_release_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    own = inspect.signature(getattr(layers, LINEAR).forward).parameters
    oldest = list(own)[: list(own).index("tp_group") + 1]

    def check_for(*newer: str) -> None:
        code = f"def forward({', '.join((*oldest, *newer))}): pass"
        names: dict[str, Any] = {}
        exec(code, vars(layers), names)
        with monkeypatch.context() as patched:
            patched.setattr(getattr(layers, LINEAR), "forward", names["forward"])
            check_for_drop_in.cache_clear()
            check_for_drop_in(SPLITS)

    check_for()
    check_for("gtp_remat_size")
    check_for("gtp_remat_size", "output_dtype")
    check_for("gtp_remat_size", "output_dtype", "x=None")
    with pytest.raises(UsageError, match=r"has a parameter x; choose a hint that works \(bf, "):
        check_for("gtp_remat_size", "output_dtype", "x")


def test_the_linear_function_counts_where_the_backward_is_split(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")

    def forward(ctx: Any, input: Any, weight: Any, bias: Any) -> None:  # noqa: A002 - Megatron's
        pass

    whole, split = tmp_path / "whole.csv", tmp_path / "split.csv"
    whole.write_text("0F0,0B0\n")
    split.write_text("0F0,0I0,0W0\n")
    monkeypatch.setattr(getattr(layers, LINEAR), "forward", written_in(layers, forward))
    check_for_drop_in(DispatchSettings(), installs=True)
    check_for_drop_in(DispatchSettings(hint=str(whole)), installs=True)
    for hint in ("bfw", "bfw-deep", "zb-h1", "zb-v", str(split)):
        with pytest.raises(
            UsageError,
            match=rf"{LINEAR}\.forward has no parameter gradient_.*; choose a hint that works "
            rf"\(bf, .*\), or use {RELEASES}$",
        ):
            install(DispatchSettings(hint=hint))


def test_who_has_changed_what_is_called_is_named(
    schedules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "backward_step", without_config)
    line = without_config.__code__.co_firstlineno
    with pytest.raises(UsageError) as told:
        install()
    assert str(told.value) == (
        f"tests.megatron.test_compatibility.without_config ({__file__}:{line}) has replaced "
        f"megatron.core.{STEP} and has no parameter config; switch that patch off"
    )


def test_a_patch_that_would_be_lost_is_refused(
    schedules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "forward_backward_pipelining_with_interleaving"
    with monkeypatch.context() as patched:
        patched.setattr(schedules, name, wraps(getattr(schedules, name))(lambda **_: []))
        with pytest.raises(
            UsageError,
            match=r"^tests\.megatron\.test_compatibility\.test_a_patch.*<lambda> \(.*\) has "
            rf"replaced megatron\.core\.pipeline_parallel\.schedules\.{name} and would not run "
            "under rrfp's schedule; switch that patch off",
        ):
            install()

    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    own = getattr(layers, LINEAR)

    class Other(own):  # type: ignore[misc, valid-type]
        @staticmethod
        @wraps(own.forward)
        def forward(*arguments: Any) -> Any:
            return own.forward(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(layers, LINEAR, Other)
        check_for_drop_in(DispatchSettings(), installs=True)
        with pytest.raises(UsageError, match=rf"Other\.forward \(.*{LINEAR}\.forward and would"):
            check_for_drop_in(SPLITS)


def test_a_patch_that_passes_everything_on_is_fine(
    schedules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "backward_step", takes_any)
    monkeypatch.setattr(
        schedules, "forward_step", wraps(schedules.forward_step)(lambda *a, **k: takes_any(*a, **k))
    )
    check_for_drop_in(SPLITS, installs=True)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            ModuleNotFoundError("No module named 'megatron'", name="megatron"),
            f"Megatron-Core is not installed here; install {RELEASES}",
        ),
        (
            ModuleNotFoundError("No module named 'triton'", name="triton"),
            "cannot be imported here: megatron.core.pipeline_parallel.schedules raises "
            f"ModuleNotFoundError (No module named 'triton'); use {RELEASES}, "
            "or install what is missing",
        ),
        (
            AttributeError("module 'torch' has no attribute 'x'"),
            "cannot be imported here: megatron.core.pipeline_parallel.schedules raises "
            f"AttributeError (module 'torch' has no attribute 'x'); use {RELEASES}, "
            "or install what is missing",
        ),
    ],
)
def test_one_that_cannot_be_imported_is_refused(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(UsageError) as refused:
        install()
    assert str(refused.value).endswith(told)


FAKE = {
    "__init__.py": "__version__ = '9.9'",
    "pipeline_parallel/__init__.py": "from .schedules import get_forward_backward_func",
    "pipeline_parallel/schedules.py": """
def get_forward_backward_func(pp_size=None, vp_size=None): pass
def backward_step(input_tensor, output_tensor, output_tensor_grad): pass
""",
}
SCRIPT = """
import sys, rrfp.megatron
assert not {"torch", "megatron"} & set(sys.modules)
for ask in (rrfp.megatron.install, rrfp.megatron.get_forward_backward_func,
            rrfp.megatron.trace_native):
    try: ask()
    except rrfp.errors.UsageError as error: print(error)
"""


def test_nothing_of_ours_is_imported_before_the_look(tmp_path: Path) -> None:
    for name, text in FAKE.items():
        path = tmp_path / "megatron" / "core" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    told = done.stdout.splitlines()
    assert len(told) == 3
    assert told[0] == told[1]
    start = f"Megatron-Core 9.9 in {tmp_path}/megatron/core is not one that rrfp knows: "
    assert all(line.startswith(start) for line in told)
    assert f"{STEP} has no parameter config, " in told[0]
    assert "pipeline_parallel.schedules.forward_step is missing" in told[2]
    assert all(line.endswith(f"; use {RELEASES}") for line in told)
    assert " more; use" in told[0]


def test_this_one_is_known() -> None:
    check_for_drop_in(SPLITS, installs=True)
    check_for_trace()


def names_in(*tables: Needs) -> set[str]:
    return {
        f"{home}.{compatibility._Need.parse(form).name}"
        for needs in tables
        for module, entries in needs.items()
        for entry in entries
        for home, form in compatibility.parse_forms(module, entry)
    }


def file_of(name: str) -> Path:
    return MEGATRON / f"{name.replace('.', '/')}.py"


def trees_below(root: str) -> Iterator[ast.Module]:
    """The trees of a module of rrfp.megatron and of all those that it imports."""
    todo, seen = [root], set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            tree = ast.parse(file_of(name).read_text())
            yield tree
            for node in tree.body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
                    own = [each.removeprefix("rrfp.megatron.") for each in names]
                    todo += [each for each in own if each not in names and file_of(each).exists()]


def used_below(root: str) -> Iterator[str]:
    """Names of `megatron.core` that these modules use, as far as their text shows."""
    for tree in trees_below(root):
        for node in tree.body:
            if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megat")):
                continue
            module = (node.module or "").removeprefix("megatron.core").lstrip(".")
            for alias in node.names:
                path = f"{module}.{alias.name}".lstrip(".")
                attributes = [
                    inner.attr
                    for inner in ast.walk(tree)
                    if isinstance(inner, ast.Attribute)
                    and ast.unparse(inner.value) == (alias.asname or alias.name)
                ]
                yield from (f"{path}.{attribute}" for attribute in attributes)
                if not attributes:
                    yield path


OPTIONAL = {
    # Only there with apex, and asked for only by layers that use it.
    "tensor_parallel.layers.fused_weight_gradient_mlp_cuda"
}


@pytest.mark.parametrize(
    ("root", "tables"),
    [("dropin", (compatibility.DROP_IN,)), ("native.schedule", (compatibility.TRACED,))],
)
def test_the_tables_have_all_that_is_used(root: str, tables: tuple[Needs, ...]) -> None:
    used = set(used_below(root)) - OPTIONAL
    assert len(used) > 8
    known = names_in(*tables)
    assert {
        path
        for path in used
        if path not in known and not any(name.startswith(f"{path}.") for name in known)
    } == set()


def test_ours_takes_what_megatrons_takes() -> None:
    from rrfp.megatron.dropin import ForwardBackward

    _, *ours, _ = inspect.signature(ForwardBackward.__call__).parameters
    for entry in compatibility.REPLACED["pipeline_parallel.schedules"]:
        assert compatibility._Need.parse(entry).positional == tuple(ours)

"""Draws: the same to the bit everywhere, distributed as they say, keyed by what they are for."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rrfp.simulate
from rrfp.simulate.jitter import exp, log, lognormals, normals, uniforms, uniforms_in_parts
from tests.effort import examples

NUM = 100_000

UNIFORMS = ["0x1.b52f0537a6250p-5", "0x1.d24ee7d01c2bcp-3", "0x1.54e3fd863b510p-2"]
NORMALS = ["-0x1.889a4e409ee78p-1", "0x1.2a94a7e61d9a8p-2", "0x1.9f71c44fb4c28p-2"]
LOGNORMALS = ["0x1.33f219f00a24ep-1", "0x1.0560d87ad0422p+0", "0x1.14ba1726e3e9fp+0"]


def test_draws_are_those_that_every_machine_makes() -> None:
    key = (7, 0, "lognormal", 3, "F")
    assert [each.hex() for each in uniforms(3, *key).tolist()] == UNIFORMS
    assert [each.hex() for each in normals(3, *key).tolist()] == NORMALS
    assert [each.hex() for each in lognormals(3, 0.5, *key).tolist()] == LOGNORMALS


@given(num=st.integers(0, 300), more=st.integers(0, 300), seed=st.integers())
@examples(quick=30, thorough=300)
def test_the_first_draws_do_not_depend_on_how_many_follow(num: int, more: int, seed: int) -> None:
    for draw in (uniforms, normals):
        assert draw(num + more, seed, "key")[:num].tolist() == draw(num, seed, "key").tolist()


def test_draws_in_parts_are_the_same_ones() -> None:
    draw = uniforms_in_parts(7, "key")
    drawn = [each for num in (3, 0, 1, 8) for each in draw(num).tolist()]
    assert drawn == uniforms(12, 7, "key").tolist()


def test_another_key_draws_something_else() -> None:
    keys: list[tuple[int | str, ...]] = [(1, "2"), (1, 2), ("1", 2), (12,), (2, 1), ("1", "2"), ()]
    assert len({uniforms(1, *key)[0] for key in keys}) == len(keys)


def test_uniforms_fill_the_interval_evenly() -> None:
    drawn = uniforms(NUM, "even")
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    # Chi-squared with 19 degrees of freedom: 43.8 in one of 1,000 such tests.
    assert ((counts - NUM / 20) ** 2 / (NUM / 20)).sum() < 43.8


def test_normals_have_the_normal_distribution() -> None:
    drawn = np.sort(normals(NUM, "normal"))
    expected = np.array([(1 + math.erf(each / math.sqrt(2))) / 2 for each in drawn.tolist()])
    # Kolmogorov and Smirnov: above 1.95 / sqrt(n) in one of 1,000 such tests.
    assert np.abs(expected - np.arange(NUM) / NUM).max() < 1.95 / math.sqrt(NUM)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
def test_lognormals_have_mean_one_and_their_sigma(sigma: float) -> None:
    drawn = lognormals(NUM, sigma, "lognormal")
    assert drawn.mean() == pytest.approx(1, abs=0.02)
    assert np.log(drawn).std() == pytest.approx(sigma, abs=0.01)


@given(st.floats(-700, 700))
@examples(quick=300, thorough=5000)
def test_exp_is_the_exponential(x: float) -> None:
    assert float(exp(np.array([x]))[0]) == pytest.approx(math.exp(x), rel=2 * 2**-52, abs=0)


@given(st.floats(2.0**-1022, 2.0**1023))
@examples(quick=300, thorough=5000)
def test_log_is_the_logarithm(x: float) -> None:
    assert float(log(np.array([x]))[0]) == pytest.approx(math.log(x), rel=4 * 2**-52, abs=0)


MODULES = {"math", "cmath", "numpy", "random", "statistics"}
INEXACT = {
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "power", "cbrt", "hypot"),
    *("sin", "cos", "tan", "atan2", "erf", "gamma", "sum", "dot", "matmul", "mean", "prod"),
    *("gauss", "normalvariate", "lognormvariate", "paretovariate", "expovariate", "normal"),
}
"""What rounds differently from machine to machine: C libraries, and sums in an order that depends
on the processor."""
METHODS = {"sum", "dot", "mean", "prod", "std", "var"}
"""Of arrays: such sums, too."""
EXACT = {"is_inside.sum"}
"""A count of what is true, so of whole numbers."""


def inexact_calls(source: str) -> list[str]:
    """What `source` calls or imports that is not exactly rounded, in the order of its lines."""
    nodes = sorted(
        (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt | ast.expr)),
        key=lambda node: (node.lineno, node.col_offset),
    )
    modules = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in MODULES
    }
    found = []
    for node in nodes:
        match node:
            case ast.ImportFrom(module=module, names=names) if module in MODULES:
                found += [f"{module}.{each.name}" for each in names if each.name in INEXACT]
            case ast.Attribute(attr=attr) if ast.unparse(node).split(".")[0] in modules:
                found += [ast.unparse(node)] * (attr in INEXACT)
            case ast.Attribute(attr=attr) if attr in METHODS:
                found += [ast.unparse(node)] * (ast.unparse(node) not in EXACT)
            case ast.BinOp(op=ast.Pow()) if not _is_literal(node):
                found.append(ast.unparse(node))
            case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.Pow() | ast.MatMult()):
                found.append(ast.unparse(node))
            case ast.Call(func=ast.Name(id="pow")):
                found.append(ast.unparse(node))
    return found


def _is_literal(power: ast.BinOp) -> bool:
    """Whether a power is that of a number by a whole number, both written down."""
    exponent = power.right.operand if isinstance(power.right, ast.UnaryOp) else power.right
    return (
        isinstance(power.left, ast.Constant)
        and isinstance(exponent, ast.Constant)
        and isinstance(exponent.value, int)
    )


@pytest.mark.parametrize(
    "path", sorted(Path(rrfp.simulate.__path__[0]).glob("*.py")), ids=lambda path: path.stem
)
def test_nothing_in_the_simulator_depends_on_the_machine(path: Path) -> None:
    assert inexact_calls(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("import numpy as np\ny = np.exp(x) + np.sqrt(x)", ["np.exp"]),
        ("import math\ny = math.log(x) * math.factorial(3)", ["math.log"]),
        (
            "import numpy\ny = numpy.sum(x) + numpy.random.normal()",
            ["numpy.sum", "numpy.random.normal"],
        ),
        ("from math import factorial, exp as e", ["math.exp"]),
        ("from random import gauss", ["random.gauss"]),
        ("from rrfp.simulate.jitter import exp, log\ny = exp(x)", []),
        ("y = 2.0**-53 + 10**12", []),
        ("y = x**2", ["x ** 2"]),
        ("y = 2**x", ["2 ** x"]),
        ("y = 2.0**0.5", ["2.0 ** 0.5"]),
        ("y = pow(x, 2)", ["pow(x, 2)"]),
        ("x **= 2", ["x **= 2"]),
        ("y = x @ z", ["x @ z"]),
        ("y = x.sum() + (x * z).mean()", ["x.sum", "(x * z).mean"]),
        ("y = x.dot(z)", ["x.dot"]),
        ("y = is_inside.sum() + sum(x)", []),
    ],
)
def test_what_depends_on_the_machine_is_seen(source: str, seen: list[str]) -> None:
    assert inexact_calls(source) == seen

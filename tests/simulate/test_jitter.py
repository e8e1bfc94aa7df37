"""Tests of jitter: the effect of each part on tasks and links, random draws that depend only on
their task, and the paper's levels by hand."""

import ast
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rrfp.simulate
from rrfp.errors import UsageError
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.model import Links, check_takes_time
from rrfp.simulate.engine import Stretch, TaskTimes
from rrfp.simulate.jitter import (
    LEVELS,
    NO_JITTER,
    exp,
    log,
    lognormals,
    normals,
    parse_jitter,
    uniforms,
    uniforms_in_parts,
)
from tests.properties.cases import examples

# Random draws: bit-identical on every machine, with the stated distribution, keyed by purpose.


NUM = 100_000

UNIFORMS = ["0x1.b52f0537a6250p-5", "0x1.d24ee7d01c2bcp-3", "0x1.54e3fd863b510p-2"]
NORMALS = ["-0x1.889a4e409ee78p-1", "0x1.2a94a7e61d9a8p-2", "0x1.9f71c44fb4c28p-2"]
LOGNORMALS = ["0x1.33f219f00a24ep-1", "0x1.0560d87ad0422p+0", "0x1.14ba1726e3e9fp+0"]


def test_draws_are_the_same_on_every_machine() -> None:
    key = (7, 0, "lognormal", 3, "F")
    assert [each.hex() for each in uniforms(3, *key).tolist()] == UNIFORMS
    assert [each.hex() for each in normals(3, *key).tolist()] == NORMALS
    assert [each.hex() for each in lognormals(3, 0.5, *key).tolist()] == LOGNORMALS


@given(num=st.integers(0, 300), more=st.integers(0, 300), seed=st.integers())
@examples(quick=30, thorough=300)
def test_the_first_draws_do_not_depend_on_how_many_follow(num: int, more: int, seed: int) -> None:
    for draw in (uniforms, normals):
        assert draw(num + more, seed, "key")[:num].tolist() == draw(num, seed, "key").tolist()


def test_draws_in_parts_are_the_same() -> None:
    draw = uniforms_in_parts(7, "key")
    drawn = [each for num in (3, 0, 1, 8) for each in draw(num).tolist()]
    assert drawn == uniforms(12, 7, "key").tolist()


def test_another_key_gives_other_draws() -> None:
    keys: list[tuple[int | str, ...]] = [(1, "2"), (1, 2), ("1", 2), (12,), (2, 1), ("1", "2"), ()]
    assert len({uniforms(1, *key)[0] for key in keys}) == len(keys)


def test_uniforms_fill_the_interval_evenly() -> None:
    drawn = uniforms(NUM, "even")
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    # Chi-squared with 19 degrees of freedom exceeds 43.8 in one of 1,000 such tests.
    assert ((counts - NUM / 20) ** 2 / (NUM / 20)).sum() < 43.8


def test_normals_have_the_normal_distribution() -> None:
    drawn = np.sort(normals(NUM, "normal"))
    expected = np.array([(1 + math.erf(each / math.sqrt(2))) / 2 for each in drawn.tolist()])
    # The Kolmogorov-Smirnov distance exceeds 1.95 / sqrt(n) in one of 1,000 such tests.
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
"""Functions whose rounding depends on the machine: they call the C library, or sum in an order that
depends on the processor."""
METHODS = {"sum", "dot", "mean", "prod", "std", "var"}
"""Methods of arrays that contain such sums."""
EXACT = {"is_inside.sum"}
"""Exact calls of these methods: this one counts booleans."""


def inexact_calls(source: str) -> list[str]:
    """Return the calls and imports in `source` that are not exactly rounded, in line order."""
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
    """Return True for a power of two literals with an integer as exponent."""
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
def test_machine_dependent_code_is_detected(source: str, seen: list[str]) -> None:
    assert inexact_calls(source) == seen


MS = 1_000_000
SHAPE = Shape(4, 400, kinds=SPLIT_BACKWARD)


def flat(shape: Shape, time_ns: int = 20 * MS) -> TaskTimes:
    return TaskTimes(*[[[time_ns] * shape.num_microbatches for _ in range(shape.num_stages)]] * 3)


def jittered(spec: str, shape: Shape = SHAPE, *, seed: int = 0, replica: int = 0) -> TaskTimes:
    return parse_jitter(spec).times(flat(shape), shape, seed, replica)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def every_time(times: TaskTimes) -> list[int]:
    kinds = (times.forward, times.input_gradient, times.weight_gradient)
    return [time_ns for rows in kinds for row in rows for time_ns in row]


def test_no_jitter_changes_nothing() -> None:
    assert parse_jitter("none") == NO_JITTER
    assert jittered("none") == flat(SHAPE)
    assert NO_JITTER.stretch(SHAPE, 0, 0) is None
    links = Links(latency_ns=5)
    assert NO_JITTER.links(links) is links


@pytest.mark.parametrize("spec", ["lognormal:0.5", "pareto:3", "length:0.5"])
def test_factors_spread_the_work_and_do_not_add_to_it(spec: str) -> None:
    times = every_time(jittered(spec, Shape(4, 4000)))
    assert mean(times) == pytest.approx(20 * MS, rel=0.05)
    assert len(set(times)) > 3000


def test_every_task_draws_its_own_lognormal_factor() -> None:
    times = jittered("lognormal:0.5")
    rows = [*times.forward, *times.input_gradient, *times.weight_gradient]
    assert len({tuple(row) for row in rows}) == 3 * SHAPE.num_stages
    assert mean([abs(a - b) for a, b in zip(rows[0], rows[1], strict=True)]) > 5 * MS


def test_pareto_has_a_heavy_tail() -> None:
    drawn = sorted(jittered("pareto:2", Shape(1, 20_000)).forward[0])
    # A factor exceeds x with probability (0.5 / x)**2: 5 with 0.01, and always 0.5.
    assert sum(time_ns > 100 * MS for time_ns in drawn) / 20_000 == pytest.approx(0.01, rel=0.3)
    assert drawn[0] >= 10 * MS


def test_a_length_is_shared_by_all_tasks_of_a_microbatch() -> None:
    times = jittered("length:0.6")
    rows = [*times.forward, *times.input_gradient, *times.weight_gradient]
    assert all(row == rows[0] for row in rows)


def test_a_slow_stage_is_slow_in_all_tasks() -> None:
    shape = Shape(2, 1, 2, Placement.V)
    slow = jittered("slow-stage:0:2.5", shape)
    assert [row[0] // MS for row in slow.weight_gradient] == [50, 20, 20, 50]


def test_jitter_is_limited_to_its_ranks() -> None:
    times = jittered("lognormal:0.5@0,2-3")
    is_touched = [row != [20 * MS] * SHAPE.num_microbatches for row in times.forward]
    assert is_touched == [True, False, True, True]


def test_parts_add_up() -> None:
    one, other = jittered("lognormal:0.5"), jittered("slow-stage:1:2")
    both = jittered("lognormal:0.5+slow-stage:1:2")
    assert both.forward[0] == one.forward[0]
    assert set(other.forward[1]) == {40 * MS}
    assert list(both.forward[1]) == pytest.approx([2 * each for each in one.forward[1]], abs=2)
    twice = jittered("lognormal:0.5+lognormal:0.5").forward[0]
    # Two parts of the same name draw independently, so their product is not a square.
    squares = [a * a / (20 * MS) for a in one.forward[0]]
    assert mean([abs(a - b) for a, b in zip(twice, squares, strict=True)]) > MS


@given(st.integers(0, 2**32), st.integers(0, 9), st.integers(1, 400))
@examples(quick=5, thorough=200)
def test_a_draw_belongs_to_its_task(seed: int, replica: int, num_microbatches: int) -> None:
    for spec in ("lognormal:0.5", "length:0.5", "pareto:2"):
        usual = jittered(spec, seed=seed, replica=replica)
        shorter = Shape(2, num_microbatches)
        assert jittered(spec, shorter, seed=seed, replica=replica).forward == [
            row[:num_microbatches] for row in usual.forward[:2]
        ]
        assert jittered(spec, seed=seed + 1, replica=replica) != usual
        assert jittered(spec, seed=seed, replica=replica + 1) != usual


# Links.


def test_a_slow_link_is_slow_in_one_direction() -> None:
    links = Links(latency_ns=1000, factors={(1, 2): 2.0})
    slowed = parse_jitter("slow-link:1-2:3+slow-link:2-1:5").links(links)
    task = Task(0, Kind.F, 0)
    assert [slowed(*ends, task) for ends in ((0, 1), (1, 2), (2, 1))] == [1000, 6000, 5000]
    assert parse_jitter("lognormal:1").links(links) is links


def test_free_links_cannot_be_slow() -> None:
    with pytest.raises(UsageError, match=r"slows a link and messages take no time; choose --costs"):
        parse_jitter("slow-link:0-1:3").links(Links())


# Delays and stops.


def run_in_turn(stretch: Stretch, rank: int, tasks: Sequence[tuple[Task, int]]) -> list[int]:
    """Run tasks one after the other on a rank; return their stretched times in ns."""
    now_ns, stretched = 0, []
    for task, time_ns in tasks:
        stretched.append(stretch(rank, now_ns, task, time_ns))
        now_ns += stretched[-1]
    return stretched


def stretch_of(spec: str, shape: Shape = SHAPE, *, seed: int = 0) -> Stretch:
    stretch = parse_jitter(spec).stretch(shape, seed, 0)
    assert stretch is not None
    return stretch


def test_the_levels_match_the_paper() -> None:
    assert LEVELS == {
        "J0": (0.0, 0.0, 0.0),
        "J1": (0.1, 5e6, 0.5),
        "J2": (0.2, 10e6, 1.0),
        "J3": (0.3, 15e6, 1.5),
    }


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("time_ms", [2, 40])
def test_a_level_delays_by_the_papers_rule(level: str, time_ms: int) -> None:
    probability, base_ns, alpha = LEVELS[level]
    rank, num = 1, SHAPE.num_microbatches
    # Every other task takes 1.5 times as long, so that the running mean changes.
    costs_ns = [time_ms * MS * (2 + m % 2) // 2 for m in range(num)]
    tasks = [(Task(rank, Kind.F, m), costs_ns[m]) for m in range(num)]
    stretched = run_in_turn(stretch_of(level), rank, tasks)
    is_hit = uniforms(num, 0, 0, "delays", 0, rank, "F", "whether").tolist()
    sizes = uniforms(num, 0, 0, "delays", 0, rank, "F", "how much").tolist()
    e = float(costs_ns[0])
    for m, cost_ns in enumerate(costs_ns):
        e = 0.9 * e + 0.1 * cost_ns
        delay = alpha * max(base_ns, e) * (0.5 + sizes[m]) if is_hit[m] < probability else 0
        assert stretched[m] - cost_ns == pytest.approx(delay, abs=1)
    num_delayed = sum(a > b for a, b in zip(stretched, costs_ns, strict=True))
    assert num_delayed / num == pytest.approx(probability, abs=0.06)


def test_delays_do_not_depend_on_the_order_of_equal_tasks() -> None:
    tasks = [(Task(0, kind, m), 20 * MS) for kind in Kind for m in range(20)]
    there = run_in_turn(stretch_of("J3"), 0, tasks)
    back = run_in_turn(stretch_of("J3"), 0, tasks[::-1])
    assert there == back[::-1]
    assert there != run_in_turn(stretch_of("J3", seed=1), 0, tasks)


def test_a_higher_level_also_delays_the_tasks_of_a_lower_one() -> None:
    tasks = [(Task(0, Kind.F, m), 20 * MS) for m in range(200)]
    stretched = [run_in_turn(stretch_of(level), 0, tasks) for level in LEVELS]
    for easier, harder in pairwise(stretched):
        assert all(a <= b for a, b in zip(easier, harder, strict=True))
        assert easier != harder


def test_delays_are_limited_to_their_ranks() -> None:
    tasks = [(Task(0, Kind.F, m), 20 * MS) for m in range(50)]
    assert run_in_turn(stretch_of("J3@1"), 0, tasks) == [20 * MS] * 50
    assert run_in_turn(stretch_of("J3@0-1"), 0, tasks) == run_in_turn(stretch_of("J3"), 0, tasks)


@pytest.mark.parametrize(
    ("spec", "start_ms", "time_ms", "taken_ms"),
    [
        ("stop:0:0.1:0.05", 0, 100, 100),
        ("stop:0:0.1:0.05", 0, 101, 151),
        ("stop:0:0.1:0.05", 100, 10, 60),
        ("stop:0:0.1:0.05", 120, 10, 40),
        ("stop:0:0.1:0.05", 150, 10, 10),
        ("stop:1:0.1:0.05", 100, 10, 10),
        ("stop:0:0.1:0.05+stop:0:0.2:0.05", 90, 100, 200),
        ("stop:0:0.2:0.05+stop:0:0.1:0.05", 90, 20, 70),
        # Overlapping stops count as one.
        ("stop:0:0.1:0.05+stop:0:0.12:0.05", 90, 20, 90),
        ("stop:0:0.1:0.1+stop:0:0.12:0.02", 90, 20, 120),
    ],
)
def test_a_stopped_rank_makes_no_progress(
    spec: str, start_ms: int, time_ms: int, taken_ms: int
) -> None:
    task = Task(0, Kind.F, 0)
    assert stretch_of(spec)(0, start_ms * MS, task, time_ms * MS) == taken_ms * MS


def test_a_stop_adds_to_delays() -> None:
    task = Task(0, Kind.F, 0)
    seed = next(s for s in range(99) if stretch_of("J3", seed=s)(0, 0, task, 20 * MS) > 20 * MS)
    delayed = stretch_of("J3", seed=seed)(0, 0, task, 20 * MS)
    assert stretch_of("J3+stop:0:0.02:1", seed=seed)(0, 0, task, 20 * MS) == delayed + 1000 * MS


# Jitter specifications.


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "'' is not jitter; write none, J0, J1, J2, J3, lognormal:SIGMA"),
        ("J4", "'J4' is not jitter"),
        ("j1", "'j1' is not jitter"),
        ("J1+", "'' is not jitter"),
        ("none+J1", "jitter none stands alone; leave it out"),
        ("J1+none", "jitter none stands alone; leave it out"),
        ("none@0", "'none@0' is not jitter; write none"),
        # The part that --sweep leaves of "J1@0,2-3+J2".
        ("1", "'1' is not jitter; put a value with commas, such as J1@0,2, into --row"),
        ("2-3+J2", "'2-3' is not jitter; put a value with commas"),
        ("lognormal", "'lognormal' is not jitter"),
        ("lognormal:0.5:1", "'lognormal:0.5:1' is not jitter"),
        ("lognormal:", "'' must be a number from 0 to 3"),
        ("lognormal:-1", "'-1' must be a number from 0 to 3"),
        ("lognormal:nan", "'nan' must be a number"),
        ("lognormal:inf", "'inf' must be a number"),
        ("lognormal:1e1", "'1e1' must be a number"),
        ("lognormal:3.1", "'3.1' must be a number from 0 to 3"),
        ("pareto:1", "'1' must be a number from 1.01"),
        ("slow-stage:1", "'slow-stage:1' is not jitter"),
        ("slow-stage:x:2", "'x' must be a pipeline rank"),
        ("slow-stage:1.5:2", "'1.5' must be a pipeline rank"),
        ("slow-stage:1:0", "'0' must be a number from 0.001 to 1000"),
        ("slow-stage:1:2@0", "'slow-stage:1:2@0' is not jitter"),
        ("slow-link:1:2", "'' must be a pipeline rank"),
        ("slow-link:0-1-2:2", "'1-2' must be a pipeline rank"),
        ("stop:1:0.5", "'stop:1:0.5' is not jitter"),
        ("stop:1:0.5:3601", "'3601' must be a number from 0 to 3600"),
        ("J1@", "'' names no pipeline ranks"),
        ("J1@2-1", "'2-1' names no pipeline ranks"),
        ("J1@0-1,x", "'0-1,x' names no pipeline ranks"),
    ],
)
def test_an_invalid_spec_is_refused(spec: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_jitter(spec)
    assert words in str(caught.value)


def test_jitter_that_leaves_no_time_is_refused() -> None:
    shape = Shape(1, 3)
    spec = "slow-stage:0:0.001"
    jitter = parse_jitter(spec)
    check_takes_time(jitter.times(flat(shape, 501), shape, 0, 0), f"jitter {spec}")
    with pytest.raises(UsageError, match=f"jitter {spec} gives every task less than a nanosecond"):
        check_takes_time(jitter.times(flat(shape, 500), shape, 0, 0), f"jitter {spec}")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lognormal:0.5@3-4", "names pipeline rank 4 and there are 4"),
        ("J1@9", "names pipeline rank 9"),
        ("slow-stage:4:2", "names pipeline rank 4"),
        ("stop:4:0:1", "names pipeline rank 4"),
        ("slow-link:3-4:2", "names pipeline rank 4"),
        ("slow-link:0-2:2", "from rank 0 to rank 2, which carries no message"),
        ("slow-link:1-1:2", "from rank 1 to rank 1, which carries no message"),
    ],
)
def test_a_spec_that_does_not_fit_the_pipeline_is_refused(spec: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        jittered(spec)
    assert words in str(caught.value)


def test_with_chunks_the_last_rank_has_a_link_to_the_first() -> None:
    links = "slow-link:3-0:2"
    assert jittered(links, Shape(4, 1, 2)) == flat(Shape(4, 1, 2))
    with pytest.raises(UsageError, match="carries no message"):
        jittered(links, Shape(4, 1, 2, Placement.V))

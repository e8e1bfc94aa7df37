"""Costs from a model's operations: counted by hand, against the literature, and read from TOML."""

import tomllib
from hashlib import blake2b
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rrfp.errors import UsageError
from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.shape import Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.language_models import FlopCosts, _even_cut, parse_flops
from rrfp.simulate.costs.model import StepCosts
from tests.effort import examples

NS = 10**9
SLOW = "[device]\nflops_per_s = 1\n"
"""One operation a second: seconds are operations."""
TINY = """
[language]
layers = 3
hidden = 4
ffn = 6
heads = 2
vocabulary = 10
tokens = { median = 2 }
"""
SEEING = f"""
{TINY}
[vision]
layers = 3
hidden = 2
ffn = 5
heads = 1
patches_per_token = 3
images = {{ median = 2 }}
patches = {{ median = 6 }}
"""


def parsed(text: str) -> FlopCosts:
    return parse_flops(tomllib.loads(text), "model.toml")


def step(text: str, *, stages: int, microbatches: int = 1, seed: int = 0) -> StepCosts:
    return parsed(text).step(Shape(stages, microbatches), seed, 0)


def rows(costs: StepCosts) -> tuple[list[int], list[int], list[int]]:
    """Nanoseconds of the first microbatch by stage, of F, B and W."""
    times = costs.times
    kinds = (times.forward, times.input_gradient, times.weight_gradient)
    forward, input_gradient, weight_gradient = ([row[0] for row in kind] for kind in kinds)
    return forward, input_gradient, weight_gradient


# A layer for two tokens: four 4 x 4 matrices and two of 4 x 6, two operations a weight and token.
LINEAR = 2 * 2 * (4 * 16 + 2 * 24)
# Half of the 2 x 2 pairs, queries with keys and weights with values, 4 wide, two operations each.
SCORES = 2 * (2 * 2 // 2) * 4 * 2
HEAD = 2 * 2 * 4 * 10


def test_operations_counted_by_hand() -> None:
    forward, input_gradient, weight_gradient = rows(step(SLOW + TINY, stages=3))
    assert forward == [(LINEAR + SCORES) * NS] * 2 + [(LINEAR + SCORES + HEAD) * NS]
    assert input_gradient == [
        (LINEAR + 2 * SCORES) * NS,
        (LINEAR + 2 * SCORES) * NS,
        (LINEAR + 2 * SCORES + HEAD) * NS,
    ]
    assert weight_gradient == [LINEAR * NS] * 2 + [(LINEAR + HEAD) * NS]


def test_a_gate_is_a_third_matrix_and_few_key_heads_are_narrow() -> None:
    gated = TINY.replace("heads = 2", "heads = 2\nkv_heads = 1\ngated = true")
    forward, _, _ = rows(step(SLOW + gated, stages=3))
    assert forward[0] == (2 * 2 * (2 * 16 + 2 * 8 + 3 * 24) + SCORES) * NS


def test_vision_layers_see_patches_and_language_layers_text_and_images() -> None:
    forward, _, _ = rows(step(SLOW + SEEING, stages=6))
    # Two images of 6 patches, attended to each by itself; 12 / 3 tokens beside the 2 of text.
    vision = 12 * 2 * (4 * 4 + 2 * 10) + 2 * (6 * 6 * 2 * 2 * 2)
    tokens = 2 + 4
    language = tokens * LINEAR // 2 + 2 * (tokens * tokens // 2) * 4 * 2
    assert forward[:3] == [vision * NS] * 3
    assert forward[3:5] == [language * NS] * 2
    assert forward[5] == (language + tokens * HEAD // 2) * NS


@given(
    layers=st.integers(1, 100),
    hidden=st.integers(1, 100).map(lambda n: n * 128),
    tokens=st.integers(1, 8192),
    vocabulary=st.integers(1, 300_000),
)
@examples(quick=30, thorough=300)
def test_a_step_with_recomputation_is_the_literature_s(
    layers: int, hidden: int, tokens: int, vocabulary: int
) -> None:
    """Narayanan et al. 2021, equation 3, with the half of the scores that a causal mask leaves."""
    costs = step(
        f"""
        recompute = true
        device = {{ flops_per_s = 1e12 }}
        [language]
        layers = {layers}
        hidden = {hidden}
        ffn = {4 * hidden}
        heads = 128
        vocabulary = {vocabulary}
        tokens = {{ median = {tokens} }}
        """,
        stages=1,
    )
    formula = (
        96
        * tokens
        * layers
        * hidden**2
        * (1 + tokens / (12 * hidden) + vocabulary / (16 * layers * hidden))
    )
    assert sum(map(sum, rows(costs))) == pytest.approx(formula / 1e12 * NS, rel=1e-9, abs=3)


def test_tensor_parallelism_divides_operations_and_adds_collectives() -> None:
    group = """
    [tensor_parallel]
    size = 4
    latency_s = 1000
    bandwidth_bytes_per_s = 1
    """
    forward, input_gradient, weight_gradient = rows(step(SLOW + TINY + group, stages=3))
    # A ring passes 2 x 3/4 of two tokens of 4 values of 2 bytes.
    all_reduce = 1000 + 24
    assert forward[0] == ((LINEAR + SCORES) // 4 + 2 * all_reduce) * NS
    assert input_gradient[0] == (LINEAR // 4 + SCORES // 2 + 2 * all_reduce) * NS
    assert input_gradient[2] == input_gradient[0] + (HEAD // 4 + all_reduce) * NS
    assert weight_gradient[0] == LINEAR // 4 * NS


def test_messages_and_links() -> None:
    links = """
    [links]
    latency_s = 3
    bandwidth_bytes_per_s = 2
    ranks_per_host = 2
    between_hosts_factor = 5
    [gradient_sync]
    seconds = 7
    [agreement]
    seconds = 1
    lateness_s = 2
    """
    costs = step(SLOW + SEEING + links, stages=4)
    inside_ns = (3 + 6 * 4 * 2 // 2) * NS
    assert costs.links(0, 1, Task(1, Kind.F, 0)) == inside_ns
    assert costs.links(2, 1, Task(1, Kind.B, 0)) == 5 * inside_ns
    assert costs.links(1, 2, Task(2, Kind.F, 0)) == 5 * inside_ns
    assert (costs.gradient_sync_ns, costs.agreement_ns, costs.lateness_ns) == (7 * NS, NS, 2 * NS)


def test_layers_cut_by_number_and_by_cost() -> None:
    text = TINY.replace("layers = 3", "layers = 24").replace("vocabulary = 10", "vocabulary = 600")
    # The head costs as much as ten layers and more: four stages of 24 layers and one of the head.
    by_number, *_ = rows(step(SLOW + text, stages=8))
    assert [each // by_number[0] for each in by_number[:-1]] == [1] * 7
    assert by_number[-1] == by_number[0] + 60 * HEAD * NS
    by_cost, *_ = rows(step(f'split = "flops"\n{SLOW}{text}', stages=8))
    assert max(by_cost) == 60 * HEAD * NS
    assert sum(by_cost) == sum(by_number)


@examples(quick=100, thorough=3000)
@given(
    st.lists(st.sampled_from([1.0, 1.0, 2.0, 5.0]), min_size=1, max_size=9),
    st.sampled_from([0.0, 1.0, 4.0, 30.0]),
    st.integers(1, 5),
)
def test_no_other_cut_has_a_less_loaded_stage(
    weights: list[float], head: float, num_stages: int
) -> None:
    num_layers = len(weights)
    assume(num_layers >= num_stages)

    def is_cut(places: tuple[int, ...]) -> bool:
        *inner, last = [end - begin for begin, end in pairwise(places)]
        return all(num >= 1 for num in inner) and last >= (0 if head else 1)

    def most(places: tuple[int, ...]) -> float:
        *inner, last = [sum(weights[begin:end]) for begin, end in pairwise(places)]
        return max(*inner, last + head) if inner else last + head

    every = (
        (0, *inner, num_layers)
        for inner in combinations_with_replacement(range(num_layers + 1), num_stages - 1)
    )
    cut = _even_cut(tuple(weights), head, num_stages)
    assert is_cut(cut)
    assert most(cut) == min(most(places) for places in every if is_cut(places))


@given(
    st.integers(1, 70),
    st.integers(0, 40),
    st.integers(1, 110),
    st.sampled_from(["layers", "flops"]),
    st.integers(1, 10_000),
)
@examples(quick=50, thorough=1000)
def test_every_layer_is_on_one_stage(
    num_language: int, num_vision: int, stages: int, split: str, vocabulary: int
) -> None:
    text = SLOW + (SEEING if num_vision else TINY)
    document: dict[str, Any] = {"split": split, **tomllib.loads(text)}
    document["language"] |= {"layers": num_language, "vocabulary": vocabulary}
    if num_vision:
        document["vision"]["layers"] = num_vision
    costs = parse_flops(document, "model")
    if stages > num_language + num_vision:
        with pytest.raises(UsageError, match=f"{num_language + num_vision} layers"):
            costs.step(Shape(stages, 1), 0, 0)
        return
    whole, cut = costs.step(Shape(1, 1), 0, 0), costs.step(Shape(stages, 1), 0, 0)
    for one, many in zip(rows(whole), rows(cut), strict=True):
        assert sum(many) == sum(one)
        assert len(many) == stages


def test_chunks_are_stages() -> None:
    text = TINY.replace("layers = 3", "layers = 4")
    shape = Shape(2, 1, 2, Placement.V)
    assert len(parsed(SLOW + text).step(shape, 0, 0).times.forward) == 4


VARIED = SEEING.replace("{ median = 6 }", "{ median = 6, sigma = 1.0, least = 2, most = 40 }")


def test_draws_follow_from_the_seed_and_the_replica_alone() -> None:
    costs = parsed(SLOW + VARIED)
    one = costs.step(Shape(2, 8), 1, 0)
    assert one == costs.step(Shape(2, 8), 1, 0)
    assert one.times != costs.step(Shape(2, 8), 2, 0).times
    assert one.times != costs.step(Shape(2, 8), 1, 1).times
    longer = costs.step(Shape(2, 16), 1, 0).times.forward
    assert [row[:8] for row in longer] == [list(row) for row in one.times.forward]
    digest = blake2b(repr(one.times).encode(), digest_size=8).hexdigest()
    assert digest == "83c431ce712613ba"


def test_a_microbatch_may_have_no_image() -> None:
    text = VARIED.replace("images = { median = 2 }", "images = { median = 0 }")
    forward, _, _ = rows(step(SLOW + text, stages=6))
    assert forward[0] == 0
    assert forward[4] == (LINEAR + SCORES) * NS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TINY, "lacks device"),
        (SLOW, "lacks language"),
        (SLOW + TINY + "size = 3", "has no 'size'"),
        (SLOW.replace("1", "0") + TINY, "flops_per_s is 0"),
        (SLOW.replace("1", "nan") + TINY, "flops_per_s is nan"),
        (SLOW.replace("1", '"fast"') + TINY, "flops_per_s is 'fast'"),
        (SLOW + TINY.replace("hidden = 4", "hidden = 5"), "2 heads do not divide"),
        (SLOW + TINY.replace("heads = 2", "heads = 2\nkv_heads = 3"), "3 kv_heads do not divide"),
        (SLOW + TINY.replace("layers = 3", "layers = 0"), "layers is 0"),
        (SLOW + TINY.replace("layers = 3", "layers = 1000000000"), "layers is 1000000000"),
        (SLOW + TINY.replace("{ median = 2 }", "{ median = -1 }"), "median is -1"),
        (SLOW + TINY.replace("{ median = 2 }", "2"), r"\[tokens\] is 2"),
        (SLOW + TINY.replace("median = 2 }", "median = 2, least = 3, most = 1 }"), "at least 3"),
        (f'split = "rows"\n{SLOW}{TINY}', "split is 'rows'"),
    ],
)
def test_wrong_models_are_refused_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parsed(text)


def test_a_model_that_takes_no_time_is_refused() -> None:
    with pytest.raises(UsageError, match="the model gives"):
        step(SLOW + TINY.replace("{ median = 2 }", "{ median = 0 }"), stages=1)


def test_costs_are_found_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(SLOW + TINY, encoding="utf-8")
    assert resolve_costs(str(path)) == parsed(SLOW + TINY)

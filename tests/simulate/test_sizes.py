"""Tests of the activation bytes in costs: in rows, tables, presets and models, and invalid ones."""

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
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.language_models import FlopCosts, _even_cut, parse_flops
from rrfp.simulate.costs.model import ScaledCosts, StepCosts
from rrfp.simulate.costs.rows import parse_rows
from rrfp.simulate.costs.toml_files import PRESETS, parse_table
from rrfp.simulate.engine import TaskTimes
from tests.properties.cases import examples

ROOT = Path(__file__).parents[2]
GB = 10**9
HEADING = "kind,pp_rank,chunk,microbatch,seconds,bytes\n"
SECONDS = "seconds = { F = 0.02, B = 0.02, W = 0.02 }\n"


def sizes_of_rows(text: str, shape: Shape) -> ActivationSizes | None:
    return parse_rows(HEADING + text, "costs.csv").step(shape, 0, 0).sizes


def sizes_of_table(text: str, shape: Shape, *, seed: int = 0) -> ActivationSizes | None:
    table = parse_table(tomllib.loads(SECONDS + text), "costs.toml")
    return table.step(shape, seed, 0).sizes


# Rows.


def test_bytes_come_from_the_most_specific_rows() -> None:
    sizes = sizes_of_rows(
        "F,0,,,0.01,1001\nB,0,,,0.01,\nW,0,,,0.01,\n"
        "F,1,0,,0.01,7\nF,1,1,,0.01,9\nF,1,1,2,0.01,50\nB,1,,,0.01,\nW,1,,,0.01,\n"
        "F,0,,1,0.02,2000\n",
        Shape(2, 3, 2, Placement.V),
    )
    # Rank 0 holds stages 0 and 3; its rows apply to both together.
    activations = [[500, 1000, 500], [7, 7, 7], [9, 9, 50], [501, 1000, 501]]
    assert sizes == ActivationSizes(activations)


@pytest.mark.parametrize("kinds", [SPLIT_BACKWARD, ("F", "B")])
def test_bytes_of_w_are_its_pending_bytes(kinds: tuple[str, ...]) -> None:
    sizes = sizes_of_rows(
        "F,0,,,0.01,1001\nB,0,,,0.01,\nW,0,,,0.01,1001\nW,0,,1,0.01,600\nW,0,,2,0.01,\n",
        Shape(1, 3, 2, kinds=SPLIT_BACKWARD if "W" in kinds else Shape(1, 1).kinds),
    )
    # The W of microbatch 2 has no bytes, so all of its activations are pending.
    assert sizes == ActivationSizes([[500] * 3, [501] * 3], [[500, 300, 500], [501, 300, 501]])


def test_pending_bytes_of_a_chunk_never_exceed_its_activations() -> None:
    text = "F,0,0,,0.01,501\nF,0,1,,0.01,501\nF,0,2,,0.01,500\nB,0,,,0.01,\nW,0,,,0.01,1500\n"
    sizes = sizes_of_rows(text, Shape(1, 1, 3))
    assert sizes == ActivationSizes([[501], [501], [500]], [[500], [500], [500]])
    text = "F,0,,,0.01,5\nB,0,,,0.01,\nW,0,0,,0.01,2\nW,0,1,,0.01,2\n"
    assert sizes_of_rows(text, Shape(1, 1, 2)) == ActivationSizes([[2], [3]], [[2], [2]])


WITHOUT = "F,0,,,0.01,\nB,0,,,0.01,\nW,0,,,0.01,\n"


def test_rows_without_bytes_give_no_sizes() -> None:
    assert sizes_of_rows(WITHOUT, Shape(1, 2)) is None
    # Bytes of microbatches beyond the step do not count either.
    assert sizes_of_rows(WITHOUT + "F,0,,2,0.01,8\nW,0,,2,0.01,8\n", Shape(1, 2)) is None
    text = "kind,pp_rank,chunk,microbatch,seconds\n" + WITHOUT.replace(",\n", "\n")
    assert parse_rows(text, "costs.csv").step(Shape(1, 2), 0, 0).sizes is None


def test_the_column_of_bytes_may_be_anywhere() -> None:
    text = " bytes, microbatch,kind,pp_rank,seconds,chunk\n12,,F,0,0.01,\n,,B,0,0.01,\n"
    assert parse_rows(text, "costs.csv").step(Shape(1, 2), 0, 0).sizes == ActivationSizes(
        [[12, 12]]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F,0,,,1,-1", "line 2: bytes is '-1'; it must be a whole number from 0 to 1125899906842"),
        ("F,0,,,1,1.5", "line 2: bytes is '1.5'"),
        ("F,0,,,1,1e9", "line 2: bytes is '1e9'"),
        ("F,0,,,1,nan", "line 2: bytes is 'nan'"),
        ("F,0,,,1,²", "line 2: bytes is '²'"),
        ("F,0,,,1,1125899906842625", "line 2: bytes is '1125899906842625'"),
        ("F,0,,,1," + "9" * 5000, "line 2: bytes is '9"),
        ("F,0,,,1,1\nB,0,,,1,0", "line 3: bytes is '0' in a row of B; leave it empty"),
        ("F,0,,,1", "line 2 has 5 cells, not one for each of kind, pp_rank, chunk, microbatch, "),
        (WITHOUT + "F,0,,1,1,5", "line 2 gives 0F0 no bytes, and other lines give them; add bytes"),
        (
            WITHOUT.replace("1,\n", "1,5\n", 1) + "F,0,,1,1,",
            "line 5 gives 0F1 no bytes, and other lines give them; add bytes to every F",
        ),
        (WITHOUT + "W,0,,0,1,5", "line 2 gives 0F0 no bytes"),
        (
            "F,0,,,1,10\nB,0,,,1,\nW,0,,,1,10\nW,0,,1,1,11",
            "line 5 lets 0W1 keep 11 bytes, and line 2 gives its F 10; give W at most as many",
        ),
    ],
)
def test_invalid_bytes_in_rows_are_refused_with_their_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        sizes_of_rows(text, Shape(1, 2))
    assert message in str(caught.value)
    assert str(caught.value).startswith("costs.csv, line")
    assert "\n" not in str(caught.value)


def test_the_error_for_an_unknown_column_names_the_optional_one() -> None:
    text = HEADING.replace("bytes", "byte") + "F,0,,,1,1"
    with pytest.raises(UsageError, match="microbatch,seconds, and may have bytes"):
        parse_rows(text, "costs.csv")


@given(
    num_chunks=st.integers(1, 4),
    activations=st.lists(st.integers(0, 2**50), min_size=1, max_size=4),
    share=st.floats(0, 1),
)
@examples(quick=50, thorough=1000)
def test_chunks_add_up_to_the_bytes_of_a_rank(
    num_chunks: int, activations: list[int], share: float
) -> None:
    pending_w = [min(size, round(size * share)) for size in activations]
    sizes = sizes_of_rows(
        "B,0,,,0.01,\n"
        + "".join(f"F,0,,{each},0.01,{size}\n" for each, size in enumerate(activations))
        + "".join(f"W,0,,{each},0.01,{size}\n" for each, size in enumerate(pending_w)),
        Shape(1, len(activations), num_chunks),
    )
    assert sizes is not None
    assert sizes.pending_w is not None
    assert [sum(each) for each in zip(*sizes.activations, strict=True)] == activations
    # Rounding may lose one pending byte per chunk.
    for whole, parts in zip(pending_w, zip(*sizes.pending_w, strict=True), strict=True):
        assert whole - num_chunks < sum(parts) <= whole


# Tables.


def test_a_table_gives_the_bytes_of_ranks_and_chunks() -> None:
    sizes = sizes_of_table(
        """
        bytes = 1e3
        bytes_owed_to_w = 0.25
        [[ranks]]
        pp_ranks = "0"
        chunk = 1
        bytes = 70
        [[ranks]]
        pp_ranks = "0-1"
        bytes = 301
        [[ranks]]
        last_share = 0.25
        seconds = { F = 0.04 }
        """,
        Shape(4, 1, 2, Placement.V),
    )
    # Ranks 0 to 3 hold stages 0 to 3 and 7 to 4. Entries for a chunk take precedence.
    activations = [[150], [150], [500], [500], [500], [500], [151], [70]]
    pending_w = [[38], [38], [125], [125], [125], [125], [38], [18]]
    assert sizes == ActivationSizes(activations, pending_w)


def test_bytes_grow_with_the_length_of_the_seconds() -> None:
    text = """
        bytes = 2e7
        length = "text"
        lengths = { text = 0.5, images = 1.0 }
        [[ranks]]
        pp_ranks = "0"
        length = "images"
        """
    costs = parse_table(tomllib.loads(SECONDS + text), "costs.toml").step(Shape(2, 50), 3, 0)
    # The bytes equal the nanoseconds of F.
    assert costs.sizes == ActivationSizes(costs.times.forward)
    assert len(set(costs.times.forward[0])) == 50


def test_a_table_without_bytes_gives_no_sizes() -> None:
    assert sizes_of_table("", Shape(2, 2)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bytes = -1", "bytes is -1; it must be a number from 0 to 1.1259e+15"),
        ("bytes = 1e16", "bytes is 1e+16"),
        ("bytes = nan", "bytes is nan"),
        ("bytes = '1 GB'", "bytes is '1 GB'"),
        ("bytes = { F = 1 }", "bytes is {'F': 1}"),
        ("bytes = 5\nbytes_owed_to_w = 1.1", "bytes_owed_to_w is 1.1; it must be a number from 0"),
        ("bytes_owed_to_w = 0.5", "has bytes_owed_to_w, a share of bytes, and no bytes; add them"),
        (
            "[[ranks]]\npp_ranks = '0'\nbytes = 5",
            "gives no bytes for 1F0, on pipeline rank 1, and does for others; add bytes",
        ),
        (
            "[[ranks]]\npp_ranks = '0-1'\nchunk = 1\nbytes = 5",
            "gives no bytes for 0F0, on pipeline rank 0",
        ),
        ("bytes = 5\n[[ranks]]\npp_ranks = '0'", "says nothing about its ranks; give seconds, byt"),
        (
            "bytes = 1e15\nlength = 'text'\nlengths = { text = 3.0 }",
            "bytes on stage 0, and the most is 1125899906842624; correct it",
        ),
    ],
)
def test_invalid_bytes_in_a_table_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        sizes_of_table(text, Shape(2, 200, 2))
    assert message in str(caught.value)
    assert "costs.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("num_ranks", [1, 8, 11])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_presets_have_a_gigabyte_of_activations_for_an_f_of_20_ms(
    name: str, num_ranks: int, num_chunks: int
) -> None:
    shape = Shape(num_ranks, 40, num_chunks)
    costs = resolve_costs(name).step(shape, 5, 0)
    assert costs.sizes is not None
    assert costs.sizes.pending_w is None
    for activations, forward in zip(costs.sizes.activations, costs.times.forward, strict=True):
        # Times are whole nanoseconds, so bytes differ by less than two ns, of 50 bytes each.
        assert all(
            abs(size - 50 * time_ns) < 100
            for size, time_ns in zip(activations, forward, strict=True)
        )
    if name != "multimodal":
        of_rank = [sum(costs.sizes.activations[stage][0] for stage in shape.stages_of(0))]
        assert of_rank == [GB]


# Models.

TINY_BYTES = """
[device]
flops_per_s = 1e9
[language]
layers = 3
hidden = 8
ffn = 12
heads = 4
vocabulary = 10
tokens = { median = 5 }
"""
HEAD_BYTES = 5 * (2 * 2 * 8 + 4 * 10)


def activation_bytes(text: str, stages: int = 3) -> list[int]:
    """Return the activation bytes of the first microbatch by stage."""
    sizes = parse_flops(tomllib.loads(text), "model.toml").step(Shape(stages, 2), 0, 0).sizes
    assert sizes is not None
    assert sizes.pending_w is None
    return [row[0] for row in sizes.activations]


@given(
    layers=st.integers(1, 40),
    hidden=st.integers(1, 64).map(lambda n: n * 128),
    tokens=st.integers(1, 8192),
    vocabulary=st.integers(1, 2000).map(lambda n: n * 128),
    size=st.sampled_from([1, 2, 4, 8]),
)
@examples(quick=30, thorough=300)
def test_the_activations_of_a_layer_match_the_literature(
    layers: int, hidden: int, tokens: int, vocabulary: int, size: int
) -> None:
    """Korthikanti et al. 2022, sections 4.2.1 and 4.3: s b h (10 + 24 / t) per layer without the
    scores, 4 s b v for the logits and 4 s b h for the rest of the head."""
    text = f"""
        dropout = true
        tensor_parallel = {{ size = {size} }}
        device = {{ flops_per_s = 1e12 }}
        [language]
        layers = {layers}
        hidden = {hidden}
        ffn = {4 * hidden}
        heads = 128
        vocabulary = {vocabulary}
        tokens = {{ median = {tokens} }}
        """
    of_layers = layers * tokens * hidden * (10 * size + 24) // size
    head = tokens * (4 * hidden + 4 * vocabulary // size)
    assert activation_bytes(text, stages=1) == [of_layers + head]


def test_tensors_counted_by_hand() -> None:
    # Per token: 4 x 8 for the norms; 4 x 8 for queries, keys, values and output; 2 x 12 for the
    # feed-forward network.
    layer = 5 * 2 * (32 + 32 + 24)
    assert activation_bytes(TINY_BYTES) == [layer, layer, layer + HEAD_BYTES]
    # With two key heads of width 2, and a gate.
    few = TINY_BYTES.replace("heads = 4", "heads = 4\nkv_heads = 2\ngated = true")
    layer = 5 * 2 * (32 + 2 * 8 + 2 * 4 + 36)
    assert activation_bytes(few) == [layer, layer, layer + HEAD_BYTES]
    wide = few.replace("heads = 4", "heads = 4\nhead_dim = 6", 1)
    layer = 5 * 2 * (32 + 2 * 24 + 2 * 12 + 36)
    assert activation_bytes(wide)[0] == layer
    assert activation_bytes("precision_bytes = 4\n" + TINY_BYTES)[0] == 5 * 4 * 88


def test_recomputation_keeps_only_inputs() -> None:
    layer = 5 * 2 * 8
    assert activation_bytes("recompute = true\n" + TINY_BYTES) == [layer, layer, layer + HEAD_BYTES]
    assert activation_bytes("recompute = true\ndropout = true\n" + TINY_BYTES)[0] == layer


def test_activations_of_vision_layers_are_patches_and_of_language_layers_text_and_images() -> None:
    vision = """
        [vision]
        layers = 2
        hidden = 2
        ffn = 5
        heads = 1
        patches_per_token = 3
        images = { median = 2 }
        patches = { median = 6 }
        """
    seen, tokens = 2 * 6 * 2 * (8 + 8 + 10), 5 + 4
    language = tokens * 2 * 88
    head = HEAD_BYTES // 5 * tokens
    assert activation_bytes(TINY_BYTES + vision, 5) == [
        seen,
        seen,
        language,
        language,
        language + head,
    ]
    none = TINY_BYTES + vision.replace("images = { median = 2 }", "images = { median = 0 }")
    assert activation_bytes(none, 5)[:3] == [0, 0, 5 * 2 * 88]


def test_a_model_with_implausible_bytes_is_refused() -> None:
    text = TINY_BYTES.replace("hidden = 8", "hidden = 1_000_000_000").replace(
        "median = 5", "median = 1e7"
    )
    with pytest.raises(UsageError, match=r"the model lets microbatch 0 keep \d+ bytes on stage 0"):
        activation_bytes(text)


@given(
    num_layers=st.integers(1, 40),
    stages=st.integers(1, 40),
    split=st.sampled_from(["layers", "flops"]),
)
@examples(quick=20, thorough=200)
def test_stages_add_up_to_the_bytes_of_the_model(num_layers: int, stages: int, split: str) -> None:
    assume(stages <= num_layers)
    text = f'split = "{split}"\n' + TINY_BYTES.replace("layers = 3", f"layers = {num_layers}")
    assert sum(activation_bytes(text, stages)) == num_layers * 5 * 2 * 88 + HEAD_BYTES


# Operations on sizes.


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepCosts, list[int]]:
    """Draw costs with sizes, and an order of their microbatches."""
    num_stages, num = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 10**12), min_size=num, max_size=num)
    activations = draw(st.lists(row, min_size=num_stages, max_size=num_stages))
    pending_w = draw(
        st.one_of(st.none(), st.just([[size // 3 for size in each] for each in activations]))
    )
    return StepCosts(
        TaskTimes(activations, activations, activations),
        sizes=ActivationSizes(activations, pending_w),
    ), draw(st.permutations(range(num)))


@given(steps())
@examples(quick=50, thorough=500)
def test_sizes_are_permuted_with_the_times(drawn: tuple[StepCosts, list[int]]) -> None:
    costs, order = drawn
    permuted = costs.permuted(order)
    assert costs.sizes is not None
    assert permuted.sizes is not None
    assert permuted.sizes.activations == permuted.times.forward
    for stage, row in enumerate(costs.sizes.pending_w or ()):
        assert permuted.sizes.pending_w is not None
        assert permuted.sizes.pending_w[stage] == [row[microbatch] for microbatch in order]
    inverse = [order.index(microbatch) for microbatch in range(len(order))]
    assert permuted.permuted(inverse).sizes == costs.sizes


def test_slower_tasks_have_the_same_bytes() -> None:
    costs, shape = resolve_costs("multimodal"), Shape(4, 8)
    slower = ScaledCosts(costs, 3.0).step(shape, 0, 0)
    assert slower.sizes == costs.step(shape, 0, 0).sizes
    assert slower.times != costs.step(shape, 0, 0).times


def test_permuted_costs_without_sizes_have_no_sizes() -> None:
    assert StepCosts(TaskTimes([[1, 2]], [[1, 2]], [[1, 2]])).permuted([1, 0]).sizes is None


def test_a_recorded_run_gives_no_sizes() -> None:
    costs = resolve_costs(str(ROOT / "traces" / "gpt-pp4-bf.pftrace"))
    assert costs.step(Shape(4, 8), 0, 0).sizes is None


# Costs from a model's operations: counted by hand, compared with the literature, read from TOML.


NS = 10**9
SLOW = "[device]\nflops_per_s = 1\n"
"""One operation per second, so that seconds are operations."""
TINY_OPERATIONS = """
[language]
layers = 3
hidden = 4
ffn = 6
heads = 2
vocabulary = 10
tokens = { median = 2 }
"""
SEEING = f"""
{TINY_OPERATIONS}
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
    """Return the nanoseconds of F, B and W of the first microbatch, each by stage."""
    times = costs.times
    kinds = (times.forward, times.input_gradient, times.weight_gradient)
    forward, input_gradient, weight_gradient = ([row[0] for row in kind] for kind in kinds)
    return forward, input_gradient, weight_gradient


# A layer for two tokens: four 4 x 4 and two 4 x 6 matrices, two operations per weight and token.
LINEAR = 2 * 2 * (4 * 16 + 2 * 24)
# Scores and their products with values: half of the 2 x 2 pairs, width 4, two operations each.
SCORES = 2 * (2 * 2 // 2) * 4 * 2
HEAD_OPERATIONS = 2 * 2 * 4 * 10


def test_operations_counted_by_hand() -> None:
    forward, input_gradient, weight_gradient = rows(step(SLOW + TINY_OPERATIONS, stages=3))
    assert forward == [(LINEAR + SCORES) * NS] * 2 + [(LINEAR + SCORES + HEAD_OPERATIONS) * NS]
    assert input_gradient == [
        (LINEAR + 2 * SCORES) * NS,
        (LINEAR + 2 * SCORES) * NS,
        (LINEAR + 2 * SCORES + HEAD_OPERATIONS) * NS,
    ]
    assert weight_gradient == [LINEAR * NS] * 2 + [(LINEAR + HEAD_OPERATIONS) * NS]


def test_a_gate_adds_a_matrix_and_fewer_key_heads_narrow_theirs() -> None:
    gated = TINY_OPERATIONS.replace("heads = 2", "heads = 2\nkv_heads = 1\ngated = true")
    forward, _, _ = rows(step(SLOW + gated, stages=3))
    assert forward[0] == (2 * 2 * (2 * 16 + 2 * 8 + 3 * 24) + SCORES) * NS


def test_vision_layers_process_patches_and_language_layers_text_and_images() -> None:
    forward, _, _ = rows(step(SLOW + SEEING, stages=6))
    # Two images of 6 patches, with attention within each image; 12 / 3 tokens and 2 of text.
    vision = 12 * 2 * (4 * 4 + 2 * 10) + 2 * (6 * 6 * 2 * 2 * 2)
    tokens = 2 + 4
    language = tokens * LINEAR // 2 + 2 * (tokens * tokens // 2) * 4 * 2
    assert forward[:3] == [vision * NS] * 3
    assert forward[3:5] == [language * NS] * 2
    assert forward[5] == (language + tokens * HEAD_OPERATIONS // 2) * NS


@given(
    layers=st.integers(1, 100),
    hidden=st.integers(1, 100).map(lambda n: n * 128),
    tokens=st.integers(1, 8192),
    vocabulary=st.integers(1, 300_000),
)
@examples(quick=30, thorough=300)
def test_the_operations_of_a_step_with_recomputation_match_the_literature(
    layers: int, hidden: int, tokens: int, vocabulary: int
) -> None:
    """Narayanan et al. 2021, equation 3, with half of the scores, because of the causal mask."""
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
    forward, input_gradient, weight_gradient = rows(step(SLOW + TINY_OPERATIONS + group, stages=3))
    # A ring all-reduce sends 2 x 3/4 of two tokens of 4 values of 2 bytes: 24 bytes.
    all_reduce = 1000 + 24
    assert forward[0] == ((LINEAR + SCORES) // 4 + 2 * all_reduce) * NS
    assert input_gradient[0] == (LINEAR // 4 + SCORES // 2 + 2 * all_reduce) * NS
    assert input_gradient[2] == input_gradient[0] + (HEAD_OPERATIONS // 4 + all_reduce) * NS
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


def test_layers_split_by_number_and_by_cost() -> None:
    text = TINY_OPERATIONS.replace("layers = 3", "layers = 24").replace(
        "vocabulary = 10", "vocabulary = 600"
    )
    # The head costs as much as 20 layers, so a split by cost leaves the last stage no layers.
    by_number, *_ = rows(step(SLOW + text, stages=8))
    assert [each // by_number[0] for each in by_number[:-1]] == [1] * 7
    assert by_number[-1] == by_number[0] + 60 * HEAD_OPERATIONS * NS
    by_cost, *_ = rows(step(f'split = "flops"\n{SLOW}{text}', stages=8))
    assert max(by_cost) == 60 * HEAD_OPERATIONS * NS
    assert sum(by_cost) == sum(by_number)


@examples(quick=100, thorough=3000)
@given(
    st.lists(st.sampled_from([1.0, 1.0, 2.0, 5.0]), min_size=1, max_size=9),
    st.sampled_from([0.0, 1.0, 4.0, 30.0]),
    st.integers(1, 5),
)
def test_no_other_split_has_a_lower_maximum(
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
    text = SLOW + (SEEING if num_vision else TINY_OPERATIONS)
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
    text = TINY_OPERATIONS.replace("layers = 3", "layers = 4")
    shape = Shape(2, 1, 2, Placement.V)
    assert len(parsed(SLOW + text).step(shape, 0, 0).times.forward) == 4


VARIED = SEEING.replace("{ median = 6 }", "{ median = 6, sigma = 1.0, least = 2, most = 40 }")


def test_draws_depend_only_on_seed_and_replica() -> None:
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
    ("text", "message"),
    [
        (TINY_OPERATIONS, "lacks device"),
        (SLOW, "lacks language"),
        (SLOW + TINY_OPERATIONS + "size = 3", "has no 'size'"),
        (SLOW.replace("1", "0") + TINY_OPERATIONS, "flops_per_s is 0"),
        (SLOW.replace("1", "nan") + TINY_OPERATIONS, "flops_per_s is nan"),
        (SLOW.replace("1", '"fast"') + TINY_OPERATIONS, "flops_per_s is 'fast'"),
        (SLOW + TINY_OPERATIONS.replace("hidden = 4", "hidden = 5"), "2 heads do not divide"),
        (
            SLOW + TINY_OPERATIONS.replace("heads = 2", "heads = 2\nkv_heads = 3"),
            "3 kv_heads do not divide",
        ),
        (SLOW + TINY_OPERATIONS.replace("layers = 3", "layers = 0"), "layers is 0"),
        (
            SLOW + TINY_OPERATIONS.replace("layers = 3", "layers = 1000000000"),
            "layers is 1000000000",
        ),
        (SLOW + TINY_OPERATIONS.replace("{ median = 2 }", "{ median = -1 }"), "median is -1"),
        (SLOW + TINY_OPERATIONS.replace("{ median = 2 }", "2"), r"\[tokens\] is 2"),
        (
            SLOW + TINY_OPERATIONS.replace("median = 2 }", "median = 2, least = 3, most = 1 }"),
            "at least 3",
        ),
        (f'split = "rows"\n{SLOW}{TINY_OPERATIONS}', "split is 'rows'"),
    ],
)
def test_invalid_models_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parsed(text)


def test_a_model_that_takes_no_time_is_refused() -> None:
    with pytest.raises(UsageError, match="the model gives"):
        step(SLOW + TINY_OPERATIONS.replace("{ median = 2 }", "{ median = 0 }"), stages=1)


def test_costs_are_found_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(SLOW + TINY_OPERATIONS, encoding="utf-8")
    assert resolve_costs(str(path)) == parsed(SLOW + TINY_OPERATIONS)

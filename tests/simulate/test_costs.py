"""Tests of costs from tables, rows and presets, and of the errors of invalid ones."""

import os
import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import RrfpError, UsageError
from rrfp.replay.cost_sources import costs_of, resolve_costs, stable_costs_name
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.language_models import FlopCosts
from rrfp.simulate.costs.layer_costs import CutCosts, layered_of
from rrfp.simulate.costs.model import Links, StepCosts, Uneven, part_of
from rrfp.simulate.costs.toml_files import PRESETS
from rrfp.simulate.engine import TaskTimes
from rrfp.trace.perfetto.reader import read_trace
from tests.analyze.simulated_runs import MODEL, TRACE, UNEVEN, written
from tests.properties.cases import examples
from tests.train.trained import Run, run

ROOT = Path(__file__).parents[2]
MS = 1_000_000

HEADING = "kind,pp_rank,chunk,microbatch,seconds\n"


def step(path: Path, text: str, shape: Shape, *, seed: int = 0, replica: int = 0) -> StepCosts:
    path.write_text(text)
    return resolve_costs(str(path)).step(shape, seed, replica)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "costs.toml"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return tmp_path / "costs.csv"


def by_stage(times: TaskTimes) -> list[tuple[int, int, int]]:
    """Return the times of F, B and W of microbatch 0 on every stage, in ms."""
    kinds = (times.forward, times.input_gradient, times.weight_gradient)
    return [tuple(row[0] // MS for row in of_stage) for of_stage in zip(*kinds, strict=True)]  # type: ignore[misc]


# Division of times.


@given(whole_ns=st.integers(0, 10**15), num_parts=st.integers(1, 9))
@examples(quick=50, thorough=1000)
def test_parts_add_up_to_the_whole(whole_ns: int, num_parts: int) -> None:
    parts = [part_of(whole_ns, num_parts, part) for part in range(num_parts)]
    assert sum(parts) == whole_ns
    assert max(parts) - min(parts) <= 1


@given(num_ranks=st.integers(1, 4), num_chunks=st.integers(1, 3), seed=st.integers(0, 9))
@examples(quick=20, thorough=200)
def test_the_time_of_a_rank_does_not_depend_on_its_chunks(
    num_ranks: int, num_chunks: int, seed: int
) -> None:
    def of_ranks(num_chunks: int) -> list[int]:
        shape = Shape(num_ranks, 3, num_chunks)
        times = resolve_costs("multimodal").step(shape, seed, 0).times
        return [
            sum(sum(times.forward[stage]) for stage in shape.stages_of(rank))
            for rank in range(num_ranks)
        ]

    assert of_ranks(num_chunks) == of_ranks(1)


# Tables.


def test_a_table_gives_the_times_of_ranks(table: Path) -> None:
    costs = step(
        table,
        """
        seconds = { F = 0.02, B = 0.03, W = 0.01 }

        [[ranks]]
        pp_ranks = "1-2,5"
        seconds = { F = 0.04 }

        [[ranks]]
        last_share = 0.25
        seconds = { F = 0.06, B = 0.08 }
        """,
        Shape(8, 2),
    )
    usual, slow, last = (20, 30, 10), (40, 30, 10), (60, 80, 10)
    assert by_stage(costs.times) == [usual, slow, slow, usual, usual, slow, last, last]
    assert (costs.agreement_ns, costs.lateness_ns, costs.gradient_sync_ns) == (0, 0, 0)
    assert costs.links.is_free


def test_a_chunk_can_have_its_own_seconds(table: Path) -> None:
    costs = step(
        table,
        """
        seconds = { F = 0.02, B = 0.02, W = 0.02 }
        [[ranks]]
        pp_ranks = "0"
        chunk = 1
        seconds = { F = 0.05 }
        [[ranks]]
        pp_ranks = "0-1"
        seconds = { F = 0.04 }
        """,
        Shape(2, 1, 2, Placement.V),
    )
    # Rank 0 holds stages 0 and 3. Entries for a chunk take precedence over later entries.
    assert [row[0] // MS for row in costs.times.forward] == [20, 20, 20, 50]


@pytest.mark.parametrize(
    ("share", "num_ranks", "num_covered"),
    [(0.375, 8, 3), (0.375, 16, 6), (0.375, 4, 2), (0.375, 1, 1), (0.01, 8, 1), (1, 8, 8)],
)
def test_a_share_of_the_pipeline_is_at_least_one_rank(
    table: Path, share: float, num_ranks: int, num_covered: int
) -> None:
    text = "seconds = {{ F = 0.02, B = 0.02, W = 0.02 }}\n[[ranks]]\n{} = {}\nseconds = {{ F = 1 }}"
    first = step(table, text.format("first_share", share), Shape(num_ranks, 1)).times.forward
    last = step(table, text.format("last_share", share), Shape(num_ranks, 1)).times.forward
    assert [row[0] == 1000 * MS for row in first] == [
        rank < num_covered for rank in range(num_ranks)
    ]
    assert first == last[::-1]


def test_a_length_is_shared_by_all_tasks_of_a_microbatch(table: Path) -> None:
    text = """
        seconds = { F = 0.02, B = 0.04, W = 0.02 }
        length = "text"
        [lengths]
        text = 0.5
        images = 1.0
        [[ranks]]
        pp_ranks = "0-1"
        length = "images"
        """
    shape = Shape(4, 200)
    times = step(table, text, shape).times
    images, text_rows = times.forward[:2], times.forward[2:]
    assert images[0] == images[1]
    assert text_rows[0] == text_rows[1]
    assert images[0] != text_rows[0]
    for of_f, of_b, of_w in zip(
        times.forward, times.input_gradient, times.weight_gradient, strict=True
    ):
        assert of_f == of_w
        assert all(abs(b - 2 * f) <= 1 for f, b in zip(of_f, of_b, strict=True))
    # The mean of a length is 1 with any sigma.
    assert sum(text_rows[0]) / 200 == pytest.approx(20 * MS, rel=0.1)
    assert step(table, text, shape, seed=1).times.forward[0] != images[0]
    assert step(table, text, shape, replica=1).times.forward[0] != images[0]
    assert step(table, text, shape).times == times


def test_a_table_gives_the_times_of_messages_and_groups(table: Path) -> None:
    costs = step(
        table,
        """
        seconds = { F = 0.02, B = 0.02, W = 0.02 }
        [links]
        latency_s = 0.001
        bandwidth_bytes_per_s = 1e9
        message_bytes = 2_000_000
        [[links.slow]]
        sender = 0
        receiver = 1
        factor = 4
        [agreement]
        seconds = 0.0005
        lateness_s = 0.002
        [gradient_sync]
        seconds = 0.1
        """,
        Shape(2, 3),
    )
    task = Task(1, Kind.F, 2)
    assert costs.links(0, 1, task) == 12 * MS
    assert costs.links(1, 0, task) == 3 * MS
    assert costs.agreement_ns == MS // 2
    assert costs.lateness_ns == 2 * MS
    assert costs.gradient_sync_ns == 100 * MS


GOOD = "seconds = { F = 0.02, B = 0.02, W = 0.02 }\n"
SLOW = "[[links.slow]]\nsender = {}\nreceiver = {}\nfactor = {}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "gives no seconds for 0F0"),
        ("seconds = { F = 1, B = 1 }", "gives no seconds for 0W0, on pipeline rank 0"),
        ("seconds = 3", "seconds is 3; it must be a table"),
        ("seconds = { F = nan, B = 1, W = 1 }", "F is nan; it must be a number from 0 to 3600"),
        ("seconds = { F = inf, B = 1, W = 1 }", "F is inf"),
        ("seconds = { F = -1, B = 1, W = 1 }", "F is -1"),
        ("seconds = { F = 1e300, B = 1, W = 1 }", "F is 1e+300"),
        ("seconds = { F = true, B = 1, W = 1 }", "F is True"),
        ("seconds = { F = '1', B = 1, W = 1 }", "F is '1'"),
        ("seconds = { G = 1 }", "must be F or B or W"),
        ("seconds = { F = 0, B = 0, W = 1e-10 }", "gives every task less than a nanosecond"),
        (
            GOOD + "second = 3",
            "has no 'second'; it has seconds, bytes, bytes_owed_to_w, length, lengths",
        ),
        (GOOD + "length = 'text'", "length 'text' is not in [lengths], which has none"),
        (GOOD + "lengths = { text = 4 }", "text is 4; it must be a number from 0 to 3"),
        (GOOD + "[[ranks]]\nseconds = { F = 1 }", "needs one of pp_ranks, first_share"),
        (GOOD + "[[ranks]]\npp_ranks = '0'\nlast_share = 0.5", "needs one of pp_ranks"),
        (GOOD + "[[ranks]]\npp_ranks = '1-0'", "'1-0' names no pipeline ranks"),
        (GOOD + "[[ranks]]\npp_ranks = 'x'", "'x' names no pipeline ranks"),
        (GOOD + "[[ranks]]\npp_ranks = 0", "pp_ranks is 0; it must be a text"),
        (
            GOOD + "[[ranks]]\npp_ranks = '0-4'\nseconds = { F = 1 }",
            "names pipeline rank 4 and there are 4",
        ),
        (
            GOOD + "[[ranks]]\npp_ranks = '0'\nchunk = 1\nseconds = { F = 1 }",
            "names chunk 1 and a rank has 1",
        ),
        (GOOD + "[[ranks]]\npp_ranks = '0'\nchunk = 0.5", "must be a whole number"),
        (GOOD + "[[ranks]]\npp_ranks = '0'\nlength = 'x'", "length 'x' is not in [lengths]"),
        (GOOD + "[ranks]\npp_ranks = '0'", "write it as [[ranks]]"),
        (GOOD + "[links]\nlatency = 1", "[links] has no 'latency'; it has latency_s"),
        (GOOD + "[links]\nmessage_bytes = 5", "[links] lacks bandwidth_bytes_per_s"),
        (GOOD + "[links]\nbandwidth_bytes_per_s = 5", "[links] lacks message_bytes"),
        (GOOD + "[[links.slow]]\nsender = 0\nreceiver = 1", "lacks factor"),
        (GOOD + "[[links.slow]]\nsender = 0\nreceiver = 1\nfactor = 2", "take no time"),
        (
            GOOD
            + "[links]\nlatency_s = 1\n"
            + SLOW.format(0, 1, 2)
            + SLOW.format(1, 2, 2)
            + SLOW.format(0, 1, 3),
            "[[slow]] 3 is for the same link as [[slow]] 1",
        ),
        (
            GOOD + "[links]\nlatency_s = 1\n" + SLOW.format(0, 1, 0),
            "factor is 0; it must be a number from 0.001 to 1000",
        ),
        (GOOD + "lengths = { text = 1 }", "nothing grows with 'text'"),
        (GOOD + "[[ranks]]\npp_ranks = '0'", "[[ranks]] 1 says nothing about its ranks"),
        (
            GOOD + "[[ranks]]\npp_ranks = '0'\nseconds = {}",
            "[[ranks]] 1 says nothing about its ranks",
        ),
        (
            GOOD + "[links]\nlatency_s = 1\n[[links.slow]]\nsender = 0\nreceiver = 2\nfactor = 2",
            "the link from rank 0 to rank 2, which carries no message",
        ),
        (
            GOOD + "[links]\nlatency_s = 1\n[[links.slow]]\nsender = 3\nreceiver = 4\nfactor = 2",
            "names pipeline rank 4",
        ),
        ("seconds = ", "is not TOML"),
        ("a = " + "[" * 5000, "costs.toml is "),
    ],
)
def test_an_invalid_table_is_refused(table: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        step(table, text, Shape(4, 2))
    assert words in str(caught.value)
    assert "costs.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


# Rows.


def test_the_most_specific_row_counts(rows: Path) -> None:
    others = "".join(f"{kind},{rank},,,0.010\n" for kind in "BW" for rank in (0, 1))
    costs = step(
        rows,
        HEADING + others + "F,0,,,0.020\nF,1,,,0.020\nF,0,1,,0.030\nF,0,,1,0.040\nF,0,1,2,0.050\n",
        Shape(2, 3, 2),
    )
    # Stages 0 and 2 are rank 0's chunks. A row for a chunk takes precedence over one for a
    # microbatch.
    assert costs.times.forward == [
        [10 * MS, 20 * MS, 10 * MS],
        [10 * MS] * 3,
        [30 * MS, 30 * MS, 50 * MS],
        [10 * MS] * 3,
    ]
    assert costs.times.input_gradient == [[5 * MS] * 3] * 4


def test_columns_in_any_order_after_a_byte_order_mark(rows: Path) -> None:
    text = "\ufeffseconds, kind, pp_rank, microbatch, chunk\r\n"
    text += "".join(f"0.02, {kind}, 0,,\r\n" for kind in "FBW") + "\r\n"
    rows.write_text(text, encoding="utf-8")
    times = resolve_costs(str(rows)).step(Shape(1, 2), 0, 0).times
    assert times == TaskTimes(*[[[20 * MS] * 2]] * 3)


def test_a_step_uses_the_first_microbatches_of_the_rows(rows: Path) -> None:
    text = HEADING + "".join(f"{kind},0,,{m},0.0{m + 1}\n" for kind in "FBW" for m in range(4))
    assert step(rows, text, Shape(1, 2)).times.forward == [[10 * MS, 20 * MS]]


@pytest.mark.parametrize("missing", ["F", "B", "W"])
@pytest.mark.parametrize("microbatch", [0, 2])
def test_the_first_task_without_a_row_is_named(rows: Path, missing: str, microbatch: int) -> None:
    text = HEADING + "".join(
        f"{kind},{rank},,{each},0.02\n"
        for kind in "FBW"
        for rank in range(2)
        for each in range(3)
        if (kind, rank) != (missing, 1) or each < microbatch
    )
    with pytest.raises(UsageError, match=f"no row for 1{missing}{microbatch}: kind {missing}"):
        step(rows, text, Shape(2, 3))


def test_without_w_rows_a_backward_is_whole_and_cannot_be_split(rows: Path) -> None:
    text = HEADING + "F,0,,,0.02\nB,0,,,0.03\n"
    times = step(rows, text, Shape(1, 2)).times
    assert times.by_kind(split=False)[Kind.B] == [[30 * MS, 30 * MS]]
    with pytest.raises(UsageError, match="no row for 0W0"):
        step(rows, text, Shape(1, 2, kinds=SPLIT_BACKWARD))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no rows"),
        (HEADING, "has no rows"),
        ("kind,pp_rank,chunk,seconds\nF,0,,1", "line 1 has the columns kind,pp_rank,chunk,seconds"),
        ("kind,kind,pp_rank,chunk,microbatch,seconds\n", "line 1 has the columns"),
        (HEADING + "F,0,,1", "line 2 has 4 cells"),
        (HEADING + "G,0,,,1", "line 2: kind is 'G'; it must be F, B or W"),
        (HEADING + "F,,,,1", "line 2: pp_rank is ''"),
        (HEADING + "F,-1,,,1", "line 2: pp_rank is '-1'"),
        (HEADING + "F,0,1.5,,1", "line 2: chunk is '1.5'"),
        (HEADING + "F,0,,²,1", "line 2: microbatch is '²'"),
        (HEADING + "F,0,,99999999999,1", "line 2: microbatch is '99999999999'"),
        (HEADING + "F,0,,,", "line 2: seconds is ''"),
        (HEADING + "F,0,,,nan", "line 2: seconds is 'nan'; it must be a number from 0 to 3600"),
        (HEADING + "F,0,,,inf", "line 2: seconds is 'inf'"),
        (HEADING + "F,0,,,-0.1", "line 2: seconds is '-0.1'"),
        (HEADING + "F,0,,,1e9", "line 2: seconds is '1e9'"),
        (HEADING + "F,0,,,1\nB,0,,,1\nF,0,,,2", "line 4 is for the same tasks as line 2"),
        (HEADING + "F,0,0,,1\nF,0,0,,1", "line 3 is for the same tasks as line 2"),
        (HEADING + 'F,0,,,"1', "is not CSV"),
        (HEADING + "F,4,,,1", "names pipeline rank 4 and there are 4"),
        (HEADING + "F,0,1,,1", "names chunk 1 and a rank has 1"),
        (
            HEADING + "".join(f"{kind},{rank},,,0\n" for kind in "FBW" for rank in range(4)),
            "gives every task less than a nanosecond",
        ),
    ],
)
def test_invalid_rows_are_refused(rows: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        step(rows, text, Shape(4, 2))
    assert words in str(caught.value)
    assert "costs.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


# Names and files of costs.

TOO_LONG = ["x" * 300, *(start + "x" * 300 + end for start, end in (("drawn:", ""), ("", ".csv")))]
"""Texts that exceed the length of a file name."""


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("num_ranks", [1, 2, 8, 11])
def test_a_preset_fits_any_pipeline(name: str, num_ranks: int) -> None:
    costs = resolve_costs(name).step(Shape(num_ranks, 400, 2), 0, 0)
    means = [sum(row) / 400 for row in costs.times.forward]
    assert means == pytest.approx([10 * MS] * 2 * num_ranks, rel=0.2)
    varies = {rank for rank in range(num_ranks) if len(set(costs.times.forward[rank])) > 1}
    assert varies == (set(range(num_ranks)) if name == "multimodal" else set())


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"F\x80", None, "directory"])
@pytest.mark.parametrize("name", ["costs.csv", "costs.toml", "costs", "costs.pftrace"])
def test_an_unreadable_file_is_refused(
    tmp_path: Path, name: str, content: bytes | str | None
) -> None:
    path = tmp_path / name
    if content == "directory":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(RrfpError) as caught:
        resolve_costs(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["costs.csv", "costs.toml", "costs", "costs.pftrace"])
@pytest.mark.parametrize("drawn", ["", "drawn:"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, drawn: str, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(UsageError, match=f"cannot read the costs {path}: it is not a regular file"):
        resolve_costs(f"{drawn}{path}")


@pytest.mark.parametrize("text", ["", "unifrom", "drawn:", "\0.csv", "drawn:uniform", *TOO_LONG])
def test_unknown_costs_are_refused(text: str) -> None:
    with pytest.raises(RrfpError):
        resolve_costs(text)


@pytest.mark.parametrize("text", ["", "drawn:"])
def test_an_empty_name_does_not_mean_the_current_directory(text: str) -> None:
    with pytest.raises(UsageError, match=f"'{text}' is not costs: choose uniform, language"):
        resolve_costs(text)


def test_a_stable_name_of_costs_names_the_newest_run_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "runs" / "a" / "trace.pftrace"
    trace.parent.mkdir(parents=True)
    trace.touch()
    Path("runs/latest").symlink_to("a")
    assert (
        stable_costs_name("runs/latest")
        == stable_costs_name("runs/latest/trace.pftrace")
        == str(trace)
    )
    assert stable_costs_name("drawn:runs/latest") == f"drawn:{trace}"
    assert stable_costs_name("a") == stable_costs_name("@-1") == str(trace)
    assert stable_costs_name("drawn:@-1") == f"drawn:{trace}"
    with pytest.raises(RrfpError, match="there is no @-2 among the 1 run in runs"):
        resolve_costs("@-2")
    assert [stable_costs_name(text) for text in ("uniform", "mine.csv")] == ["uniform", "mine.csv"]


@pytest.mark.parametrize("drawn", ["", "drawn:"])
def test_the_costs_of_a_recorded_run(drawn: str) -> None:
    trace = ROOT / "traces" / "gpt-pp4-bf.pftrace"
    num_microbatches = 8
    costs = resolve_costs(f"{drawn}{trace}")
    first, second = (costs.step(Shape(4, num_microbatches), seed, 0).times for seed in (0, 1))
    assert len(first.forward) == 4
    assert min(min(row) for row in first.forward) > 0
    assert first != second


EXAMPLES = re.findall(
    r"```(toml|csv)\n(.*?)```",
    (ROOT / "docs" / "reference" / "costs.md").read_text(encoding="utf-8"),
    re.DOTALL,
)


@pytest.mark.parametrize(("language", "example"), EXAMPLES, ids=["table", "rows", "bytes", "model"])
def test_examples_of_the_documentation(tmp_path: Path, language: str, example: str) -> None:
    shape = Shape(8, 2, 2) if language == "toml" else Shape(1, 4)
    times = step(tmp_path / f"costs.{language}", example, shape).times
    if language == "csv":
        assert times.forward == [[20 * MS, 20 * MS, 20 * MS, 45 * MS]]
    else:
        # Stages of images and texts differ, and so does the last stage.
        assert times.forward[0] != times.forward[12]
        assert times.input_gradient[15] != times.input_gradient[14]


# Operations on costs.


def test_permuted_costs_follow_the_admitted_microbatches() -> None:
    costs = StepCosts(
        TaskTimes([[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]),
        Links(ns_per_byte=1.0, num_bytes=[10, 20, 30]),
        agreement_ns=5,
    )
    permuted = costs.permuted([2, 0, 1])
    assert permuted.times == TaskTimes([[3, 1, 2]], [[6, 4, 5]], [[9, 7, 8]])
    assert [permuted.links(0, 1, Task(0, Kind.F, each)) for each in range(3)] == [30, 10, 20]
    assert permuted.agreement_ns == 5
    assert StepCosts(costs.times).permuted([2, 0, 1]).links.is_free


def test_links_are_free_if_no_message_takes_time() -> None:
    assert Links().is_free
    assert Links(ns_per_byte=1.0, num_bytes=[0, 0]).is_free
    assert not Links(latency_ns=1).is_free
    assert not Links(ns_per_byte=0.5, num_bytes=[0, 1]).is_free


# Costs by layer: with another split of layers into stages, and joined or divided microbatches.


__all__ = ["run"]


def assert_same(found: StepCosts, expected: StepCosts, off_ns: int = 0) -> None:
    """Check that two costs have the same times, up to `off_ns`, and are otherwise equal."""
    for name in ("forward", "input_gradient", "weight_gradient"):
        for row, other in zip(
            getattr(found.times, name), getattr(expected.times, name), strict=True
        ):
            assert all(abs(a - b) <= off_ns for a, b in zip(row, other, strict=True))
    assert found.sizes == expected.sizes
    assert found.links == expected.links
    assert found.gradient_sync_ns == expected.gradient_sync_ns


class TestCosts:
    """Tests of costs by layer."""

    @pytest.mark.parametrize("uneven", Uneven)
    def test_an_unchanged_split_of_layers_costs_the_same(
        self, uneven: Uneven, tmp_path: Path
    ) -> None:
        for text, split in (
            (str(written(tmp_path, UNEVEN)), (4, 4, 3, 4)),
            ("multimodal", (2,) * 4),
        ):
            costs, shape = resolve_costs(text), Shape(4, 5, kinds=SPLIT_BACKWARD)
            cut = CutCosts(layered_of(costs, shape, split, uneven), split)
            for seed in range(3):
                assert_same(cut.step(shape, seed, 0), costs.step(shape, seed, 0))

    def test_the_split_of_a_model_costs_the_same(self, tmp_path: Path) -> None:
        costs = resolve_costs(str(written(tmp_path, MODEL)))
        assert isinstance(costs, FlopCosts)
        for num_ranks, chunks in product((2, 5), (1, 2)):
            shape = Shape(num_ranks, 4, chunks)
            cut = CutCosts(costs, costs.split_over(shape.num_stages))
            # Sums in another order can differ in the last bit.
            assert_same(cut.step(shape, 7, 1), costs.step(shape, 7, 1), off_ns=1)

    def test_the_split_of_a_recorded_run_costs_the_same(self) -> None:
        costs = costs_of(read_trace(TRACE))
        shape, split = costs.shape, (2,) * costs.shape.num_stages
        cut = CutCosts(layered_of(costs, shape, split), split)
        assert_same(cut.step(shape, 1, 0), costs.step(shape, 1, 0), off_ns=1)

    def test_a_slow_rank_stays_slow_and_heavy_layers_stay_heavy(self, tmp_path: Path) -> None:
        """Rank 1 takes 1.5 times as long as the others. With 3 instead of 4 layers it takes a
        quarter less. On its new stage the moved layer takes as long as that stage's layers if rank
        1 is slow ('ranks'), or 1.5 times as long if its layers are heavy ('layers')."""
        costs, shape = resolve_costs(str(written(tmp_path, UNEVEN))), Shape(4, 3)
        forward = costs.step(shape, 0, 0).times.forward
        for uneven, factor in ((Uneven.RANKS, 1.0), (Uneven.LAYERS, 1.5)):
            layered = layered_of(costs, shape, (4, 4, 4, 4), uneven)
            after = CutCosts(layered, (4, 3, 5, 4)).step(shape, 0, 0).times.forward
            assert after[1] == pytest.approx([0.75 * ns for ns in forward[1]], abs=1)
            grown = [(1 + factor / 4) * ns for ns in forward[2]]
            assert after[2] == pytest.approx(grown, abs=1)

    def test_the_head_stays_on_the_last_stage(self, tmp_path: Path) -> None:
        """The last stage's F takes 8 ms more than four layers. Without layers it takes 8 ms."""
        costs, shape = resolve_costs(str(written(tmp_path, UNEVEN))), Shape(4, 3)
        layered = layered_of(costs, shape, (4, 4, 4, 4))
        before = costs.step(shape, 0, 0)
        after = CutCosts(layered, (4, 6, 6, 0)).step(shape, 0, 0)
        head = [round(ns * 8 / 28) for ns in before.times.forward[3]]
        assert after.times.forward[3] == pytest.approx(head, abs=1)
        assert after.sizes is not None
        assert before.sizes is not None
        expected = [num / 3 for num in before.sizes.activations[3]]
        assert after.sizes.activations[3] == pytest.approx(expected, abs=1)

    def test_a_vision_layer_stays_a_vision_layer(self) -> None:
        """On a stage of text layers, the time of a vision layer still depends on the images."""
        costs, shape = resolve_costs("multimodal"), Shape(8, 6)
        layered = layered_of(costs, shape, (4,) * 8)
        before = costs.step(shape, 3, 0).times.forward
        after = CutCosts(layered, (4, 4, 3, 5, 4, 4, 4, 4)).step(shape, 3, 0).times.forward
        joint = [own + other / 4 for own, other in zip(before[3], before[2], strict=True)]
        assert after[3] == pytest.approx(joint, abs=1)

    def test_joined_and_divided_microbatches(self, tmp_path: Path) -> None:
        """Two joined microbatches take the work of both, and the fixed time of a task once."""
        costs = resolve_costs(str(written(tmp_path, MODEL)))
        assert isinstance(costs, FlopCosts)
        split = costs.split_over(4)
        given = CutCosts(costs, split).step(Shape(4, 6), 0, 0)
        joined = CutCosts(costs, split, joined=2).step(Shape(4, 3), 0, 0)
        divided = CutCosts(costs, split, divided=2).step(Shape(4, 12), 0, 0)
        assert given.sizes is not None
        assert joined.sizes is not None
        for stage in range(4):
            fixed_ns = split[stage] * 1e-4 * 1e9
            row = given.times.forward[stage]
            pairs = [row[2 * i] + row[2 * i + 1] - fixed_ns for i in range(3)]
            assert joined.times.forward[stage] == pytest.approx(pairs, abs=2)
            halves = [(row[i // 2] - fixed_ns) / 2 + fixed_ns for i in range(12)]
            assert divided.times.forward[stage] == pytest.approx(halves, abs=2)
            activations = given.sizes.activations[stage]
            sums = [activations[2 * i] + activations[2 * i + 1] for i in range(3)]
            assert joined.sizes.activations[stage] == pytest.approx(sums, abs=2)
        assert sum(joined.links.num_bytes) == sum(given.links.num_bytes)

    def test_a_document_with_another_split(self, run: Run, tmp_path: Path) -> None:
        written(tmp_path, UNEVEN)
        document = """
[cut]
costs = "costs.toml"
layers = "4,3,5,4"
[cut.given]
layers = "4,4,4,4"
pp = 4
microbatches = 3
"""
        found = resolve_costs(str(written(tmp_path, document, "cut.toml")))
        layered = layered_of(resolve_costs("costs.toml"), Shape(4, 3), (4, 4, 4, 4))
        expected = CutCosts(layered, (4, 3, 5, 4))
        assert_same(found.step(Shape(4, 3), 5, 0), expected.step(Shape(4, 3), 5, 0))
        code, _, err = run("simulate", "--costs", "cut.toml", "--pp", "4", "--microbatches", "3")
        assert (code, err) == (0, "")
        for wrong, message in (
            (document.replace("4,3,5,4", "4,3,5,5"), "17 layers in all and the model has 16"),
            (document.replace("4,3,5,4", "4,0,8,4"), "leaves a stage in the middle without layers"),
            (document.replace("4,3,5,4", "four"), "write the layers of each stage"),
            (document.split("[cut.given]")[0], "does not say how many layers"),
            (document.replace("costs.toml", "cut.toml"), "is to be cut itself"),
        ):
            written(tmp_path, wrong, "cut.toml")
            with pytest.raises(UsageError, match=message):
                resolve_costs("cut.toml")

    def test_costs_of_another_pipeline_are_refused(self) -> None:
        layered = layered_of(resolve_costs("uniform"), Shape(4, 2), (2,) * 4)
        with pytest.raises(UsageError, match="of 4 pipeline ranks, not 2"):
            CutCosts(layered, (4, 4)).step(Shape(2, 2), 0, 0)
        with pytest.raises(UsageError, match="into 2 stages"):
            CutCosts(layered, (4, 4)).step(Shape(4, 2), 0, 0)


def test_every_kind_has_its_fixed_times(tmp_path: Path) -> None:
    costs = resolve_costs(str(written(tmp_path, MODEL)))
    assert isinstance(costs, FlopCosts)
    for kind in Kind:
        assert costs.fixed_ns[kind].sum() == pytest.approx(16 * 1e-4 * 1e9)

"""Steps whose order of entry is planned, admitted, balanced or chosen learn the same."""

import itertools
import json
import logging
import os
import select
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rrfp.errors import UsageError
from rrfp.megatron.look_ahead import AheadIterator, AheadIterators
from rrfp.megatron.settings import DispatchSettings
from rrfp.megatron.step.microbatch_data import DataHabits, StepData
from rrfp.planning.collectives import decode_items, encode_items
from rrfp.planning.step_admission import StepAdmission, StepFile
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.admission import format_step, parse_admission, parse_assignments, pyramid
from rrfp.schedule.named_hints import AUTO, AutoHint
from rrfp.trace.records import Phase, PhaseRecord
from rrfp.train.checkpoints.reading import differences
from rrfp.train.checks import check_settings
from rrfp.train.data.batches import Batch
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks
from tests.megatron.native_runs import run_script
from tests.megatron.training import (
    NUM,
    SMALL,
    Outcome,
    RankRun,
    Rig,
    native,
    on_rigs,
    ours,
    run_on_items,
    train_variant,
    train_variants,
)
from tests.train import checkpointed

# `admit plan` in the drop-in: the order is planned while the step before runs, and the training is
# that of Megatron's own schedule on items in that order.


pytestmark = pytest.mark.timeout(310)


VARIED = {**SMALL, "pp": 2, "microbatches": NUM, "variable_lengths": True, "seq_length": 48}
MOST_STEPS = 12


def test_settings_that_plan_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="admit 'pyramid' plans nothing; choose admit 'plan'"):
        DispatchSettings(admit="pyramid", plan_ms=5)
    for wrong in (0, -1.0, "5", float("inf")):
        with pytest.raises(UsageError, match="must be a finite number above 0"):
            DispatchSettings(admit="plan", plan_ms=wrong)


def test_items_ahead_go_to_the_next_step() -> None:
    ahead = AheadIterator(iter(range(5)))
    assert [next(ahead), next(ahead)] == [0, 1]
    assert ahead.look(2) == [2, 3]
    assert ahead.look(2) == [2, 3]
    assert next(ahead) == 2
    # One is missing, and none is lost.
    assert ahead.look(3) is None
    assert list(ahead) == [3, 4]


def test_a_failure_ahead_comes_in_its_place() -> None:
    def items() -> Any:
        yield 0
        raise OSError("the disk is gone")

    ahead = AheadIterator(items())
    assert ahead.look(2) is None
    assert next(ahead) == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)


def test_draws_that_move_random_states_are_not_looked_at() -> None:
    ahead = AheadIterator(int(torch.randint(4, ())) for _ in range(4))
    assert ahead.look(3) is None
    assert ahead.look(1) is None
    assert len(list(ahead)) == 4


def test_another_iterator_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    both = AheadIterators()
    first, second = iter(range(4)), iter(range(4))
    (looked,) = both.wrap([first])
    assert looked.look(2) == [0, 1]
    with caplog.at_level(logging.WARNING):
        assert list(both.wrap([second])[0]) == [0, 1, 2, 3]
    assert "2 items that were drawn ahead wait for the one before" in caplog.text
    assert list(both.wrap([first])[0]) == [0, 1, 2, 3]
    assert both.wrap([[1, 2], None]) == [[1, 2], None]
    assert both.wrap([second, second]) == [second, second]


def test_a_planned_run_trains_as_in_that_order() -> None:
    assert all(run_ranks(2, on_rigs, train_planned, VARIED, timeout_s=300))


def train_planned(layout: Any, settings: dict[str, Any]) -> bool:
    rig = Rig(settings, layout)
    schedule = ours(admit="plan", plan_ms=20.0, hint="bfw")
    stream = itertools.chain.from_iterable(rig.data(NUM) for _ in range(MOST_STEPS))
    items = list(rig.data(NUM))
    planned = 0
    for _ in range(MOST_STEPS):
        outcome = rig.run(schedule, num_microbatches=NUM, data=stream)
        order = schedule.report.order
        assert sorted(order) == list(range(NUM))
        in_order = iter([items[number] for number in order])
        assert rig.run(native(), num_microbatches=NUM, data=in_order) == outcome
        (links,) = [each for each in schedule._links.values() if each.planner is not None]
        planned += links.planner.figures is not None
        if planned == 2:
            break
        if layout.rank == 0:
            # A step of this model ends before the planner's process has begun.
            assert select.select([links.planner._process._answers], [], [], 60)[0]
            time.sleep(0.2)
    assert planned == 2
    process = links.planner._process
    assert (process is not None) == (layout.rank == 0)
    schedule.close()
    links.planner.close()
    return process is None or not Path(f"/proc/{process.pid}").exists() or os.name != "posix"


# The drop-in admits a step's items in another order than they come in: it learns what Megatron's
# own schedule learns from items that come in that order, no matter which ranks have data.


class Unhashable:
    """A cost function that no table of schedules can be keyed by."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, item: Batch) -> float:
        return 1.0


def test_settings_that_sort_nothing_are_refused() -> None:
    with pytest.raises(
        UsageError, match="admit 'given' does not sort them; choose admit 'pyramid'"
    ):
        DispatchSettings(admit_cost="tokens")
    for wrong in (3, ["tokens"], Unhashable()):
        with pytest.raises(UsageError, match="it must be a name, or a function of an item that"):
            DispatchSettings(admit="pyramid", admit_cost=wrong)
    with pytest.raises(UsageError, match="admit is 3; it must be a name or a path, as text"):
        DispatchSettings(admit=3)
    with pytest.raises(UsageError, match="'heavy' is not an admission order"):
        ours(admit="heavy")
    with pytest.raises(UsageError, match="'weight' is not a microbatch's cost"):
        ours(admit="pyramid", admit_cost="weight")


def test_a_file_and_what_fails() -> None:
    assert all(run_ranks(2, on_rigs, follow_and_fail, VARIED, timeout_s=300))


def follow_and_fail(layout: Any, settings: dict[str, Any]) -> bool:
    rig = Rig(settings, layout)
    items = list(rig.data(NUM))
    order = pyramid([batch["tokens"].numel() for batch in items])
    expected = run_on_items(rig, native(), [items[number] for number in order])
    follow_a_file(rig, items, order, expected)
    fail_and_go_on(rig, items, expected)
    return True


def follow_a_file(rig: Rig, items: list[Batch], order: list[int], expected: Outcome) -> None:
    """Lines of an admission file count for training steps only."""
    lines = [" ".join(map(str, each)) for each in (order, range(NUM))]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        schedule = ours(admit=file.name)
    assert run_on_items(rig, schedule, items) == expected
    with torch.no_grad():
        given = run_on_items(rig, schedule, items, forward_only=True)
    assert run_on_items(rig, schedule, items).losses == given.losses
    assert run_on_items(rig, schedule, items) == expected
    is_first = rig.layout.pp_rank == rig.layout.tp_rank == 0
    with pytest.raises(
        UsageError if is_first else PeerLostError,
        match=f"admits {NUM} microbatches and step 3 has 2" if is_first else "could not order",
    ):
        rig.run(schedule, num_microbatches=2)
    dist.barrier()
    fail_without_data(rig, schedule)
    schedule.close()


def fail_without_data(rig: Rig, schedule: Callable[..., list[Any]]) -> None:
    is_first = rig.layout.pp_rank == 0
    with pytest.raises(
        UsageError if is_first else PeerLostError,
        match="has no data iterator; pass one" if is_first else "could not order",
    ):
        rig.run(lambda **given: schedule(**{**given, "data_iterator": None}))
    dist.barrier()


def fail_and_go_on(rig: Rig, items: list[Batch], expected: Outcome) -> None:
    """The first rank says what is wrong, and the others that it was the first rank."""

    def fails(_: Batch) -> int:
        raise ArithmeticError("too heavy")

    by_fails, plain = ours(admit="pyramid", admit_cost=fails), ours(admit="pyramid")
    is_first = rig.layout.pp_rank == 0
    for schedule, given, complaint in (
        (by_fails, items, "the cost fails of microbatch 0 raised ArithmeticError: too heavy"),
        (plain, items[:3], "data iterator ended after 3 microbatches"),
        (
            plain,
            [(item, 1) for item in items],
            "a tuple, has none of tokens, input_ids, text, whose size",
        ),
    ):
        with pytest.raises(
            UsageError if is_first else PeerLostError,
            match=complaint if is_first else "first rank of this replica could not order",
        ):
            run_on_items(rig, schedule, given)
        dist.barrier()
    fail_without_data(rig, plain)
    assert run_on_items(rig, plain, items) == expected
    plain.close()
    by_fails.close()


VARIED_ITEMS = {**SMALL, "microbatches": NUM, "variable_lengths": True, "seq_length": 48}
REPLICAS = {**VARIED_ITEMS, "pp": 1, "dp": 2}


def test_a_failure_names_its_replica_and_the_run_goes_on() -> None:
    assert all(run_ranks(2, on_rigs, fail_on_a_replica_and_go_on, REPLICAS, timeout_s=300))


def fail_on_a_replica_and_go_on(layout: Any, settings: dict[str, Any]) -> bool:
    rig = Rig(settings, layout)
    items = list(rig.data(NUM))
    plain = ours(admit="pyramid", admit_across="replicas")
    expected = run_on_items(rig, plain, items)

    def fails(item: Batch) -> float:
        if layout.dp_rank == 1:
            raise ArithmeticError("too heavy")
        return float(item["tokens"].numel())

    def weighs_less(item: Batch) -> float:
        return -1.0

    cases: list[tuple[Any, list[Any], int, str, str]] = [
        (
            ours(admit_across="replicas", admit_cost=fails),
            items,
            1,
            "the cost fails of microbatch 0 raised ArithmeticError: too heavy",
            "the first rank of replica 1 could not weigh the step's microbatches",
        ),
        (
            plain,
            items[:3] if layout.dp_rank == 0 else items,
            0,
            "data iterator ended after 3 microbatches",
            "the first rank of replica 0 could not weigh the step's microbatches",
        ),
        (
            plain,
            [{**item, "of": Rig} if layout.dp_rank == 1 else item for item in items],
            1,
            "a type in an item of the data iterator cannot be sent to another replica",
            "rank 1 could not send the microbatches that are assigned to other replicas; its own",
        ),
        (
            ours(admit_across="replicas", admit_cost=weighs_less),
            items,
            layout.dp_rank,
            "the cost of a microbatch is -1, and --admit-across adds costs up",
            "",
        ),
    ]
    with (
        tempfile.NamedTemporaryFile("w", suffix=".csv") as file,
        tempfile.NamedTemporaryFile("w", suffix=".csv") as listed,
    ):
        listed.write("6 7 8 3 4 5; 0 1 2 9 10 11\n")
        listed.flush()
        cases.append(
            (
                # Nothing is weighed, so the items are drawn when they are exchanged.
                ours(admit_across=listed.name),
                items[:3] if layout.dp_rank == 1 else items,
                1,
                "data iterator ended after 3 microbatches",
                "rank 1 could not send the microbatches that are assigned to other replicas; its",
            )
        )
        file.write("0 3; 1 2\n" if layout.dp_rank == 0 else "anything")
        file.flush()
        if layout.dp_rank == 0:
            cases.append((ours(admit_across=file.name), items, 0, "and step 0 has 6 for each", ""))
        else:
            # A file that only the first replica reads may be another one elsewhere.
            Path(file.name).write_text("0; 1")
            complaint = "the first rank of the first replica could not balance"
            cases.append((ours(admit_across=file.name), items, 0, "", complaint))
        for schedule, given, failing, own, others in cases:
            fails_here = failing == layout.dp_rank
            with pytest.raises(
                UsageError if fails_here else PeerLostError, match=own if fails_here else others
            ):
                run_on_items(rig, schedule, given)
            dist.barrier()
    assert run_on_items(rig, plain, items) == expected
    for schedule, *_ in cases:
        schedule.close()
    return True


def test_one_replica_has_nothing_to_balance() -> None:
    replicas = SimpleNamespace(size=lambda: 1)
    admission = StepAdmission(DispatchSettings(admit_across="replicas"))
    with pytest.raises(UsageError, match="over data-parallel replicas and there is 1; leave it"):
        admission.assign(0, list, 4, None, replicas, torch.device("cpu"))


def test_items_travel_as_they_are_and_take_nothing_along() -> None:
    table = torch.arange(1_000_000.0)
    item: dict[Any, Any] = {
        "row": table[10:14],
        "spread": torch.ones(3).expand(100, 3),
        "half": torch.tensor([[0.5, -0.0]], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "none": torch.zeros((0, 3), dtype=torch.int64),
        7: torch.tensor(5),
        "more": [1, 2.5, float("inf"), True, None, "text", (b"bytes", {"deep": [()]})],
    }
    payload = encode_items([(0, 3, item)])
    assert len(payload) < 3000
    ((chunk, place, found),) = decode_items(payload, torch.device("cpu"))
    assert (chunk, place) == (0, 3)
    assert found.keys() == item.keys()
    assert found["more"] == item["more"]
    for key in item.keys() - {"more"}:
        assert found[key].dtype == item[key].dtype
        assert torch.equal(found[key], item[key])
    assert found["half"][0, 1].signbit().item()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff" * 100,
        encode_items([1, 2])[:-1],
        encode_items({"a": torch.ones(3)})[:-1],
        encode_items("text").replace(b"text", b'te"t'),
        encode_items(torch.ones(1)).replace(b"float32", b"manual_"),
        encode_items(torch.ones(1)).replace(b'["tensor"]', b'["import"]'),
    ],
    ids=range(7),
)
def test_what_is_garbled_is_not_read(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not|cut short|Expecting|delimiter|decode"):
        decode_items(payload, torch.device("cpu"))


def test_what_cannot_be_sent_is_named() -> None:
    for value in (object(), {1, 2}, torch.eye(2).to_sparse(), NoStreams):
        with pytest.raises(UsageError, match="in an item of the data iterator cannot be sent to"):
            encode_items([value])


class NoStreams:
    """Random streams of a task that draws nothing."""

    def active(self) -> Any:
        return tempfile.TemporaryDirectory()

    inactive = active


def test_a_chunk_that_draws_nothing_is_left_out_from_then_on() -> None:
    habits = DataHabits()
    data = StepData([iter("abcd"), iter("wxyz")], 2, habits, keeps_order=False, group_size=2)
    assert data.drawing_chunks == [0, 1]
    for chunk, items in ((0, "cb"), (1, "yx")):
        assert len(data.first(chunk, 2)) == 2
        data.replace(chunk, items)
    streams: Any = NoStreams()
    with data.of(0, 1, None, streams) as view:
        assert next(view) == "b"
    with data.of(1, 0, None, streams):
        pass
    again = StepData([iter("abcd"), iter("wxyz")], 2, habits, keeps_order=False, group_size=2)
    assert again.drawing_chunks == [0]


def test_the_file_keeps_the_steps_that_a_run_goes_on_from(tmp_path: Path) -> None:
    path = tmp_path / "dealing.csv"
    given = [range(2), range(2, 4)]
    file = StepFile(path, given)
    for assignment in ([[3, 0], [1, 2]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        file.write(assignment)
    file.close()
    with path.open("a") as torn:
        torn.write("0 1; 2")
    file = StepFile(path, given, first_step=1)
    file.write([[2, 3], [0, 1]])
    file.close()
    assert path.read_text() == "3 0; 1 2\n2 3; 0 1\n"
    # Elsewhere nothing is known of what came before.
    elsewhere = tmp_path / "other.csv"
    StepFile(elsewhere, given, first_step=2).close()
    assert elsewhere.read_text() == "0 1; 2 3\n" * 2
    assert len(parse_assignments(path.read_text(), "file").steps) == 2


@pytest.mark.slow
def test_a_balanced_run_goes_on_and_is_repeated_from_its_file(tmp_path: Path) -> None:
    """Under other hints, too."""
    lengths: dict[str, Any] = {"variable_lengths": True, "seq_length": 48, "pp": 4, "dp": 2}
    balanced = {**lengths, "admit": "pyramid", "admit_across": "replicas"}
    run = checkpointed.train(tmp_path / "whole", 4, **balanced)
    lines = run.assignments.read_text()
    assert len(lines.splitlines()) == 4
    expected = checkpointed.tensors_of(checkpointed.newest(tmp_path / "whole"))

    parted = tmp_path / "parted"
    checkpointed.train(parted, 2, **balanced, hint="f-first")
    resumed = checkpointed.train(parted, 4, **balanced, hint="bfw", resume=True)
    assert resumed.assignments.read_text() == lines
    assert_same(parted, expected)

    listed = {**lengths, "admit_across": str(run.assignments)}
    repeated = checkpointed.train(tmp_path / "listed", 4, **listed, hint="1f1b", dispatch="fixed")
    assert repeated.assignments.read_text() == lines
    assert_same(tmp_path / "listed", expected)

    checkpointed.train(tmp_path / "given", 4, **lengths)
    given = checkpointed.tensors_of(checkpointed.newest(tmp_path / "given"))
    assert differences(given, expected)


def assert_same(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    found = checkpointed.tensors_of(checkpointed.newest(directory))
    assert differences(found, expected) == []


def test_a_recorded_job_writes_down_what_it_deals_and_repeats_it(tmp_path: Path) -> None:
    first = job(tmp_path / "balanced", "--admit-across", "replicas", "--hint", "bfw")
    lines = (tmp_path / "balanced" / "run" / "dealing.csv").read_text()
    assert len(parse_assignments(lines, "file").steps) == SMALL["steps"]
    listed = str(tmp_path / "balanced" / "run" / "dealing.csv")
    assert job(tmp_path / "listed", "--admit-across", listed) == first
    assert (tmp_path / "listed" / "run" / "dealing.csv").read_text() == lines


def job(out: Path, *options: str) -> list[dict[str, Any]]:
    """Run a job of two replicas under `rrfp run`, and return the results of its ranks."""
    out.mkdir()
    settings = json.dumps(REPLICAS)
    options = (*options, "--out", str(out / "run"))
    run_ranks(2, run_script, [*options], [str(out), settings], timeout_s=200)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


# `--hint auto` on real ranks: the hint changes while the run goes on, on all ranks alike, and what
# is trained does not.


CHOSEN = AutoHint(first="gpipe", every=5, waits=True)
"""It begins with a hint that nobody would choose, so that it has to change."""

PACED = {"pace": "uniform", "jitter": "slow-stage:1:1.5"}
"""So that what tasks take does not depend on who else uses this machine."""


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dispatch": "megatron"}, "--dispatch megatron runs 1f1b only, not 'auto'"),
        ({"dispatch": "fixed"}, "--hint auto chooses what binds as well"),
        ({"grad_order": "arrival"}, "lets the sums of gradients depend on the order of tasks"),
        ({"w": "ranked"}, "--w ranked needs an order"),
    ],
)
def test_what_would_decide_otherwise_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_settings(TrainSettings(**{**SMALL, "pp": 2, "hint": "auto", **settings}))


def test_the_drop_in_refuses_it_too() -> None:
    assert DispatchSettings(hint="auto").policy.hint is AUTO
    with pytest.raises(UsageError, match="choose canonical"):
        DispatchSettings(hint="auto", grad_order="arrival")
    with pytest.raises(UsageError, match="leave --dispatch out"):
        DispatchSettings(hint="auto", dispatch="fixed")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pp": 2, "dp": 2, "chunks": 2, "placement": "v"}, id="V on two replicas"),
        pytest.param({"pp": 2, "hold": 4}, id="one chunk under a hold", marks=pytest.mark.slow),
    ],
)
def test_hints_change_and_the_training_does_not(layout: dict[str, Any]) -> None:
    settings = {**SMALL, **layout, "microbatches": 6, "steps": 12} | PACED
    num_ranks = layout["pp"] * layout.get("dp", 1)
    variants = [{"hint": "bf", "pace": None, "jitter": "none"}, {"hint": CHOSEN}]
    ranks = run_ranks(num_ranks, train_variants, settings, variants, timeout_s=300)
    for plain, chosen in ranks:
        assert chosen.losses == plain.losses
        assert chosen.grad_norms == plain.grad_norms
        assert chosen.parameters_sha256 == plain.parameters_sha256
    policies = [[replace(each, choice=None) for each in chosen.policies] for _, chosen in ranks]
    assert all(each == policies[0] for each in policies)
    names = [each.hint_name for each in policies[0]]
    # One step warms up, three are measured, and their tables come two steps later.
    assert names[:6] == ["gpipe"] * 6
    assert "gpipe" not in names[6:]
    choices = [each.choice for each in ranks[0][1].policies]
    assert [number for number, choice in enumerate(choices) if choice is not None] == [6, 11]
    first = choices[6]
    assert first is not None
    assert first.predicted_s < first.kept_s
    assert first.num_candidates > 3


# `rrfp train --admit plan`: training under planned orders is that of the same orders from a file,
# to the bit, and the file that a run writes is read back.


PLANNED: dict[str, Any] = {
    **SMALL,
    "pp": 2,
    "microbatches": 6,
    "variable_lengths": True,
    "seq_length": 48,
    "hint": "bfw",
    "steps": 6,
}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"plan_ms": 5.0}, "--admit given plans nothing; add --admit plan or leave"),
        ({"admit": "plan", "plan_ms": 0.0}, "it must be a finite number above 0"),
        ({"admit": "plan", "dispatch": "megatron"}, "choose --admit pyramid or another"),
        ({"admit": "plan", "dp": 2, "admit_across": "replicas"}, "assigns it others; choose"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_settings(TrainSettings(**{**SMALL, "pp": 2, **settings}))


def test_training_is_that_of_the_order() -> None:
    ranks = run_ranks(2, plan_then_repeat, timeout_s=300)
    for planned, listed in ranks:
        assert listed.losses == planned.losses
        assert listed.grad_norms == planned.grad_norms
        assert listed.parameters_sha256 == planned.parameters_sha256
        # The first steps have nothing to plan by.
        assert planned.plans[0] is None
        assert planned.plans[-1] is not None
    phases = [each for each in ranks[0][0].records if isinstance(each, PhaseRecord)]
    searches = [each for each in phases if each.phase == Phase.PLAN]
    assert len(searches) == sum(plan is not None for plan in ranks[0][0].plans)


def plan_then_repeat() -> tuple[RankRun, RankRun]:
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from rrfp.train.launch.process_groups import parallel_groups

    settings = TrainSettings(**{**PLANNED, "admit": "plan", "plan_ms": 60.0})
    with (
        parallel_groups(settings) as layout,
        tempfile.NamedTemporaryFile("w", suffix=".csv") as file,
    ):
        planned = train_variant(settings, layout)
        file.write("".join(format_step([order]) for order in planned.orders))
        file.flush()
        return planned, train_variant(settings.changed(admit=file.name, plan_ms=None), layout)


def test_a_run_that_goes_on_goes_on_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "admission.csv"

    def write(first_step: int, *orders: list[int]) -> tuple[tuple[int, ...], ...]:
        file = StepFile(path, [range(3)], first_step)
        for order in orders:
            file.write([order])
        file.close()
        return parse_admission(path.read_text(), "file").orders

    assert write(0, [2, 1, 0], [1, 0, 2]) == ((2, 1, 0), (1, 0, 2))
    # Half a line is left by a run that was killed, and steps are run again.
    path.write_text(path.read_text() + "0 1")
    assert write(1, [0, 2, 1]) == ((2, 1, 0), (0, 2, 1))
    # Steps that another run has planned, or none.
    assert write(4, [1, 2, 0]) == ((2, 1, 0), (0, 2, 1), (0, 1, 2), (0, 1, 2), (1, 2, 0))

"""Items that are dealt in a job: what cannot be, who says so, and what is written down. What is
learned is in rows of test_learns_the_same.py."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rrfp.errors import UsageError
from rrfp.megatron.batch_balancer import Dealer
from rrfp.megatron.collectives import packed, unpacked
from rrfp.megatron.job.step_files import DealingFile
from rrfp.megatron.step.microbatch_data import DataHabits, StepData
from rrfp.runtime.protocols import PeerLostError
from rrfp.schedule.admission import Admit
from rrfp.schedule.balance import AdmitAcross, parse_dealings
from rrfp.train.checkpoints.reading import differences
from rrfp.train.data.batches import Batch
from tests import checkpointed
from tests.loops import NUM, run_on_items
from tests.ranks import run_ranks
from tests.recorded_jobs import run_script
from tests.rigs import Rig, on_rigs, ours
from tests.training import SMALL

pytestmark = pytest.mark.timeout(310)

VARIED = {**SMALL, "microbatches": NUM, "variable_lengths": True, "seq_length": 48}
REPLICAS = {**VARIED, "pp": 1, "dp": 2}


def test_a_failure_names_its_replica_and_the_run_goes_on() -> None:
    assert all(run_ranks(2, on_rigs, fail_and_go_on, REPLICAS, timeout_s=300))


def fail_and_go_on(layout: Any, settings: dict[str, Any]) -> bool:
    rig = Rig(settings, layout)
    items = list(rig.data(NUM))
    plain = ours(admit="pyramid", admit_across="replicas")
    expected = run_on_items(rig, plain, items)

    def fails(item: Batch) -> float:
        if layout.dp_rank == 1:
            raise ArithmeticError("too heavy")
        return float(item["tokens"].numel())

    def owes(item: Batch) -> float:
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
            "rank 1 could not send the microbatches that it deals away; its own error says why",
        ),
        (
            ours(admit_across="replicas", admit_cost=owes),
            items,
            layout.dp_rank,
            "the cost of a microbatch is -1, and --admit-across adds costs up",
            "",
        ),
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("0 3; 1 2\n" if layout.dp_rank == 0 else "anything")
        file.flush()
        if layout.dp_rank == 0:
            cases.append((ours(admit_across=file.name), items, 0, "and step 0 has 6 for each", ""))
        else:
            # A file that only the first replica reads may be another one elsewhere.
            Path(file.name).write_text("0; 1")
            told = "the first rank of the first replica could not deal"
            cases.append((ours(admit_across=file.name), items, 0, "", told))
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


def test_one_replica_has_nobody_to_deal_to() -> None:
    groups = SimpleNamespace(dp=SimpleNamespace(size=lambda: 1))
    dealer = Dealer(AdmitAcross.REPLICAS, Admit.GIVEN)
    with pytest.raises(UsageError, match="deals to data-parallel replicas and there is 1"):
        dealer.order(0, None, list, 4, groups, torch.device("cpu"))  # type: ignore[arg-type]


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
    parcel = packed([(0, 3, item)])
    assert len(parcel) < 3000
    ((chunk, place, found),) = unpacked(parcel, torch.device("cpu"))
    assert (chunk, place) == (0, 3)
    assert found.keys() == item.keys()
    assert found["more"] == item["more"]
    for key in item.keys() - {"more"}:
        assert found[key].dtype == item[key].dtype
        assert torch.equal(found[key], item[key])
    assert found["half"][0, 1].signbit().item()


@pytest.mark.parametrize(
    "parcel",
    [
        b"",
        b"\xff" * 100,
        packed([1, 2])[:-1],
        packed({"a": torch.ones(3)})[:-1],
        packed("text").replace(b"text", b'te"t'),
        packed(torch.ones(1)).replace(b"float32", b"manual_"),
        packed(torch.ones(1)).replace(b'["tensor"]', b'["import"]'),
    ],
    ids=range(7),
)
def test_what_is_garbled_is_not_read(parcel: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not|cut short|Expecting|delimiter|decode"):
        unpacked(parcel, torch.device("cpu"))


def test_what_cannot_be_sent_is_named() -> None:
    for value in (object(), {1, 2}, torch.eye(2).to_sparse(), NoStreams):
        with pytest.raises(UsageError, match="in an item of the data iterator cannot be sent to"):
            packed([value])


class NoStreams:
    """Random streams of a task that draws nothing."""

    def inside(self) -> Any:
        return tempfile.TemporaryDirectory()

    outside = inside


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
    file = DealingFile(path, 2, 2)
    for hands in ([[3, 0], [1, 2]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        file.write(hands)
    file.close()
    with path.open("a") as torn:
        torn.write("0 1; 2")
    file = DealingFile(path, 2, 2, first_step=1)
    file.write([[2, 3], [0, 1]])
    file.close()
    assert path.read_text() == "3 0; 1 2\n2 3; 0 1\n"
    # Elsewhere nothing is known of what came before.
    elsewhere = tmp_path / "other.csv"
    DealingFile(elsewhere, 2, 2, first_step=2).close()
    assert elsewhere.read_text() == "0 1; 2 3\n" * 2
    assert len(parse_dealings(path.read_text(), "file").steps) == 2


@pytest.mark.slow
def test_a_dealt_run_goes_on_and_is_repeated_from_its_file(tmp_path: Path) -> None:
    """Under other hints, too."""
    lengths: dict[str, Any] = {"variable_lengths": True, "seq_length": 48, "pp": 4, "dp": 2}
    dealt = {**lengths, "admit": "pyramid", "admit_across": "replicas"}
    run = checkpointed.train(tmp_path / "whole", 4, **dealt)
    lines = run.dealing.read_text()
    assert len(lines.splitlines()) == 4
    expected = checkpointed.tensors_of(checkpointed.newest(tmp_path / "whole"))

    parted = tmp_path / "parted"
    checkpointed.train(parted, 2, **dealt, hint="f-first")
    resumed = checkpointed.train(parted, 4, **dealt, hint="bfw", resume=True)
    assert resumed.dealing.read_text() == lines
    assert_same(parted, expected)

    listed = {**lengths, "admit_across": str(run.dealing)}
    repeated = checkpointed.train(tmp_path / "listed", 4, **listed, hint="1f1b", dispatch="fixed")
    assert repeated.dealing.read_text() == lines
    assert_same(tmp_path / "listed", expected)

    checkpointed.train(tmp_path / "given", 4, **lengths)
    given = checkpointed.tensors_of(checkpointed.newest(tmp_path / "given"))
    assert differences(given, expected)


def assert_same(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    found = checkpointed.tensors_of(checkpointed.newest(directory))
    assert differences(found, expected) == []


def test_a_recorded_job_writes_down_what_it_deals_and_repeats_it(tmp_path: Path) -> None:
    first = job(tmp_path / "dealt", "--admit-across", "replicas", "--hint", "bfw")
    lines = (tmp_path / "dealt" / "run" / "dealing.csv").read_text()
    assert len(parse_dealings(lines, "file").steps) == SMALL["steps"]
    listed = str(tmp_path / "dealt" / "run" / "dealing.csv")
    assert job(tmp_path / "listed", "--admit-across", listed) == first
    assert (tmp_path / "listed" / "run" / "dealing.csv").read_text() == lines


def job(out: Path, *options: str) -> list[dict[str, Any]]:
    """What the ranks of a job of two replicas saw under `rrfp run`."""
    out.mkdir()
    settings = json.dumps(REPLICAS)
    options = (*options, "--out", str(out / "run"))
    run_ranks(2, run_script, [*options], [str(out), settings], timeout_s=200)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]

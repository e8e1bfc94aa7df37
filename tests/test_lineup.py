"""What presets and flags make a race of."""

from fractions import Fraction
from pathlib import Path

import pytest

from rrfp.errors import UsageError
from rrfp.race.lineup import Asked, line_up, read_bound
from rrfp.race.presets import PRESETS, SCALES, preset_named
from rrfp.race.runner import Hosts, check
from rrfp.race.systems import PEERS, SYSTEMS, Project
from rrfp.schedule.admission import Admit
from rrfp.schedule.knobs import Bytes, Hold, ShareOf1F1B
from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.toml_files import preset
from tests.races import tiny_lineup


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_holds_its_systems_against_megatron(name: str, scale: str) -> None:
    lineup = line_up([preset_named(name, SCALES[scale])], SCALES[scale], Asked())
    assert {row.system.name for row in lineup.rows} > {"megatron-1f1b"}
    for row in lineup.rows:
        assert {row.entry, row.megatron} <= lineup.entries.keys()
        assert row.against is None or row.against in lineup.entries
        settings = lineup.entries[row.entry].settings
        assert settings.model.layers % (settings.layout.pp * settings.layout.chunks) == 0
        assert settings.policy.limit is None or settings.policy.hold is None


def test_the_first_preset_has_all_that_people_use() -> None:
    lineup = line_up([preset_named("rq1", SCALES["laptop"])], SCALES["laptop"], Asked())
    rows = {(row.case.profile, row.system.name, row.bound, row.admit) for row in lineup.rows}
    for profile in ("language", "language+lognormal:0.5", "multimodal"):
        for name, bound in [
            *((name, "") for name in ("megatron-1f1b", "megatron-interleaved", "fixed-1f1b")),
            *((name, "") for name, peer in PEERS.items() if peer.project.is_installed),
            ("fixed-zb-h1", ""),
            *(
                (name, bound)
                for name in ("bf", "bfw", "bf-deep", "bfw-deep", "zb-v")
                for bound in ("limit 32", "hold 1.0x", "hold 1.5x", "hold 2.0x")
            ),
        ]:
            assert (profile, name, bound, Admit.GIVEN) in rows
            is_sorted = (profile, name, bound, Admit.PYRAMID) in rows
            # Microbatches that cost the same have no order to choose.
            assert is_sorted == (profile == "multimodal" and bound != "")


def test_presets_share_what_they_both_run() -> None:
    both = tiny_lineup("rq1", "rq6", profiles=("multimodal",))
    alone = [tiny_lineup(name, profiles=("multimodal",)) for name in ("rq1", "rq6")]
    assert both.entries.keys() == alone[0].entries.keys() | alone[1].entries.keys()
    assert len(both.entries) < sum(len(lineup.entries) for lineup in alone)
    assert len(both.rows) == sum(len(lineup.rows) for lineup in alone)


def test_torchs_systems_are_laid_out_as_they_are_driven() -> None:
    peers = {system.peer: system for system in SYSTEMS.values() if system.peer}
    assert peers.keys() == PEERS.keys()
    for name, peer in PEERS.items():
        assert (peers[name].chunks, peers[name].placement) == (peer.chunks, peer.placement)


def test_what_is_asked_for_narrows_the_presets() -> None:
    lineup = tiny_lineup(
        "rq1", systems=("bfw",), profiles=("language+J2",), holds=("paper", "hold 5")
    )
    assert [(row.system.name, row.bound) for row in lineup.rows] == [
        ("megatron-1f1b", ""),
        ("bfw", "limit 32"),
        ("bfw", "hold 5"),
    ]
    assert {entry.settings.run.jitter for entry in lineup.entries.values()} == {"J2"}


def test_a_plan_of_megatron_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="choose another --system"):
        tiny_lineup("rq3", systems=("megatron-1f1b",))


@pytest.mark.parametrize(("name", "peers"), [("fb", tuple(Project)), ("torch-zbv", ())])
def test_a_system_without_a_row_is_named(name: str, peers: tuple[Project, ...]) -> None:
    with pytest.raises(UsageError, match=f"--system {name} makes no row"):
        tiny_lineup("rq1", systems=("bf", name), peers=peers)


def test_the_length_of_tasks_is_that_of_presets_alone(tmp_path: Path) -> None:
    costs = tmp_path / "a+b.toml"
    costs.write_text("seconds = { F = 1, B = 1, W = 1 }\n")
    for profile, jitter in ((f"{costs}", "none"), (f"{costs}+J2", "J2")):
        lineup = tiny_lineup("rq1", systems=("bf",), profiles=(profile,))
        for entry in lineup.entries.values():
            assert (entry.settings.run.pace, entry.settings.run.jitter) == (str(costs), jitter)
            assert entry.time_factor == 1.0
        with pytest.raises(UsageError, match="leave --task-ms out"):
            tiny_lineup("rq1", systems=("bf",), profiles=(profile,), task_ms=5.0)
    lineup = tiny_lineup("rq1", systems=("bf",), profiles=("language",), task_ms=5.0)
    assert {entry.time_factor for entry in lineup.entries.values()} == {0.25}


def test_tasks_of_another_length_are_another_case() -> None:
    short, long = (
        tiny_lineup("rq1", systems=("bf",), profiles=("language",), task_ms=task_ms)
        for task_ms in (5.0, 60.0)
    )
    assert not short.entries.keys() & long.entries.keys()
    assert all("seed 1234, 60 ms a task: " in name for name in long.entries)


@pytest.mark.parametrize("heavy", ["F", "B", "W"])
def test_whatever_differs_between_microbatches_is_something_to_sort_by(
    heavy: str, tmp_path: Path
) -> None:
    def admits(varied: str) -> set[Admit]:
        rows = [
            f"{kind},{rank},0,{microbatch},{0.01 * (1 + microbatch * (kind == varied))}"
            for kind in "FBW"
            for rank in range(3)
            for microbatch in range(3)
        ]
        costs = tmp_path / "mine.csv"
        costs.write_text("\n".join(("kind,pp_rank,chunk,microbatch,seconds", *rows)))
        lineup = tiny_lineup("rq1", systems=("bfw",), profiles=(str(costs),))
        return {row.admit for row in lineup.rows}

    assert admits("") == {Admit.GIVEN}
    assert admits(heavy) == {Admit.GIVEN, Admit.PYRAMID}


def test_costs_of_chunks_are_refused_with_what_to_do(tmp_path: Path) -> None:
    costs = tmp_path / "mine.toml"
    costs.write_text(
        "seconds = { F = 1, B = 1, W = 1 }\n"
        '[[ranks]]\npp_ranks = "0"\nchunk = 1\nseconds = { F = 2 }\n'
    )
    with pytest.raises(UsageError, match=r"cannot race: .*chunk 1.*--profile or --scale"):
        tiny_lineup("rq1", systems=("zb-v",), profiles=(str(costs),))


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("paper", (32, None)),
        ("limit 4", (4, None)),
        ("hold 8", (None, 8)),
        ("hold 40GiB", (None, Bytes(40 * 2**30))),
        ("hold 1.5x", (None, ShareOf1F1B(Fraction(3, 2)))),
    ],
)
def test_bounds(text: str, bound: tuple[int | None, Hold | None]) -> None:
    assert read_bound(text) == bound


def test_a_share_of_1f1bs_bytes_is_the_same_number_for_all_systems() -> None:
    lineup = tiny_lineup("rq1", profiles=("multimodal",))
    holds = {
        entry.settings.policy.hold
        for row in lineup.rows
        for entry in [lineup.entries[row.entry]]
        if row.bound == "hold 1.0x"
    }
    (hold,) = holds
    assert isinstance(hold, Bytes)
    shape = Shape(lineup.rows[0].case.pp, lineup.rows[0].case.microbatches)
    settings = next(iter(lineup.entries.values())).settings
    peaks = []
    for number in range(settings.num_steps):
        sizes = preset("multimodal").step(shape, settings.run.seed + number, 0).sizes
        assert sizes is not None
        for rank, row in enumerate(sizes.kept):
            width = shape.num_ranks - rank
            peaks += [sum(row[first : first + width]) for first in range(len(row))]
    assert hold.num == max(peaks)


def test_costs_without_bytes_hold_microbatches_of_one_size(tmp_path: Path) -> None:
    costs = tmp_path / "even.toml"
    costs.write_text("seconds = { F = 1, B = 1, W = 1 }\n")
    lineup = tiny_lineup("rq1", profiles=(str(costs),))
    holds = {lineup.entries[row.entry].settings.policy.hold for row in lineup.rows}
    assert holds == {None, lineup.rows[0].case.pp}


@pytest.mark.parametrize("text", ["hold 0", "hold 0x", "hold -1", "hold many", "hold 1.5", "hold "])
def test_bounds_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"--hold is '.*'; write 12 \(microbatches\)"):
        read_bound(text)


def test_costs_with_slow_messages_are_torchs_too(tmp_path: Path) -> None:
    costs = tmp_path / "slow.toml"
    costs.write_text("seconds = { F = 1, B = 1, W = 1 }\n[links]\nlatency_s = 1e-3\n")
    lineup = tiny_lineup("rq1", profiles=(str(costs),))
    assert any(entry.peer for entry in lineup.entries.values())
    check(lineup, Hosts(), tmp_path)

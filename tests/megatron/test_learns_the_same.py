"""Nothing that we do to the order of the tasks changes what is learned: whatever the model, the
layout, the data and the call, our schedules come to what Megatron's own does, to the last bit.

Each row of one table is a test. The rows of a layout share one start of its ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, cast

import pytest

from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import RankFailedError, run_ranks
from tests.megatron import multimodal
from tests.megatron.sameness import (
    REVERSE,
    Row,
    Settings,
    admitted,
    balanced,
    balanced_by_tokens,
    called,
    from_data,
    learn,
    logged,
    of_images,
    on_simulated_device,
    over_planes,
    overlapped,
    trained,
    trained_by_ours,
    with_order_files,
)
from tests.megatron.training import NUM, SMALL

TIMEOUT_S = 500.0
"""For all that is asked of a layout."""

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

LAYOUTS: dict[str, Settings] = {
    "pp1": {"pp": 1},
    "pp2": {"pp": 2},
    # The middle stage has neither data nor a loss.
    "pp3": {"pp": 3, "layers": 3},
    "pp4": {"pp": 4},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "pp2-tp2-sp": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "pp2-dp2": {"pp": 2, "dp": 2},
    "pp2-ep2": {"pp": 2, "dp": 2, "ep": 2},
    "pp2-c2-dp2": {"pp": 2, "chunks": 2, "dp": 2},
    # At two ranks Megatron's own interleaving mixes up its messages over gloo.
    "pp3-c2": {"pp": 3, "chunks": 2, "layers": 6, "microbatches": 6},
}


def hints(*names: str) -> list[Settings]:
    return [{"hint": name} for name in names]


# Models, trained by the hint that splits backwards and by the one that takes them in reverse.

VARIED: Settings = {"variable_lengths": True, "seq_length": 64}
MODELS: dict[str, Settings] = {
    "tied": {"tie_embeddings": True},
    "bf16": {"dtype": "bf16"},
    "tied in bf16": {"tie_embeddings": True, "dtype": "bf16"},
    "recompute all": {"recompute": "full"},
    "recompute attention": {"recompute": "selective"},
    "lengths": VARIED,
    "experts": {"experts": 4},
    "experts in bf16": {"experts": 4, "dtype": "bf16"},
    "experts recomputed": {"experts": 4, "recompute": "full"},
    "optimizer": {"distributed_optimizer": True},
    "optimizer in bf16": {"distributed_optimizer": True, "dtype": "bf16"},
    "optimizer with experts": {"distributed_optimizer": True, "experts": 4},
}
DENSE = ("tied", "bf16", "recompute all", "recompute attention", "lengths")
MODELS_OF: dict[str, tuple[str, ...]] = {
    "pp2": DENSE,
    "pp3-c2": DENSE,
    "pp2-tp2-sp": ("tied in bf16", "recompute all", "lengths", "experts"),
    "pp2-dp2": ("tied", "optimizer", "optimizer in bf16"),
    "pp2-ep2": ("experts in bf16", "experts recomputed", "optimizer with experts"),
}


def rows_of_models() -> Iterator[Row]:
    for layout, models in MODELS_OF.items():
        for model in models:
            settings = {"steps": 2, **MODELS[model]}
            is_slow = layout == "pp3-c2" and model != "lengths"
            yield Row(layout, model, trained, hints("bfw", REVERSE), settings, is_slow)


# Every way to dispatch, on a plain GPT.

DISPATCHES: list[Settings] = [
    {"dispatch": "fixed", "hint": "1f1b"},
    {"dispatch": "fixed", "hint": "gpipe"},
    {"dispatch": "fixed", "hint": "bf"},
    *hints("bf", "fb", "b-first", "f-first", "1f1b", "gpipe"),
    {"hint": "bf", "limit": 1},
]
SHUFFLES = hints("shuffled 0", "shuffled 1", "shuffled 2")


def rows_of_dispatches() -> Iterator[Row]:
    five: Settings = {"steps": 5}
    yield Row("pp4", "gpt", trained, DISPATCHES, five)
    yield Row("pp2", "gpt with backwards shuffled", trained, SHUFFLES, five)
    for layout in ("pp1", "pp2-tp2", "pp2-dp2"):
        yield Row(layout, "gpt", trained, DISPATCHES, five, is_slow=True)
    long = {**VARIED, "seq_length": 128, **five}
    yield Row("pp2-tp2", "gpt with lengths", trained, DISPATCHES, long, is_slow=True)
    # Megatron draws dropout in its order of execution, we by task.
    dropout: Settings = {"dropout": 0.1, "steps": 2}
    yield Row("pp2", "gpt with dropout", trained_by_ours, hints("bf", "bfw", REVERSE), dropout)
    for layout in ("pp2-dp2", "pp2-c2-dp2"):
        name, settings = "gpt overlapped", {"distributed_optimizer": True}
        yield Row(layout, name, overlapped, hints("bf", "bfw", REVERSE), settings)


# One step, as training loops may ask for it.

CALLED: list[Settings] = [
    {},
    {"hint": REVERSE},
    {"hint": REVERSE, "dispatch": "fixed"},
    {"hint": "f-first", "limit": 1},
]
CALLED_WITH_CHUNKS: list[Settings] = [
    {},
    {"hint": "bf-deep", "limit": 1},
    {"hint": "bfw"},
    {"hint": "bfw-deep", "hold": 2},
    {"hint": "interleaved"},
    {"hint": "interleaved", "dispatch": "fixed"},
    {"hint": REVERSE},
]
AGREED: list[Settings] = [
    {},
    {"hint": "bfw"},
    {"hint": "bfw", "agreement": "unanimous"},
    {"hint": "f-first", "limit": 1},
    {"hint": "zb-h1", "dispatch": "fixed"},
]


def rows_of_calls() -> Iterator[Row]:
    yield Row("pp3", "called in many ways", called, CALLED)
    yield Row("pp3-c2", "called in many ways", called, CALLED_WITH_CHUNKS)
    yield Row("pp2-tp2-sp", "agreed on", logged, AGREED)
    yield Row("pp2-ep2", "experts agreed on", logged, AGREED, {"experts": 4})


def rows_of_images() -> Iterator[Row]:
    for layout, name, settings in (
        ("pp2", "images", {}),
        ("pp2", "images in bf16 recomputed", {"dtype": "bf16", "recompute": "full"}),
        ("pp2", "images attention recomputed", {"recompute": "selective"}),
        ("pp2-tp2", "images", {}),
        ("pp2-dp2", "images", {"distributed_optimizer": True}),
        ("pp4", "images in bf16", {"dtype": "bf16"}),
        ("pp3-c2", "images", {}),
    ):
        is_slow = layout in ("pp2-tp2", "pp2-dp2")
        of_model = {**multimodal.SMALL_SCENES, **LAYOUTS[layout], **settings}
        yield Row(layout, name, of_images, hints("bf", "bfw"), of_model, is_slow)


# Data that move the loop's random states, and items that are admitted in another order.

DATA_LAYOUTS = ("pp2", "pp3-c2", "pp2-tp2", "pp2-dp2")
PYRAMIDS: list[Settings] = [
    {"hint": "bf"},
    {"hint": "bfw", "hold": 2},
    {"hint": "gpipe", "dispatch": "fixed"},
    {"hint": "bf", "admit_cost": "tokens"},
]


def rows_of_data() -> Iterator[Row]:
    six: Settings = {"microbatches": NUM}
    for layout in DATA_LAYOUTS:
        for kind in ("shuffled", "of_generators"):
            is_slow = layout != "pp2" and (layout, kind) != ("pp3-c2", "of_generators")
            work = partial(from_data, kind=kind)
            chosen = hints("bf", "bfw", "f-first", REVERSE)
            yield Row(layout, f"data {kind}", work, chosen, six, is_slow)
            if layout != "pp3-c2":
                admitting = [{**hint, "admit": "pyramid"} for hint in hints("bfw", REVERSE)]
                yield Row(layout, f"data {kind} admitted", work, admitting, six, is_slow)
    # Workers take seconds to start and to end.
    yield Row("pp2", "data of_workers", partial(from_data, kind="of_workers"), hints("bfw"), six)


ADMITTED: list[Settings] = [
    {"hint": "bf"},
    {"hint": "bfw"},
    {"hint": "bf", "dispatch": "fixed"},
    {},
]


def rows_of_admission() -> Iterator[Row]:
    for layout in ("pp2", "pp3", "pp2-tp2", "pp2-dp2", "pp3-c2"):
        is_slow = layout in ("pp2-tp2", "pp2-dp2")
        items: Settings = {"microbatches": NUM, "variable_lengths": True, "seq_length": 48}
        yield Row(layout, "items admitted", admitted, ADMITTED, items, is_slow)
    for layout, (_, row) in GIVEN_AND_ADMITTED.items():
        assert row.layout == layout
        yield row


def lengths(layout: str, admit: str, *schedules: Settings) -> Row:
    """Items of many lengths, in an order of admission that Megatron's schedule is given, too."""
    settings = {**VARIED, "microbatches": NUM, "admit": admit}
    return Row(layout, f"lengths {admit}", trained, schedules, settings, layout != "pp2")


GIVEN_AND_ADMITTED = {
    layout: (lengths(layout, "given"), lengths(layout, "pyramid", *PYRAMIDS))
    for layout in ("pp2", "pp2-tp2", "pp2-dp2")
}

DEALT: list[Settings] = [
    *hints("bf", "bfw", "f-first"),
    {"hint": "1f1b", "dispatch": "fixed"},
]


LENGTHS_DEALT = Row(
    "pp2-dp2",
    "lengths dealt",
    trained,
    DEALT,
    {**VARIED, "microbatches": NUM, "admit": "pyramid", "admit_across": "replicas"},
)


def rows_of_dealing() -> Iterator[Row]:
    items: Settings = {"microbatches": NUM, "variable_lengths": True, "seq_length": 48}
    yield Row("pp2-dp2", "items dealt", balanced, [*DEALT, {}], items)
    yield Row("pp2-dp2", "items dealt by tokens", balanced_by_tokens, [*DEALT, {}], items)
    yield LENGTHS_DEALT
    by_ours, settings = hints("bf-deep", "bfw"), LENGTHS_DEALT.settings
    yield Row("pp2-c2-dp2", "lengths dealt", trained_by_ours, by_ours, settings, is_slow=True)


def rows_of_planes() -> Iterator[Row]:
    planes: list[Settings] = [
        {"hint": "bf", "transport": "shm", "outbox_mb": 1},
        {"hint": "bfw", "transport": "bounce"},
    ]
    yield Row("pp4", "planes", over_planes, planes)
    with_nixl: Settings = {"hint": "bf", "transport": "nixl", "outbox_mb": 1}
    yield Row("pp4", "nixl", over_planes, [with_nixl], needs="nixl")
    yield Row("pp4", "simulated device", on_simulated_device, hints("bf", "bfw"))


ROWS = [
    *rows_of_models(),
    *rows_of_dispatches(),
    *rows_of_calls(),
    *rows_of_images(),
    *rows_of_data(),
    *rows_of_admission(),
    *rows_of_dealing(),
    *rows_of_planes(),
]

Learned = Callable[[Row], list[list[Any]]]
"""By rank, what a row's reference comes to and then each of its schedules."""


@pytest.fixture(scope="module")
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Runs whatever was selected of a layout when the first of its rows is asked for."""
    rows_of: dict[str, dict[str, Row]] = defaultdict(dict)
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            for row in cast("tuple[Row, ...]", item.callspec.params["rows"]):
                settings = {**SMALL, **LAYOUTS[row.layout]}
                directory = tmp_path_factory.getbasetemp()
                if not row.is_there:
                    continue
                rows_of[row.layout][row.id] = with_order_files(row, settings, directory)

    @cache
    def by_rank(layout: str) -> list[dict[str, list[Any]]] | RankFailedError:
        settings = {**SMALL, **LAYOUTS[layout]}
        num_ranks = TrainSettings(**settings).layout.world_size
        try:
            return run_ranks(
                num_ranks, learn, settings, [*rows_of[layout].values()], timeout_s=TIMEOUT_S
            )
        except RankFailedError as error:
            return error

    def of_row(row: Row) -> list[list[Any]]:
        found = by_rank(row.layout)
        if isinstance(found, RankFailedError):
            raise found
        return [by_row[row.id] for by_row in found]

    return of_row


def each_of(*tuples: tuple[Row, ...]) -> pytest.MarkDecorator:
    """A test for each of these tuples of rows."""
    return pytest.mark.parametrize(
        "rows",
        [
            pytest.param(
                rows,
                id=rows[-1].id if len(rows) < 3 else rows[0].layout,  # pyright: ignore[reportGeneralTypeIssues]
                marks=[
                    *([pytest.mark.slow] * any(row.is_slow for row in rows)),
                    *(
                        pytest.mark.skip(f"needs the package {row.needs}: '.[{row.needs}]'")
                        for row in rows
                        if not row.is_there
                    ),
                ],
            )
            for rows in tuples
        ],
    )


@each_of(*((row,) for row in ROWS))
def test_ours_learn_the_same(rows: tuple[Row], learned: Learned) -> None:
    (row,) = rows
    for rank, (expected, *found) in enumerate(learned(row)):
        for schedule, outcome in zip(row.schedules, found, strict=True):
            assert outcome == expected, f"rank {rank}, {schedule}"


# And the rows tell something.


@each_of(*(tuple(row for row in rows_of_models() if row.layout == layout) for layout in MODELS_OF))
def test_every_model_learns_something_else(rows: tuple[Row, ...], learned: Learned) -> None:
    losses = {tuple(learned(row)[0][0].losses) for row in rows}
    # Not always equal: where numbers are kept may change a last bit in Megatron's own schedule.
    assert len(losses) >= len({frozenset(learning_of(row).items()) for row in rows})


def learning_of(row: Row) -> Settings:
    """The settings but for those that change where numbers are kept, and not what is learned."""
    kept = ("recompute", "distributed_optimizer")
    return {name: value for name, value in row.settings.items() if name not in kept}


@each_of(*((row,) for row in ROWS if row.schedules is SHUFFLES))
def test_backwards_ran_out_of_order(rows: tuple[Row], learned: Learned) -> None:
    for _, *runs in learned(rows[0]):
        for run in runs:
            assert run.backwards != sorted(run.backwards)


@each_of(*((row,) for row in rows_of_data() if row.layout in ("pp2", "pp2-tp2", "pp2-dp2")))
def test_inputs_meet_the_labels_of_their_own_samples(rows: tuple[Row], learned: Learned) -> None:
    """Both stages draw the same."""
    first, *_, last = (outcomes[0].drawn for outcomes in learned(rows[0]))
    assert first == last


@each_of(*GIVEN_AND_ADMITTED.values(), (lengths("pp2-dp2", "given"), LENGTHS_DEALT))
def test_admission_changes_only_the_sequence_of_the_sum(
    rows: tuple[Row, Row], learned: Learned
) -> None:
    for (given,), (sorted_, *_) in zip(*map(learned, rows), strict=True):
        assert given.parameters_sha256 != sorted_.parameters_sha256
        assert given.tokens == sorted_.tokens
        # The first step starts from the same parameters.
        assert sorted_.losses[0] == pytest.approx(given.losses[0], rel=1e-6)
        assert sorted_.grad_norms[0] == pytest.approx(given.grad_norms[0], rel=1e-5)

"""The proof of `rrfp verify`: what is done to the order does not change what is learned.

Each layout is one launch. Its ranks train a small model again and again from the same start: by the
reference, then under every hint that goes with the layout and every rule of agreement, with random
delays before each task and each message, so that no two runs have the same timing. Losses, gradient
norms and the final parameters must equal the reference's on every rank, to the last bit.

The reference is Megatron's own schedule; for the V, which Megatron lacks, it is `zb-v` as a fixed
order. Megatron draws dropout by its own order of execution, so with dropout on ours are compared
among themselves, the first of them being the reference.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError, UsageError
from rrfp.hint_files import resolve_hint
from rrfp.megatron.parallel import Layout, seed_random_states
from rrfp.megatron.settings import DispatchMode, TrainSettings
from rrfp.runtime.delays import Delays
from rrfp.schedule.dispatcher import AgreementRule
from rrfp.schedule.hints import HINT_NAMES
from rrfp.schedule.order import Order, format_order
from rrfp.schedule.shape import SPLIT_BACKWARD, Placement, Shape
from rrfp.trace.records import Record
from rrfp.trace.rundir import RunDir

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp4": {"pp": 4},
    "pp2-tp2-sp": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "pp4-c2-loop": {"pp": 4, "chunks": 2},
    "pp2-c2-v": {"pp": 2, "chunks": 2, "placement": Placement.V},
    "pp2-dp2-distopt": {"pp": 2, "dp": 2, "distributed_optimizer": True},
    "moe-pp2-ep2": {"model": "moe", "pp": 2, "dp": 2, "ep": 2},
    "vlm-pp4": {"model": "vlm", "pp": 4},
    "vlm-pp2-c2-v": {"model": "vlm", "pp": 2, "chunks": 2, "placement": Placement.V},
}
"""The layouts by name: what each sets of `TrainSettings`."""

RANDOM = "random"
"""The hint that puts each rank's tasks, the weight gradients among them, in a random order."""

HINTS = (*HINT_NAMES, RANDOM)

_SMALL: dict[str, Any] = {
    "microbatches": 8,
    "seq_length": 32,
    "layers": 8,
    "hidden": 32,
    "heads": 4,
    "no_trace": True,
}
_DROPOUT = 0.1
_MAX_DELAY_S = 1e-3
_SEED = 1234


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a layout: how it is dispatched, and whether with dropout."""

    hint: str
    """A hint's name, or `RANDOM`."""
    dispatch: DispatchMode
    agreement: AgreementRule | None
    """None where no ranks share a collective inside a task."""
    dropout: float = 0.0
    bound: str = ""
    """`limit 1`, `hold 2`: the bound on memory, if it is not the default."""

    @property
    def name(self) -> str:
        return f"{self.dispatch} {self.hint}"

    @property
    def settings(self) -> dict[str, Any]:
        """What it sets of `TrainSettings`, but for the path of a random hint."""
        chosen: dict[str, Any] = {
            "hint": self.hint,
            "dispatch": self.dispatch,
            "dropout": self.dropout,
        }
        if self.agreement is not None:
            chosen["agreement"] = self.agreement
        if self.bound:
            name, number = self.bound.split()
            chosen[name] = int(number)
        return chosen


@dataclass(frozen=True, slots=True)
class Learned:
    """What one rank learned in one run."""

    losses: list[float]
    grad_norms: list[float]
    parameters_sha256: str

    def difference(self, other: "Learned") -> str | None:
        """What of `other` is not the same to the last bit, in a few words; None if all is."""
        for name, ours, theirs in (
            ("loss", self.losses, other.losses),
            ("gradient norm", self.grad_norms, other.grad_norms),
        ):
            for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                if a != b:
                    return f"{name} of step {step}: {b!r}, not {a!r}"
        return None if self.parameters_sha256 == other.parameters_sha256 else "final parameters"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A variant held against its reference."""

    layout: str
    variant: Variant
    reference: Variant
    difference: str | None
    """None: the same to the last bit on every rank."""


def variants_of(
    layout: str, hints: tuple[str, ...] = HINTS, *, full: bool = False
) -> list[Variant]:
    """Every valid combination of hint and agreement on a layout, without and with dropout; the
    first is the reference. `full` adds binding orders and tight bounds on memory.

    Raises UsageError for a layout or hint that there is not.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"'{layout}' is not a layout ({', '.join(LAYOUTS)})")
    for hint in hints:
        if hint not in HINTS:
            raise UsageError(f"'{hint}' is not a hint ({', '.join(HINTS)})")
    reference = _reference(layout)
    ours = [
        variant
        for hint in dict.fromkeys(hints)
        for variant in _variants_of_hint(layout, hint, full=full)
        if _is_valid(layout, variant)
    ]
    with_dropout = [
        replace(variant, dropout=_DROPOUT)
        for variant in ours
        if variant.dispatch is DispatchMode.READY and not variant.bound
    ]
    # A single one has none to be compared with.
    return [reference, *ours, *(with_dropout if len(with_dropout) > 1 else ())]


def _reference(layout: str) -> Variant:
    if LAYOUTS[layout].get("placement") == Placement.V:
        return Variant("zb-v", DispatchMode.FIXED, None)
    hint = "interleaved" if "chunks" in LAYOUTS[layout] else "1f1b"
    return Variant(hint, DispatchMode.MEGATRON, None)


def _variants_of_hint(layout: str, hint: str, *, full: bool) -> Iterator[Variant]:
    shares_collectives = {"tp", "cp", "ep"} & LAYOUTS[layout].keys()
    rules: tuple[AgreementRule | None, ...] = (
        tuple(AgreementRule) if shares_collectives else (None,)
    )
    for rule in rules:
        yield Variant(hint, DispatchMode.READY, rule)
        if full:
            yield Variant(hint, DispatchMode.READY, rule, bound="limit 1")
            yield Variant(hint, DispatchMode.READY, rule, bound="hold 1")
            yield Variant(hint, DispatchMode.READY, rule, bound="hold 3")
    if full and hint != RANDOM:
        yield Variant(hint, DispatchMode.FIXED, None)


def _is_valid(layout: str, variant: Variant) -> bool:
    settings = TrainSettings(**_SMALL, **LAYOUTS[layout], **variant.settings)
    if variant.hint == RANDOM:
        settings = replace(settings, hint=None)
    try:
        settings.validate()
        resolve_hint(settings.resolved_hint, settings.shape)
    except UsageError:
        return False
    return True


def verify(
    layout: str,
    variants: list[Variant],
    directory: Path,
    *,
    steps: int,
    launch: Callable[[TrainSettings, RunDir], None],
) -> list[Verdict]:
    """Train every variant on the layout in one launch of its ranks, in `directory`, and compare.

    `launch` runs the ranks to their end (`rrfp.megatron.launch`). Raises RrfpError when a rank
    fails.
    """
    base = TrainSettings(**_SMALL, **LAYOUTS[layout], steps=steps, seed=_SEED)
    random_order = directory / "random.csv"
    random_order.write_text(format_order(_random_order(base.shape)), encoding="utf-8")
    chosen = []
    for variant in variants:
        settings = replace(base, **variant.settings)
        chosen.append(
            replace(settings, hint=str(random_order)) if variant.hint == RANDOM else settings
        )
    run = RunDir(directory)
    lines = "".join(f"{settings.to_json()}\n" for settings in chosen)
    _variants_file(run).write_text(lines, encoding="utf-8")
    launch(base, run)
    learned = [_read_learned(run, rank, len(variants)) for rank in range(base.world_size)]
    return list(_verdicts(layout, variants, learned))


def _random_order(shape: Shape) -> Order:
    shape = replace(shape, kinds=SPLIT_BACKWARD)
    rows = []
    for rank in range(shape.num_ranks):
        row = list(shape.tasks_of(rank))
        random.Random(f"{_SEED} {rank}").shuffle(row)
        rows.append(tuple(row))
    return Order(RANDOM, shape, tuple(rows))


def _verdicts(
    layout: str, variants: list[Variant], learned: list[list[Learned]]
) -> Iterator[Verdict]:
    references: dict[float, int] = {}
    for index, variant in enumerate(variants):
        reference = references.setdefault(variant.dropout, index)
        if reference == index:
            continue
        differences = (
            by_variant[reference].difference(by_variant[index]) for by_variant in learned
        )
        found = (
            f"rank {rank}, {difference}"
            for rank, difference in enumerate(differences)
            if difference is not None
        )
        yield Verdict(layout, variant, variants[reference], next(found, None))


# What the ranks do, and the files through which they are told and tell.


def _variants_file(run: RunDir) -> Path:
    return run.path / "variants.jsonl"


def _learned_file(run: RunDir, rank: int) -> Path:
    return run.path / f"learned-{rank}.jsonl"


def _read_learned(run: RunDir, rank: int, num_variants: int) -> list[Learned]:
    lines = _learned_file(run, rank).read_text(encoding="utf-8").splitlines()
    if len(lines) != num_variants:
        raise RrfpError(
            f"rank {rank} finished {len(lines)} of {num_variants} runs; see {run.rank_log(rank)}"
        )
    return [Learned(**json.loads(line)) for line in lines]


def work(run: RunDir, settings: TrainSettings, layout: Layout) -> None:
    """Train every variant on this rank, from the start each time, and write what it learned."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    lines = _variants_file(run).read_text(encoding="utf-8").splitlines()
    with _learned_file(run, layout.rank).open("w", encoding="utf-8") as file:
        for index, line in enumerate(lines):
            delays = Delays(index, layout.rank, _MAX_DELAY_S)
            learned = _learn(TrainSettings.from_json(line), layout, delays)
            file.write(json.dumps(asdict(learned)) + "\n")
            file.flush()


def _learn(settings: TrainSettings, layout: Layout, delays: Delays) -> Learned:
    from rrfp.megatron.data import open_data
    from rrfp.megatron.model import build_model
    from rrfp.megatron.rank import schedule_of
    from rrfp.megatron.training import Trainer

    def forget(_: Record) -> None:
        pass

    seed_random_states(settings, layout)
    data = open_data(settings)
    model = build_model(settings, layout, data)
    schedule = schedule_of(settings, layout.pp_rank, forget, delays)
    batches = data.batches(layout.dp_rank)
    trainer = Trainer(settings, layout, model, batches, schedule, forget)
    results = [trainer.train_step(step) for step in range(settings.num_steps)]
    schedule.close()
    return Learned(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        parameters_sha256(model.chunks),
    )


def parameters_sha256(chunks: Sequence[Any]) -> str:
    """The digest of all parameters of a rank's model chunks, bit for bit."""
    import torch

    digest = hashlib.sha256()
    for chunk in chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

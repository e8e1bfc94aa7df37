"""The runs that `rrfp verify` compares, layout by layout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rrfp.errors import UsageError
from rrfp.schedule.hints.table import HINTS
from rrfp.schedule.policy import AgreementRule, Dispatch
from rrfp.schedule.shape import Placement
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings

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
"""By name of a layout: the `TrainSettings` that it sets."""

RANDOM = "random"
"""The hint that puts each rank's tasks, weight gradients included, in a random order."""

CHOICES = (*HINTS, RANDOM)
"""What `--hint` takes."""

SMALL: dict[str, Any] = {
    "microbatches": 8,
    "seq_length": 32,
    "layers": 8,
    "hidden": 32,
    "heads": 4,
    "no_trace": True,
}
_DROPOUT = 0.1


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a layout: its policy, and whether it has dropout."""

    hint: str
    """A hint's name, or `RANDOM`."""
    dispatch: Dispatch
    agreement: AgreementRule | None
    """None if no ranks share a collective inside a task."""
    dropout: float = 0.0
    bound: str = ""
    """The bound on memory unless it is the default: `limit 1`, `hold 2`."""

    @property
    def name(self) -> str:
        return f"{self.dispatch} {self.hint}"

    @property
    def settings(self) -> dict[str, Any]:
        """The `TrainSettings` that it sets, except a random hint."""
        chosen: dict[str, Any] = {"dispatch": self.dispatch, "dropout": self.dropout}
        if self.hint != RANDOM:
            chosen["hint"] = self.hint
        if self.agreement is not None:
            chosen["agreement"] = self.agreement
        if self.bound:
            name, number = self.bound.split()
            chosen[name] = int(number)
        return chosen


def variants_of(
    layout: str, hints: tuple[str, ...] = CHOICES, *, full: bool = False, shares_gpu: bool = False
) -> list[Variant]:
    """Every valid combination of hint and agreement on a layout, without and with dropout; the
    first is the reference: Megatron's own schedule, or the same order of ours where ranks share a
    GPU, over which Megatron's transfers do not go. `full` adds binding orders and tight bounds on
    memory.

    Raises UsageError for an unknown layout or hint.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"'{layout}' is not a layout ({', '.join(LAYOUTS)})")
    for hint in hints:
        if hint not in CHOICES:
            raise UsageError(f"'{hint}' is not a hint ({', '.join(CHOICES)})")
    reference = _reference(layout)
    if shares_gpu:
        reference = replace(reference, dispatch=Dispatch.FIXED)
    ours = [
        variant
        for hint in dict.fromkeys(hints)
        for variant in _variants_of_hint(layout, hint, full=full)
        if _is_valid(layout, variant)
    ]
    with_dropout = [
        replace(variant, dropout=_DROPOUT)
        for variant in ours
        if variant.dispatch is Dispatch.READY and not variant.bound
    ]
    # A single variant has nothing to be compared with.
    return [reference, *ours, *(with_dropout if len(with_dropout) > 1 else ())]


def layout_settings(layout: str, others: Mapping[str, Any]) -> TrainSettings:
    """The settings of a small run on this layout, with others."""
    return TrainSettings(**SMALL, **LAYOUTS[layout], **others)


def _reference(layout: str) -> Variant:
    if LAYOUTS[layout].get("placement") == Placement.V:
        return Variant("zb-v", Dispatch.FIXED, None)
    hint = "interleaved" if "chunks" in LAYOUTS[layout] else "1f1b"
    return Variant(hint, Dispatch.MEGATRON, None)


def _variants_of_hint(layout: str, hint: str, *, full: bool) -> Iterator[Variant]:
    shares_collectives = {"tp", "cp", "ep"} & LAYOUTS[layout].keys()
    rules: tuple[AgreementRule | None, ...] = (
        tuple(AgreementRule) if shares_collectives else (None,)
    )
    for rule in rules:
        yield Variant(hint, Dispatch.READY, rule)
        if full:
            yield Variant(hint, Dispatch.READY, rule, bound="limit 1")
            yield Variant(hint, Dispatch.READY, rule, bound="hold 1")
            yield Variant(hint, Dispatch.READY, rule, bound="hold 3")
    if full and hint != RANDOM:
        yield Variant(hint, Dispatch.FIXED, None)


def _is_valid(layout: str, variant: Variant) -> bool:
    try:
        settings = layout_settings(layout, variant.settings)
        check_settings(settings)
        settings.hint.on(settings.shape)
    except UsageError:
        return False
    return True

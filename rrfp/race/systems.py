"""The systems that are compared, by the names that rows show.

A name covers everything except the bound on memory and the admission order, which rows show
separately.
"""

from dataclasses import dataclass, replace

from rrfp.errors import UsageError, did_you_mean
from rrfp.race.peers import PEERS
from rrfp.schedule.hints.hint import WeightGradients
from rrfp.schedule.patience.setting import IMPATIENT, AutoPatience, Patience
from rrfp.schedule.policy import Dispatch
from rrfp.schedule.shape import Placement


@dataclass(frozen=True, slots=True)
class System:
    """What decides, by which hint, on which chunks."""

    name: str
    hint: str
    dispatch: Dispatch | None = Dispatch.READY
    """None: a peer decides; `hint` is then one with the same tasks."""
    chunks: int = 1
    placement: Placement = Placement.LOOP
    w: WeightGradients = WeightGradients.IDLE
    patience: Patience = IMPATIENT

    @property
    def peer(self) -> str | None:
        """The peer that decides, by its name in `PEERS`."""
        return self.name if self.dispatch is None else None

    @property
    def is_ours(self) -> bool:
        """Whether tasks are dispatched by readiness, so that memory can be bounded."""
        return self.dispatch is Dispatch.READY

    @property
    def told_dispatch(self) -> str:
        """The dispatch as rows show it."""
        return self.dispatch or PEERS[self.name].project


def _v(name: str, hint: str) -> System:
    return System(name, hint, chunks=2, placement=Placement.V)


def _peer(name: str, hint: str) -> System:
    """A peer; `hint` is one with the same tasks."""
    peer = PEERS[name]
    return System(name, hint, None, peer.chunks, peer.placement)


MEGATRON = System("megatron-1f1b", "1f1b", Dispatch.MEGATRON)
"""The system that all others are compared with."""
MEGATRON_INTERLEAVED = System("megatron-interleaved", "interleaved", Dispatch.MEGATRON, 2)
TORCH_1F1B = _peer("torch-1f1b", "1f1b")
TORCH_INTERLEAVED = _peer("torch-interleaved", "interleaved")
TORCH_INTERLEAVED_ZB = _peer("torch-interleaved-zb", "bfw")
TORCH_ZBV = _peer("torch-zbv", "zb-v")
TORCH_DUALPIPEV = _peer("torch-dualpipev", "zb-v")
DEEPSPEED_1F1B = _peer("deepspeed-1f1b", "1f1b")
FIXED_1F1B = System("fixed-1f1b", "1f1b", Dispatch.FIXED)
FIXED_ZB_H1 = System("fixed-zb-h1", "zb-h1", Dispatch.FIXED)
BF = System("bf", "bf")
FB = System("fb", "fb")
B_FIRST = System("b-first", "b-first")
F_FIRST = System("f-first", "f-first")
BFW = System("bfw", "bfw")
HINT_1F1B = System("1f1b", "1f1b")
HINT_ZB_H1 = System("zb-h1", "zb-h1")
BF_DEEP = _v("bf-deep", "bf-deep")
BFW_DEEP = _v("bfw-deep", "bfw-deep")
ZB_V = _v("zb-v", "zb-v")
ZB_V_PATIENT = replace(
    ZB_V, name="zb-v-patient", w=WeightGradients.RANKED, patience=AutoPatience.AUTO
)

SYSTEMS = {
    system.name: system
    for system in (
        MEGATRON,
        MEGATRON_INTERLEAVED,
        TORCH_1F1B,
        TORCH_INTERLEAVED,
        TORCH_INTERLEAVED_ZB,
        TORCH_ZBV,
        TORCH_DUALPIPEV,
        DEEPSPEED_1F1B,
        FIXED_1F1B,
        FIXED_ZB_H1,
        BF,
        FB,
        B_FIRST,
        F_FIRST,
        BFW,
        HINT_1F1B,
        HINT_ZB_H1,
        BF_DEEP,
        BFW_DEEP,
        ZB_V,
        ZB_V_PATIENT,
    )
}


def system_named(name: str) -> System:
    """The system of that name; raises UsageError, with the list of names, if there is none."""
    if name not in SYSTEMS:
        raise UsageError(
            f"'{name}' is not a system of the race ({', '.join(SYSTEMS)})"
            f"{did_you_mean(name, SYSTEMS)}"
        )
    return SYSTEMS[name]

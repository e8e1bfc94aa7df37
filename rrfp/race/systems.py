"""The systems of races, by the names that rows show.

A name covers everything except the memory bound and the admission order, which rows show
separately.
"""

import importlib.util
from dataclasses import dataclass, replace
from enum import StrEnum

from rrfp.errors import UsageError, did_you_mean
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.shape import SPLIT_BACKWARD, WHOLE_BACKWARD, Placement, Shape
from rrfp.train.settings import Dtype, ModelKind, TrainSettings

# Peers: schedules of other projects, with their requirements. This module imports neither torch nor
# DeepSpeed, because the command line checks the requirements before it starts ranks.


class Project(StrEnum):
    """The project of a peer's schedule; rows show it in place of a dispatch."""

    TORCH = "torch"
    """torch.distributed.pipelining"""
    DEEPSPEED = "deepspeed"

    @property
    def is_installed(self) -> bool:
        """True if the project's package can be imported. It is not imported, and a mere directory
        of that name in the working directory does not count."""
        spec = importlib.util.find_spec(self)
        return spec is not None and spec.origin is not None


@dataclass(frozen=True, slots=True)
class Peer:
    """A schedule of another project, with the layout that it runs on here."""

    project: Project
    schedule: str
    """Name of its class in torch.distributed.pipelining or deepspeed.runtime.pipe.engine."""
    chunks: int
    """Model chunks per pipeline rank."""
    placement: Placement
    splits: bool
    """True if it splits weight gradients off the backward, always or for some microbatches."""

    def shape(self, num_ranks: int, num_microbatches: int) -> Shape:
        """Return the shape of one of its steps, with its kinds of task."""
        kinds = SPLIT_BACKWARD if self.splits else WHOLE_BACKWARD
        return Shape(num_ranks, num_microbatches, self.chunks, self.placement, kinds)


def _torch(
    schedule: str, chunks: int, placement: Placement = Placement.LOOP, *, splits: bool = False
) -> Peer:
    """Make a peer that is a schedule of torch.distributed.pipelining."""
    return Peer(Project.TORCH, schedule, chunks, placement, splits)


PEERS = {
    "torch-1f1b": _torch("Schedule1F1B", 1),
    "torch-interleaved": _torch("ScheduleInterleaved1F1B", 2),
    "torch-interleaved-zb": _torch("ScheduleInterleavedZeroBubble", 2, splits=True),
    "torch-zbv": _torch("ScheduleZBVZeroBubble", 2, Placement.V, splits=True),
    "torch-dualpipev": _torch("ScheduleDualPipeV", 2, Placement.V, splits=True),
    "deepspeed-1f1b": Peer(Project.DEEPSPEED, "PipelineEngine", 1, Placement.LOOP, splits=False),
}
"""The peers by the names that rows show."""


def check_peer(name: str, settings: TrainSettings) -> None:
    """Raise UsageError if there is no peer of that name, if its project is not installed, or if it
    cannot train with these settings."""
    if name not in PEERS:
        raise UsageError(f"'{name}' is not a peer that can run here ({', '.join(PEERS)})")
    peer = PEERS[name]
    check_installed(peer.project, name)
    _require(
        settings.layout.pp > 1,
        f"{name} has nothing to schedule on --pp {settings.layout.pp}; use 2 ranks or more",
    )
    _require(
        (settings.layout.chunks, settings.layout.placement) == (peer.chunks, peer.placement),
        f"{name} runs on {peer.chunks} chunk(s) per rank in a {peer.placement}, not "
        f"{settings.layout.chunks} in a {settings.layout.placement}; give --chunks {peer.chunks} "
        f"--placement {peer.placement}",
    )
    _require(
        not settings.data.variable_lengths and settings.model.kind != ModelKind.VLM,
        f"{name} exchanges messages of one shape; leave --variable-lengths and "
        f"--model {ModelKind.VLM} to the others",
    )
    layout = settings.layout
    _require(
        peer.project is not Project.DEEPSPEED
        or (layout.tp, layout.cp, layout.dp or 1, settings.model.dtype) == (1, 1, 1, Dtype.FP32),
        f"{name} runs here on pipeline ranks alone, in fp32; leave --tp, --cp, --dp and --dtype "
        "out",
    )
    problem = peer_problem(name, settings.layout.pp, settings.data.microbatches)
    _require(problem is None, f"{name} {problem}")


def check_installed(project: Project, what: str) -> None:
    """Raise UsageError if `project`, which `what` needs, is not installed."""
    _require(
        project.is_installed,
        f"{what} needs {project}, which is not installed; run pip install {project}",
    )


def peer_problem(name: str, num_ranks: int, number: int) -> str | None:
    """Return the reason why a peer cannot run `number` microbatches on `num_ranks` ranks; None if
    it can. Other requirements are not checked."""
    if name == "torch-1f1b" and number < num_ranks:
        return (
            f"needs at least one microbatch per rank, {num_ranks}, not {number}; choose "
            "another --scale"
        )
    if name == "torch-dualpipev" and number < 2 * num_ranks:
        return (
            f"needs at least one microbatch per stage, {2 * num_ranks}, not {number}; choose "
            "another --scale"
        )
    num_rounds = max(1, number // num_ranks)
    if name in ("torch-interleaved", "torch-interleaved-zb") and number % num_rounds:
        return (
            f"runs {number} microbatches on {num_ranks} ranks in {num_rounds} rounds, which do "
            f"not divide them; choose another --scale"
        )
    return None


def _require(condition: bool, message: str) -> None:
    """Raise UsageError with this message unless the condition is true."""
    if not condition:
        raise UsageError(message)


@dataclass(frozen=True, slots=True)
class System:
    """A system that can race."""

    name: str
    policy: Policy
    """The policy. For a peer, which decides by itself, its hint has the same tasks as the peer."""
    chunks: int = 1
    placement: Placement = Placement.LOOP

    @property
    def peer(self) -> str | None:
        """Name in `PEERS` of the peer that decides; None for rrfp and Megatron."""
        return self.name if self.name in PEERS else None

    @property
    def dispatch(self) -> Dispatch | None:
        """The dispatch of the policy; None for a peer."""
        return None if self.peer else self.policy.dispatch

    @property
    def is_ours(self) -> bool:
        """True if rrfp dispatches tasks by readiness, so that memory bounds apply."""
        return self.dispatch is Dispatch.READY

    @property
    def dispatch_label(self) -> str:
        """Dispatch, or a peer's project, as rows show it."""
        return self.dispatch or PEERS[self.name].project


def _system(
    name: str,
    hint: str,
    dispatch: Dispatch = Dispatch.READY,
    chunks: int = 1,
    placement: Placement = Placement.LOOP,
) -> System:
    """Make a system of rrfp or Megatron with a hint, its dispatch and its layout."""
    return System(name, Policy(HINTS[hint], dispatch=dispatch), chunks, placement)


def _peer(name: str, hint: str) -> System:
    """Make the system of a peer, on the peer's layout; `hint` is one with the same tasks."""
    return _system(name, hint, chunks=PEERS[name].chunks, placement=PEERS[name].placement)


_ZB_V = _system("zb-v", "zb-v", chunks=2, placement=Placement.V)
_PATIENT = replace(_ZB_V.policy, w=WeightGradients.RANKED).waiting()

SYSTEMS = {
    system.name: system
    for system in (
        _system("megatron-1f1b", "1f1b", Dispatch.MEGATRON),
        _system("megatron-interleaved", "interleaved", Dispatch.MEGATRON, 2),
        _peer("torch-1f1b", "1f1b"),
        _peer("torch-interleaved", "interleaved"),
        _peer("torch-interleaved-zb", "bfw"),
        _peer("torch-zbv", "zb-v"),
        _peer("torch-dualpipev", "zb-v"),
        _peer("deepspeed-1f1b", "1f1b"),
        _system("fixed-1f1b", "1f1b", Dispatch.FIXED),
        _system("fixed-zb-h1", "zb-h1", Dispatch.FIXED),
        _system("bf", "bf"),
        _system("fb", "fb"),
        _system("b-first", "b-first"),
        _system("f-first", "f-first"),
        _system("bfw", "bfw"),
        _system("1f1b", "1f1b"),
        _system("zb-h1", "zb-h1"),
        _system("bf-deep", "bf-deep", chunks=2, placement=Placement.V),
        _system("bfw-deep", "bfw-deep", chunks=2, placement=Placement.V),
        _ZB_V,
        replace(_ZB_V, name="zb-v-patient", policy=_PATIENT),
    )
}
"""The systems by name."""

MEGATRON = SYSTEMS["megatron-1f1b"]
"""The reference that all other systems are compared with."""


def system_named(name: str) -> System:
    """The system of that name; raises UsageError, with the list of names, for an unknown name."""
    if name not in SYSTEMS:
        raise UsageError(
            f"'{name}' is not a system of the race ({', '.join(SYSTEMS)})"
            f"{did_you_mean(name, SYSTEMS)}"
        )
    return SYSTEMS[name]

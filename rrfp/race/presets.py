"""The paper's questions as presets of races, and the sizes of races at each scale.

The paper does not number its questions; the presets follow its order: RQ1 end to end (its section
7.2, the large table), RQ2 where the time goes (table 3), RQ3 injected jitter (table 6), RQ4 hints
(table 7), RQ5 scaling (table 8), RQ6 memory and equality of gradients (appendices C.2 and E).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rrfp.schedule.admission import Admit

PAPER_BOUND = "paper"
"""Name of the bound that is the paper's limit on D."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a race."""

    pp: int
    microbatches: int
    steps: int
    task_ms: float
    """Mean time of a pipeline rank's F, B and W."""
    groups: tuple[tuple[int, int], ...]
    """Pipeline and tensor-parallel ranks of comparisons with tensor parallelism."""
    pps: tuple[int, ...]
    """Numbers of pipeline ranks of the scaling preset."""
    microbatch_counts: tuple[int, ...]
    """Numbers of microbatches of the scaling preset."""


SCALES = {
    "tiny": Scale(3, 3, 2, 4.0, ((3, 1), (2, 2)), (3,), (3, 6)),
    "laptop": Scale(8, 32, 10, 20.0, ((4, 1), (4, 2)), (2, 4, 8, 16), (16, 32, 64)),
    "node": Scale(16, 64, 10, 20.0, ((8, 1), (8, 2), (8, 4)), (4, 8, 16, 32), (32, 64, 128)),
    "cluster": Scale(
        32, 128, 10, 20.0, ((16, 1), (16, 2), (16, 4)), (8, 16, 32, 64), (64, 128, 256)
    ),
}
"""`tiny` is for tests: its tasks are too short for meaningful speeds."""


Sizes = tuple[tuple[int, int, int], ...]
"""Pipeline ranks, tensor-parallel ranks and microbatches of each case."""


def _one_size(scale: Scale) -> Sizes:
    """Return a single size: the scale's pipeline ranks and microbatches, without tensor
    parallelism."""
    return ((scale.pp, 1, scale.microbatches),)


def _tensor_parallel_sizes(scale: Scale) -> Sizes:
    """Return a size for each of the scale's groups of pipeline and tensor-parallel ranks."""
    return tuple((pp, tp, scale.microbatches) for pp, tp in scale.groups)


def _growing_sizes(scale: Scale) -> Sizes:
    """Return sizes with more and more pipeline ranks, then with more and more microbatches, each
    once."""
    pps = [(pp, 1, scale.microbatches) for pp in scale.pps]
    counts = [(scale.pp, 1, count) for count in scale.microbatch_counts]
    return tuple(dict.fromkeys([*pps, *counts]))


class Measure(StrEnum):
    """Figure that a preset's table and chart show."""

    SPEED = "speed"
    """Speedup over Megatron's 1F1B."""
    TIME = "time"
    """Parts of the step: compute, blocking, coordination."""
    SLOWDOWN = "slowdown"
    """Slowdown relative to the same system without jitter, or to `bf`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Systems under equal conditions: every system under every bound, in every case."""

    systems: tuple[str, ...]
    """Names in `rrfp.race.systems.SYSTEMS`."""
    profiles: tuple[str, ...]
    levels: tuple[str, ...] = ("",)
    """Jitter added to each profile."""
    bounds: tuple[str, ...] = (PAPER_BOUND,)
    """Bounds of readiness-first systems: `paper`, `limit 4`, `hold 8`, or `hold 1.5x` (of the
    largest peak that 1F1B has in bytes)."""
    admits: tuple[Admit, ...] = (Admit.GIVEN,)
    """Admission orders of readiness-first systems. Others than the given one race only if the
    microbatches' costs differ."""
    sizes: Callable[[Scale], Sizes] = _one_size
    seeds: tuple[int, ...] = ()
    """Seeds of the cases; if empty, the seed that the user gives."""
    most_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """A question and the contests that answer it."""

    name: str
    question: str
    measure: Measure
    contests: tuple[Contest, ...]


_EVEN = "language"
_VARYING = "language+lognormal:0.5"
_IMAGES = "multimodal"
_HOLDS = ("hold 1.0x", "hold 1.5x", "hold 2.0x")
"""At 1.0x, systems have as much memory as 1F1B needs in the heaviest of the steps."""
_LIMITS = ("limit 4", "limit 8", "limit 16", "limit 32", "limit 48")
_FEW = ("megatron-1f1b", "fixed-1f1b", "bf", "bfw")
_ALL = (
    "megatron-1f1b",
    "megatron-interleaved",
    "torch-1f1b",
    "torch-interleaved",
    "torch-interleaved-zb",
    "torch-zbv",
    "torch-dualpipev",
    "deepspeed-1f1b",
    "fixed-1f1b",
    "fixed-zb-h1",
    "bf",
    "bfw",
    "bf-deep",
    "bfw-deep",
    "zb-v",
)

PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "rq1",
            "End to end: how fast is each system, and how much does it hold?",
            Measure.SPEED,
            (
                Contest(
                    systems=_ALL,
                    profiles=(_EVEN, _VARYING, _IMAGES),
                    bounds=(PAPER_BOUND, *_HOLDS),
                    admits=(Admit.GIVEN, Admit.PYRAMID),
                ),
                # Patience pays off only with even tasks.
                Contest(
                    systems=("megatron-1f1b", "zb-v-patient"),
                    profiles=(_EVEN,),
                    bounds=("hold 1.0x",),
                ),
            ),
        ),
        Preset(
            "rq2",
            "Where does the time of a step go?",
            Measure.TIME,
            (Contest(systems=_FEW, profiles=(_VARYING,), sizes=_tensor_parallel_sizes),),
        ),
        Preset(
            "rq3",
            "How much does injected jitter slow each system down?",
            Measure.SLOWDOWN,
            (Contest(systems=_FEW, profiles=(_EVEN,), levels=("J0", "J1", "J2", "J3")),),
        ),
        Preset(
            "rq4",
            "What does the choice of the hint change?",
            Measure.SLOWDOWN,
            (
                Contest(
                    systems=(
                        "megatron-1f1b",
                        "bf",
                        "fb",
                        "b-first",
                        "f-first",
                        "1f1b",
                        "bfw",
                        "zb-h1",
                    ),
                    profiles=(_VARYING, _IMAGES),
                ),
            ),
        ),
        Preset(
            "rq5",
            "Does the gain grow with the pipeline and with the step?",
            Measure.SPEED,
            (
                Contest(
                    systems=("megatron-1f1b", "bf", "bfw"),
                    profiles=(_VARYING,),
                    sizes=_growing_sizes,
                ),
            ),
        ),
        Preset(
            "rq6",
            "What does memory buy, and are gradients the same?",
            Measure.SPEED,
            (
                Contest(
                    systems=("megatron-1f1b", "bf", "bfw"),
                    profiles=(_IMAGES,),
                    bounds=(*_LIMITS, *_HOLDS),
                ),
                Contest(
                    systems=_ALL,
                    profiles=(_IMAGES,),
                    bounds=("hold 1.0x",),
                    seeds=(42, 1234, 2026),
                    most_steps=1,
                ),
            ),
        ),
    )
}

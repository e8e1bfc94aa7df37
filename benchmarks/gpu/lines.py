"""The lines of the table: what is to hold, and how it is measured, or what is missing for that."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu import figures
from rrfp.runtime.probe import probe

_LIMIT_S = 120.0
_IPC_SHARE = 0.8
_SMALL_US = 60.0
_NO_TRAINING = "training does not run on GPUs yet"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured for a line."""

    figure: str
    holds: bool = True
    """Whether it is as good as the line asks."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of docs/gpu.md."""

    name: str
    goal: str
    """Empty for a figure that others are held against."""
    measure: Callable[[], Measured] | None = None
    """Raises NoAnswerError if it cannot be measured; None if nothing measures it yet."""
    lacks: str = ""
    """Why nothing measures it yet."""


def _copies() -> Measured:
    return Measured(f"{probe(figures.copies, limit_s=_LIMIT_S):.0f} GB/s")


def _large_ipc() -> Measured:
    told = probe(figures.large_ipc, limit_s=_LIMIT_S)
    share = told["ipc"] / told["own"]
    return Measured(f"{told['ipc']:.0f} GB/s, {share:.0%}", share >= _IPC_SHARE)


def _small_message() -> Measured:
    taken_us = probe(figures.small_message, limit_s=_LIMIT_S)
    return Measured(f"{taken_us:.1f} us", taken_us < _SMALL_US)


def _large_message() -> Measured:
    taken_us = probe(figures.large_message, limit_s=_LIMIT_S)
    return Measured(f"{taken_us:.0f} us, {figures.NUM_BYTES / taken_us / 1e3:.0f} GB/s")


def _wake_ups() -> Measured:
    told = probe(figures.wake_ups, limit_s=_LIMIT_S)
    return Measured(f"{told['spinning']:.1f} us spinning, {told['blocking']:.1f} us blocking")


LINES = (
    Line("Copies within the device, 64 MB", "", _copies),
    Line("Launch of a kernel and wake-up of the host behind it", "", _wake_ups),
    Line(
        "CUDA IPC within the device, 64 MB",
        f"{_IPC_SHARE:.0%} of the device's own copies",
        _large_ipc,
    ),
    Line(
        "64 KB over CUDA IPC within the device, one way, both hosts' wake-ups included",
        f"under {_SMALL_US:.0f} us",
        _small_message,
    ),
    Line("64 MB over CUDA IPC within the device, one way", "", _large_message),
    *(
        Line(name, goal, lacks=_NO_TRAINING)
        for name, goal in (
            (
                "4 and 8 stages on one GPU, bf16, with and without dropout, GPT and MoE: `bf`, "
                "`bfw` and `zb-v` ready against `1f1b` fixed",
                "the same to the bit",
            ),
            ("One process with all stages against four", "the same to the bit"),
            ("Tasks of 5 ms: the runtime's own time", "under 2% of a step"),
            ("Tasks of 5 ms: the device idle between ready tasks", "under 20 us (median)"),
            ("Memory over 1,000 steps", "no growth"),
            (
                "Most memory against Megatron's own schedule, at equal activations",
                "within 2%",
            ),
            ("`compute-sanitizer` on a short run, memcheck and racecheck", "clean"),
        )
    ),
)

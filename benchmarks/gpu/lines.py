"""The lines of the table: what is to hold, and how it is measured."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from benchmarks.gpu import figures, training
from rrfp.runtime.device.cuda_runtime import check_cuda
from rrfp.runtime.isolated_call import call_isolated

_LIMIT_S = 120.0
_IPC_SHARE = 0.8
_SMALL_US = 60.0
_OWN_SHARE = 0.02
_GAP_US = 20.0
_NUM_STEPS = 1000
_MEMORY_SHARE = 0.02
_TRAINING_LIMIT_S = 280.0
_SANITIZER = "compute-sanitizer"
_MODELS = ("gpt", "moe")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement for a line."""

    figure: str
    holds: bool = True
    """True if it meets the line's requirement."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of docs/gpu.md."""

    name: str
    goal: str
    """Empty for a figure that others are held against."""
    measure: Callable[[], Measured]
    """Raises NoAnswerError if it fails."""
    lacks: Callable[[], str | None] = lambda: None
    """The missing requirement of the measurement on this machine; None if it can run."""
    is_timed: bool = False
    """True if the figure is a time, so that nothing else may run meanwhile."""


def _copies() -> Measured:
    return Measured(f"{call_isolated(figures.copies, limit_s=_LIMIT_S):.0f} GB/s")


def _large_ipc() -> Measured:
    told = call_isolated(figures.large_ipc, limit_s=_LIMIT_S)
    share = told["ipc"] / told["own"]
    return Measured(f"{told['ipc']:.0f} GB/s, {share:.0%}", share >= _IPC_SHARE)


def _bare_message() -> Measured:
    return Measured(f"{call_isolated(figures.bare_message, limit_s=_LIMIT_S):.1f} us")


def _small_message() -> Measured:
    taken_us = call_isolated(figures.small_message, limit_s=_LIMIT_S)
    return Measured(f"{taken_us:.1f} us", taken_us < _SMALL_US)


def _large_message(measure: Callable[[], float]) -> Measured:
    taken_us = call_isolated(measure, limit_s=_LIMIT_S)
    return Measured(f"{taken_us:.0f} us, {figures.NUM_BYTES / taken_us / 1e3:.0f} GB/s")


def _wake_ups() -> Measured:
    told = call_isolated(figures.wake_ups, limit_s=_LIMIT_S)
    return Measured(f"{told['spinning']:.1f} us spinning, {told['blocking']:.1f} us blocking")


def _same_to_the_bit() -> Measured:
    found = []
    for num_stages in (4, 8):
        for model in _MODELS:
            asked = (training.SHARED, num_stages, model)
            differ = call_isolated(training.differences, *asked, limit_s=_TRAINING_LIMIT_S)
            found += [f"{num_stages} stages, {model}: {each}" for each in differ]
    return _same(found)


def _same_vlm() -> Measured:
    asked = (training.SHARED, 4, "vlm")
    return _same(call_isolated(training.differences, *asked, limit_s=_TRAINING_LIMIT_S))


def _one_process() -> Measured:
    found = []
    for model in _MODELS:
        found += call_isolated(
            training.one_process, training.SHARED, 4, model, limit_s=_TRAINING_LIMIT_S
        )
    return _same(found)


def _same(differences: Sequence[str]) -> Measured:
    if not differences:
        return Measured("the same")
    return Measured(f"{len(differences)} differences, the first {differences[0]}", holds=False)


@cache
def _own_time() -> dict[str, float]:
    """Two lines ask for it."""
    told: dict[str, float] = call_isolated(
        training.own_time, training.SHARED, limit_s=_TRAINING_LIMIT_S
    )
    return told


def _own_share() -> Measured:
    share = _own_time()["share"]
    return Measured(f"{share:.2%}", share < _OWN_SHARE)


def _gap() -> Measured:
    gap_us = _own_time()["gap_us"]
    return Measured(f"{gap_us:.1f} us", gap_us < _GAP_US)


def _growth() -> Measured:
    told = call_isolated(training.growth, training.SHARED, _NUM_STEPS, limit_s=_TRAINING_LIMIT_S)
    first, last = (" and ".join(f"{each:.1f}" for each in told[name]) for name in ("first", "last"))
    pairs = zip(told["first"], told["last"], strict=True)
    return Measured(f"{first} MB at first, {last} MB at last", all(b <= a for a, b in pairs))


def _most_memory() -> Measured:
    # Megatron's transfers take a GPU a rank; on one GPU its schedule without a pipeline runs.
    num_ranks = min(4, len(check_cuda().gpus))
    told = call_isolated(training.most_memory, training.OWN, num_ranks, limit_s=_TRAINING_LIMIT_S)
    ratios = [ours / native for ours, native in zip(told["fixed"], told["megatron"], strict=True)]
    figure = f"{' and '.join(f'{ratio:.3f}' for ratio in ratios)} of its own"
    return Measured(figure, all(abs(ratio - 1) <= _MEMORY_SHARE for ratio in ratios))


def _sanitized() -> Measured:
    codes = {
        tool: call_isolated(training.sanitized, training.SHARED, tool, limit_s=_TRAINING_LIMIT_S)
        for tool in ("memcheck", "racecheck")
    }
    dirty = [f"{tool} exits with {code}" for tool, code in codes.items() if code]
    return Measured("; ".join(dirty) or "clean", not dirty)


def _no_sanitizer() -> str | None:
    return None if shutil.which(_SANITIZER) else f"{_SANITIZER} is not installed"


LINES = (
    Line("Copies within the device, 64 MB", "", _copies, is_timed=True),
    Line("Launch of a kernel and wake-up of the host behind it", "", _wake_ups, is_timed=True),
    Line(
        "CUDA IPC within the device, 64 MB",
        f"{_IPC_SHARE:.0%} of the device's own copies",
        _large_ipc,
        is_timed=True,
    ),
    Line(
        "64 KB by CUDA's calls alone, one way, wake-ups included",
        "",
        _bare_message,
        is_timed=True,
    ),
    Line(
        "64 KB over CUDA IPC, one way, wake-ups included",
        f"under {_SMALL_US:.0f} us",
        _small_message,
        is_timed=True,
    ),
    Line(
        "64 MB over CUDA IPC, one way",
        "",
        partial(_large_message, figures.large_message),
        is_timed=True,
    ),
    Line(
        "64 MB through the host, by `bounce`, one way",
        "",
        partial(_large_message, figures.bounced_message),
        is_timed=True,
    ),
    Line(
        "Tasks of 5 ms: the runtime's own time",
        f"under {_OWN_SHARE:.0%} of a step",
        _own_share,
        is_timed=True,
    ),
    Line(
        "Tasks of 5 ms: the device idle between ready tasks",
        f"under {_GAP_US:.0f} us (median)",
        _gap,
        is_timed=True,
    ),
    Line(
        "4 and 8 stages on one GPU, bf16, with and without dropout, GPT and MoE: `bf` and `bfw` "
        "ready against `1f1b` fixed, and `zb-v` ready against `zb-v` fixed",
        "the same to the bit",
        _same_to_the_bit,
    ),
    Line("The same of a vlm of 4 stages", "the same to the bit", _same_vlm),
    Line("One process with all stages against four", "the same to the bit", _one_process),
    Line(f"Memory over {_NUM_STEPS:,} steps", "no growth", _growth),
    Line(
        "Most memory against Megatron's own schedule",
        f"within {_MEMORY_SHARE:.0%}",
        _most_memory,
    ),
    Line(
        "`compute-sanitizer` on a short run, memcheck and racecheck",
        "clean",
        _sanitized,
        lacks=_no_sanitizer,
    ),
)

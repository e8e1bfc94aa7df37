"""Formats a candidate as flags of `rrfp train`, `rrfp run` and Megatron-LM's scripts."""

from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote

from rrfp.inputs import layout_string
from rrfp.schedule.admission import Admit
from rrfp.schedule.shape import Placement
from rrfp.tune.source import Candidate, Source


@dataclass(frozen=True, slots=True)
class Flags:
    """A candidate's flags; each text is a flag with its value."""

    train: tuple[str, ...]
    """Flags of `rrfp train`."""
    run: tuple[str, ...]
    """Flags of `rrfp run`."""
    megatron: tuple[str, ...] | None
    """Flags of Megatron-LM's script behind `rrfp run`; None if Megatron-LM cannot build the
    model."""


def flags_of(candidate: Candidate, source: Source) -> Flags:
    """Return the flags with which a run uses the candidate's settings."""
    policy = tuple(_policy(candidate, source))
    layout = tuple(_layout(candidate, source))
    is_loop = candidate.placement is Placement.LOOP
    placement = () if is_loop else (f"--placement {candidate.placement}",)
    chunks = () if candidate.chunks == 1 else (f"--chunks {candidate.chunks}",)
    return Flags(
        (f"--pp {source.shape.num_ranks}", *chunks, *placement, *layout, *policy),
        (*placement, *policy),
        _megatron(candidate, source),
    )


def _policy(candidate: Candidate, source: Source) -> Iterator[str]:
    """Yield the flags of a candidate's policy and admission order. A run's own `--admit` takes the
    place of the candidate's."""
    yield from candidate.policy.flags()
    if source.admitted is not None:
        yield f"--admit {quote(source.admitted)}"
    elif candidate.admit is not Admit.GIVEN:
        yield f"--admit {candidate.admit}"


def _layout(candidate: Candidate, source: Source) -> Iterator[str]:
    """Yield the flags of `rrfp train` for the split of layers, if they can be moved, the number of
    microbatches and, if it changes, the micro-batch size."""
    if candidate.split is not None and source.moves_layers:
        yield f"--layers {sum(candidate.split)}"
        if len(set(candidate.split)) > 1:
            yield f"--layout {quote(layout_string(candidate.split))}"
    yield f"--microbatches {candidate.microbatches(source.shape.num_microbatches)}"
    if candidate.joined != candidate.divided:
        yield f"--micro-batch-size {_size(candidate, source)}"


def _megatron(candidate: Candidate, source: Source) -> tuple[str, ...] | None:
    """Return the flags of Megatron-LM's scripts for the ranks, the split or chunks, and the batch
    sizes if known; None for the V placement and for models other than language models."""
    if candidate.placement is Placement.V or not source.is_text:
        return None
    size, ranks = _size(candidate, source), source.shape.num_ranks
    num = candidate.microbatches(source.shape.num_microbatches) * source.num_replicas
    flags = [f"--pipeline-model-parallel-size {ranks}"]
    split = candidate.split
    if split is not None and len(set(split)) > 1:
        flags.append(f"--pipeline-model-parallel-layout {quote(layout_string(split))}")
    elif candidate.chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {candidate.chunks}")
    if source.micro_batch_size is not None:
        flags += [f"--micro-batch-size {size}", f"--global-batch-size {size * num}"]
    return tuple(flags)


def _size(candidate: Candidate, source: Source) -> int:
    """Number of sequences in a microbatch of the candidate."""
    return (source.micro_batch_size or 1) * candidate.joined // candidate.divided

"""Cost files of ten kinds, drawn by seeds, to hold `rrfp tune` against a plain search on."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Case:
    """Costs, and the pipeline that they are of."""

    name: str
    document: str
    pp: int
    microbatches: int
    memory: str
    layers: int | None
    """None: the model says it itself."""
    uneven: str = "ranks"
    jitter: str = "none"

    def slower(self, factor: float) -> "Case":
        """The same costs with all times so much longer."""

        def longer(found: re.Match[str]) -> str:
            name, number = found.groups()
            by = 1 / factor if name == "flops_per_s" else factor
            return f"{name} = {float(number) * by:.6g}"

        document = re.sub(
            r"\b([FBW]|latency_s|layer_s|flops_per_s) = ([\d.e+-]+)", longer, self.document
        )
        return replace(self, document=document)


def cases(seed: int) -> list[Case]:
    """One of each kind."""
    return [make(random.Random(f"{seed} {name}")) for name, make in _KINDS.items()]


def _table(draw: random.Random, length: str | None = None, sigma: float = 0.0) -> str:
    forward = draw.uniform(0.008, 0.03)
    backward, weight = forward * draw.uniform(0.9, 1.2), forward * draw.uniform(0.5, 0.9)
    lines = [
        f"seconds = {{ F = {forward:.5f}, B = {backward:.5f}, W = {weight:.5f} }}",
        "bytes = 1e9",
        f"bytes_owed_to_w = {draw.uniform(0.4, 1.0):.3f}",
    ]
    if length is not None:
        lines += [f'length = "{length}"', "[lengths]", f"{length} = {sigma:.3f}"]
    return "\n".join(lines) + "\n"


def _of_ranks(ranks: str, forward: float, backward: float, weight: float, more: str = "") -> str:
    return (
        f"[[ranks]]\n{ranks}\n"
        f"seconds = {{ F = {forward:.5f}, B = {backward:.5f}, W = {weight:.5f} }}\n{more}"
    )


def _heavy_stage(draw: random.Random) -> Case:
    rank = draw.randrange(1, 3)
    ranks = _of_ranks(f'pp_ranks = "{rank}"', 0.024, 0.026, 0.018)
    head = "seconds = { F = 0.020, B = 0.022, W = 0.015 }\nbytes = 1e9\n"
    return Case("stage of 20% more", head + ranks, 4, 12, "1.0x", 24, "layers")


def _slow_rank(draw: random.Random) -> Case:
    rank, factor = draw.randrange(0, 4), draw.uniform(1.3, 1.8)
    ranks = _of_ranks(f'pp_ranks = "{rank}"', 0.02 * factor, 0.022 * factor, 0.015 * factor)
    head = "seconds = { F = 0.020, B = 0.022, W = 0.015 }\nbytes = 1e9\n"
    return Case("one slow rank", head + ranks, 4, 16, "1.25x", 28)


def _long_tails(draw: random.Random) -> Case:
    return Case("long tails", _table(draw, "text", draw.uniform(0.9, 1.3)), 4, 16, "1.0x", 16)


def _vision_tower(draw: random.Random) -> Case:
    text = (
        f"{_table(draw, 'text', 0.5)}images = {draw.uniform(0.8, 1.1):.3f}\n"
        '[[ranks]]\nfirst_share = 0.375\nlength = "images"\n'
    )
    return Case("vision tower", text, 8, 16, "1.0x", 32)


def _heavy_vision(draw: random.Random) -> Case:
    text = (
        f"{_table(draw, 'text', 0.4)}images = {draw.uniform(0.6, 0.9):.3f}\n"
        '[[ranks]]\nfirst_share = 0.25\nlength = "images"\n'
        "seconds = { F = 0.03, B = 0.033, W = 0.02 }\nbytes = 1.6e9\n"
    )
    return Case("heavy vision tower", text, 4, 16, "1.0x", 20)


def _heavy_head(draw: random.Random) -> Case:
    head = draw.uniform(1.3, 1.7)
    ranks = _of_ranks("last_share = 0.01", 0.02 * head, 0.021 * head, 0.014 * head)
    text = "seconds = { F = 0.020, B = 0.021, W = 0.014 }\nbytes = 1e9\n"
    return Case("heavy head", text + ranks, 4, 12, "1.0x", 20)


def _model(draw: random.Random) -> Case:
    text = f"""
[language]
layers = 16
hidden = 1024
ffn = 4096
heads = 16
vocabulary = {draw.choice((50_000, 128_000, 200_000))}
tokens = {{ median = 1024, sigma = {draw.uniform(0.0, 0.6):.3f}, least = 64, most = 8192 }}
[device]
flops_per_s = 60e12
layer_s = {draw.choice((1e-4, 5e-4, 1e-3))}
"""
    return Case("model with a large vocabulary", text, 4, 16, "1.0x", None)


def _slow_links(draw: random.Random) -> Case:
    links = f"[links]\nlatency_s = {draw.uniform(0.001, 0.004):.5f}\n"
    return Case("slow links", _table(draw, "text", 0.4) + links, 4, 12, "1.0x", 16)


def _noise(draw: random.Random) -> Case:
    jitter = f"lognormal:{draw.uniform(0.2, 0.6):.2f}"
    return Case("noise", _table(draw), 4, 16, "1.0x", 24, jitter=jitter)


def _little_memory(draw: random.Random) -> Case:
    return Case("little memory", _table(draw, "text", 0.7), 4, 16, "0.8x", 16)


_KINDS: dict[str, Callable[[random.Random], Case]] = {
    make.__name__.strip("_"): make
    for make in (
        _heavy_stage,
        _slow_rank,
        _long_tails,
        _vision_tower,
        _heavy_vision,
        _heavy_head,
        _model,
        _slow_links,
        _noise,
        _little_memory,
    )
}

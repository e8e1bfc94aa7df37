"""Costs cut anew, as a TOML document: `rrfp tune` writes one for each proposal, so that it can be
simulated, or held to in a paced run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rrfp.errors import UsageError
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.language_models import FlopCosts
from rrfp.simulate.costs.layer_costs import CutCosts, Layered, StageLayers, check_split
from rrfp.simulate.costs.model import Costs, Uneven
from rrfp.simulate.costs.toml_files import TableCosts, ranged, read_table

CUT = "cut"
"""The key that only such a document has."""
_MOST_PIECES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The stages that costs by stage are given for: `[cut.given]`."""

    layers: str
    """By stage, in model order: 8,8,8,8."""
    pp: int = ranged(1)
    microbatches: int = ranged(1)
    chunks: int = ranged(1, default=1)
    placement: Placement = Placement.LOOP
    uneven: Uneven = Uneven.RANKS

    def layered(self, costs: Costs) -> Layered:
        shape = Shape(self.pp, self.microbatches, self.chunks, self.placement)
        return layered_of(costs, shape, parse_split(self.layers, "layers"), self.uneven)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How costs are cut anew: `[cut]`."""

    costs: str
    """What `--costs` takes."""
    layers: str
    """By stage, in model order: 5,6,7,6."""
    given: Given | None = None
    """None: the costs are a model's, which tell layers apart themselves."""
    joined: int = ranged(1, _MOST_PIECES, default=1)
    divided: int = ranged(1, _MOST_PIECES, default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    cut: Cut


def parse_cut(document: Mapping[str, Any], name: str, resolve: Callable[[str], Costs]) -> CutCosts:
    """Read such a document; `name` is what errors call it, and `resolve` reads the costs that it
    cuts. Raises UsageError for what is wrong."""
    cut = cut_in(document, name)
    costs = resolve(cut.costs)
    if cut.given is not None:
        layered = cut.given.layered(costs)
    elif isinstance(costs, FlopCosts):
        layered = costs
    else:
        raise UsageError(
            f"{name} cuts {cut.costs}, which does not say how many layers its stages have; add "
            "[cut.given]"
        )
    split = parse_split(cut.layers, f"{name}, [cut]: layers")
    check_split(split, layered.num_layers, len(split), f"{name}, [cut]: layers")
    return CutCosts(layered, split, cut.joined, cut.divided)


def cut_in(document: Mapping[str, Any], name: str) -> Cut:
    """The `[cut]` of a document; `name` is what errors call it. Raises UsageError for a wrong
    one."""
    return read_table(_Document, document, name).cut


def written_cut(cut: Cut) -> str:
    """The document, as `parse_cut` reads it."""
    lines = ["[cut]", f"costs = {_quoted(cut.costs)}", f'layers = "{cut.layers}"']
    lines += [
        f"{name} = {value}"
        for name, value in (("joined", cut.joined), ("divided", cut.divided))
        if value > 1
    ]
    given = cut.given
    if given is not None:
        lines += [
            "",
            "[cut.given]",
            f'layers = "{given.layers}"',
            f"pp = {given.pp}",
            f"microbatches = {given.microbatches}",
            f"chunks = {given.chunks}",
            f'placement = "{given.placement}"',
            f'uneven = "{given.uneven}"',
        ]
    return "\n".join(lines) + "\n"


def layered_of(
    costs: Costs, shape: Shape, split: Sequence[int], uneven: Uneven = Uneven.RANKS
) -> StageLayers:
    """Costs by stage as costs by layer: `split` says how many layers each stage of `shape` has.
    Raises UsageError where they do not fit."""
    check_split(split, sum(split), shape.num_stages, "the split")
    if not any(split):
        raise UsageError("the stages have no layers at all; say how many each has")
    towers = costs.towers(shape) if isinstance(costs, TableCosts) else ()
    return StageLayers(costs, shape, tuple(split), towers, uneven)


def parse_split(text: str, name: str) -> tuple[int, ...]:
    """Layers by stage, such as 7,8,8,7. Raises UsageError for anything else; `name` is what errors
    call it."""
    cells = text.split(",")
    if not all(cell.strip().isdecimal() and len(cell.strip()) < 5 for cell in cells):
        raise UsageError(f"{name} is '{text:.60}'; write the layers of each stage, such as 7,8,8,7")
    return tuple(int(cell) for cell in cells)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

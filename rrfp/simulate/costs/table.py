"""Costs as a table in TOML: seconds and bytes by pipeline rank, and how data make them vary."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from rrfp.errors import UsageError
from rrfp.schedule.shape import Shape
from rrfp.schedule.sizes import Sizes
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.model import (
    FACTORS,
    LONGEST_S,
    MOST_BYTES,
    Links,
    StepCosts,
    check_chunk,
    check_link,
    check_rank,
    check_sizes,
    check_takes_time,
    part_of,
)
from rrfp.simulate.costs.ranges import parse_ranges
from rrfp.simulate.costs.sections import Agreement, GradientSync, LinkSpeed
from rrfp.simulate.costs.toml_tables import ranged, read_table
from rrfp.simulate.draws import LARGEST_SIGMA, lognormals
from rrfp.simulate.world import TaskTimes
from rrfp.trace.records import NS_PER_S

PRESETS = ("uniform", "language", "multimodal")
"""The tables that come with rrfp, in profiles/."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds and bytes of some ranks, or of one chunk of each: `[[ranks]]`."""

    pp_ranks: str | None = None
    """Such as 0-2,5."""
    first_share: float | None = ranged(0, 1, default=None)
    """Or the ranks of this share of the pipeline from its start, at least one."""
    last_share: float | None = ranged(0, 1, default=None)
    """Or up to its end."""
    chunk: int | None = None
    """The chunk that the figures are for; by default they are the whole rank's."""
    seconds: Mapping[Kind, float] = ranged(0, LONGEST_S, default_factory=dict)
    bytes: float | None = ranged(0, MOST_BYTES, default=None)
    length: str | None = None

    def ranks(self, num_ranks: int) -> Sequence[int]:
        """The pipeline ranks that this entry is about."""
        if self.pp_ranks is not None:
            return [rank for each in parse_ranges(self.pp_ranks, "pp_ranks") for rank in each]
        if self.first_share is not None:
            return range(_num_in(self.first_share, num_ranks))
        assert self.last_share is not None
        return range(num_ranks - _num_in(self.last_share, num_ranks), num_ranks)


def _num_in(share: float, num_ranks: int) -> int:
    return max(1, int(share * num_ranks + 0.5))


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A directed link whose messages take longer: `[[links.slow]]`."""

    sender: int
    receiver: int
    factor: float = ranged(*FACTORS)


@dataclass(frozen=True, slots=True)
class LinkTimes(LinkSpeed):
    """How long messages between neighbouring ranks take: `[links]`."""

    message_bytes: int = ranged(0, 10**12, default=0)
    """Size of every message, whatever its microbatch's length."""
    slow: tuple[SlowLink, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """The whole document."""

    seconds: Mapping[Kind, float] = ranged(0, LONGEST_S, default_factory=dict)
    """Times of a whole pipeline rank, by kind, for a microbatch of length 1."""
    bytes: float | None = ranged(0, MOST_BYTES, default=None)
    """What a whole pipeline rank keeps from F until it is freed, for a microbatch of length 1; it
    grows with the same length as the seconds. By default nothing is said of memory."""
    bytes_owed_to_w: float | None = ranged(0, 1, default=None)
    """The share of the bytes that is kept from B until W; by default all of them."""
    length: str | None = None
    """The name of the length that seconds and bytes grow with; by default they are constant."""
    lengths: Mapping[str, float] = ranged(0, LARGEST_SIGMA, default_factory=dict)
    """The sigma of each length, drawn once per microbatch from a lognormal of mean 1."""
    ranks: tuple[RankTimes, ...] = ()
    """Exceptions by rank; if two entries contradict each other, the later one counts."""
    links: LinkTimes = LinkTimes()
    agreement: Agreement = field(default_factory=Agreement)
    gradient_sync: GradientSync = field(default_factory=GradientSync)

    @property
    def has_bytes(self) -> bool:
        """Whether it says anything of memory."""
        return self.bytes is not None or any(each.bytes is not None for each in self.ranks)


@dataclass(frozen=True, slots=True)
class _Figure:
    """The nanoseconds of a kind of task on a stage, or what it keeps in bytes. Equal ones share a
    row, as a large step has millions of tasks."""

    amount: float
    """For a microbatch of length 1."""
    length: str | None
    num_parts: int
    """How many chunks the amount covers."""
    part: int

    def row(self, factors: Sequence[float]) -> list[int]:
        """The amounts by microbatch."""
        return [
            part_of(round(self.amount * factor), self.num_parts, self.part) for factor in factors
        ]


@dataclass(frozen=True, slots=True)
class TableCosts:
    """A `Costs` from a table."""

    name: str
    """What errors call the table."""
    table: Table

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        table, num_microbatches = self.table, shape.num_microbatches
        factors: dict[str | None, Sequence[float]] = {None: [1.0] * num_microbatches}
        for length, sigma in table.lengths.items():
            drawn = lognormals(num_microbatches, sigma, seed, replica, "length", length)
            factors[length] = drawn.tolist()
        by_rank = self._by_rank(shape)
        row = cache(lambda figure: figure.row(factors[figure.length]))
        times = TaskTimes(
            *(
                [row(self._time(by_rank, shape, stage, kind)) for stage in range(shape.num_stages)]
                for kind in Kind
            )
        )
        check_takes_time(times, self.name)
        kept = [row(each) for each in self._kept(by_rank, shape)]
        return StepCosts(
            times,
            self._links(shape),
            round(table.agreement.seconds * NS_PER_S),
            round(table.agreement.lateness_s * NS_PER_S),
            round(table.gradient_sync.seconds * NS_PER_S),
            sizes=self._sizes(kept) if kept else None,
        )

    def towers(self, shape: Shape) -> tuple[str | None, ...]:
        """The name of the length that each stage's time grows with: what its layers look at."""
        by_rank = self._by_rank(shape)
        return tuple(
            self._time(by_rank, shape, stage, Kind.F).length for stage in range(shape.num_stages)
        )

    def _by_rank(self, shape: Shape) -> list[list[RankTimes]]:
        """By rank: the entries about it, the one with precedence last."""
        by_rank: list[list[RankTimes]] = [[] for _ in range(shape.num_ranks)]
        for each in sorted(self.table.ranks, key=lambda each: each.chunk is not None):
            if each.chunk is not None:
                check_chunk(each.chunk, shape, f"{self.name}, [[ranks]],")
            for rank in each.ranks(shape.num_ranks):
                check_rank(rank, shape, f"{self.name}, [[ranks]],")
                by_rank[rank].append(each)
        return by_rank

    def _time(
        self, by_rank: list[list[RankTimes]], shape: Shape, stage: int, kind: Kind
    ) -> _Figure:
        def time_ns(entry: Table | RankTimes) -> float | None:
            seconds = entry.seconds.get(kind)
            return None if seconds is None else seconds * NS_PER_S

        figure = self._figure(by_rank, shape, stage, time_ns)
        if figure is None:
            raise UsageError(
                f"{self.name} gives no seconds for {Task(stage, kind, 0)}, on pipeline rank "
                f"{shape.rank_of(stage)}; add seconds of {kind}"
            )
        return figure

    def _kept(self, by_rank: list[list[RankTimes]], shape: Shape) -> list[_Figure]:
        """What every stage keeps; empty if the table says nothing of memory."""
        if not self.table.has_bytes:
            return []
        figures = []
        for stage in range(shape.num_stages):
            figure = self._figure(by_rank, shape, stage, lambda entry: entry.bytes)
            if figure is None:
                raise UsageError(
                    f"{self.name} gives no bytes for {Task(stage, Kind.F, 0)}, on pipeline rank "
                    f"{shape.rank_of(stage)}, and does for others; add bytes for every rank"
                )
            figures.append(figure)
        return figures

    def _figure(
        self,
        by_rank: list[list[RankTimes]],
        shape: Shape,
        stage: int,
        of: Callable[[Table | RankTimes], float | None],
    ) -> _Figure | None:
        """What the table says about a stage; None if it is silent."""
        rank, chunk = shape.rank_of(stage), shape.chunk_of(stage)
        amount, length, is_own = of(self.table), self.table.length, False
        for each in by_rank[rank]:
            if each.chunk in (None, chunk):
                length = each.length or length
                own = of(each)
                if own is not None:
                    amount, is_own = own, each.chunk is not None
        if amount is None:
            return None
        num_parts, part = (1, 0) if is_own else (shape.num_chunks, chunk)
        return _Figure(amount, length, num_parts, part)

    def _sizes(self, kept: list[list[int]]) -> Sizes:
        share = self.table.bytes_owed_to_w
        owed = None if share is None else [[round(size * share) for size in row] for row in kept]
        sizes = Sizes(kept, owed)
        check_sizes(sizes, self.name)
        return sizes

    def _links(self, shape: Shape) -> Links:
        links = self.table.links
        for slow in links.slow:
            check_link(slow.sender, slow.receiver, shape, f"{self.name}, [[links.slow]],")
        return links.links(
            [links.message_bytes] * shape.num_microbatches if links.message_bytes else (),
            {(slow.sender, slow.receiver): slow.factor for slow in links.slow},
        )


def parse_table(document: Mapping[str, Any], name: str) -> TableCosts:
    """Read a table of costs from a TOML document; `name` is what errors call it.

    Raises UsageError for an unknown key, for a value of the wrong type or out of range, and for
    entries that contradict each other or would have no effect.
    """
    table = read_table(Table, document, name)
    for number, each in enumerate(table.ranks, 1):
        where = f"{name}, [[ranks]] {number}"
        selections = (each.pp_ranks, each.first_share, each.last_share)
        if sum(selection is not None for selection in selections) != 1:
            raise UsageError(f"{where} needs one of pp_ranks, first_share, last_share; give one")
        if each.pp_ranks is not None:
            parse_ranges(each.pp_ranks, where)
        if not each.seconds and each.bytes is None and each.length is None:
            raise UsageError(f"{where} says nothing about its ranks; give seconds, bytes or length")
        _check_length(each.length, table, where)
    if table.bytes_owed_to_w is not None and not table.has_bytes:
        raise UsageError(f"{name} has bytes_owed_to_w, a share of bytes, and no bytes; add them")
    _check_length(table.length, table, name)
    used = {table.length, *(each.length for each in table.ranks)}
    for length in table.lengths:
        if length not in used:
            raise UsageError(
                f"{name}, [lengths]: nothing grows with '{length}'; give it as a length, or leave "
                "it out"
            )
    links = table.links
    if bool(links.message_bytes) != bool(links.bandwidth_bytes_per_s):
        lacking = "bandwidth_bytes_per_s" if links.message_bytes else "message_bytes"
        raise UsageError(
            f"{name}, [links] lacks {lacking}, without which bytes take no time; add it"
        )
    if links.slow and not (links.latency_s or links.message_bytes):
        raise UsageError(
            f"{name}, [links] has a slow link and messages take no time; add latency_s"
        )
    ends = [(slow.sender, slow.receiver) for slow in links.slow]
    for number, each_ends in enumerate(ends, 1):
        first = ends.index(each_ends) + 1
        if first != number:
            raise UsageError(
                f"{name}, [links], [[slow]] {number} is for the same link as [[slow]] {first}; "
                "remove one of them"
            )
    return TableCosts(name, table)


def preset(name: str) -> TableCosts:
    """The costs of that name in `PRESETS`."""
    text = (
        files("rrfp.simulate.costs").joinpath(f"profiles/{name}.toml").read_text(encoding="utf-8")
    )
    return parse_table(tomllib.loads(text), f"costs {name}")


def _check_length(length: str | None, table: Table, where: str) -> None:
    if length is not None and length not in table.lengths:
        there_are = ", ".join(table.lengths) or "none"
        raise UsageError(
            f"{where}: length '{length}' is not in [lengths], which has {there_are}; add it there"
        )

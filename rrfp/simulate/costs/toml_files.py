"""Costs as a table in TOML: seconds and bytes by pipeline rank, and how data make them vary."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rrfp.errors import UsageError
from rrfp.schedule.bounds import ActivationSizes
from rrfp.schedule.shape import Shape
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
    parse_ranges,
    part_of,
)
from rrfp.simulate.engine import TaskTimes
from rrfp.simulate.jitter import LARGEST_SIGMA, lognormals
from rrfp.trace.records import NS_PER_S

# Reads dataclasses from TOML tables: fields are the keys, and their types say what is valid.


MOST = 10**9
"""The largest number, unless its field says otherwise; a larger one is a typing error."""

_T = TypeVar("_T")


def ranged(least: float, most: float = MOST, **of_the_field: Any) -> Any:
    """Declare a dataclass field for a number, or for a mapping to numbers, from `least` to `most`;
    `read_table` checks the range."""
    return field(metadata={"range": (least, most)}, **of_the_field)


def read_table(kind: type[_T], table: object, where: str) -> _T:
    """Build a dataclass from a table of TOML; `where` is what errors call the table.

    Fields may be numbers (at least 0 unless `ranged`), strings, booleans, choices (a StrEnum),
    other such dataclasses, tuples of them (an array of tables) or mappings from names or choices to
    numbers; each may be optional. Raises UsageError for an unknown or missing key, and for a value
    of the wrong type or out of range.
    """
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} is {table!r}; it must be a table")
    types = get_type_hints(kind)
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise UsageError(f"{where} has no '{key}'; it has {', '.join(known)}")
    for key, each in known.items():
        if key not in table and each.default is MISSING and each.default_factory is MISSING:
            raise UsageError(f"{where} lacks {key}; add it")
    values = {}
    for key, value in table.items():
        limits = known[key].metadata.get("range", (0, MOST))
        values[key] = _value(types[key], value, limits, key, where)
    return kind(**values)


def _value(kind: Any, value: object, limits: tuple[float, float], key: str, where: str) -> Any:
    """Convert the value of the table's `key` to the field's type `kind`, nested tables included.
    Raises UsageError for a value of the wrong type or out of range."""
    if NoneType in get_args(kind):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    origin = get_origin(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{where}: {key} is {value!r}; write it as [[{key}]]")
        return tuple(
            read_table(get_args(kind)[0], each, f"{where}, [[{key}]] {number}")
            for number, each in enumerate(value, 1)
        )
    if origin is not None:
        if not isinstance(value, Mapping):
            raise UsageError(f"{where}: {key} is {value!r}; it must be a table")
        names, numbers = get_args(kind)
        where = f"{where}, {key}"
        return {
            _value(names, name, limits, "a key", where): _value(numbers, each, limits, name, where)
            for name, each in value.items()
        }
    if is_dataclass(kind):
        return read_table(kind, value, f"{where}, [{key}]")  # type: ignore[arg-type]
    if issubclass(kind, StrEnum):
        return _choice(kind, value, key, where)
    if kind in (str, bool):
        if not isinstance(value, kind):
            wanted = "a text" if kind is str else "true or false"
            raise UsageError(f"{where}: {key} is {value!r}; it must be {wanted}")
        return value
    return _number(kind, value, limits, key, where)


def _choice(kind: type[StrEnum], value: object, key: str, where: str) -> StrEnum:
    """Return the value as a member of the enum `kind`. Raises UsageError for any other value."""
    if value not in tuple(kind):
        raise UsageError(f"{where}: {key} is {value!r}; it must be {' or '.join(kind)}")
    return kind(str(value))


def _number(
    kind: type, value: object, limits: tuple[float, float], key: str, where: str
) -> int | float:
    """Return the number unchanged. Raises UsageError unless it is of the wanted type and within the
    limits; booleans and NaN are refused."""
    least, most = limits
    wanted = int if kind is int else int | float
    # NaN compares as false, and booleans are integers to Python; neither is accepted.
    if not isinstance(value, wanted) or isinstance(value, bool) or not least <= value <= most:
        what = "whole number" if kind is int else "number"
        raise UsageError(
            f"{where}: {key} is {value!r}; it must be a {what} from {least:g} to {most:g}"
        )
    return value


# The sections that all forms of costs in TOML share.


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The speed of the links between neighboring ranks: the keys that every `[links]` has."""

    latency_s: float = ranged(0, LONGEST_S, default=0.0)
    bandwidth_bytes_per_s: float | None = ranged(1, 1e15, default=None)
    """By default, bytes take no time."""

    def links(self, num_bytes: Sequence[int], factors: Mapping[tuple[int, int], float]) -> Links:
        """Make links of this speed. `num_bytes` are message sizes by microbatch; `factors` slow
        down links, by (sender, receiver). Without a bandwidth, messages take only the latency."""
        bandwidth = self.bandwidth_bytes_per_s
        return Links(
            round(self.latency_s * NS_PER_S),
            NS_PER_S / bandwidth if bandwidth else 0.0,
            num_bytes,
            factors,
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """The rounds of a group that must agree: `[agreement]`."""

    seconds: float = ranged(0, LONGEST_S, default=0.0)
    lateness_s: float = ranged(0, LONGEST_S, default=0.0)
    """The most by which a message reaches another member later than the first."""


@dataclass(frozen=True, slots=True)
class GradientSync:
    """The reduction of gradients between replicas at the end of a step: `[gradient_sync]`."""

    seconds: float = ranged(0, LONGEST_S, default=0.0)


PRESETS = ("uniform", "language", "multimodal")
"""The tables that come with rrfp, in profiles/."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds and bytes of some ranks, or of one chunk of each: `[[ranks]]`."""

    pp_ranks: str | None = None
    """Pipeline ranks, such as 0-2,5."""
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
        """Return the pipeline ranks that this entry is about, as listed or by its share from the
        pipeline's start or end. Listed ranks may be beyond the last one."""
        if self.pp_ranks is not None:
            return [rank for each in parse_ranges(self.pp_ranks, "pp_ranks") for rank in each]
        if self.first_share is not None:
            return range(_num_in(self.first_share, num_ranks))
        assert self.last_share is not None
        return range(num_ranks - _num_in(self.last_share, num_ranks), num_ranks)


def _num_in(share: float, num_ranks: int) -> int:
    """Return the number of ranks in a share of the pipeline, rounded, at least 1."""
    return max(1, int(share * num_ranks + 0.5))


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A directed link whose messages take longer: `[[links.slow]]`."""

    sender: int
    receiver: int
    factor: float = ranged(*FACTORS)


@dataclass(frozen=True, slots=True)
class LinkTimes(LinkSpeed):
    """How long messages between neighboring ranks take: `[links]`."""

    message_bytes: int = ranged(0, 10**12, default=0)
    """Size of every message, whatever its microbatch's length."""
    slow: tuple[SlowLink, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """The whole document."""

    seconds: Mapping[Kind, float] = ranged(0, LONGEST_S, default_factory=dict)
    """Times of a whole pipeline rank, by kind, for a microbatch of length 1."""
    bytes: float | None = ranged(0, MOST_BYTES, default=None)
    """The activation bytes of a whole pipeline rank for a microbatch of length 1. They grow with
    the same length as the seconds. By default memory is not modeled."""
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
        """True if the table, or an entry for some ranks, gives bytes."""
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
        """Return the amounts by microbatch: this chunk's part of the amount times each microbatch's
        factor."""
        return [
            part_of(round(self.amount * factor), self.num_parts, self.part) for factor in factors
        ]


@dataclass(frozen=True, slots=True)
class TableCosts:
    """A `Costs` from a table."""

    name: str
    """The name of the table in errors."""
    table: Table

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Return the costs of a step. Each length is drawn once per microbatch from the seed and
        the replica, and scales the seconds and bytes that grow with it. Raises UsageError if the
        table does not fit the shape."""
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
        kept = [row(each) for each in self._activations(by_rank, shape)]
        return StepCosts(
            times,
            self._links(shape),
            round(table.agreement.seconds * NS_PER_S),
            round(table.agreement.lateness_s * NS_PER_S),
            round(table.gradient_sync.seconds * NS_PER_S),
            sizes=self._sizes(kept) if kept else None,
        )

    def towers(self, shape: Shape) -> tuple[str | None, ...]:
        """Return for each stage the name of the length that its times grow with (None: constant),
        by which stages of different models are distinguished."""
        by_rank = self._by_rank(shape)
        return tuple(
            self._time(by_rank, shape, stage, Kind.F).length for stage in range(shape.num_stages)
        )

    def _by_rank(self, shape: Shape) -> list[list[RankTimes]]:
        """Return the table's entries about each rank; those for one chunk, which have precedence,
        come last. Raises UsageError for a rank or a chunk that the shape lacks."""
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
        """Return the figure of a kind of task on a stage, in ns. Raises UsageError if the table has
        none."""

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

    def _activations(self, by_rank: list[list[RankTimes]], shape: Shape) -> list[_Figure]:
        """Return the activation bytes by stage; empty if the table does not model memory. Raises
        UsageError if it gives bytes for some stages only."""
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
        """Return the figure of a stage, which `of` takes from the table or an entry; the last entry
        that has one counts, and likewise for the length. A figure of the whole rank is divided
        among its chunks. None without any."""
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

    def _sizes(self, kept: list[list[int]]) -> ActivationSizes:
        """Make the activation sizes, with the table's share of the bytes pending for W. Raises
        UsageError for sizes out of range."""
        share = self.table.bytes_owed_to_w
        owed = None if share is None else [[round(size * share) for size in row] for row in kept]
        sizes = ActivationSizes(kept, owed)
        check_sizes(sizes, self.name)
        return sizes

    def _links(self, shape: Shape) -> Links:
        """Make the links, with messages of one size. Raises UsageError for a slow link that carries
        no message."""
        links = self.table.links
        for slow in links.slow:
            check_link(slow.sender, slow.receiver, shape, f"{self.name}, [[links.slow]],")
        return links.links(
            [links.message_bytes] * shape.num_microbatches if links.message_bytes else (),
            {(slow.sender, slow.receiver): slow.factor for slow in links.slow},
        )


def parse_table(document: Mapping[str, Any], name: str) -> TableCosts:
    """Build the costs of a table from a parsed TOML document; `name` is what errors call it.

    Raises UsageError for an unknown or missing key, for a value of the wrong type or out of range,
    and for entries that contradict each other or would have no effect.
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
    """Read a preset of costs from the package's profiles/NAME.toml; the name is not checked."""
    text = (
        files("rrfp.simulate.costs").joinpath(f"profiles/{name}.toml").read_text(encoding="utf-8")
    )
    return parse_table(tomllib.loads(text), f"costs {name}")


def _check_length(length: str | None, table: Table, where: str) -> None:
    """Raise UsageError if a length is not one that the table defines; None always passes."""
    if length is not None and length not in table.lengths:
        there_are = ", ".join(table.lengths) or "none"
        raise UsageError(
            f"{where}: length '{length}' is not in [lengths], which has {there_are}; add it there"
        )

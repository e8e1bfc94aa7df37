"""The policy: the values that control a dispatcher, with their parsing, checks and JSON.

`Policy` has a field for each knob. The field declares the knob's reader, its description, its help
and its default, and `KNOBS` collects the declarations. The options of the command line, TOML files,
the rows of `rrfp simulate`, `run.json` and what travels to the ranks all derive from that table, so
a knob that is added here is known everywhere.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from fractions import Fraction
from typing import Any, Self

from rrfp.errors import UsageError, did_you_mean
from rrfp.schedule.hints import Hint, Order, OrderFile, WeightGradients
from rrfp.schedule.named_hints import AUTO, BF, HINTS, Alternation, AutoHint, hint_named
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import plain_integer

PAPER_LIMIT = 32
"""The paper's limit on D (its App. C), and the smallest default limit."""


class Dispatch(StrEnum):
    """The part of the system that decides which task a rank runs next."""

    READY = "ready"
    """The dispatcher picks the ready task that the hint ranks best."""
    FIXED = "fixed"
    """The hint's order binds."""
    MEGATRON = "megatron"
    """Megatron-Core's own schedule function, with its blocking transfers."""


class AgreementRule(StrEnum):
    """The rule by which a group picks its next task from those ready at each member."""

    INTERSECTION = "intersection"
    """The best of the tasks that are ready at all members."""
    UNANIMOUS = "unanimous"
    """The task that each member would pick by itself, if all pick the same (paper section 4.2)."""


# The hold: the most activations that a rank keeps from F until W, in the user's own unit.
#
# Written as `12` (microbatches of the whole rank), `1500000B`, `512MiB`, `40GiB`, `40GB`, `1.0x`
# (a multiple of 1F1B's largest peak in bytes in the steps that are compared) or `auto` (what the
# device has left).


_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_READ_UNITS = {name.lower(): size for name, size in (_UNITS | _DECIMAL_UNITS).items()}
_MOST_BYTES = 2**60
_MOST_MICROBATCHES = 10**6
_FORMS = "12 (microbatches), 1500000B, 512MiB, 40GiB, 40GB, 1.0x (of 1F1B's largest peak in bytes)"


@dataclass(frozen=True, slots=True)
class Bytes:
    """A number of bytes on each rank."""

    num: int

    def __str__(self) -> str:
        """In a unit in which it is a whole number, so that reading it back is exact."""
        binary = [each for each in reversed(_UNITS.items()) if each[0] not in ("B", "KiB")]
        decimal = [each for each in reversed(_DECIMAL_UNITS.items()) if each[0] != "kB"]
        units = (*binary, *decimal, ("B", 1))
        name, size = next(each for each in units if self.num % each[1] == 0)
        return f"{self.num // size}{name}"


@dataclass(frozen=True, slots=True)
class ShareOf1F1B:
    """A multiple of the largest peak, in bytes, that 1F1B has over the ranks and steps of a
    comparison."""

    factor: Fraction

    def __str__(self) -> str:
        text = f"{float(self.factor):g}"
        return f"{text}x" if "." in text else f"{text}.0x"


class Auto(StrEnum):
    """The memory that the device has left after parameters, gradients, optimizer states and a
    margin."""

    AUTO = "auto"


Hold = int | Fraction | Bytes | ShareOf1F1B | Auto
"""A number counts microbatches of the whole rank: with n chunks, one chunk's is 1/n."""


def parse_hold(text: str, name: str = "the hold", *, auto: bool = True) -> Hold:
    """Parse a hold: `12` counts microbatches (up to 10**6), `512MiB` is bytes (up to 2**60, in any
    case), `1.0x` a multiple of 1F1B's peak (up to 1000), and `auto` what the device has left.
    Raises UsageError, which calls it `name`, for anything else, and for `auto` with `auto=False`,
    where no device is used."""
    text = text.strip()
    if text == Auto.AUTO and auto:
        return Auto.AUTO
    if re.fullmatch(r"\d{1,7}", text, re.ASCII) and 1 <= int(text) <= _MOST_MICROBATCHES:
        return int(text)
    number = r"(\d{1,19}(?:\.\d{1,9})?)"
    units = "|".join(_READ_UNITS)
    if match := re.fullmatch(rf"{number} ?({units})", text, re.ASCII | re.IGNORECASE):
        num = int(Fraction(match[1]) * _READ_UNITS[match[2].lower()])
        if 1 <= num <= _MOST_BYTES:
            return Bytes(num)
    elif match := re.fullmatch(rf"{number}x", text, re.ASCII):
        factor = Fraction(match[1])
        if 0 < factor <= 1000:
            return ShareOf1F1B(factor)
    raise UsageError(f"{name} is '{text:.40}'; write {_FORMS}{' or auto' if auto else ''}")


def check_hold(hold: object) -> None:
    """Raise UsageError unless this is a hold (at least 1 if it counts microbatches) or None (no
    bound)."""
    if hold is None or isinstance(hold, Bytes | ShareOf1F1B | Auto):
        return
    if type(hold) not in (int, Fraction) or hold < 1:  # type: ignore[operator]
        raise UsageError(
            f"the hold is {hold!r}; it must be a whole number, at least 1, or a size such as 40GiB"
        )


def check_hold_is_absolute(hold: object) -> None:
    """Raise UsageError for a share of 1F1B's peak, which only a comparison can resolve. Anything
    else passes, without a check."""
    if isinstance(hold, ShareOf1F1B):
        raise UsageError(
            f"a hold of {hold} is a share of what 1F1B keeps in a comparison, and a run compares "
            "nothing; give microbatches, or a size such as 40GiB"
        )


def counts_microbatches(hold: Hold | None) -> bool:
    """True if a hold is in microbatches, and for None (no hold)."""
    return hold is None or isinstance(hold, int | Fraction)


def doubled(hold: Hold) -> Hold:
    """Double a hold of microbatches (rounded down to a whole number) or bytes; return any other
    unchanged."""
    if isinstance(hold, int | Fraction):
        return int(2 * hold)
    return Bytes(2 * hold.num) if isinstance(hold, Bytes) else hold


def hold_as_json(hold: Hold | None) -> int | float | str | None:
    """Convert a hold for `run.json` and traces: a number of microbatches, or a text for any other
    hold. None stays."""
    if hold is None or isinstance(hold, int):
        return hold
    return float(hold) if isinstance(hold, Fraction) else str(hold)


def byte_unit(num: float) -> tuple[str, int]:
    """Return the largest binary unit not above this number of bytes, with its size in bytes; `B`
    below 1 KiB."""
    units = reversed(_UNITS.items())
    return next(((name, size) for name, size in units if abs(num) >= size), ("B", 1))


def format_bytes(num: float) -> str:
    """Format a number of bytes with a binary unit and three significant digits, such as 1.25 GiB;
    whole numbers from 100 on, and below 1 KiB."""
    name, size = byte_unit(num)
    value = num / size
    return f"{value:.0f} {name}" if name == "B" or value >= 100 else f"{value:.3g} {name}"


# The patience: `auto`, `0` (never wait), or a time such as `5ms`.


_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
LONGEST_NS = 60 * 10**9
"""The longest patience; a longer one is a typing error."""


class AutoPatience(StrEnum):
    """Each rank derives its patience from the errors of announcements (`Punctuality`)."""

    AUTO = "auto"


Patience = int | AutoPatience
"""A number is in ns; 0 never waits."""

IMPATIENT = 0


def parse_patience(text: str, name: str = "the patience") -> Patience:
    """Parse a patience, which errors call `name`: `auto`, `0`, or a time such as 5ms, which is
    returned in ns. Raises UsageError for any other text, and above 60 s."""
    text = text.strip()
    if text == AutoPatience.AUTO:
        return AutoPatience.AUTO
    if text == "0":
        return IMPATIENT
    if match := re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|ms|s)", text, re.ASCII):
        patience_ns = int(Fraction(match[1]) * _NS[match[2]])
        if patience_ns <= LONGEST_NS:
            return patience_ns
    raise UsageError(f"{name} is '{text:.40}'; write auto, 0 (never wait), or a time such as 5ms")


def check_patience(patience: object) -> None:
    """Raise UsageError unless this is `auto`, or a whole number of ns from 0 to 60 s."""
    if isinstance(patience, AutoPatience):
        return
    if type(patience) is not int or not 0 <= patience <= LONGEST_NS:
        raise UsageError(
            f"the patience is {patience!r}; it must be auto, or a number of ns from 0 to "
            f"{LONGEST_NS}"
        )


def patience_as_json(patience: Patience) -> str:
    """Format a patience for `run.json` and traces: `auto`, `0`, or a time in the largest unit in
    which it is a whole number. Reading it back is exact."""
    if isinstance(patience, AutoPatience):
        return str(patience)
    if patience == 0:
        return "0"
    unit = next(name for name, ns in reversed(_NS.items()) if patience % ns == 0)
    return f"{patience // _NS[unit]}{unit}"


# The declaration of a knob.


class Panel(StrEnum):
    """The part of a help screen that lists a knob."""

    SCHEDULE = "Schedule"
    MEMORY = "Memory"


Reader = Callable[[str, str, bool], Any]
"""Parses a text. The second argument is the name of the value in errors. The third says whether the
value is for a run, which has a device and Megatron, or for a simulation, which has neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """The declaration of one field of `Policy`."""

    name: str
    """The field. The flag is `--name`."""
    default: Any
    parse: Reader
    describe: Callable[[Any], Any]
    """Converts a value to JSON. Reading it back is exact."""
    help: str
    """The start of the help text, which is the same for runs and simulations."""
    in_runs: str
    """The end of the help text of commands that run a job."""
    in_simulations: str
    """The end of the help text of commands that simulate."""
    panel: Panel
    metavar: str
    kinds: tuple[type, ...]
    """The types of its values in TOML files and JSON, apart from null."""
    choices: tuple[str, ...]
    """The texts that a shell completes; empty if any text is allowed."""
    is_common: bool
    """Whether short help screens list the flag."""

    def help_text(self, *, in_run: bool) -> str:
        """Return the help text for a command that runs a job, or for one that simulates, with a
        full stop."""
        return self.help + (self.in_runs if in_run else self.in_simulations) + "."

    def offered(self, *, in_run: bool) -> tuple[str, ...]:
        """Return the choices that a shell completes: those that the knob's parser accepts in a
        command that runs a job, or in one that simulates."""
        found = []
        for choice in self.choices:
            with suppress(UsageError):
                self.parse(choice, self.name, in_run)
                found.append(choice)
        return tuple(found)

    def read(self, value: Any, label: str, *, in_run: bool) -> Any:
        """Parse a text, which errors call `label`; return any other value unchanged and unchecked.
        Raises UsageError for an invalid text."""
        return self.parse(value, label, in_run) if type(value) is str else value


def knob(
    default: Any,
    help_text: str,
    parse: Reader,
    describe: Callable[[Any], Any] = lambda value: value,
    *,
    in_runs: str = "",
    in_simulations: str = "",
    panel: Panel = Panel.SCHEDULE,
    metavar: str = "TEXT",
    kinds: tuple[type, ...] = (str,),
    choices: tuple[str, ...] = (),
    is_common: bool = False,
) -> Any:
    """Declare a field of `Policy` that a user may set: a dataclass field whose metadata become a
    `Knob`. The help text ends without a full stop."""
    return field(
        default=default,
        metadata={
            "parse": parse,
            "describe": describe,
            "help": help_text,
            "in_runs": in_runs,
            "in_simulations": in_simulations,
            "panel": panel,
            "metavar": metavar,
            "kinds": kinds,
            "choices": choices,
            "is_common": is_common,
        },
    )


def one_of(choices: type[StrEnum], *in_runs_only: StrEnum) -> Reader:
    """Make a parser that accepts the values of an enum, and raises UsageError, with the valid ones,
    for any other text. Simulations do not accept `in_runs_only`."""

    def parse(text: str, label: str, in_run: bool) -> StrEnum:
        offered = [each for each in choices if in_run or each not in in_runs_only]
        if text not in offered:
            # A flag is written by the user of a command, any other label by a programmer.
            what = "it must be one of" if label.startswith("--") else "choose one of"
            raise UsageError(
                f"{label} is '{text}'; {what} {', '.join(offered)}{did_you_mean(text, offered)}"
            )
        return choices(text)

    return parse


def _parse_hint(text: str, label: str, in_run: bool) -> Hint:
    """Parse a hint's name or `auto`. Raises UsageError for anything else; `rrfp.inputs` resolves
    the paths of order files before."""
    return AUTO if text == AUTO.name else hint_named(text, (AUTO.name,))


def _parse_limit(text: str, label: str, in_run: bool) -> int:
    """Parse a limit, a whole number from 1 to 10**9 - 1; the same in runs and simulations."""
    return parse_count(text, label)


def _parse_hold(text: str, label: str, in_run: bool) -> Hold:
    """Parse a hold; `auto` is only for runs, which have a device."""
    return parse_hold(text, label, auto=in_run)


def _parse_patience(text: str, label: str, in_run: bool) -> Patience:
    """Parse a patience; the same in runs and simulations."""
    return parse_patience(text, label)


def parse_count(text: str, label: str) -> int:
    """Parse a whole number from 1 to 10**9 - 1. Raises UsageError for any other text."""
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text, re.ASCII):
        raise UsageError(f"{label} is '{text}'; it must be a whole number from 1 to {10**9 - 1}")
    return int(text)


@dataclass(frozen=True, slots=True)
class Policy:
    """The values that control the dispatchers of a step. A bound of None withholds nothing. Raises
    UsageError for invalid values, and for those that exclude each other."""

    hint: Hint = knob(
        BF,
        "What goes first of the ready tasks: a hint, an order file (.csv), or auto (chosen ",
        _parse_hint,
        lambda hint: hint.name,
        in_runs="while the run goes on, by simulating its own steps) [bf]",
        in_simulations="by simulating other steps) [bf]",
        metavar="HINT",
        choices=(AUTO.name, *HINTS),
        is_common=True,
    )
    order: Order | None = None
    """The hint's order for one shape (`rrfp.schedule.rehearsal.fitted`). Positions and deviations
    are counted against it, and `fixed` dispatch requires it. A hint that is an `Order` serves as
    its own."""
    dispatch: Dispatch = knob(
        Dispatch.READY,
        "ready (default: the hint ranks ready tasks)",
        one_of(Dispatch, Dispatch.MEGATRON),
        str,
        in_runs=", fixed (its order binds) or megatron (Megatron-Core's own schedule)",
        in_simulations=" or fixed (its order binds)",
        metavar="WHO",
        choices=tuple(Dispatch),
        is_common=True,
    )
    limit: int | None = knob(
        None,
        "Forwards a rank may run ahead of its backwards",
        _parse_limit,
        in_runs=f" [if ready without --hold: what fills the pipeline, {PAPER_LIMIT} or more]",
        in_simulations=", or none [if ready without --hold: what fills the pipeline, "
        f"{PAPER_LIMIT} or more]",
        panel=Panel.MEMORY,
        metavar="INT",
        kinds=(int,),
        is_common=True,
    )
    """The D (chunk-forwards minus chunk-backwards run) at which `ready` dispatch withholds
    forwards. A binding order is checked against it when it is chosen."""
    hold: Hold | None = knob(
        None,
        "Most activations that a rank keeps, instead of --limit: 8 (microbatches), 40GiB, or ",
        _parse_hold,
        hold_as_json,
        in_runs="auto (what the device has left)",
        in_simulations="1.0x (of 1F1B's largest peak in bytes)",
        panel=Panel.MEMORY,
        metavar="SIZE",
        kinds=(int, str),
        is_common=True,
    )
    """The most activations that `ready` dispatch keeps on a rank from F until W, in microbatches of
    the whole rank or in bytes. It replaces the limit."""
    w: WeightGradients = knob(
        WeightGradients.IDLE,
        "When an order used as a hint runs weight gradients: idle (default: when nothing else is "
        "ready) or ranked (at their places)",
        one_of(WeightGradients),
        str,
        metavar="WHEN",
        choices=tuple(WeightGradients),
    )
    agreement: AgreementRule = knob(
        AgreementRule.INTERSECTION,
        "What ranks that share collectives run: intersection (default: the best task that all have "
        "ready) or unanimous (the task that all would pick)",
        one_of(AgreementRule),
        str,
        metavar="RULE",
        choices=tuple(AgreementRule),
    )
    patience: Patience = knob(
        IMPATIENT,
        "How long a free rank waits for a better task that another rank has announced: 0 (default: "
        "never), auto (by how punctual announcements are) or a time such as 5ms",
        _parse_patience,
        patience_as_json,
        metavar="TIME",
        kinds=(int, str),
        choices=tuple(AutoPatience),
    )
    limits_by_shape: bool = False
    """Whether `of_shape` sets the limit, to `usual_limit`."""

    def __post_init__(self) -> None:
        for name, each in KNOBS.items():
            if int in each.kinds:
                object.__setattr__(self, name, plain_integer(getattr(self, name)))
        if self.limit is not None and self.hold is not None:
            raise UsageError(
                f"a limit of {self.limit} and a hold of {self.hold} exclude each other; keep the "
                "hold, which is exact, or the limit"
            )
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise UsageError(f"the limit is {self.limit!r}; it must be a whole number, at least 1")
        check_hold(self.hold)
        if self.w is WeightGradients.RANKED and not self.hint.ranks_weight_gradients:
            raise UsageError(
                f"--w ranked needs an order that places the weight gradients, and {self.hint.name} "
                "does not; leave --w out or choose an order such as zb-h1"
            )
        check_patience(self.patience)
        if self.dispatch is not Dispatch.READY:
            self._check_binding()
        if isinstance(self.hint, Order):
            object.__setattr__(self, "order", self.hint)

    def _check_binding(self) -> None:
        """Raise UsageError for values that only `ready` dispatch can follow: a hold that is not in
        microbatches, the hint `auto`, a patience, and an `agreement` or `w` other than the
        default."""
        if not counts_microbatches(self.hold):
            raise UsageError(
                f"a hold of {self.hold} withholds forwards by their size, and --dispatch "
                f"{self.dispatch} runs them where its order has them; give the hold in "
                "microbatches, or use --dispatch ready"
            )
        if isinstance(self.hint, AutoHint):
            raise UsageError(
                f"--hint auto chooses what binds as well, and --dispatch {self.dispatch} decides "
                "it; leave --dispatch out, or name a hint"
            )
        if self.patience != IMPATIENT:
            raise UsageError(
                f"--dispatch {self.dispatch} waits for the next task of its order as long as "
                "it takes; leave --patience out, or use --dispatch ready"
            )
        if self.agreement is not AgreementRule.INTERSECTION:
            raise UsageError(
                f"--dispatch {self.dispatch} has one order and nothing to agree on; leave "
                "--agreement out"
            )
        if self.w is not WeightGradients.IDLE:
            raise UsageError(
                f"--dispatch {self.dispatch} runs weight gradients where its order has them; "
                "leave --w out"
            )

    def with_usual_limit(self) -> Self:
        """Return this policy with `limits_by_shape` set if it has `ready` dispatch and neither
        limit nor hold, else cleared. The limit itself is set by `of_shape`."""
        is_bound = self.limit is not None or self.hold is not None
        return replace(self, limits_by_shape=not is_bound and self.dispatch is Dispatch.READY)

    def of_shape(self, shape: Shape) -> Self:
        """Return this policy unchanged or, if `limits_by_shape`, with the usual limit for steps of
        this shape (None if no limit fills the pipeline). The latter raises UsageError for a shape
        that the hint does not support."""
        if not self.limits_by_shape:
            return self
        return replace(self, limit=usual_limit(self.hint.for_shape(shape), shape))

    @property
    def waits(self) -> bool:
        """True if a free rank may wait for an announced task although others are ready: the
        patience is not 0."""
        return self.patience != IMPATIENT

    def waiting(self, waits: bool = True) -> Self:
        """Return this policy with a patience of `auto`, or of 0 if not `waits`."""
        return replace(self, patience=AutoPatience.AUTO if waits else IMPATIENT)

    def hold_slots(self, num_chunks: int) -> int | None:
        """Return the hold in slots of one chunk and one microbatch; None without a hold, or if it
        does not count microbatches. Raises ValueError for a fraction that is no whole number of
        slots."""
        if not isinstance(self.hold, int | Fraction):
            return None
        if isinstance(self.hold, int):
            return self.hold * num_chunks
        slots = self.hold * num_chunks
        if slots.denominator > 1:
            raise ValueError(f"a hold of {self.hold} on {num_chunks} chunks is {slots} slots")
        return int(slots)

    @property
    def hold_bytes(self) -> int | None:
        """The hold in bytes; None without a hold, or if it is in another unit."""
        return self.hold.num if isinstance(self.hold, Bytes) else None

    def num_in_flight(self, num_microbatches: int, num_chunks: int, *, forward_only: bool) -> int:
        """Return the number of messages that a link must be able to hold at once, so that a full
        link never constrains a decision. It is below all microbatches and chunks only for `ready`
        dispatch with a limit, or a hold in microbatches, in steps with backwards.

        An activation waiting on a link counts in its sender's D and held slots, a gradient in its
        receiver's, so neither can exceed the bound. With one chunk per rank a link carries only one
        of the two; with several it may carry both, and the number doubles.
        """
        bound = num_microbatches * num_chunks
        if self.dispatch is Dispatch.READY and not forward_only:
            slots = self.hold_slots(num_chunks)
            if slots is not None:
                bound = min(bound, slots)
            elif self.limit is not None:
                # While a rank drains, D exceeds the limit by up to one activation per chunk.
                bound = min(bound, self.limit + num_chunks)
        return bound if num_chunks == 1 else 2 * bound

    def values(self) -> dict[str, Any]:
        """Return the values of the knobs by name, as they are (not as JSON)."""
        return {name: getattr(self, name) for name in KNOBS}

    def flags(self) -> list[str]:
        """Return the command-line flags of this policy, each with its value: the hint, and the
        values that differ from the defaults. One string has flag and value, such as `--hold 8`."""
        values = self.described().items()
        usual = type(self)(hint=self.hint).described()
        return [
            f"--{name} {value}" for name, value in values if name == "hint" or value != usual[name]
        ]

    def described(self) -> dict[str, Any]:
        """Return the policy as JSON by knob name, defaults included, for `run.json` and traces. A
        null bound withholds nothing."""
        return {name: each.describe(getattr(self, name)) for name, each in KNOBS.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the policy as JSON for the ranks, which read it by `from_json`. In addition to
        `described` it has the text of an order file, which a rank may not be able to read."""
        text = {_ORDER: self.hint.text} if isinstance(self.hint, OrderFile) else {}
        return self.described() | text

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the JSON of `to_json`; knobs that it lacks get their defaults, and unknown keys are
        ignored. A `ready` policy without a bound later gets the usual limit for its shape. Raises
        UsageError for invalid values."""
        given = {
            name: each.read(values[name], f"--{name}", in_run=True)
            for name, each in KNOBS.items()
            if name in values and not (name == "hint" and _ORDER in values)
        }
        if _ORDER in values:
            given["hint"] = OrderFile(values["hint"], values[_ORDER])
        return cls(**given).with_usual_limit()


_ORDER = "order"
"""The JSON key of the text of an order file."""

KNOBS: dict[str, Knob] = {
    each.name: Knob(name=each.name, default=each.default, **each.metadata)
    for each in fields(Policy)
    if each.metadata
}
"""The knobs by name."""


def split_knobs(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into those that set knobs, and the others. No value is checked."""
    given = {name: value for name, value in values.items() if name in KNOBS}
    return given, {name: value for name, value in values.items() if name not in KNOBS}


def usual_limit(hint: Hint, shape: Shape) -> int | None:
    """Return the default limit of `ready` dispatch: the paper's 32, or the one that fills the
    pipeline, if that is larger; None if no limit fills it. `hint` must be that of the shape
    (`Hint.for_shape`)."""
    filling = filling_limit(hint, shape)
    return None if filling is None else max(PAPER_LIMIT, filling)


def filling_limit(hint: Hint, shape: Shape) -> int | None:
    """Return a limit under which steps of equal tasks are no slower than 1F1B's with the same
    chunks, as found by simulations (docs/decisions/0036-usual-limit.md): twice the ranks with one
    chunk, twice an order's largest D, else three times the stages. None, as no limit suffices, for
    a rule that prefers the first of several chunks."""
    if shape.num_chunks == 1:
        return 2 * shape.num_ranks
    if isinstance(hint, Order):
        return 2 * max(map(hint.peak_depth, range(shape.num_ranks)))
    if isinstance(hint, Alternation) and not hint.deep:
        # This hint runs the first chunks far ahead, and a draining rank runs microbatches one by
        # one.
        return None
    return 3 * shape.num_stages

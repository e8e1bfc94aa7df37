"""The hold: how much of its activations a rank may keep from F until W, in the user's own unit.

Written as `12` (microbatches of the whole rank), `1500000B`, `512MiB`, `40GiB`, `40GB`, `1.0x` (of
the largest peak in bytes that 1F1B has in the steps that are compared) or `auto` (what the device
has left).
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from rrfp.errors import UsageError
from rrfp.schedule.tasks import Value

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_READ_UNITS = {name.lower(): size for name, size in (_UNITS | _DECIMAL_UNITS).items()}
_MOST_BYTES = 2**60
_MOST_MICROBATCHES = 10**6
_FORMS = "12 (microbatches), 1500000B, 512MiB, 40GiB, 40GB, 1.0x (of 1F1B's largest peak in bytes)"


@dataclass(frozen=True, slots=True)
class Bytes(Value):
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
class ShareOf1F1B(Value):
    """A multiple of the largest peak, in bytes, that 1F1B has over the ranks and steps of a
    comparison."""

    factor: Fraction

    def __str__(self) -> str:
        text = f"{float(self.factor):g}"
        return f"{text}x" if "." in text else f"{text}.0x"


class Auto(StrEnum):
    """What the device has left after parameters, gradients, optimizer states and a margin."""

    AUTO = "auto"


Hold = int | Fraction | Bytes | ShareOf1F1B | Auto
"""A number is one of microbatches of the whole rank: with n chunks, 1/n is one chunk's."""


def parse_hold(text: str, name: str = "the hold", *, auto: bool = True) -> Hold:
    """Read a hold; `name` is what errors call it. Raises UsageError for any other text, and for
    `auto` where no device is used (`auto=False`)."""
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
    """Raise UsageError for what is no hold; None withholds nothing."""
    if hold is None or isinstance(hold, Bytes | ShareOf1F1B | Auto):
        return
    if type(hold) not in (int, Fraction) or hold < 1:  # type: ignore[operator]
        raise UsageError(
            f"the hold is {hold!r}; it must be a whole number, at least 1, or a size such as 40GiB"
        )


def check_is_absolute(hold: object) -> None:
    """Raise UsageError for a hold that means something only in a comparison."""
    if isinstance(hold, ShareOf1F1B):
        raise UsageError(
            f"a hold of {hold} is a share of what 1F1B keeps in a comparison, and a run compares "
            "nothing; give microbatches, or a size such as 40GiB"
        )


def counts_microbatches(hold: Hold | None) -> bool:
    """Whether a hold, if there is one, is in microbatches."""
    return hold is None or isinstance(hold, int | Fraction)


def doubled(hold: Hold) -> Hold:
    """Twice a hold that is a number of microbatches or bytes; any other as it is."""
    if isinstance(hold, int | Fraction):
        return int(2 * hold)
    return Bytes(2 * hold.num) if isinstance(hold, Bytes) else hold


def described_hold(hold: Hold | None) -> int | float | str | None:
    """A hold as `run.json` and traces state it: a number of microbatches, or a text."""
    if hold is None or isinstance(hold, int):
        return hold
    return float(hold) if isinstance(hold, Fraction) else str(hold)


def byte_unit(num: float) -> tuple[str, int]:
    """The unit in which a person reads so many bytes, and its size."""
    units = reversed(_UNITS.items())
    return next(((name, size) for name, size in units if abs(num) >= size), ("B", 1))


def told_bytes(num: float) -> str:
    """A number of bytes as a person reads it, such as 1.25 GiB."""
    name, size = byte_unit(num)
    value = num / size
    return f"{value:.0f} {name}" if name == "B" or value >= 100 else f"{value:.3g} {name}"


# Patience as a setting: `auto`, `0` (never wait), or a time such as `5ms`.


_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
LONGEST_NS = 60 * 10**9
"""The longest patience; a longer one is a typing error."""


class AutoPatience(StrEnum):
    """Each rank follows the errors of what is announced to it (`Punctuality`)."""

    AUTO = "auto"


Patience = int | AutoPatience
"""A number is one of ns, and 0 never waits."""

IMPATIENT = 0


def parse_patience(text: str, name: str = "the patience") -> Patience:
    """Read a patience; `name` is what errors call it. Raises UsageError for any other text."""
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
    """Raise UsageError for what is no patience."""
    if isinstance(patience, AutoPatience):
        return
    if type(patience) is not int or not 0 <= patience <= LONGEST_NS:
        raise UsageError(
            f"the patience is {patience!r}; it must be auto, or a number of ns from 0 to "
            f"{LONGEST_NS}"
        )


def described_patience(patience: Patience) -> str:
    """A patience as `run.json` and traces state it, so that reading it back is exact."""
    if isinstance(patience, AutoPatience):
        return str(patience)
    if patience == 0:
        return "0"
    unit = next(name for name, ns in reversed(_NS.items()) if patience % ns == 0)
    return f"{patience // _NS[unit]}{unit}"

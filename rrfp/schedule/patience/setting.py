"""Patience as a setting: `auto`, `0` (never wait), or a time such as `5ms`."""

import re
from enum import StrEnum
from fractions import Fraction

from rrfp.errors import UsageError

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

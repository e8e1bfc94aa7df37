"""Reads numbers from a launcher's environment variables."""

from collections.abc import Mapping

from rrfp.errors import UsageError

_MOST_PORT = 2**16 - 1


def natural(environment: Mapping[str, str], name: str, by: str, least: int = 0) -> int:
    """The number in a variable that must be there. Raises UsageError."""
    text = environment.get(name)
    if text is None:
        raise UsageError(
            f"{name} is not set, and {by} started this process; let {by} set it, or unset what "
            "it has left in the environment"
        )
    # Not every digit of Unicode is one that int() reads, nor one that anybody means.
    if not (text.isascii() and text.isdigit() and len(text) <= 18) or int(text) < least:
        raise UsageError(
            f"{name} is '{text[:40]}', and {by} sets it to a whole number of {least} or more; "
            "see who else has set it"
        )
    return int(text)


def port(environment: Mapping[str, str], by: str) -> int:
    """MASTER_PORT, which must be there. Raises UsageError."""
    found = natural(environment, "MASTER_PORT", by, 1)
    if found > _MOST_PORT:
        raise UsageError(
            f"MASTER_PORT is {found} and a port is at most {_MOST_PORT}; see who has set it"
        )
    return found


def below(environment: Mapping[str, str], name: str, bound: str, by: str) -> tuple[int, int]:
    """A number, and the one of another variable that it must be below."""
    value, most = natural(environment, name, by), natural(environment, bound, by, 1)
    if value >= most:
        raise UsageError(
            f"{name} is {value} and {bound} is {most}, and the first must be below the second; "
            f"see which of them {by} has not set"
        )
    return value, most

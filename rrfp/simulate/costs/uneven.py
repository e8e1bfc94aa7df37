"""Whose fault it is that stages differ: a choice of `rrfp tune`."""

from enum import StrEnum


class Uneven(StrEnum):
    """Why stages in the middle with equally many layers do not take equally long."""

    RANKS = "ranks"
    """Their ranks are slower or faster, whatever layers they hold."""
    LAYERS = "layers"
    """Their layers are heavier or lighter, on whatever rank they lie."""

"""Pipeline-parallel training that follows readiness (RRFP, arXiv 2605.18750) on Megatron-Core."""

__version__ = "0.1.0"

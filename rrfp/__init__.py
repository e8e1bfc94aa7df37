"""Pipeline-parallel training that follows readiness (RRFP, arXiv 2605.18750) on Megatron-Core."""

# Imported first: it says whether the core's modules come compiled.
from rrfp import compiled as compiled

__version__ = "0.1.0"

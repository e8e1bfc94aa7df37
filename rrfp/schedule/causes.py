"""Why a rank is idle: every idle interval has exactly one of these causes."""

from enum import StrEnum


class Cause(StrEnum):
    """The cause of a wait (design: what is recorded)."""

    WARMUP = "warmup"
    """Before the rank's first task of the step."""
    FORWARD_INPUT = "forward_input"
    """Nothing is ready; the hint's best unfinished task waits for an activation."""
    BACKWARD_INPUT = "backward_input"
    """Nothing is ready; the hint's best unfinished task waits for a gradient."""
    LIMIT = "limit"
    """A forward was here and the limit on D withheld it."""
    HOLD = "hold"
    """A forward was here and the bound on held activations withheld it."""
    COORDINATION = "coordination"
    """Something was ready here; the group had not agreed on it yet."""
    ORDER = "order"
    """Fixed dispatch: something was ready and the order forbade it."""
    TRANSFER = "transfer"
    """Issuing or waiting for a blocking send or receive (Megatron's own)."""
    GRADIENT_SYNC = "gradient_sync"
    """Data-parallel reduction not hidden by work."""
    DRAIN = "drain"
    """After the rank's last task of the step."""

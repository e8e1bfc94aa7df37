"""Why a rank is idle: every idle interval has exactly one of these causes."""

from enum import StrEnum


class Cause(StrEnum):
    """The cause of a wait."""

    WARMUP = "warmup"
    """Before the rank's first task of the step."""
    FORWARD_INPUT = "forward_input"
    """Nothing is ready; the hint's best unfinished task waits for an activation."""
    BACKWARD_INPUT = "backward_input"
    """Nothing is ready; the hint's best unfinished task waits for a gradient."""
    LIMIT = "limit"
    """A task was here and the limit on D withheld it."""
    HOLD = "hold"
    """A forward was here and the bound on held activations withheld it."""
    PATIENCE = "patience"
    """A task could run, but a better one was announced and will be here soon."""
    COORDINATION = "coordination"
    """A task was ready here, but the group had not agreed on it yet."""
    ORDER = "order"
    """Fixed dispatch: a task was ready, but the order put another one first."""
    TRANSFER = "transfer"
    """Issuing or waiting for a blocking send or receive (Megatron's own schedule)."""
    GRADIENT_SYNC = "gradient_sync"
    """Data-parallel reduction not hidden behind work."""
    DRAIN = "drain"
    """After the rank's last task of the step."""

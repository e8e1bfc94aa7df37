"""Charts of a run as altair objects, one module for each family of charts."""

from enum import StrEnum


class ChartKind(StrEnum):
    """The names of charts on the command line."""

    BUBBLES = "bubbles"
    GANTT = "gantt"
    HINT = "hint"
    MEMORY = "memory"
    MISALIGNMENT = "misalignment"
    PROGRESS = "progress"
    TASK_TIMES = "task-times"
    MESSAGE_TIMES = "message-times"

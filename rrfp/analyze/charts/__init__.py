"""Charts of a run as altair objects, one module for each family of charts."""

from enum import StrEnum


class ChartKind(StrEnum):
    """A chart's name on the command line."""

    BUBBLES = "bubbles"
    GANTT = "gantt"
    HINT = "hint"
    MEMORY = "memory"
    MISALIGNMENT = "misalignment"
    PROGRESS = "progress"
    TASK_TIMES = "task-times"
    MESSAGE_TIMES = "message-times"

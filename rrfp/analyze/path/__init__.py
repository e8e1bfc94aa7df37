"""The critical path of a step: which chain of tasks and messages made it as long as it was."""

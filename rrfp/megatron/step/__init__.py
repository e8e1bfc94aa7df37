"""One rank's computation in one step of a Megatron model, task by task."""

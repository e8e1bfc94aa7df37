"""The computation of one rank in one step of a Megatron model, task by task."""

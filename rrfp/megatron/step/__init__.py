"""What a rank computes in one step on a Megatron model, task by task."""

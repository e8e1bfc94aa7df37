"""What makes Megatron-Core run on the CPU."""

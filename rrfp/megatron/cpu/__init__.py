"""Patches that make Megatron-Core run on the CPU."""

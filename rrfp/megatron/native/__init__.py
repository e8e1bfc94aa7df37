"""Megatron's own schedule, recorded and paced."""

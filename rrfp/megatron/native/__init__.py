"""Records and paces Megatron's own schedule."""

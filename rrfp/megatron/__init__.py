"""The Megatron-Core floor: the CPU host, the GPT, its data, and training on one rank."""

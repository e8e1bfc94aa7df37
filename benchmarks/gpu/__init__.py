"""The proof kit: what is to hold on a GPU, line by line (docs/gpu.md)."""

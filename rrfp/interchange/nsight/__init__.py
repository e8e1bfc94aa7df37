"""A run read from what Nsight Systems exported as SQLite."""

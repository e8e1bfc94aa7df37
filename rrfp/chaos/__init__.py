"""Training under faults that are injected on purpose, and what becomes of it."""

"""What is decided before a step: the order of its microbatches, and the hint."""

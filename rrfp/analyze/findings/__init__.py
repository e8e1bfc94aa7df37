"""What makes the steps of a run long, in words, and what mending it would save."""

"""What the models of `rrfp train` learn from."""

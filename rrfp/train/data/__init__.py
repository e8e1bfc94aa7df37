"""The training data of `rrfp train`."""

"""Checkpoints of `rrfp train`: saved whole or not at all, resumed under any policy and layout."""

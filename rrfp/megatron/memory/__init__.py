"""Activation memory of a step in bytes: measured on the model, and bounded for other data."""

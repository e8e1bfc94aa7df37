"""Patience: when a free rank waits for a better task that another rank has announced."""

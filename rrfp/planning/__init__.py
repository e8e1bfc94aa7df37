"""Decisions before a step: its items, their order of entry, and the hint."""

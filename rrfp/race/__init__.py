"""Races of systems: presets for the paper's questions, their execution, and the results."""

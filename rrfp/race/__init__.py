"""Races: systems compared side by side, the paper's questions as presets, and the results."""

"""Hints: the rankings of ready tasks, and the table of those that have a name."""

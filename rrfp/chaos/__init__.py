"""Fault injection into training runs, and verdicts on how the runs handled the faults."""

"""What this machine can do for a run: each thing tried out, with a figure and what to do about it.

A file has the checks of one thing. What may hang, or takes an import of seconds, is asked of a
process of its own.
"""

"""Checks of this machine: each tries out one thing that runs need, with a figure and advice.

Checks that may hang, or whose imports take seconds, run in a process of their own.
"""

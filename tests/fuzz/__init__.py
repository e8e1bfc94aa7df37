"""Feeds every reader damaged copies of its files: `python -m tests.fuzz`, or `make fuzz`.

An input passes if the reader reads it, or refuses it with a one-sentence error, in bounded time and
memory.
"""

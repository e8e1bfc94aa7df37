"""Deciding what runs next: tasks, shapes, hints, orders, bounds, policies and the dispatcher.

Pure: no I/O, no clock, no threads, and only the standard library.
"""

"""Hints: what ranks the tasks that are ready."""

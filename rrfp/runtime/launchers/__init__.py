"""Whoever may have started this process as one of several, and how it says so."""

"""The tables of a run as files."""

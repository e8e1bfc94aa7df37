"""Recordings: record types, run directories, spill files, and traces in Perfetto's format."""

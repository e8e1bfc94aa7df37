"""Simulates many ranks in virtual time, with the runtime's own dispatcher."""

"""Whether a host's ranks live: what each shows its launcher, and how the launcher judges it."""

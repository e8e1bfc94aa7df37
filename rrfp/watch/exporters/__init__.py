"""Where the figures of a run go besides the terminal: a file a system, each by its own library."""

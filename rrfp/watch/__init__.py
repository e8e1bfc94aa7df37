"""A run that is going, followed from the files that it writes: its figures, and who became slow."""

"""`rrfp bench`: the command, and how a race is told and drawn."""

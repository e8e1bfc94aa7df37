"""`rrfp tune`: the search, its trials, and how they are told."""

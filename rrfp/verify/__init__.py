"""`rrfp verify`: shows that the order of tasks does not change what a model learns."""

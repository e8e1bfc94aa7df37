"""`rrfp verify`: what is done to the order of tasks does not change what is learned."""

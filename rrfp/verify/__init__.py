"""`rrfp verify`: checks that the order of tasks does not change the result of training."""

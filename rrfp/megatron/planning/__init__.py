"""Plans the order in which the microbatches of a real run's steps enter, while the step before
runs."""

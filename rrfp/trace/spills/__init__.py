"""What ranks write while they train, until it is in the run's one trace."""

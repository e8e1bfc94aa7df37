"""Charts of a run, one module a family: each takes the run's frames and returns an altair chart."""

"""Charts of a run, a module a family: each takes the run's frames and gives an altair chart."""

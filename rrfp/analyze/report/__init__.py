"""`rrfp analyze report`: all that a run's trace tells, as one page."""

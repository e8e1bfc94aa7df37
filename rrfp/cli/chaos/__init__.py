"""`rrfp chaos`: a training under faults."""

"""What `rrfp train` runs: its settings, its ranks, its loop and its evaluation."""

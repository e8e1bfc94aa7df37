"""What `rrfp train` runs: settings, the ranks' processes, the training loop and evaluation."""

"""What to train with: settings, and the split of a model's layers, found by simulation."""

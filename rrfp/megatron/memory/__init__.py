"""What a step keeps in memory, in bytes: measured on the model, and predicted for other data."""

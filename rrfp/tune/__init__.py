"""Search, by simulation, for settings and a split of the model's layers."""
